"""What a step spends its time on, and what could still be done, seen in the user's own loop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from autofuse.advice import advice_on, capital, escaped, has_fused_steps, in_units, percent, refused, si
from autofuse.clock import Sample
from autofuse.costs import COMPILED, OPTIMIZER, Cost, Costs, NvtxRecorder, Recorder
from autofuse.errors import first_line
from autofuse.flops import Forward, count_flops, matmul_rate, precision_of
from autofuse.tables import as_html, as_text

if TYPE_CHECKING:
    from autofuse.step import TrainingStep

__all__ = ["Profile", "profile"]

PROFILED = 3  # steps under the profiler, whose overhead the timed steps are free of
TIMED_BEFORE = 2  # timed before those, where the length of the loop is not known
RELEVANT = 0.1  # the share of a step from which on something is worth a sentence


@dataclass
class Profile:
    """What was measured; complete when the ``with`` block is left.

    Attributes:
        hardware, model: what ran, and where.
        steps: optimizer steps that were timed. The first, and those with something that happens
            once in them (a compilation, a proof), are not.
        step_s: seconds of a step, the median; without loading data.
        waited_s: seconds between two steps, the median: loading data, logging, evaluation.
        tokens_per_second: elements of ``input_ids`` in the timed steps' own time; rows where there are
            none.
        flops: of the step's forward and backward, of the model as it is written: padding, ignored
            labels and what checkpointing computes again included.
        rate: the measured GFLOP/s of matrix products in ``dtype``.
        operations, modules: the dearest, under the profiler.
        groups: kind of work -> share of the profiled step.
        applied: names of the patches that were kept.
        refused: the patches that were tried or cannot be had, with the report's reason.
        fused_optimizer: whether every group of every optimizer has a fused step.
        notes: what was not measured, and why.

    >>> print(Profile("this CPU", "GPT2", steps=4, step_s=0.2, flops=10**10, rate=100.0).share_of_floor)
    0.5
    """

    hardware: str = ""
    model: str = ""
    steps: int = 0
    profiled: int = 0
    step_s: float | None = None
    waited_s: float | None = None
    tokens_per_second: float | None = None
    flops: int | None = None
    dtype: str = ""
    rate: float | None = None
    operations: list[Cost] = field(default_factory=list)
    modules: list[Cost] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)
    profiled_ms: float | None = None
    trace: str | None = None
    applied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    fused_optimizer: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def compiled(self) -> bool:
        return "compile" in self.applied or self.groups.get(COMPILED, 0.0) > 0

    @property
    def floor_s(self) -> float | None:
        """Seconds that the FLOPs alone take at the measured rate."""
        return self.flops / self.rate / 1e9 if self.flops and self.rate else None

    @property
    def share_of_floor(self) -> float | None:
        """How much of the step's time the floor is; above 1 where patches leave out what the model as
        it is written would compute."""
        return self.floor_s / self.step_s if self.floor_s and self.step_s else None

    # --- in words ------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """What dominates and what could still be done, in sentences."""
        if not self.steps and not self.groups:
            return ["Nothing is measured yet.", *self.notes] if not self.notes else list(self.notes)
        found = [self._on_time(), self._on_floor(), self._on_waiting(), self._on_what_dominates()]
        share = self.groups.get(OPTIMIZER, 0.0)
        if share >= RELEVANT and max(self.groups, key=self.groups.__getitem__) != OPTIMIZER:
            found.append(f"{capital(OPTIMIZER)} is {share:.0%}: {advice_on(OPTIMIZER, self)}.")
        return [sentence for sentence in found if sentence] + self.notes

    def _on_time(self) -> str:
        if self.step_s is None:
            return ""
        tokens = self.tokens_per_second
        speed = "" if tokens is None else f", {tokens:,.0f} tokens or rows per second"
        return f"A step takes {in_units(self.step_s)} (median of {self.steps}){speed}."

    def _on_floor(self) -> str:
        if self.floor_s is None or self.share_of_floor is None or self.rate is None or self.flops is None:
            return ""
        text = (
            f"The model as it is written needs {si(self.flops)}FLOP a step, which takes "
            f"{in_units(self.floor_s)} at this machine's measured {self.rate:,.0f} GFLOP/s in {self.dtype}: "
            f"{percent(self.share_of_floor)} of the step."
        )
        if self.share_of_floor > 1:
            text += " More than all of it, since patches leave out work (padding, ignored labels), or large"
            text += " matrices run faster than the measured one."
        return text

    def _on_waiting(self) -> str:
        if self.waited_s is None or self.step_s is None or self.waited_s < RELEVANT * self.step_s:
            return ""
        times = self.waited_s / self.step_s
        how = f"{times:.1f} times" if times >= 1 else f"{times:.0%} of"
        return (
            f"Between two steps the loop waits {in_units(self.waited_s)}, {how} the step's own time: for "
            "data, if it does nothing else there. DataLoader(num_workers=..., prefetch_factor=..., "
            "persistent_workers=True) loads beside the step, pin_memory=True and .to(device, "
            "non_blocking=True) copy beside it; preparing the data once, before, is cheaper still."
        )

    def _on_what_dominates(self) -> str:
        if not self.groups:
            return ""
        name = max(self.groups, key=self.groups.__getitem__)
        share = self.groups[name]
        return f"{share:.0%} of the step is {name}: {advice_on(name, self)}."

    # --- how it looks --------------------------------------------------------------------------

    def _tables(self) -> list[Table]:
        title = f"autofuse: {self.model} on {self.hardware}"
        if not self.groups:
            return []
        groups = [
            Cost(name, ms=share * (self.profiled_ms or 0.0), share=share)
            for name, share in self.groups.items()
            if share
        ]
        return [
            _table("what", groups, title),
            _table("operation", self.operations, "", calls=True),
            _table("module (its own operations)", self.modules, "", calls=True, backward=True),
        ]

    def __str__(self) -> str:
        return "\n".join([*map(as_text, self._tables()), *self.lines()])

    def _repr_html_(self) -> str:
        tables = self._tables()
        words = "".join(f"<p>{escaped(line)}</p>" for line in self.lines())
        return "".join(map(as_html, tables)) + words

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "floor_s": self.floor_s,
            "share_of_floor": self.share_of_floor,
            "lines": self.lines(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def _table(what: str, costs: list[Cost], title: str, *, calls: bool = False, backward: bool = False) -> Table:
    table = Table(title=title or None, title_justify="left", expand=False)
    table.add_column(what, overflow="fold", min_width=30)
    columns = [("calls", calls), ("ms per step", True), ("of it backward", backward), ("share", True)]
    for name, wanted in columns:
        if wanted:
            table.add_column(name, justify="right", no_wrap=True)
    for cost in costs[:10]:
        cells = [f"{cost.calls:.0f}", f"{cost.ms:.2f}", f"{cost.backward_ms:.2f}", f"{cost.share:.0%}"]
        shown = [cell for cell, (_, wanted) in zip(cells, columns, strict=True) if wanted]
        table.add_row(cost.name.replace("[", r"\["), *shown)
    return table


# --- watching ----------------------------------------------------------------------------------


@contextmanager
def profile(
    step: TrainingStep,
    *,
    steps: int | None = None,
    nvtx: bool = False,
    trace: str | Path | None = None,
) -> Iterator[Profile]:
    """Watch the steps of the loop inside: real training steps, with the very same numbers as without.

    Profile once the tuner is done, or steps with and without patches are mixed (a note says so).
    The first step is left out. A few are timed as they are, up to three run under torch.profiler,
    and what follows is timed again. At the end the FLOPs are counted on one batch, without patches
    and without a trace: with several processes, all of them have to profile. Where the loop
    is left by an error, the times and the trace are kept, and no FLOPs are counted.

    Args:
        steps: watch that many optimizer steps, the last of them under the profiler, whatever else
            runs inside; by default all, and the profiler comes early.
        nvtx: mark each module's forward and backward for Nsight Systems, instead of running
            torch.profiler (one of them alone can listen to a GPU).
        trace: write a Chrome trace of the profiled steps to this path.

    Raises:
        ValueError: ``steps`` is no whole number of at least 2, ``trace`` is a folder or in one that does
            not exist, or ``nvtx`` is asked for without CUDA or together with ``trace``.

    >>> import autofuse
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = autofuse.optimize(model, optimizer, loss_fn=torch.nn.functional.mse_loss)
    >>> with profile(step) as watched:
    ...     for _ in range(6):
    ...         _ = step(torch.ones(4, 8), torch.zeros(4, 1))
    >>> watched.profiled, watched.flops  # 2 * 4 rows * (2 * 64 + 3 * 8)
    (3, 1216)
    """
    _check(steps, nvtx, trace)
    watch = _Watch(step, steps, nvtx)
    watch.begin()
    try:
        yield watch.profile
    except BaseException as error:  # Ctrl+C too: what was measured until then is kept
        watch.left_by(error, trace)
        raise
    finally:
        watch.end()
    watch.measure()
    watch.count()
    watch.export(trace)


def _check(steps: int | None, nvtx: bool, trace: str | Path | None) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 2):
        raise ValueError(
            f"steps={steps!r}: expected a whole number of at least 2, since the first step is never counted"
        )
    if nvtx and not torch.cuda.is_available():
        raise ValueError(
            "nvtx=True marks ranges for Nsight Systems and needs CUDA, which is not available here"
        )
    if nvtx and trace is not None:
        raise ValueError(
            "nvtx=True and trace= exclude each other: one tool alone can listen to a GPU. Leave trace= out "
            "and record with `nsys profile`, or leave nvtx=True out"
        )
    if trace is not None and Path(trace).is_dir():
        raise ValueError(f"trace={str(trace)!r} is a folder: expected the path of a file, such as trace.json")
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise ValueError(f"trace={str(trace)!r}: the folder {Path(trace).absolute().parent} does not exist")


class _Watch:
    """Listens to the clock, and decides which steps are timed and which profiled."""

    def __init__(self, step: TrainingStep, steps: int | None, nvtx: bool) -> None:
        self._step, self._steps = step, steps
        self._profiled_wanted = PROFILED if steps is None else min(PROFILED, (steps - 1) // 2)
        self._timed_before = TIMED_BEFORE if steps is None else steps - 1 - self._profiled_wanted
        self._seen = 0
        self._timed: list[Sample] = []
        self._profiled: list[Sample] = []
        self._skip = False  # the next sample has the end of the recording in it
        self._counted: tuple[Sample, list[Forward]] | None = None
        self._recorder: Recorder | NvtxRecorder = NvtxRecorder(step) if nvtx else Recorder(step)
        self._recorded = nvtx
        report = step.report
        self.profile = Profile(report.hardware, report.model)
        if step.tuning:
            self.profile.notes.append(
                "The tuner is still at work: these figures mix steps with and without the patches that it "
                'compares. Profile once step.report.tuning.state is "done".'
            )

    def begin(self) -> None:
        self._step.clock.listen(self)

    def end(self) -> None:
        """Everything as it was before."""
        self._step.clock.unlisten(self)
        self._recorder.stop()

    def __call__(self, sample: Sample) -> None:
        if self._steps is not None and self._seen >= self._steps:
            return
        self._seen += 1
        forwards = self._recorder.take_forwards()
        if self._skip:
            self._skip = False
        elif self._seen == 1 or sample.one_off:
            self._record_again()
        elif self._recorder.running and not isinstance(self._recorder, NvtxRecorder):
            self._profiled.append(sample)
        else:
            self._timed.append(sample)
        if forwards and not sample.one_off:
            self._counted = (sample, forwards)
        self._next()

    def _record_again(self) -> None:
        """What happens once would hide everything else in the recording."""
        if self._recorder.running and isinstance(self._recorder, Recorder):
            self._recorder.stop()
            self._recorder = Recorder(self._step)
            self._profiled.clear()

    def _next(self) -> None:
        """Start or end the recording, between two steps."""
        recorder = self._recorder
        if isinstance(recorder, NvtxRecorder):
            if not recorder.running:
                recorder.start()
        elif recorder.running:
            if len(self._profiled) >= self._profiled_wanted or self._seen == self._steps:
                recorder.stop()
                self._recorded = self._skip = True
        elif not self._recorded and len(self._timed) >= self._timed_before and self._profiled_wanted:
            recorder.start()
            self._recorded = not recorder.running

    # --- what came of it -------------------------------------------------------------------------

    def measure(self) -> None:
        """Fill in the times and the costs."""
        profile = self.profile
        profile.steps, profile.profiled = len(self._timed), len(self._profiled)
        report = self._step.report
        profile.applied = [row.name for row in report.rows if row.status == "kept"]
        profile.refused, profile.fused_optimizer = refused(report), has_fused_steps(self._step.optimizers)
        profile.dtype = str(precision_of(self._step)).removeprefix("torch.")
        if self._timed:
            profile.step_s = median(sample.seconds for sample in self._timed)
            waits = [sample.waited for sample in self._timed if sample.waited is not None]
            profile.waited_s = median(waits) if waits else None
            tokens = sum(sample.tokens for sample in self._timed)
            seconds = sum(sample.seconds for sample in self._timed)
            profile.tokens_per_second = tokens / seconds if tokens and seconds else None
        else:
            profile.notes.append(
                f"No step was timed: {self._seen} optimizer steps ended inside, and the first one and those "
                "with something that happens once in them do not count. Run more inside the block."
            )
        if isinstance(self._recorder, NvtxRecorder):
            profile.notes.append("The costs by operation are in Nsight Systems' recording, not here.")
        elif self._profiled:
            costs: Costs = self._recorder.costs(len(self._profiled))
            profile.operations, profile.modules = costs.operations, costs.modules
            profile.groups, profile.profiled_ms = costs.groups, costs.step_ms
        else:
            why = self._recorder.refused or f"the loop ended after {self._seen} optimizer steps"
            profile.notes.append(f"The costs by operation and the FLOPs were not measured: {why}.")

    def left_by(self, error: BaseException, trace: str | Path | None) -> None:
        """Keep what was measured until ``error``; nothing here may take its place."""
        broken_off = ", in the midst of what the profiler recorded" if self._recorder.running else ""
        notes = self.profile.notes
        notes.append(f"The loop was left by an error ({first_line(error).rstrip(': ')}){broken_off}.")
        try:
            self.end()
            self.measure()
            if self._profiled:
                notes.append("The FLOPs were not counted: that runs a step's forward and backward once more.")
            self.export(trace)
        except Exception as another:
            notes.append(f"Not all that was measured could be kept: {first_line(another)}.")

    def count(self) -> None:
        """Fill in the FLOPs and the rate; runs one step's forward and backward once more."""
        if self._counted is None:
            if self._profiled:
                self.profile.notes.append(
                    "The FLOPs were not counted: the loop calls parts of the model, never the model itself."
                )
            return
        profile, (sample, forwards) = self.profile, self._counted
        try:
            flops = count_flops(self._step, forwards)
        except Exception as error:
            profile.notes.append(f"The FLOPs were not counted: {first_line(error)}")
            return
        profile.flops = self._scaled(flops, sample)
        profile.rate = matmul_rate(self._step.clock._device, precision_of(self._step))
        if profile.rate is None:
            profile.notes.append(f"The rate of matrix products in {profile.dtype} could not be measured.")

    def _scaled(self, flops: int, counted: Sample) -> int:
        """Where no timed step had the shape of the one whose FLOPs were counted: by its tokens."""
        shapes = Counter(sample.shape for sample in self._timed)
        if not shapes or set(shapes) == {counted.shape} or not counted.tokens:
            return flops
        tokens = median(sample.tokens for sample in self._timed)
        self.profile.notes.append(
            "Batches differ in shape: the FLOPs are those of one, scaled by its tokens."
        )
        return round(flops * tokens / counted.tokens)

    def export(self, path: str | Path | None) -> None:
        if path is None:
            return
        if not self._profiled or isinstance(self._recorder, NvtxRecorder):
            self.profile.notes.append(f"{path} was not written, since no step was profiled.")
            return
        self._recorder.export(path)
        self.profile.trace = str(path)
