"""What could still be done about a step, in words, and the figures that they quote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from autofuse.costs import BETWEEN, COMMUNICATION, COMPILED, OPTIMIZER, OTHERS, PRODUCTS

if TYPE_CHECKING:
    from autofuse.profile import Profile
    from autofuse.report import Report

__all__ = ["advice_on", "has_fused_steps", "refused"]

NEAR_THE_RATE = 0.7
_FEWER_STEPS = (
    "more micro-batches per step (accumulate=; of a Trainer gradient_accumulation_steps=) take fewer steps "
    "for the same tokens"
)


def advice_on(group: str, profile: Profile) -> str:
    """What a group of operations is, and what would make it shorter."""
    return {
        PRODUCTS: _on_products,
        OPTIMIZER: _on_optimizer,
        COMPILED: _on_compiled,
        COMMUNICATION: lambda _: (
            "weights and gradients on their way between the processes; a larger batch gives each of them "
            "more to do between two exchanges"
        ),
        OTHERS: _on_others,
        BETWEEN: _on_between,
    }[group](profile)


def refused(report: Report) -> dict[str, str]:
    """The rejected rows with their reasons, but for what was taken back or not asked for."""
    return {
        row.name: row.reason
        for row in report.rows
        if row.status == "rejected" and (row.gain is not None or not _untried(row.reason, report))
    }


def _untried(reason: str, report: Report) -> bool:
    chosen = reason == "undone" or "was asked for" in reason
    return chosen or f"Tuning was stopped: {reason}." in report.tuning.notes


def has_fused_steps(optimizers: Iterable[Optimizer]) -> bool:
    """Whether every group of every optimizer has a fused step: torch's, or its class is named so (FusedAdam).

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.ones(2))]
    >>> [has_fused_steps([torch.optim.AdamW(weights, fused=fused)]) for fused in (True, False)]
    [True, False]
    """
    several = list(optimizers)
    return bool(several) and all(
        any(base.__name__.startswith("Fused") for base in type(each).__mro__)
        or all(group.get("fused") for group in each.param_groups)
        for each in several
    )


def _on_compiled(profile: Profile) -> str:
    return f"what Inductor has fused; less of it means a smaller model{_or_precision(profile)}"


def _on_products(profile: Profile) -> str:
    ms = profile.groups[PRODUCTS] * (profile.profiled_ms or 0.0)
    if not profile.flops or not profile.rate or not ms:
        return f"a larger batch{_or_precision(profile)} makes them faster"
    reached = profile.flops / (ms / 1e3) / (profile.rate * 1e9)
    if reached >= NEAR_THE_RATE:
        left = f"there is little left but a larger batch{_or_precision(profile)}"
    else:
        left = "larger matrices (a larger batch, fewer and wider layers) would use the machine better"
    return f"at {percent(reached)} of the measured rate {left}"


def _or_precision(profile: Profile) -> str:
    """Lower precision, where it is neither in place nor rejected."""
    low = profile.dtype in ("bfloat16", "float16") or "precision" in profile.applied
    return "" if low or "precision" in profile.refused else " or lower precision"


def _on_optimizer(profile: Profile) -> str:
    reason = profile.refused.get("optimizer")
    if "optimizer" in profile.applied or profile.fused_optimizer or reason == "already fused":
        return f"it is fused already; {_FEWER_STEPS}"
    if reason is not None:
        return f"a fused one was rejected ({reason}); {_FEWER_STEPS}"
    return f"a fused one is faster (autofuse.FusedAdam, fused=True); {_FEWER_STEPS}"


def _on_others(profile: Profile) -> str:
    dearest = next((cost.name for cost in profile.operations if cost.group == OTHERS), "")
    what = f"norms, activations, dropout, copies and the like, above all {dearest}"
    if profile.compiled:
        return what
    if "compile" in profile.refused:
        return f"{what}; {_no_compile(profile)}"
    return f"{what}; compile=True joins neighbours into one pass over memory"


def _on_between(profile: Profile) -> str:
    remedy = "Python, and waiting for it; a larger batch"
    if profile.compiled:
        return f"{remedy} gives each call more to do"
    if "compile" in profile.refused:
        return f"{remedy} gives each call more to do; {_no_compile(profile)}"
    return f"{remedy}, or compile=True, gives each call more to do"


def _no_compile(profile: Profile) -> str:
    return f"compiling, which would join some, was rejected ({profile.refused['compile']})"


def in_units(seconds: float) -> str:
    """
    >>> in_units(2.0), in_units(0.0314), in_units(2e-6)
    ('2.00 s', '31.4 ms', '2 µs')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def percent(share: float) -> str:
    """
    >>> percent(0.253), percent(0.002)
    ('25%', 'under 1%')
    """
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def si(value: float) -> str:
    """
    >>> si(2.5e9), si(12)
    ('2.5 G', '12 ')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
