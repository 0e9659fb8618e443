"""A training step by autofuse beside the best that is known to do by hand.

    python -m benchmarks.train_step [--models gpt2,llama] [--steps N] [--memory] [--json FILE]

Eager is a plain loop in fp32. Hand-tuned is the best of {eager, torch.compile of the whole model} x
{fp32, bf16 autocast}, each with fused AdamW. Every candidate lives in a process of its own, and only
one runs at a time: they take turns of one step, in random order and on the same batch, so that
whatever else the machine does hits all alike. The first steps prove, compile and warm up, and are not
counted. Ratios are taken round by round, and the median over the rounds is shown; beside it the same
of CPU seconds, which a busy machine disturbs less. One that is far behind the best hand-tuned after a
few rounds takes no more turns. A spread (interquartile) of some percent says that the machine was busy.

``--memory`` measures the peak of what one step allocates beside the weights, the optimizer's state
and the batch: gradients, activations, logits and whatever is temporary. It is the running sum of
PyTorch's own allocations and frees; once of all, and once without the tensors that end up as the
parameters' gradients, which are as large as the weights whatever is done about logits. The rise of
the process's resident memory, which also sees what other libraries allocate, is shown beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autofuse
from benchmarks.models import BIG_VOCABULARY, WORKLOADS, Workload

BATCHES = 3  # as many steps to warm up, and as many rounds before anybody drops out
STEPS = 10
FAR_BEHIND = 1.25  # times the best hand-tuned
RUN = 10_000  # steps of the run that autofuse is told to decide for
SAME_LOSS = 1e-4  # relative, in fp32, in each step

Step = Callable[[Mapping[str, Tensor]], Tensor]


# --- the candidates ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One way to train."""

    name: str
    kind: Literal["eager", "hand-tuned", "autofuse"]
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    compiled: bool = False

    def step(self, model: nn.Module) -> Step:
        """The training step, as its user writes it."""
        fused = True if self.kind == "hand-tuned" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        if self.kind == "autofuse":
            return autofuse.optimize(model, optimizer, precision=self.precision, steps=RUN)
        forward = torch.compile(model) if self.compiled else model
        device, narrow = next(model.parameters()).device.type, self.precision == "bf16"

        def step(batch: Mapping[str, Tensor]) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=narrow):
                loss: Tensor = forward(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


EAGER = Candidate("eager", "eager")
AUTOFUSE = Candidate("autofuse", "autofuse", "auto")
AUTOFUSE_FP32 = Candidate("autofuse, fp32", "autofuse")
CANDIDATES = (
    EAGER,
    Candidate("fused", "hand-tuned"),
    Candidate("fused, bf16", "hand-tuned", "bf16"),
    Candidate("fused, compile", "hand-tuned", compiled=True),
    Candidate("fused, compile, bf16", "hand-tuned", "bf16", compiled=True),
    AUTOFUSE,
    AUTOFUSE_FP32,
)


# --- in the candidate's process ----------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What came of some steps."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Memory:
    """The peak of one step above what was there before it, in bytes."""

    peak: int
    others: int  # the peak of all but the tensors that end up as the parameters' gradients
    resident: int | None  # the rise of resident memory; None where the system does not tell


def work(workload: Workload, candidate: Candidate, parent: Connection) -> None:
    """A process's life: say how long it took to set up, then answer until it is asked for its report."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = workload.build().to(device)
        batches = cycle([{k: v.to(device) for k, v in b.items()} for b in workload.batches(BATCHES)])
        start = time.perf_counter()
        step = candidate.step(model)
        parent.send(time.perf_counter() - start)
        while isinstance(request := parent.recv(), int):
            parent.send(_turn(step, [next(batches) for _ in range(request)]))
        parent.send(_memory(step, next(batches)) if request == "memory" else _report(step))
    except Exception as error:
        parent.send(error)


def _turn(step: Step, batches: Sequence[Mapping[str, Tensor]]) -> Turn:
    turn = Turn()
    for batch in batches:
        start, cpu = time.perf_counter(), time.process_time()
        turn.losses.append(step(batch).item())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        turn.seconds.append(time.perf_counter() - start)
        turn.cpu.append(time.process_time() - cpu)
    return turn


def _report(step: Step) -> list[dict[str, Any]]:
    return step.report.to_dict()["rows"] if isinstance(step, autofuse.TrainingStep) else []


def _memory(step: Step, batch: Mapping[str, Tensor]) -> Memory:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resident = _resident("VmRSS", reset=True)
    step(batch)
    most = _resident("VmHWM")
    gradients: set[int] = set()
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: gradients.update(_gradients(optimizer)))
    everything = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        everything.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=everything, profile_memory=True) as seen:
        step(batch)
    hook.remove()
    events = _allocations(seen, device)
    last = {address: index for index, (address, size) in enumerate(events) if size > 0}
    others = [
        size
        for index, (address, size) in enumerate(events)
        if address not in gradients or index < last.get(address, 0)
    ]
    return Memory(
        peak=max(accumulate((size for _, size in events), initial=0)),
        others=max(accumulate(others, initial=0)),
        resident=most - resident if most and resident and device == "cpu" else None,
    )


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Where the gradients lie that the optimizer is about to use."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            yield parameter.grad.untyped_storage().data_ptr()


def _allocations(seen: torch.profiler.profile, device: str) -> list[tuple[int, int]]:
    """What PyTorch's allocator gave out and took back, in order: (address, bytes), negative if taken back."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events, waiting = [], seen.profiler.kineto_results.experimental_event_tree()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == device:
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(events, key=lambda e: e[0])]


