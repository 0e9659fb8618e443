"""Figures: the waterfall from the loop as it was to the loop as it is. Needs matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autofuse.tables import arrow, measured_gain, share

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":
        raise
    raise ModuleNotFoundError(
        "a plot needs matplotlib, which is not installed: pip install autofuse[plot]", name=error.name
    ) from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from autofuse.plan import Row
    from autofuse.report import Tuning

__all__ = ["Bar", "bars", "svg", "waterfall"]

BEFORE, NOW, SAVED, GREY = "#6e7781", "#0969da", "#2da44e", "#7d8590"
_TEXT = "#010203"  # stands for "the page's own colour", which matplotlib cannot say
_HEIGHT = 0.62  # of a bar, where the next is 1 further down


@dataclass(frozen=True)
class Bar:
    """One bar: a whole step, or the part of it that a patch saves.

    Attributes:
        kind: ``before``, ``saved``, ``rejected``, ``rest`` or ``now``.
        start, end: in milliseconds; a patch that saves goes from the larger to the smaller.
        ends: the 95% confidence interval of ``end``.
    """

    label: str
    kind: str
    start: float
    end: float
    text: str
    ends: tuple[float, float] | None = None


def bars(rows: Sequence[Row], tuning: Tuning) -> list[Bar]:
    """The bars from top to bottom.

    Each patch's share is drawn on the step that those before it have left. What the ends, which are
    measured for themselves, differ by beyond that (1% of the step and more) is a bar of its own.

    Raises:
        ValueError: how long a step of the loop as it was took is not known.
    """
    rank = {name: position for position, name in enumerate(tuning.order)}
    measured = [row for row in rows if _usable(measured_gain(row))]
    measured.sort(key=lambda row: rank.get(row.name, len(rank)))
    baseline = tuning.baseline_ms or next((row.before_ms for row in measured if row.before_ms), None)
    if baseline is None or not _usable(baseline) or baseline <= 0:
        raise ValueError("no waterfall without the milliseconds of a step of the loop as it was")
    result = [Bar("before", "before", 0.0, baseline, _ms(baseline))]
    level = baseline
    for row in measured:
        gain = measured_gain(row)
        assert gain is not None
        ends = (
            None if row.interval is None else (level * (1 - row.interval[1]), level * (1 - row.interval[0]))
        )
        end, text = level * (1 - gain), share(gain, row.interval)
        if row.status == "rejected":
            result.append(Bar(row.name, "rejected", level, end, f"{text}, not kept", ends))
        else:
            result.append(Bar(row.name, "saved", level, end, text, ends))
            level = end
    kept = any(row.status == "kept" for row in rows)
    final = tuning.final_ms if kept and _usable(tuning.final_ms) and tuning.final_ms else level
    if level > 0 and abs(final - level) >= 0.01 * baseline:
        result.append(Bar("the rest", "rest", level, final, share(1 - final / level)))
    return [*result, Bar("now", "now", 0.0, final, _ms(final))]


def waterfall(rows: Sequence[Row], tuning: Tuning, title: str = "", ink: str | None = "black") -> Figure:
    """The bars as a figure of its own: nothing of pyplot is touched.

    Args:
        ink: the colour of text and lines; None: on a page (`svg`) that of the page's text.

    >>> from autofuse.plan import Row
    >>> from autofuse.report import Tuning
    >>> rows = [Row("loss", "kept", gain=0.25, interval=(0.2, 0.3))]
    >>> len(waterfall(rows, Tuning("done", baseline_ms=400.0, final_ms=300.0)).axes[0].patches)
    3
    """
    drawn, paper, ink = bars(rows, tuning), "white" if ink else "none", ink or _TEXT
    figure = _Figure(figsize=(7.6, 1.3 + 0.4 * len(drawn)), layout="constrained", facecolor=paper)
    axes = figure.add_subplot(facecolor="none")
    for position, bar in enumerate(drawn):
        _draw(axes, position, bar, ink)
    for position, (bar, following) in enumerate(pairwise(drawn)):
        level = bar.start if bar.kind == "rejected" else bar.end
        span = [position + _HEIGHT / 2, position + 1 - _HEIGHT / 2]
        if following.kind != "now" or abs(following.end - level) < 0.01 * drawn[0].end:
            axes.plot([level, level], span, color=GREY, linewidth=1)
    rightmost = max(max(bar.start, bar.end, *(bar.ends or ())) for bar in drawn)
    axes.set_xlim(0, rightmost * 1.4)  # room for the text beside the longest bar
    axes.set_ylim(len(drawn) - 0.45, -0.55)
    axes.set_yticks(range(len(drawn)), [bar.label for bar in drawn], parse_math=False)
    axes.set_xlabel("milliseconds per step; beside a patch: the share of a step that it saves (95% interval)")
    _dress(axes, ink)
    title = "\n".join(filter(None, [title, _headline(rows, drawn, tuning)]))
    figure.suptitle(title, x=0.012, horizontalalignment="left", color=ink, fontsize=11, parse_math=False)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element whose text has the colour of the page around it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    # Its stylesheet is for "*": in a page that would be all other drawings too.
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)
    style = "max-width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt"
    return text.replace("<svg", f'<svg role="img" aria-label="milliseconds per step" style="{style}"', 1)


class _Figure(Figure):
    def _repr_png_(self) -> bytes:
        """Notebooks know how to show a Figure only where pyplot has been imported."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def _draw(axes: Axes, position: int, bar: Bar, ink: str) -> None:
    colour = {"before": BEFORE, "now": NOW, "saved": SAVED}.get(bar.kind, GREY)
    hollow = bar.kind == "rejected"
    axes.barh(
        position,
        bar.end - bar.start,
        left=bar.start,
        height=_HEIGHT,
        color="none" if hollow else colour,
        edgecolor=colour,
        linestyle="--" if hollow else "-",
        label=bar.kind,
    )
    if bar.ends is not None:
        errors = [[max(bar.end - min(bar.ends), 0)], [max(max(bar.ends) - bar.end, 0)]]
        axes.errorbar(
            bar.end,
            position,
            xerr=errors,
            fmt="none",
            ecolor=GREY if hollow else ink,
            elinewidth=1.2,
            capsize=3,
        )
    axes.annotate(
        bar.text,
        (max(bar.start, bar.end, *(bar.ends or ())), position),
        (6, 0),
        textcoords="offset points",
        verticalalignment="center",
        color=GREY if hollow else ink,
        fontsize=9,
        fontweight="bold" if bar.kind in ("before", "now") else "normal",
    )


def _dress(axes: Axes, ink: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    axes.tick_params(colors=ink, labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set(color=ink, fontsize=9)
    axes.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


def _headline(rows: Sequence[Row], drawn: Sequence[Bar], tuning: Tuning) -> str:
    if tuning.state == "done" and not any(row.status == "kept" for row in rows):
        return "no patch is kept: the loop is as it was"
    times = "" if tuning.speedup is None else f": {tuning.speedup:.2f} times as fast"
    return f"{arrow(drawn[0].end, drawn[-1].end)} ms per step{times}"


def _ms(value: float) -> str:
    return f"{arrow(value, value).partition(' ')[0]} ms"


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
