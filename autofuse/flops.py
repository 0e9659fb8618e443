"""The useful work of a step: the FLOPs of the model as it is written, and the machine's rate at them.

What a patch leaves out (logits that are never built, padding) or hides (a compiled region, a fused
operation) counts all the same, so that two runs of one model can be compared whatever is applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autofuse.batch import fresh
from autofuse.hardware import DTYPES, Hardware
from autofuse.probe import modules_behind
from autofuse.proof import evaluate
from autofuse.regions import eagerly
from autofuse.timing import measure_matmul_rate

if TYPE_CHECKING:
    from autofuse.step import TrainingStep

__all__ = ["Forward", "count_flops", "matmul_rate", "precision_of"]


@dataclass(frozen=True)
class Forward:
    """What one micro-batch's forward was called with: ``step(*args)``, or in pieces the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_pieces: bool

    def loss(self, step: TrainingStep) -> Tensor:
        if self.in_pieces:
            return step._stand_in_loss(fresh(self.args, detached=True), fresh(self.kwargs, detached=True))
        return step._forward(fresh(self.args, detached=True))[0]


def count_flops(step: TrainingStep, forwards: Sequence[Forward]) -> int:
    """FLOPs of the forward and the backward of ``forwards``, without any patch; leaves no trace.

    A multiplication and an addition are two. Matrix products, convolutions and attention count (all
    of its scores, also where a causal mask leaves half of them out), nothing else does.
    """
    # A change of precision changes no FLOPs, and the step may not fit into memory without it.
    undone = [patch for patch in step._patches.active if patch.exact]
    for patch in reversed(undone):
        patch.undo()
    try:
        return sum(_count(step, forward) for forward in forwards)
    finally:
        for patch in undone:
            step._patches.apply_or_reject(patch)


def _count(step: TrainingStep, forward: Forward) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=_more_formulas())

    def loss() -> Tensor:
        counter.flop_counts.clear()  # reentrant checkpointing is evaluated a second time
        return forward.loss(step)

    held = (p for o in step.optimizers for group in o.param_groups for p in group["params"])
    trained = {id(p): p for p in (*step.model.parameters(), *held) if p.requires_grad}
    others = modules_behind([step._loop.loss_fn, step._loop.forward])
    # PyTorch warns of the counter's own hooks where the caller has compiled the model.
    with warnings.catch_warnings(action="ignore"), eagerly(), counter:
        evaluate(loss, step.model, list(trained.values()), others)
    return counter.get_total_flops()


def _more_formulas() -> dict[Any, Any]:
    """Attention on devices that PyTorch's counter leaves out."""

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
        aten._scaled_dot_product_fused_attention_overrideable: attention,
        aten._scaled_dot_product_fused_attention_overrideable_backward: backward,
    }


def precision_of(step: TrainingStep) -> torch.dtype:
    """The dtype in which the step multiplies matrices."""
    first = next(step.model.parameters(), None)
    if first is not None and first.dtype == torch.float64:  # autocast leaves it alone
        return torch.float64
    return step._patches._precision()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """GFLOP/s of a matrix product on ``device``, measured, with the threads and the TF32 setting of now.

    None where it cannot be measured. Takes tens of milliseconds, the first time.

    >>> matmul_rate(torch.device("cpu"), torch.float32) > 0
    True
    """
    if dtype not in DTYPES.values():
        return None
    if device.type == "cpu":
        return Hardware.detect("cpu").matmul_rate(dtype, torch.get_num_threads())
    # Anew: TF32 may be on by now.
    return measure_matmul_rate.__wrapped__(device.type, dtype, torch.get_num_threads())
