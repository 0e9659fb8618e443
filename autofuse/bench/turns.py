"""A candidate's side of the pipe: it takes its steps when its parent asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from autofuse.bench.memory import Meter

__all__ = ["Ask", "Finished", "Turn", "Turns"]


class Finished(Exception):
    """No more steps are asked for."""


@dataclass(frozen=True)
class Ask:
    """What the parent asks for: steps (with their memory measured), or the report if there are none.

    Args:
        steps: how many at least.
        most: how many at most, until the candidate has settled.
        seconds: no new step after so long, once there were ``steps``.
    """

    steps: int
    most: int = 0
    seconds: float = float("inf")
    memory: bool = False


@dataclass(frozen=True)
class Turn:
    """What came of some steps; ``cuda_peak`` in bytes since the turn before, None on a CPU."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settled: bool = True
    cuda_peak: int | None = None


class Turns:
    """Call `begin` before each step, which waits until one is asked for, and `end` after it.

    The seconds from the making of this object to the first `begin` are the candidate's setup.

    Attributes:
        settled: whether later steps will be like this one (nothing is tuned any more).
        report: what the candidate says of itself, as JSON can hold it.
    """

    def __init__(self, connection: Connection, device_type: str) -> None:
        self.settled: Callable[[], bool] = lambda: True
        self.report: Callable[[], dict[str, Any]] = dict
        self._connection, self._device = connection, device_type
        self._ask: Ask | None = None
        self._setup: float | None = time.perf_counter()

    def begin(self) -> None:
        """Wait for the next step.

        Raises:
            Finished: the report was asked for, and given: there is no next step.
        """
        if self._setup is not None:
            setup, self._setup = time.perf_counter() - self._setup, None
            self._connection.send(setup)
        if self._ask is None:
            self._ask = self._connection.recv()
            assert self._ask is not None
            if self._ask.steps == 0:
                self._connection.send(self.report())
                raise Finished
            self._turn, self._meter = Turn(), Meter(self._device) if self._ask.memory else None
            if self._device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        if self._meter is not None:
            self._meter.before()
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def end(self, loss: Tensor) -> None:
        """The step is done; ``loss`` is a scalar."""
        value = loss.item()
        if self._device != "cpu":
            torch.accelerator.synchronize()
        self._turn.seconds.append(time.perf_counter() - self._start)
        self._turn.cpu.append(time.process_time() - self._cpu)
        self._turn.losses.append(value)
        if self._meter is not None:
            self._meter.after()
        if self._done():
            self._ask = None
            self._connection.send(self._turn if self._meter is None else self._meter.result())

    def _done(self) -> bool:
        ask, count = self._ask, len(self._turn.seconds)
        assert ask is not None
        settled = self.settled()
        if count < ask.steps or (not settled and count < ask.most and sum(self._turn.seconds) < ask.seconds):
            return False
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else None
        turn = self._turn
        self._turn = Turn(turn.seconds, turn.cpu, turn.losses, settled, peak)
        return True
