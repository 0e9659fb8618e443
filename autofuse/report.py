"""Report: what was done to a training step, and what happened in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from autofuse.plan import Row, render, rows_table, to_html

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
    """What tuning has cost and brought so far.

    Attributes:
        state: "not measured" (the plan was applied at once), "waiting" for the first batch,
            "measuring" or "done".
        steps: optimizer steps taken while tuning; all of them trained the model.
        seconds: time of these steps and of the proofs.
        extra_seconds: what that was beyond the same steps of the loop as it was.
        baseline_ms, final_ms: milliseconds of a step of the loop as it was, and as it is now.
        gain, interval: the share of a step's time that is saved in all, and its 95% interval.
    """

    state: str = "not measured"
    steps: int = 0
    seconds: float = 0.0
    extra_seconds: float = 0.0
    baseline_ms: float | None = None
    final_ms: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None


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
        return next(row for row in self.rows if row.name == name)

    def lines(self) -> list[str]:
        """What happened, in sentences."""
        c = self.counters
        sentences = [f"{c.steps} optimizer steps over {c.micro_batches} batches."]
        if not self.proved:
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
        return render(rows_table(self.rows, self._title()), "\n".join(self.lines()))

    def _repr_html_(self) -> str:
        return to_html(rows_table(self.rows, self._title()), "\n".join(self.lines()))

    def _title(self) -> str:
        return f"autofuse: {self.model} on {self.hardware}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "model": self.model,
            "proved": self.proved,
            "counters": dict(vars(self.counters)),
            "tuning": dict(vars(self.tuning)),
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)
