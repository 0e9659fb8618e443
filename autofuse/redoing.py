"""How a step that fails is done again: without one patch less at a time, until it is the user's own error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autofuse.clock import StepClock
from autofuse.errors import first_line, is_out_of_memory
from autofuse.patch import Patch
from autofuse.patches import Patches
from autofuse.report import Counters
from autofuse.stepping import Stepping
from autofuse.window import Window

__all__ = ["Redoing"]

Result = tuple[Tensor, Callable[[], Any]]


class Redoing:
    """The part of a `TrainingStep` that does a micro-batch, or its whole window, once more."""

    optimizers: tuple[Optimizer, ...]
    counters: Counters
    clock: StepClock
    _device: torch.device
    _patches: Patches
    _stepping: Stepping
    _window: Window
    _redone: bool

    def _forward_backward(self, batch: tuple[Any, ...]) -> Result:
        raise NotImplementedError

    def _without_failing_patch(self, error: Exception) -> Result:
        """Do the window again with one patch less at a time; the user's own error comes out."""
        self._redone = True
        active = self._patches.active
        if not active:
            self._forget_last()
            raise error
        if is_out_of_memory(error):  # the traceback holds what the step had allocated
            traceback.clear_frames(error.__traceback__)
            torch.accelerator.empty_cache() if self._device.type != "cpu" else None
        undone: list[Patch] = []
        for patch in reversed(active):
            patch.undo()
            undone.append(patch)
            try:
                result = self._replay()
            except Exception:
                continue
            for innocent in reversed(undone[:-1]):
                self._patches.apply_or_reject(innocent)
            reason = f"it failed in batch {self.counters.micro_batches}: {first_line(error)}"
            self._patches.give_up([patch], reason)
            return result
        for patch in reversed(undone):  # it fails without any patch: the error is the user's own
            self._patches.apply_or_reject(patch)
        self._forget_last()
        raise error

    def _forget_last(self) -> None:
        """Take the micro-batch that failed out of the window."""
        window = self._window
        window.replay.pop()
        if not window.torn and len(window.weights) == len(window.replay):
            return
        if window.replay:
            self._replay_all()
        else:
            self.counters.micro_batches -= len(window.weights)
            self._stepping.zero_grad(self.optimizers)
            self._window = Window()

    def _begin_anew(self) -> None:
        """After an interrupt: the gradients may be those of half a backward."""
        self.counters.micro_batches -= len(self._window.weights)
        self._stepping.zero_grad(self.optimizers)
        self._window = Window()
        self.clock.reset()

    def _replay(self) -> Result:
        """The last micro-batch again with its random numbers; if gradients of it may be there already,
        the whole window again, from no gradient."""
        if self._window.torn or len(self._window.weights) != len(self._window.replay) - 1:
            return self._replay_all()
        return self._forward_backward(self._window.replay[-1].restore())

    def _replay_all(self) -> Result:
        window = self._window
        self.counters.micro_batches -= len(window.weights)
        window.weights, window.finite = [], []
        self._stepping.zero_grad(self.optimizers)
        for moment in window.replay:
            result = self._forward_backward(moment.restore())
        return result
