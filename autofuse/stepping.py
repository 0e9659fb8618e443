"""The optimizer's part of a training step: unscale, clip, step, scheduler, scaler, zero the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofuse.errors import first_line
from autofuse.patch import Settings
from autofuse.patches import Patches
from autofuse.report import Counters
from autofuse.window import Loop

__all__ = ["Stepping"]


class Stepping:
    """Takes the optimizer steps, and counts them.

    Args:
        model: whose gradients are clipped where there is no optimizer.
        patches: for the optimizer's patch, which is given up when a step fails with it alone.
    """

    def __init__(
        self, model: nn.Module, loop: Loop, settings: Settings, patches: Patches, counters: Counters
    ) -> None:
        self._model, self._loop, self._settings = model, loop, settings
        self._patches, self._counters = patches, counters

    def step(self, optimizers: Sequence[Optimizer], factor: float, finite: bool) -> bool:
        """Whether a step was taken; ``factor`` scales the gradients, ``finite``: they are sound."""
        scaler, clip = self._settings.active_scaler, self._loop.clip_grad_norm
        held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        parameters: list[Any] = [p for p in (held or self._model.parameters()) if p.grad is not None]
        if not parameters:
            return False
        if scaler is not None and (clip is not None or factor != 1 or not finite):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if factor != 1:
            for gradient in (p.grad for p in parameters):
                gradient.mul_(factor)
        if clip is not None and finite:
            norm = nn.utils.clip_grad_norm_(parameters, clip)
            finite = bool(torch.isfinite(norm))
        if not optimizers:  # the gradients are the caller's
            return False
        before = 0.0 if scaler is None else scaler.get_scale()
        if finite or scaler is not None:  # a scaler sees for itself what is not finite, and learns of it
            for optimizer in optimizers:
                self._step_one(optimizer)
        if scaler is not None:
            scaler.update()
            finite = scaler.get_scale() >= before
        if not finite:
            self._counters.skipped += 1
            return False
        self._counters.steps += 1
        for scheduler in self._loop.schedulers:
            scheduler.step()
        return True

    def _step_one(self, optimizer: Optimizer) -> None:
        scaler = self._settings.active_scaler
        step = (lambda: optimizer.step()) if scaler is None else (lambda: scaler.step(optimizer))
        patch = self._patches.get("optimizer")
        if patch is None or not patch.applied:
            step()
            return
        try:
            step()
        except Exception as error:
            patch.undo()
            step()  # an error of the user's own comes out here
            self._patches.give_up(
                [patch], f"it failed in step {self._counters.steps + 1}: {first_line(error)}"
            )

    def zero_grad(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
