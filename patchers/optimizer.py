"""The optimizer's step, fused: torch's own optimizers by their flag, hand-written Adams by a new class.

The object stays the same: its ``param_groups``, its ``state``, its state dict, its hooks and the
schedulers that were made before. torch's Adam, AdamW, SGD and Adagrad keep their class too. On any
device the provider is torch's fused kernel; Apex's is used by `autofuse.FusedAdam` alone, whose state
it needs (float32 moments, one step count for the group).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.functional.adam_like import Layout, recognise
from autofuse.functional.adam_swap import FusedAdamLike, follow_scheduler, fused_optimizer_class, suits
from autofuse.functional.optimizer_probe import (
    probe_clone,
    probe_shapes,
    quiet,
    same_training,
    unhooked_step,
)
from autofuse.functional.torch_fused import FusedFlags, is_torch_optimizer, prove, refusal
from autofuse.optim import FusedAdam
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name

__all__ = ["find", "order"]

order = 60


def find(context: Context) -> Patch | Rejected:
    """Every param group of every optimizer, with its fused step or the reason why it has none."""
    optimizers = list({id(o): o for o in map(_inner, context.optimizers)}.values())
    if not optimizers:
        return Rejected("there is no optimizer")
    sparse = [
        module.weight
        for _, module in context.modules
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    sites: list[Site] = []
    changes: list[tuple[set[str], Callable[[Transaction, Sequence[str]], None]]] = []
    with quiet():
        for number, optimizer in enumerate(optimizers):
            name = "optimizer" if len(optimizers) == 1 else f"optimizers[{number}]"
            found, change = _find_one(optimizer, name, sparse)
            sites += found
            changes.append(({site.path for site in found}, change))

    def apply(transaction: Transaction, accepted: Sequence[Site]) -> None:
        for paths, change in changes:
            chosen = [site.path for site in accepted if site.path in paths]
            if chosen:
                change(transaction, chosen)

    reasons = {site.reason for site in sites if not site.accepted}
    none = not any(site.accepted for site in sites)
    reason = "; ".join(sorted(reasons)) if none else "the fused step is one pass over memory"
    return Patch(sites, apply, reason=reason, in_forward=False)


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one (Accelerate's) wraps and steps."""
    inner = getattr(optimizer, "optimizer", None)
    wrapped = isinstance(inner, Optimizer) and inner.param_groups is optimizer.param_groups
    return _inner(inner) if wrapped and inner is not None else optimizer


def _find_one(
    optimizer: Optimizer, name: str, sparse: Sequence[Tensor]
) -> tuple[list[Site], Callable[[Transaction, Sequence[str]], None]]:
    sites = [
        Site(f"{name}.param_groups[{index}]", class_name(optimizer))
        for index in range(len(optimizer.param_groups))
    ]
    if isinstance(optimizer, (FusedAdam, FusedAdamLike)):
        return [site.rejected("already fused") for site in sites], _nothing
    if is_torch_optimizer(optimizer):
        return _find_torch(optimizer, sites, sparse)
    return _find_hand_written(optimizer, sites, sparse)


def _nothing(transaction: Transaction, paths: Sequence[str]) -> None:
    """The change of an optimizer that is left alone."""


# --- torch's own ------------------------------------------------------------------------------------


def _find_torch(
    optimizer: Optimizer, sites: list[Site], sparse: Sequence[Tensor]
) -> tuple[list[Site], Callable[[Transaction, Sequence[str]], None]]:
    operation = f"fused {class_name(optimizer).rpartition('.')[2].lower()}"
    proofs: dict[str, str | None] = {}
    found = []
    for site, group in zip(sites, optimizer.param_groups, strict=True):
        reason = refusal(optimizer, group, sparse)
        if reason is None:
            signature = _signature(optimizer, group)
            if signature not in proofs:
                proofs[signature] = prove(optimizer, group)
            reason = proofs[signature]
        found.append(
            Site(site.path, site.cls, operation, "torch") if reason is None else site.rejected(reason)
        )

    def change(transaction: Transaction, paths: Sequence[str]) -> None:
        FusedFlags(optimizer, [i for i, site in enumerate(sites) if site.path in paths]).apply(transaction)

    return found, change


def _signature(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """What the proof of a group depends on: groups that differ in their rates are proved once."""
    hyper = {key: group.get(key) for key in optimizer.defaults if key not in ("lr", "fused", "foreach")}
    kinds = sorted({(str(p.device), str(p.dtype)) for p in group["params"]})
    return repr((hyper, kinds, sorted(map(str, probe_shapes(group["params"])))))


# --- hand-written -----------------------------------------------------------------------------------


def _find_hand_written(
    optimizer: Optimizer, sites: list[Site], sparse: Sequence[Tensor]
) -> tuple[list[Site], Callable[[Transaction, Sequence[str]], None]]:
    """All groups or none: they share one ``step``."""
    reason = _whole_refusal(optimizer, sparse)
    layouts: list[Layout] = []
    for group in optimizer.param_groups if reason is None else ():
        if any(layout.holds_for(group) for layout in layouts):
            continue
        verdict = recognise(optimizer, group)
        if isinstance(verdict, Rejected):
            reason = verdict.reason
            break
        layouts.append(verdict)
    fused = fused_optimizer_class(type(optimizer), tuple(layouts)) if reason is None else type(optimizer)
    if reason is None:
        reason = _check_swap(optimizer, fused)
    if reason is not None:
        return [site.rejected(reason) for site in sites], _nothing

    def change(transaction: Transaction, paths: Sequence[str]) -> None:
        if len(paths) < len(sites):
            return  # some of its groups were taken back: it keeps its own step
        transaction.set_class(optimizer, fused)
        step = follow_scheduler(optimizer)
        if step is not None:
            transaction.set_attribute(optimizer, "step", step)

    operation = "fused adamw" if layouts[0].rule.decay != "l2" else "fused adam"
    return [Site(site.path, site.cls, operation, "torch") for site in sites], change


def _whole_refusal(optimizer: Optimizer, sparse: Sequence[Tensor]) -> str | None:
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return "its step was replaced on the object"
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return "it handles a scaler's scale itself"
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) not in (Tensor, nn.Parameter):
                return f"its parameters are of the tensor class {type(param).__name__}"
        reason = refusal(optimizer, {**group, "fused": False}, sparse)
        if reason is not None:
            return reason
    return None


def _check_swap(optimizer: Optimizer, fused: type[Optimizer]) -> str | None:
    """Both classes through the same steps, in the dtypes and on the devices of the real parameters."""
    if not all(suits(optimizer, group, fused) for group in optimizer.param_groups):
        return "the state it has now is not the state it makes"
    for group in optimizer.param_groups:
        shapes = probe_shapes(group["params"])
        for device, dtype in sorted({(p.device, p.dtype) for p in group["params"]}, key=str):
            original, swapped = _starter(optimizer, group), _starter(optimizer, group, fused)
            try:
                same = same_training(original, swapped, shapes, dtype, device)
            except Exception as error:
                return f"its fused step fails on a probe ({type(error).__name__}: {str(error)[:120]})"
            if not same:
                return f"its fused step differs from its own in {dtype} on {device.type}"
    return None


def _starter(
    optimizer: Optimizer, group: dict[str, Any], cls: type[Optimizer] | None = None
) -> Callable[[list[Tensor]], tuple[Optimizer, Callable[[], object]]]:
    def start(params: list[Tensor]) -> tuple[Optimizer, Callable[[], object]]:
        clone = probe_clone(optimizer, [{**group, "params": params}], cls)
        step = unhooked_step(type(clone))
        return clone, lambda: step(clone)

    return start