def _resident(line: str, reset: bool = False) -> int | None:
    """``line`` of the process's status, in bytes; ``reset`` starts the peak anew."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


# --- in the parent -----------------------------------------------------------------------------


@dataclass
class Runner:
    """A candidate's process, and what it has answered."""

    workload: Workload
    candidate: Candidate
    turns: list[Turn] = field(default_factory=list)  # the first one is the warm-up
    setup: float = 0.0
    report: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=work, args=(self.workload, self.candidate, theirs), daemon=True
        )
        self._process.start()
        theirs.close()  # so that a process that dies is noticed here
        self.setup = self._receive() or 0.0

    def turn(self, steps: int) -> None:
        turn = self._ask(steps)
        if turn is not None:
            self.turns.append(turn)

    def memory(self) -> Memory | None:
        memory: Memory | None = self._ask("memory")
        self._process.join()
        return memory

    def finish(self) -> None:
        """End the process; nothing to do if it has ended."""
        if self.failure is None and self._process.is_alive():
            self.report = self._ask("report") or []
        self._process.join()

    def _ask(self, request: int | str) -> Any:
        if self.failure is not None:
            return None
        self._connection.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            answer = RuntimeError("its process has died")
        if isinstance(answer, Exception):
            self.failure = f"{type(answer).__name__}: {answer}"
            return None
        return answer

    # --- what is known of it -----------------------------------------------------------------

    @property
    def rounds(self) -> list[float]:
        """Seconds of each step but the warm-up's."""
        return [seconds for turn in self.turns[1:] for seconds in turn.seconds]

    @property
    def cpu(self) -> list[float]:
        return [seconds for turn in self.turns[1:] for seconds in turn.cpu]

    @property
    def seconds(self) -> float:
        return median(self.rounds) if self.rounds else float("inf")

    @property
    def losses(self) -> list[float]:
        return [loss for turn in self.turns for loss in turn.losses]

    @property
    def first_step(self) -> float:
        """Seconds until the first step was done: to set up, prove, compile and train."""
        return self.setup + (self.turns[0].seconds[0] if self.turns else 0.0)

    @property
    def start_up(self) -> float:
        """What setting up and the warm-up took more than as many of the fastest steps take later."""
        fastest = min(self.rounds, default=0.0)
        return self.setup + sum(s - fastest for s in self.turns[0].seconds) if self.turns else 0.0

    @property
    def in_fp32(self) -> bool:
        narrow = any(row["name"] == "precision" and row["status"] == "kept" for row in self.report)
        return self.candidate.precision != "bf16" and not narrow


