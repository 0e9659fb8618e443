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
    """

    seconds: float
    waited: float | None
    tokens: int
    shape: Hashable
    one_off: bool = False


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
        self._depth = 0
        self._started = self._seconds = 0.0
        self._begun: float | None = None
        self._ended: float | None = None
        self._shapes: list[Hashable] = []
        self._tokens = self._graphs = 0

    def listen(self, listener: Listener, *, exact: bool = True) -> None:
        """Call ``listener`` after each optimizer step.

        Args:
            exact: wait for the GPU before and after each step. Otherwise a sample has the time of
                the host, which follows the GPU's over many steps.
        """
        (self._exact if exact else self._rough).append(listener)

    def unlisten(self, listener: Listener) -> None:
        for listeners in (self._exact, self._rough):
            if listener in listeners:
                listeners.remove(listener)

    @property
    def _idle(self) -> bool:
        return not self._exact and not self._rough

    @contextmanager
    def running(self, batch: Any = None) -> Iterator[None]:
        """What runs inside belongs to the step; may be nested, and entered several times for a step."""
        self.start(batch)
        try:
            yield
        finally:
            self.stop()

    def start(self, batch: Any = None) -> None:
        """Begin a part of the step; ``batch`` is given once for each micro-batch."""
        if self._idle:
            return
        self._depth += 1
        if batch is not None:
            self._note(batch)
        if self._depth == 1:
            self._synchronize()
            self._started = time.perf_counter()
            if self._begun is None:
                self._begun, self._graphs = self._started, _graphs()

    def stop(self) -> None:
        if self._depth == 0:  # nobody listened when it began
            return
        self._depth -= 1
        if self._depth == 0:
            self._synchronize()
            self._seconds += time.perf_counter() - self._started

    def step_done(self, key: Hashable = None, *, one_off: bool = False) -> None:
        """The optimizer step was taken: tell the listeners.

        Args:
            key: which of several optimizers; a part of the sample's shape.
        """
        if self._idle:
            return
        if self._depth:  # inside running(): what follows belongs to the next step
            self._synchronize()
            now = time.perf_counter()
            self._seconds += now - self._started
            self._started = now
        waited = None if self._ended is None or self._begun is None else max(self._begun - self._ended, 0.0)
        one_off = one_off or _graphs() != self._graphs
        sample = Sample(self._seconds, waited, self._tokens, (key, *self._shapes), one_off)
        self.reset()
        self._ended = time.perf_counter()
        for listener in (*self._exact, *self._rough):
            listener(sample)

    def reset(self) -> None:
        """Forget what was measured since the last step."""
        self._seconds, self._begun, self._tokens = 0.0, None, 0
        self._shapes = []

    def _note(self, batch: Any) -> None:
        found = dict(tensors(batch))
        self._shapes.append(tuple(tuple(t.shape) for t in found.values()))
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor):
            self._tokens += ids.numel()
        elif found:
            first = next(iter(found.values()))
            self._tokens += first.shape[0] if first.dim() else 1

    def _synchronize(self) -> None:
        if self._exact and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
