"""The clock of a training step: how long each optimizer step took, for whoever listens.

Nothing is measured, and a GPU is never waited for, while nobody listens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autofuse.batch import tensors
from autofuse.proof import runs

__all__ = ["Listener", "Sample", "StepClock"]


@dataclass(frozen=True)
class Sample:
    """One optimizer step, with all micro-batches of its window, as it was timed.

    Attributes:
        seconds: inside the step: forward, loss, backward, optimizer; without loading data.
        waited: between the end of the step before and the beginning of this one, in seconds: data
            loading, logging, evaluation. None for the first.
        tokens: elements of each micro-batch's ``input_ids`` (padding included); without any, the
            rows of its first tensor.
        shape: what two samples must have in common to be compared as they are.
        one_off: something that happens once was in it (a compilation): it says nothing of the others.
        peak: the most memory that the device had allocated, in bytes, where somebody waits for the device.
    """

    seconds: float
    waited: float | None
    tokens: int
    shape: Hashable
    one_off: bool = False
    peak: int | None = None

    @property
    def pace(self) -> float:
        """Seconds per token."""
        return self.seconds / max(self.tokens, 1)


Listener = Callable[[Sample], object]


class StepClock:
    """Measures the step as a call and in pieces.

    >>> clock, seen = StepClock(torch.device("cpu")), []
    >>> clock.listen(seen.append)
    >>> with clock.running({"input_ids": torch.zeros(2, 8)}):
    ...     pass
    >>> clock.step_done()
    >>> seen[0].tokens, seen[0].waited
    (16, None)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._exact: list[Listener] = []
        self._rough: list[Listener] = []
        self._held = self._running = False
        self._started = self._seconds = 0.0
        self._begun: float | None = None
        self._ended: float | None = None
        self._shapes: list[Hashable] = []
        self._tokens = self._events = 0

    def listen(self, listener: Listener, *, exact: bool = True) -> None:
        """Call ``listener`` after each optimizer step.

        Args:
            exact: wait for the GPU before and after each step, and count its memory. Otherwise a
                sample has the time of the host, which follows the GPU's over many steps.
        """
        (self._exact if exact else self._rough).append(listener)

    def unlisten(self, listener: Listener) -> None:
        for listeners in (self._exact, self._rough):
            if listener in listeners:
                listeners.remove(listener)
        if not self.listened:
            self.reset()
            self._ended = None

    @property
    def listened(self) -> bool:
        return bool(self._exact or self._rough)

    @property
    def is_running(self) -> bool:
        return self._running

    @contextmanager
    def running(self, batch: Any = None) -> Iterator[None]:
        """All that runs inside belongs to the step."""
        self.start(batch)
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held
            self.stop()

    def start(self, batch: Any = None) -> None:
        """Begin a part of the step; nothing to do inside one. ``batch``: see `note`."""
        if not self.listened:
            return
        if batch is not None:
            self.note(batch)
        if not self._running:
            self._synchronize()
            self._running, self._started = True, time.perf_counter()
            if self._begun is None:
                self._begun, self._events = self._started, _one_off_events()
                if self._exact and self._device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """End a part of the step; nothing to do outside of one, or inside `running`."""
        if self._running and not self._held:
            self._synchronize()
            self._seconds += time.perf_counter() - self._started
            self._running = False

    def note(self, batch: Any) -> None:
        """Tell of a micro-batch that belongs to the step."""
        if not self.listened:
            return
        found = dict(tensors(batch))
        self._shapes.append(tuple(tuple(t.shape) for t in found.values()))
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor):
            self._tokens += ids.numel()
        elif found:
            first = next(iter(found.values()))
            self._tokens += first.shape[0] if first.dim() else 1

    def step_done(self, key: Hashable = None, *, one_off: bool = False) -> None:
        """The optimizer step was taken: tell the listeners.

        Args:
            key: which of several optimizers; a part of the sample's shape.
            one_off: the step did something that the others do not.
        """
        if not self.listened:
            self.reset()
            return
        held, self._held = self._held, False
        self.stop()
        self._held = held
        waited = None if self._ended is None or self._begun is None else max(self._begun - self._ended, 0.0)
        sample = Sample(
            self._seconds,
            waited,
            self._tokens,
            (key, *self._shapes),
            one_off or self._seconds <= 0 or _one_off_events() != self._events,
            self._peak(),
        )
        self.reset()
        self._ended = time.perf_counter()
        for listener in (*self._exact, *self._rough):
            listener(sample)

    def reset(self) -> None:
        """Forget what was measured since the last step."""
        self._running, self._seconds, self._begun, self._tokens = False, 0.0, None, 0
        self._shapes = []

    def _peak(self) -> int | None:
        counted = self._exact and self._device.type == "cuda"
        return torch.cuda.max_memory_allocated(self._device) if counted else None

    def _synchronize(self) -> None:
        if self._exact and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _one_off_events() -> int:
    return _graphs() + runs.evaluations  # the steps that were run for comparison


def _graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