def race(
    workload: Workload,
    candidates: Sequence[Candidate] = CANDIDATES,
    steps: int = STEPS,
    say: Callable[[str], object] = lambda text: None,
) -> list[Runner]:
    """All candidates in turns; those that are far behind drop out."""
    runners, order = [Runner(workload, c) for c in candidates], random.Random(0)
    for runner in runners:
        say(f"{workload.title}: {runner.candidate.name} starts")
        runner.start()
        runner.turn(BATCHES)
    going = [r for r in runners if r.failure is None]
    for number in range(1, max(1, steps) + 1):
        say(f"{workload.title}: round {number} of {steps}")
        order.shuffle(going)
        for runner in going:
            runner.turn(1)
        if number >= BATCHES:
            limit = FAR_BEHIND * behind(best(runners), going)
            for runner in [r for r in going if r.candidate.kind != "autofuse" and behind(r, going) > limit]:
                going.remove(runner)
                runner.finish()
    for runner in runners:
        runner.finish()
    return runners


def best(runners: Sequence[Runner]) -> Runner:
    """The best hand-tuned, among those that took all turns."""
    found = [r for r in runners if r.candidate.kind == "hand-tuned"]
    most = max(len(r.rounds) for r in found)
    found = [r for r in found if len(r.rounds) == most]
    return min(found, key=lambda runner: behind(runner, found))


def behind(runner: Runner, others: Sequence[Runner]) -> float:
    """How many times the time of each round's fastest hand-tuned it takes, in the median: a quiet
    moment of the machine, which only one of them met, decides nothing."""
    rivals = [r.rounds for r in others if r.candidate.kind == "hand-tuned"]
    return median(a / min(b) for a, b in zip(runner.rounds, zip(*rivals, strict=False), strict=False))


def results(workload: Workload, runners: Sequence[Runner]) -> dict[str, Any]:
    """What is known of all candidates, as JSON can hold it."""
    hand, reference = best(runners), runners[0]
    rows = []
    for runner in runners:
        ratios = [a / b for a, b in zip(runner.rounds, hand.rounds, strict=False)]
        cpu = [a / b for a, b in zip(runner.cpu, hand.cpu, strict=False)]
        pairs = zip(runner.losses, reference.losses, strict=False)
        rows.append(
            {
                **asdict(runner.candidate),
                "failure": runner.failure,
                "seconds": runner.rounds,
                "median_s": runner.seconds if runner.rounds else None,
                "iqr_s": spread(runner.rounds),
                "ratio": median(ratios) if ratios else None,
                "ratio_iqr": spread(ratios),
                "cpu_s": runner.cpu,
                "cpu_ratio": median(cpu) if cpu else None,
                "first_step_s": runner.first_step,
                "start_up_s": runner.start_up,
                "losses": runner.losses,
                "loss_difference": max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
                if runner.in_fp32
                else None,
                "report": runner.report,
            }
        )
    return {
        "title": workload.title,
        "goal": workload.goal,
        "best_hand_tuned": hand.candidate.name,
        "candidates": rows,
    }


