"""Plan: what would be done, where and why. Making one changes nothing."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult

from autofuse.patch import Context, Patch, Rejected, Site
from autofuse.regions import is_fsdp
from autofuse.registry import find_patches
from autofuse.tables import content, render, to_html

__all__ = ["Plan", "Row", "as_saved", "make_plan", "row_named"]

VERSION = 1  # of what is saved
# Gradients are handed over by FSDP's hooks in a real backward, which a proof could not take back.
NOT_UNDER_FSDP = (
    "what acts in the forward cannot be proved under FSDP, whose own hooks take the gradients "
    "(for lower precision it has a MixedPrecisionPolicy)"
)


@dataclass
class Row:
    """One patch in a plan or a report.

    Attributes:
        status: ``planned``, ``kept``, ``rejected`` or ``skipped``.
        error: the largest relative error that the proof found (of the loss, or of all gradients
            together); None where nothing was compared yet.
        before_ms, after_ms: milliseconds of a step without and with the patch, where measured.
        gain: the share of a step's time that the patch saves, where measured: 0.25 is a quarter.
        interval: the 95% confidence interval of ``gain``.
        peak_before_mb, peak_after_mb: the device's peak of allocated memory in a step without and
            with the patch, in 10^6 bytes, where the device counts it.
    """

    name: str
    status: str
    reason: str = ""
    sites: list[Site] = field(default_factory=list)
    error: float | None = None
    before_ms: float | None = None
    after_ms: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    peak_before_mb: float | None = None
    peak_after_mb: float | None = None

    @property
    def accepted(self) -> list[Site]:
        return [site for site in self.sites if site.accepted]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "sites": [site.to_dict() for site in self.sites]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        row = cls(**{**data, "sites": [Site(**site) for site in data["sites"]]})
        row.interval = None if row.interval is None else (row.interval[0], row.interval[1])
        return row


@dataclass
class Plan:
    """The rows of every patch, for one model on one hardware.

    >>> import autofuse
    >>> plan = autofuse.plan(torch.nn.LayerNorm(8), hardware=autofuse.Hardware.named("V100"))
    >>> [row.status for row in plan.rows if row.name == "norms"]
    ['planned']
    """

    rows: list[Row]
    hardware: str
    model: str = ""
    note: str = ""
    patches: dict[str, Patch] = field(default_factory=dict, repr=False, compare=False)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return row_named(self.rows, name)

    @property
    def precision(self) -> str:
        """What `autofuse.optimize` must be asked for to get the precision of this plan."""
        chosen = {row.name: row.accepted[0].operation or "" for row in self.rows if row.accepted}
        if "precision" in chosen:
            return "fp16" if "float16 " in f"{chosen['precision']} ".replace("bfloat16", "") else "bf16"
        return "tf32" if "tf32" in chosen else "fp32"

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "torch": torch.__version__,
            "hardware": self.hardware,
            "model": self.model,
            "note": self.note,
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; ``optimize(..., plan=path)`` makes exactly its changes again."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is no plan, or one of another version.
        """
        try:
            data = json.loads(Path(path).read_text())
            if "counters" in data:
                raise ValueError("it is a report's JSON: save the plan itself, with step.plan.save(path)")
            rows, hardware = [Row.from_dict(row) for row in data["rows"]], data["hardware"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a saved plan ({type(error).__name__}: {error})") from error
        if data.get("version") != VERSION:
            raise ValueError(
                f"{path} is a plan of version {data.get('version')!r}, and this autofuse reads version "
                f"{VERSION}: make it anew with autofuse.plan(...).save(path)"
            )
        return cls(rows, hardware, data.get("model", ""), data.get("note", ""))

    def __str__(self) -> str:
        return render(self.rows, self._title(), [self.note])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from content(self.rows, self._title(), [self.note], options.max_width)

    def _repr_html_(self) -> str:
        return to_html(self.rows, self._title(), [self.note])

    def _title(self) -> str:
        return f"Plan for {self.model} on {self.hardware}"


def row_named(rows: Sequence[Row], name: str) -> Row:
    """The row of that name; a KeyError with the nearest names for any other."""
    found = next((row for row in rows if row.name == name), None)
    if found is not None:
        return found
    names = [row.name for row in rows]
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise KeyError(f"no row {name!r}{hint} There are: {', '.join(names) or 'none'}")


def make_plan(
    context: Context,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    saved: Plan | None = None,
) -> Plan:
    """Ask every patcher; nothing is changed."""
    chosen = None if only is None else set(only)
    left_out = set(skip)
    allowed = None if saved is None else {row.name: row for row in saved.rows if row.accepted}

    def wanted(name: str) -> str | None:
        if name in left_out:
            return "left out by skip"
        if chosen is not None and name not in chosen:
            return "not among only"
        if allowed is not None and (name not in allowed or allowed[name].status not in ("planned", "kept")):
            return "not in the plan that was given"
        return None

    rows, patches, sharded = [], {}, is_fsdp(context.model)
    for name, answer in find_patches(context, wanted):
        if isinstance(answer, str):
            rows.append(Row(name, "skipped", answer))
        elif isinstance(answer, Rejected):
            rows.append(Row(name, "rejected", answer.reason))
        else:
            if allowed is not None:
                answer = as_saved(answer, allowed[name])
            if sharded and answer.in_forward and answer.accepted:
                answer.reject(NOT_UNDER_FSDP)
            rows.append(row_of(answer, "planned"))
            patches[name] = answer
    model = type(context.model).__name__
    note = _note(rows)
    if saved is not None:
        asked = [row for row in saved.rows if row.status in ("planned", "kept") and wanted(row.name) is None]
        note = " ".join(filter(None, [*_differences(asked, patches, saved.model, model), note]))
    return Plan(rows, context.hardware.name, model, note, patches)


def _differences(asked: list[Row], patches: dict[str, Patch], made_for: str, model: str) -> Iterator[str]:
    """What a saved plan asks for that this model does not have, in sentences."""
    if made_for not in ("", model):
        yield f"The plan that was given was made for {made_for}, and this model is {model}."
    sites = [(row.name, site.path) for row in asked for site in row.accepted]
    here = {(name, site.path) for name, patch in patches.items() for site in patch.accepted}
    missing = [f"{path} ({name})" if path else name for name, path in sites if (name, path) not in here]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        yield (
            f"{len(missing)} of the {len(sites)} sites of the plan that was given were not found here, or "
            f"cannot be changed: {shown}."
        )


def as_saved(patch: Patch, row: Row) -> Patch:
    """The form of ``patch`` that the given plan has, at its sites alone; nothing is measured again."""
    wanted = {(site.path, site.operation) for site in row.accepted}
    forms = (f for f in _forms(patch) if wanted <= {(site.path, site.operation) for site in f.accepted})
    form = next(forms, patch)
    form.name = patch.name
    paths = {path for path, _ in wanted}
    form.reject("not in the plan that was given", [s.path for s in form.accepted if s.path not in paths])
    form.timed, form.pays, form.fallback, form.upgrade = False, None, None, None
    return form


def _forms(patch: Patch) -> Iterator[Patch]:
    """The patch and every other form of it. A step of infinite length pays any price."""
    yield patch
    fallback = None if patch.fallback is None else patch.fallback()
    upgrade = None if patch.upgrade is None else patch.upgrade(math.inf)
    for other in (fallback, upgrade):
        if isinstance(other, Patch):
            yield from _forms(other)


def row_of(patch: Patch, status: str) -> Row:
    """The row of a patch; one without an accepted site is rejected, whatever its status."""
    return Row(patch.name, status if patch.accepted else "rejected", patch.reason, patch.sites)


def _note(rows: list[Row]) -> str:
    if not rows:
        return "no patcher was found: is autofuse installed, or its checkout complete?"
    return "" if any(row.accepted for row in rows) else "Nothing more to do."
