"""Report: what was done to a training step, and what happened in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult

from autofuse.plan import Row, row_named
from autofuse.savings import Savings, savings_of
from autofuse.tables import arrow, content, measured_gain, render, share, to_html

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

__all__ = ["Counters", "Report", "Tuning"]


@dataclass
class Counters:
    """What the training step has counted.

    Attributes:
        steps: optimizer steps taken.
        micro_batches: forward and backward passes.
        skipped: optimizer steps not taken, for a loss or gradient that was not finite.
        nonfinite: losses that were NaN or inf.
        first_nonfinite: the 1-based micro-batch in which the first came; None while there is none.
    """

    steps: int = 0
    micro_batches: int = 0
    skipped: int = 0
    nonfinite: int = 0
    first_nonfinite: int | None = None


@dataclass
class Tuning:
    """What the tuner has measured of the whole step, and what that has cost.

    Attributes:
        state: ``not measured``, ``waiting``, ``measuring`` or ``done``.
        steps: optimizer steps taken while tuning; all of them are steps of the training.
        seconds: what they took, proofs and compilation included.
        extra_seconds: of these, what is more than the same steps would have taken before.
        baseline_ms: milliseconds of a step of the loop as it was found.
        final_ms: milliseconds of a step as it is now.
        interval: the 95% confidence interval of `gain`.
        tokens_per_step: tokens of a step, where a batch has any.
        peak_before_mb, peak_after_mb: the device's peak of allocated memory in a step as it was and
            as it is now, in 10^6 bytes.
        order: names of the patches in the order in which they were timed; empty: that of the rows.
        notes: further sentences for the report.

    >>> Tuning("done", baseline_ms=800.0, final_ms=400.0).speedup
    2.0
    """

    state: str = "not measured"
    steps: int = 0
    seconds: float = 0.0
    extra_seconds: float = 0.0
    baseline_ms: float | None = None
    final_ms: float | None = None
    interval: tuple[float, float] | None = None
    tokens_per_step: float | None = None
    peak_before_mb: float | None = None
    peak_after_mb: float | None = None
    order: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """The share of a step's time that is saved, all patches together; None until it is measured."""
        return 1 - self.final_ms / self.baseline_ms if self.baseline_ms and self.final_ms else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast the step is as it was; None until it is measured."""
        return self.baseline_ms / self.final_ms if self.baseline_ms and self.final_ms else None

    @property
    def stopped(self) -> str:
        """The note on why it ended before everything was tried (a loaded state, a later call); else ""."""
        return next((note for note in self.notes if note.startswith("Tuning was stopped:")), "")

    def sentences(self, kept: bool, undone: bool = False) -> list[str]:
        """What was found; ``kept``: whether any patch is in place; ``undone``: it was taken back."""
        if self.state == "waiting":
            return ["Not yet measured: the tuner waits for steps that it can compare."]
        if self.state == "measuring":
            return [f"Still measuring: {self.steps} steps in {_seconds(self.seconds)} so far.", *self.notes]
        if self.state != "done":
            return ["How much faster it is was not measured.", *self.notes]
        nothing = "Undone" if undone else "Nothing was kept" if self.stopped else "Nothing helped"
        found = self._speed() if kept else [f"{nothing}: the loop is as it was."]
        if kept and self.stopped and not found:
            found = ["How much faster it is was not measured."]
        return [*found, self._cost(kept), *self.notes]

    def _speed(self) -> list[str]:
        before, after, speedup = self.baseline_ms, self.final_ms, self.speedup
        if before is None or after is None or speedup is None:
            return []
        sure = ""
        if self.interval is not None and max(self.interval) < 1:
            sure = f" ({1 / (1 - self.interval[0]):.2f} to {1 / (1 - self.interval[1]):.2f})"
        seconds = max(before, after) >= 100
        unit, scale, digits = ("s", 1e-3, 3) if seconds else ("ms", 1, 2)
        times = f"{before * scale:.{digits}f} {unit} → {after * scale:.{digits}f} {unit} per step"
        sentences = [f"{times}: {speedup:.2f} times as fast as the loop was{sure}."]
        if self.tokens_per_step:
            rates = (f"{self.tokens_per_step / ms * 1e3:,.0f}" for ms in (before, after))
            sentences.append(f"{' → '.join(rates)} tokens per second.")
        if self.peak_before_mb and self.peak_after_mb is not None:
            less = 1 - self.peak_after_mb / self.peak_before_mb
            change = f"{share(abs(less))} {'less' if less >= 0 else 'more'}"
            peaks = arrow(self.peak_before_mb, self.peak_after_mb)
            sentences.append(f"Peak memory of a step: {peaks} MB, {change}.")
        return sentences

    def _cost(self, kept: bool) -> str:
        start = f"Tuning took {self.steps} steps of the training and {_seconds(self.seconds)}"
        if self.extra_seconds <= 0:
            return f"{start}, no more than these steps would have taken before."
        more = f"{start}, {_seconds(self.extra_seconds)} more than these steps would have taken before"
        if not kept or self.baseline_ms is None or self.final_ms is None:
            return f"{more}."
        won = (self.baseline_ms - self.final_ms) / 1e3
        return f"{more}; won back after {self.extra_seconds / won:,.0f} steps." if won > 0 else f"{more}."

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "order": list(self.order), "notes": list(self.notes), "speedup": self.speedup}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tuning:
        tuning = cls(**{name: value for name, value in data.items() if name != "speedup"})
        tuning.interval = None if tuning.interval is None else (tuning.interval[0], tuning.interval[1])
        return tuning


@dataclass
class Report:
    """Prints itself as text, as HTML in a notebook, and as JSON.

    >>> report = Report([Row("norms", "kept", "one fused operation", error=1e-7)], "this CPU", "GPT2")
    >>> "norms" in str(report) and "kept" in str(report)
    True
    >>> report.to_dict()["counters"]["steps"]
    0
    """

    rows: list[Row]
    hardware: str
    model: str
    counters: Counters = field(default_factory=Counters)
    notes: list[str] = field(default_factory=list)
    proved: bool = False
    tuning: Tuning = field(default_factory=Tuning)

    def __getitem__(self, name: str) -> Row:
        return row_named(self.rows, name)

    @property
    def _kept(self) -> bool:
        return any(row.status == "kept" for row in self.rows)

    @property
    def _measured(self) -> bool:
        return self.tuning.gain is not None or any(measured_gain(row) is not None for row in self.rows)

    def lines(self) -> list[str]:
        """What happened, in sentences."""
        c = self.counters
        sentences = self.tuning.sentences(self._kept, any(row.reason == "undone" for row in self.rows))
        sentences.append(f"{c.steps} optimizer steps over {c.micro_batches} batches.")
        if not self.proved and self.tuning.state in ("not measured", "waiting"):
            sentences.append("Not yet proved on a batch: that happens in the first step.")
        if c.nonfinite:
            sentences.append(
                f"{c.nonfinite} losses were not finite, the first in batch {c.first_nonfinite}: "
                "its optimizer step was not taken."
            )
        if c.skipped:
            sentences.append(
                f"{c.skipped} optimizer steps were skipped for a loss or gradient that was not finite."
            )
        return sentences + self.notes

    def __str__(self) -> str:
        return render(self.rows, self._title(), self.lines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from content(self.rows, self._title(), self.lines(), options.max_width)

    def _repr_html_(self) -> str:
        return to_html(self.rows, self._title(), self.lines(), self._svg())

    def _svg(self) -> str:
        """The waterfall, if there is one and matplotlib is at hand."""
        try:
            from autofuse.figures import svg, waterfall

            return svg(waterfall(self.rows, self.tuning, ink=None)) if self._measured else ""
        except (ImportError, ValueError):
            return ""

    def _title(self) -> str:
        return f"autofuse: {self.model} on {self.hardware}"

    def plot(self, path: str | Path | None = None) -> Figure:
        """A waterfall from a step of the loop as it was to one as it is now.

        Args:
            path: where to save it too (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: nothing has been measured, or not in this run.
            ValueError: shares were measured, but how long a step took is not known.
        """
        from autofuse.figures import waterfall

        self._check_measured(self._measured)
        figure = waterfall(self.rows, self.tuning, title=self._title())
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def savings(
        self,
        hours: float,
        *,
        price_per_hour: float | None = None,
        kilowatts: float | None = None,
        grams_co2_per_kwh: float | None = None,
    ) -> Savings:
        """What the whole run saves, less what the tuning has cost.

        Args:
            hours: what the run takes with the loop as it was.
            price_per_hour: of the machine, in any currency.
            kilowatts: what the machine draws while it trains.
            grams_co2_per_kwh: of the electricity.

        Raises:
            ValueError: a figure is negative or not finite, or CO2 is asked for without kilowatts.
            RuntimeError: nothing has been measured, or not in this run.

        >>> tuning = Tuning("done", baseline_ms=800.0, final_ms=400.0)
        >>> report = Report([Row("loss", "kept")], "this CPU", "GPT2", tuning=tuning)
        >>> report.savings(hours=24, price_per_hour=3).money_saved
        36.0
        """
        tuning = self.tuning
        tried = self._measured or not tuning.stopped
        nothing = tuning.state == "done" and not self._kept and tried
        gain, interval = (0.0, None) if nothing else (tuning.gain, tuning.interval)
        self._check_measured(gain is not None)
        assert gain is not None
        return savings_of(
            gain,
            interval,
            hours=hours,
            price_per_hour=price_per_hour,
            kilowatts=kilowatts,
            grams_co2_per_kwh=grams_co2_per_kwh,
            tuned_hours=tuning.steps * (tuning.baseline_ms or 0.0) / 3.6e6,
            extra_hours=tuning.extra_seconds / 3600,
        )

    def _check_measured(self, measured: bool) -> None:
        if measured:
            return
        if self.tuning.state == "not measured":
            raise RuntimeError(
                "nothing was measured: optimize(..., measure=True) without plan= times the patches"
            )
        if self.tuning.state == "done":
            stopped = f"a state was loaded, or tuning was stopped ({self.tuning.stopped})"
            why = stopped if self.tuning.stopped else "nothing of what is kept was timed"
            raise RuntimeError(
                f"this run has not measured how much faster the loop is, and will not: {why}. Call "
                "optimize(..., measure=True) anew to measure, and load no state into it"
            )
        raise RuntimeError(
            f"nothing has been measured yet (the tuner is {self.tuning.state}): train some more steps first"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "model": self.model,
            "proved": self.proved,
            "counters": dict(vars(self.counters)),
            "tuning": self.tuning.to_dict(),
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that gave ``data`` in `to_dict` or, by way of JSON, in `to_json`."""
        return cls(
            [Row.from_dict(row) for row in data["rows"]],
            data["hardware"],
            data["model"],
            Counters(**data["counters"]),
            list(data["notes"]),
            data["proved"],
            Tuning.from_dict(data["tuning"]),
        )


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 600 else f"{value / 60:,.1f} min"