def spread(values: Sequence[float]) -> float:
    """The interquartile range.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def memory(workload: Workload = BIG_VOCABULARY) -> dict[str, Any]:
    """The peaks of eager and of autofuse, each after some steps in a fresh process."""
    peaks: dict[str, Memory] = {}
    for candidate in (EAGER, AUTOFUSE, AUTOFUSE_FP32):
        runner = Runner(workload, candidate)
        runner.start()
        runner.turn(BATCHES)
        peak = runner.memory()
        if peak is None:
            raise RuntimeError(f"{candidate.name}: {runner.failure}")
        peaks[candidate.name] = peak
    eager, fused = peaks[EAGER.name], peaks[AUTOFUSE.name]
    return {
        "title": workload.title,
        "goal": workload.goal,
        "peaks": {name: asdict(peak) for name, peak in peaks.items()},
        "ratio": fused.peak / eager.peak,
        "ratio_of_others": fused.others / eager.others,
    }


# --- what is shown -----------------------------------------------------------------------------


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title=result["title"], title_justify="left")
    table.add_column("")
    for column in (
        "s per step",
        "spread",
        "rounds",
        "x best by hand",
        "spread",
        "in CPU s",
        "first step, s",
        "start-up, s",
        "loss",
    ):
        table.add_column(column, justify="right")
    for row in result["candidates"]:
        name = row["name"] + (" *" if row["name"] == result["best_hand_tuned"] else "")
        if row["failure"] is not None or row["median_s"] is None:
            table.add_row(name, f"failed: {row['failure']}")
            continue
        loss = row["loss_difference"]
        table.add_row(
            name,
            f"{row['median_s']:.3f}",
            f"{row['iqr_s']:.3f}",
            f"{len(row['seconds'])}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_iqr']:.3f}",
            f"{row['cpu_ratio']:.3f}",
            f"{row['first_step_s']:.1f}",
            f"{row['start_up_s']:.1f}",
            "" if loss is None else f"{loss:.0e}",
        )
    console.print(table)


def show_memory(result: Mapping[str, Any], console: Console) -> None:
    title = f"Peak of a step above weights, optimizer and batch, MB: {result['title']}"
    table = Table(title=title, title_justify="left")
    for column in ("", "allocated", "without gradients of parameters", "rise of resident memory"):
        table.add_column(column, justify="right" if column else "left")
    for name, peak in result["peaks"].items():
        sizes = (peak["peak"], peak["others"], peak["resident"])
        table.add_row(name, *("" if size is None else f"{size / 1e6:,.0f}" for size in sizes))
    console.print(table)


@dataclass(frozen=True)
class Goal:
    """Something promised, and what came of it."""

    what: str
    value: float
    limit: float
    spread: float = 0.0

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        spread = f", spread {self.spread:.2g}" if self.spread else ""
        verdict = "met" if self.met else "NOT MET"
        return f"{verdict}: {self.what}: {self.value:.3g}{spread} (goal: {self.limit:.3g})"


def goals(result: Mapping[str, Any]) -> Iterator[Goal]:
    """What is promised of a race: the time of autofuse's defaults, and every fp32 loss."""
    for row in result["candidates"]:
        if row["name"] == AUTOFUSE.name:
            ratio = float("inf") if row["ratio"] is None else row["ratio"]
            what = f"{result['title']}: autofuse over {result['best_hand_tuned']}"
            yield Goal(what, ratio, result["goal"], row["ratio_iqr"])
    worst = max(row["loss_difference"] or 0.0 for row in result["candidates"])
    yield Goal(f"{result['title']}: the largest difference of an fp32 loss", worst, SAME_LOSS)


def memory_goals(result: Mapping[str, Any]) -> Iterator[Goal]:
    """The memory promised, with the parameters' gradients and without."""
    what = f"{result['title']}: autofuse's memory over eager's"
    yield Goal(what, result["ratio"], result["goal"])
    yield Goal(f"{what}, without gradients of parameters", result["ratio_of_others"], result["goal"])


@contextmanager
def cold_cache() -> Iterator[None]:
    """An empty Inductor cache, for all candidates: what an earlier one has compiled, a later one finds."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        raise argparse.ArgumentTypeError(f"there are {', '.join(WORKLOADS)}, not {', '.join(unknown)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 where a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        type=_names,
        default=list(WORKLOADS),
        help=f"some of {','.join(WORKLOADS)}; all by default",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps of each ({STEPS})")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a step too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "patchers": autofuse.registry.patcher_names(),
        "models": {},
    }
    promised: list[Goal] = []
    with cold_cache():
        for name in options.models:
            start, load = time.monotonic(), os.getloadavg()[0]
            with console.status("") as status:
                runners = race(WORKLOADS[name], steps=options.steps, say=status.update)
            result = results(WORKLOADS[name], runners)
            result |= {"took_s": time.monotonic() - start, "load": [load, os.getloadavg()[0]]}
            found["models"][name] = result
            show(result, console)
            console.print(f"It took {result['took_s']:.0f} s; the load was {load:.1f} before it.\n")
            promised += goals(result)
            _write(options.json, found)
        if options.memory:
            found["memory"] = memory()
            show_memory(found["memory"], console)
            promised += memory_goals(found["memory"])
            _write(options.json, found)
    for goal in promised:
        console.print(str(goal), style=None if goal.met else "bold red", highlight=False)
    return 0 if all(goal.met for goal in promised) else 1


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    """After each model, so that a run that is stopped has shown what it found."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
