"""The window of micro-batches between two optimizer steps, and what is needed to do one again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autofuse.batch import fresh
from autofuse.patches import Patches
from autofuse.probe import RandomState

__all__ = ["Loop", "Moment", "Window", "is_finite"]


@dataclass(frozen=True)
class Loop:
    """The options of the loop around the model, as `autofuse.optimize` takes them."""

    loss_fn: Callable[..., Tensor] | None = None
    forward: Callable[..., Tensor] | None = None
    schedulers: tuple[Any, ...] = ()
    accumulate: int = 1
    clip_grad_norm: float | None = None
    on_nonfinite: str = "report"
    steps: int | None = None


@dataclass
class Moment:
    """A micro-batch and what its forward starts from, to do it again."""

    batch: tuple[Any, ...]
    random: RandomState | None
    buffers: list[tuple[Tensor, Tensor]]

    @classmethod
    def now(cls, batch: tuple[Any, ...], patches: Patches) -> Moment:
        if not patches.active:  # it will not be done again
            return cls(batch, None, [])
        return cls(fresh(batch), RandomState.capture(), [(b, b.detach().clone()) for b in patches.moving])

    def restore(self) -> tuple[Any, ...]:
        """Put the generators and the moving buffers back; returns the batch."""
        if self.random is not None:
            self.random.restore()
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        return fresh(self.batch)


@dataclass
class Window:
    """The micro-batches since the last optimizer step."""

    finite: list[Callable[[], bool]] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    replay: list[Moment] = field(default_factory=list)

    @property
    def torn(self) -> bool:
        """Whether a backward began and did not end: the gradients are not those of whole micro-batches."""
        return len(self.finite) < len(self.weights)

    @property
    def reference(self) -> int:
        """The first weight that counts: the scale in which the window's gradients are summed."""
        return next((w for w in self.weights if w), 1)


def is_finite(loss: Tensor) -> Callable[[], bool]:
    """Whether the loss is finite, to be asked after the backward was launched: the flag is copied
    beside the running computation, so that a GPU is never waited for in mid-step."""
    flag = torch.isfinite(loss.detach()).all()
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def ask() -> bool:
        copied.synchronize()
        return bool(host)

    return ask
