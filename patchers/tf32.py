"""The `tf32` patch: float32 matrix products and convolutions on tensor cores (10 bits of mantissa).

PyTorch has two interfaces for it. The old one, ``allow_tf32``, raises when it is read after the new
one, ``fp32_precision``, was set to something that it cannot say, and code that is in use reads
either (Dynamo and Inductor read both). So wherever the two agree they are changed together: the old
setter also sets the new flag, where there is a new flag. Where they disagree already, or only one
exists, the change is made through the one that can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.patch import Context, Patch, Rejected, Site, Transaction

__all__ = ["find", "order"]

order = 10


@dataclass(frozen=True)
class _Switch:
    """One of PyTorch's TF32 switches, under both interfaces.

    Args:
        path: the attribute path of the object that has ``allow_tf32``.
        work: what is computed in TF32 when it is on.
        flags: the parts of it that have an ``fp32_precision`` ("" for the object itself).
        parents: what a flag inherits from while it is "none", the nearest first.
    """

    path: str
    work: str
    flags: tuple[str, ...]
    parents: tuple[str, ...]

    def new(self) -> list[Any]:
        """The objects with the new flag; empty where PyTorch does not have it."""
        owners = [_resolve(f"{self.path}.{flag}" if flag else self.path) for flag in self.flags]
        return [owner for owner in owners if _read(owner, "fp32_precision") is not None]

    def enabled(self) -> bool:
        """Whether it is on, read from whichever interface can be read."""
        new = [owner.fp32_precision for owner in self.new()]
        return all(value == "tf32" for value in new) if new else bool(_read(self.old, "allow_tf32"))

    @property
    def old(self) -> Any:
        return _resolve(self.path)

    def enable(self, transaction: Transaction) -> None:
        """Turn it on; the transaction's rollback makes every flag read as it did before."""
        agreed = _read(self.old, "allow_tf32")  # None: the old flag is gone, or contradicts the new one
        before = [(owner, self._own(owner.fp32_precision)) for owner in self.new()]

        def restore() -> None:
            if agreed is not None:
                self.old.allow_tf32 = agreed
            for owner, value in before:  # last: the old setter has overwritten them
                owner.fp32_precision = value

        transaction.on_undo(restore)
        if agreed is not None:
            self.old.allow_tf32 = True
        for owner, _ in before:
            if owner.fp32_precision != "tf32":
                owner.fp32_precision = "tf32"

    def _own(self, value: str) -> str:
        """What a flag is set to itself: a value that it shares with its parent is inherited.

        (A flag's own value cannot be read. Set to "none" it reads the same either way.)
        """
        parents = [_read(_resolve(path), "fp32_precision") for path in self.parents]
        inherited = next((parent for parent in parents if parent not in (None, "none")), None)
        return "none" if value == inherited else value


_SWITCHES = (
    _Switch(
        "torch.backends.cuda.matmul",
        "float32 matmul",
        flags=("",),
        parents=("torch.backends.cudnn", "torch.backends"),  # cudnn's is CUDA's as a whole
    ),
    _Switch(
        "torch.backends.cudnn",
        "float32 convolution",
        flags=("conv", "rnn"),
        parents=("torch.backends.cudnn", "torch.backends"),
    ),
)


def find(context: Context) -> Patch | Rejected:
    """The TF32 switches that are off, where the hardware has TF32 and the precision allows it."""
    if context.precision == "fp32":
        return Rejected('precision="fp32" was asked for, and TF32 rounds the factors to 10 bits of mantissa')
    pays, reason = context.hardware.tf32_choice()
    if not pays:
        return Rejected(reason)
    off = [switch for switch in _SWITCHES if not switch.enabled()]
    if not off:
        return Rejected("already enabled: float32 matrix products and convolutions run in TF32")
    sites = [Site(switch.path, switch.work, operation="tf32", provider="torch") for switch in off]
    return Patch(sites, _change, reason=reason, exact=False, forced=context.precision == "tf32")


def _change(transaction: Transaction, sites: Sequence[Site]) -> None:
    paths = {site.path for site in sites}
    for switch in _SWITCHES:
        if switch.path in paths:
            switch.enable(transaction)


def _resolve(path: str) -> Any:
    """The object at ``torch.a.b``, or None where this PyTorch has no such thing."""
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _read(owner: Any, flag: str) -> Any:
    """A flag's value; None if it does not exist or refuses to be read (RuntimeError)."""
    try:
        return getattr(owner, flag, None)
    except RuntimeError:
        return None
