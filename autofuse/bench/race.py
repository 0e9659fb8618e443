"""Candidates side by side in one run.

Each lives in a fresh process of its own, with an empty cache of compiled code, and only one runs at a
time: they take turns of one step, in random order and on the same batches, so that whatever else the
machine does hits all alike. The first steps prove, compile, tune and warm up, and are not counted. A
hand-tuned candidate or another library that is far behind after a few rounds takes no more turns.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Protocol

import torch

from autofuse.bench.apart import PATIENCE, Failure
from autofuse.bench.candidates import CANDIDATES, Candidate, Job
from autofuse.bench.memory import Memory
from autofuse.bench.turns import Ask, Finished, Turn, Turns
from autofuse.bench.workloads import Workload

__all__ = ["BATCHES", "STEPS", "Runner", "behind", "best", "device_type", "race"]

BATCHES = 3  # as many steps to warm up, and as many rounds before anybody drops out
STEPS = 10
TUNING_STEPS = 150  # at most, until autofuse has tuned
Process = multiprocessing.get_context("spawn").Process
FAR_BEHIND = 1.25  # times the best hand-tuned


def device_type() -> str:
    """Where the benchmark trains.

    >>> device_type() in ("cpu", "cuda")
    True
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- in the candidate's process ----------------------------------------------------------------


def work(workload: Workload, candidate: Candidate, cache: str, parent: Connection) -> None:
    """A process's life: say how long it took to set up, then take the steps that are asked for."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        device = torch.device(device_type())
        model, optimizer, batches = workload.make(BATCHES)
        model.to(device)
        batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        turns = Turns(parent, device.type)
        candidate.train(Job(workload, model, optimizer, batches, device, turns))
    except (Finished, EOFError, ConnectionError):  # all but the first: the parent is gone
        pass
    except Exception as error:
        parent.send(Failure.of(error))


# --- in the parent -----------------------------------------------------------------------------


@dataclass
class Runner:
    """A candidate's process, and what it has answered. Seconds everywhere.

    Attributes:
        warm_up: the steps until it had settled; ``turns`` are the rounds that count.
        failure: why it gave up; None if it did not.
    """

    workload: Workload
    candidate: Candidate
    warm_up: Turn = field(default_factory=Turn)
    turns: list[Turn] = field(default_factory=list)
    setup: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    patience: float = PATIENCE

    def start(self) -> None:
        self.failure = self.candidate.missing
        if self.failure is not None:
            return
        self._connection, theirs = Pipe()
        self._cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = Process(
            target=work,
            args=(self.workload, self.candidate, self._cache.name, theirs),
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that a process that dies is noticed here
        self.setup = self._receive() or 0.0

    def settle(self, seconds: float = float("inf")) -> None:
        """The first steps: until nothing is tuned any more, or ``seconds`` are over."""
        self.warm_up = self._ask(Ask(BATCHES, TUNING_STEPS, seconds)) or self.warm_up

    def turn(self) -> None:
        turn = self._ask(Ask(1))
        if turn is not None:
            self.turns.append(turn)

    def memory(self) -> Memory | None:
        memory: Memory | None = self._ask(Ask(2, memory=True))
        return memory

    def finish(self) -> None:
        """Ask for the report and end the process; nothing to do if it has ended or never began."""
        if not hasattr(self, "_process"):
            return
        if self.failure is None and self._process.is_alive():
            self.report = self._ask(Ask(0)) or {}
        self._process.join(self.patience if self.failure is None else 1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._cache.cleanup()

    def _ask(self, ask: Ask) -> Any:
        if self.failure is not None:
            return None
        with suppress(OSError):  # it has died: what it said last is still to be read
            self._connection.send(ask)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answered = self._connection.poll(self.patience)
            answer = self._connection.recv() if answered else Failure(f"no answer in {self.patience:.0f} s")
        except (EOFError, OSError):
            answer = Failure("its process has died")
        if isinstance(answer, Failure):
            self.failure = answer.reason
            return None
        return answer

    # --- what is known of it -----------------------------------------------------------------

    @property
    def rounds(self) -> list[float]:
        """Seconds of each step that counts."""
        return [seconds for turn in self.turns for seconds in turn.seconds]

    @property
    def cpu(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn.cpu]

    @property
    def losses(self) -> list[float]:
        return [loss for turn in (self.warm_up, *self.turns) for loss in turn.losses]

    @property
    def kept(self) -> list[str]:
        """The names of the patches that autofuse has kept."""
        return [row["name"] for row in self.report.get("rows", ()) if row["status"] == "kept"]

    @property
    def computes_in(self) -> str:
        """ "bf16" or "fp32", as far as it is known."""
        narrow = self.candidate.precision == "bf16" or (
            self.candidate.precision == "auto" and "precision" in self.kept
        )
        return "bf16" if narrow else "fp32"


class Say(Protocol):
    """Where progress is shown."""

    def __call__(self, text: str, passing: bool = False) -> object: ...


def race(
    workload: Workload,
    candidates: Sequence[Candidate] = tuple(CANDIDATES.values()),
    steps: int = STEPS,
    say: Say = lambda text, passing=False: None,
    seconds: float = float("inf"),
) -> list[Runner]:
    """All candidates in turns; those that are far behind drop out.

    Args:
        say: is told what happens, ``passing`` where it is out of date soon.
        seconds: what the whole race may take, as far as that can be helped: who has not started by
            half of it does not take part, and no round begins after it.
    """
    begun, order = time.monotonic(), random.Random(0)
    runners = [Runner(workload, c, patience=min(PATIENCE, seconds)) for c in candidates]
    try:
        for runner in runners:
            left = seconds / 2 - (time.monotonic() - begun)
            if left <= 0:
                runner.failure = "no time was left for it"
                continue
            say(f"{workload.title}: {runner.candidate.title} starts")
            runner.start()
            runner.settle(left)
        going = [runner for runner in runners if runner.failure is None]
        for number in range(1, max(1, steps) + 1):
            if number > 1 and time.monotonic() - begun > seconds:
                break
            say(f"{workload.title}: round {number} of {steps}", passing=True)
            order.shuffle(going)
            for runner in going:
                runner.turn()
            if number >= BATCHES:
                going = _without_those_far_behind(runners, going)
    finally:
        for runner in runners:
            runner.finish()
    return runners


def _without_those_far_behind(runners: Sequence[Runner], going: list[Runner]) -> list[Runner]:
    leader = best(runners)
    if leader is None:
        return going
    limit = FAR_BEHIND * behind(leader, going)
    staying = [r for r in going if r.candidate.kind == "autofuse" or behind(r, going) <= limit]
    for runner in going:
        if runner not in staying:
            runner.finish()
    return staying


def best(runners: Sequence[Runner]) -> Runner | None:
    """The best hand-tuned, among those that took all turns; None without any."""
    found = [r for r in runners if r.candidate.kind == "hand-tuned" and r.rounds]
    most = max((len(r.rounds) for r in found), default=0)
    found = [r for r in found if len(r.rounds) == most]
    return min(found, key=lambda runner: behind(runner, found), default=None)


def behind(runner: Runner, others: Sequence[Runner]) -> float:
    """How many times the time of each round's fastest hand-tuned it takes, in the median: a quiet
    moment of the machine, which only one of them met, decides nothing."""
    rivals = [r.rounds for r in others if r.candidate.kind == "hand-tuned" and r.rounds]
    ratios = [a / min(b) for a, b in zip(runner.rounds, zip(*rivals, strict=False), strict=False)]
    return median(ratios) if ratios else float("inf")
