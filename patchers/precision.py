"""Autocast: bf16 where the hardware is fast in it, fp16 with a GradScaler on Volta and Turing only.

The precision is a setting of the training step. What the user asks for is done, with a warning
where something better exists; "auto" is decided by the hardware, on a CPU by its measured rates,
and kept only if the user's own first batch runs faster with it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name

order = 12

# A change of precision costs accuracy: it must make the step 1.1 times as fast.
WORTH = 1 - 1 / 1.1

ASKED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find(context: Context) -> Patch | Rejected:
    already = _model_dtype(context)
    if already != torch.float32:
        return Rejected(f"the model is in {_name(already)} already: it is trained as it is")
    asked = context.precision
    if context.settings.autocast_dtype is not None:
        return Rejected(
            f"nothing more to do: autocast to {_name(context.settings.autocast_dtype)} is on already"
        )
    if asked in ("fp32", "tf32"):
        return Rejected(f'precision="{asked}" was asked for')
    dtype, reason = context.hardware.autocast_dtype()
    if asked in ASKED:
        dtype, reason = ASKED[asked], _asked(asked, dtype, reason)
    if dtype is None:
        return Rejected(reason)
    return _patch(context, dtype, reason, forced=asked != "auto")


def _asked(asked: str, best: torch.dtype | None, reason: str) -> str:
    if asked == "fp16" and best == torch.bfloat16:
        warnings.warn(
            'precision="fp16" needs loss scaling; this hardware is as fast in bf16, which does not: '
            'precision="bf16" is the better choice',
            stacklevel=2,
        )
    return f'precision="{asked}" was asked for' + (f" (advised against: {reason})" if best is None else "")


def _patch(context: Context, dtype: torch.dtype, reason: str, *, forced: bool) -> Patch:
    settings, kind = context.settings, context.device.type
    scaled = dtype == torch.float16
    operation = f"autocast to {_name(dtype)}" + (" with GradScaler" if scaled else "")
    site = Site("", class_name(context.model), operation, "torch.autocast")

    def change(transaction: Transaction, sites: Sequence[Site]) -> None:
        transaction.set_attribute(settings, "autocast_dtype", dtype)
        if scaled and settings.scaler is None:
            # A proof takes the change back and makes it again: the scaler, once made, stays the same.
            settings.scaler = torch.amp.GradScaler(kind)

    return Patch([site], change, reason=reason, exact=False, forced=forced, worth=WORTH)


def _model_dtype(context: Context) -> torch.dtype:
    """The dtype of most of the model's floating parameters."""
    count: Counter[torch.dtype] = Counter()
    for parameter in context.model.parameters():
        if parameter.is_floating_point():
            count[parameter.dtype] += parameter.numel()
    return count.most_common(1)[0][0] if count else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
