"""How the figures look: tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autofuse.bench.figures import NEVER_SLOWER

__all__ = ["plot", "save_plot", "seconds", "show", "show_memory"]

COLUMNS = (
    "s per step",
    "spread",
    "rounds",
    "x best by hand",
    "spread",
    "in CPU s",
    "share of floor",
    "fast after, s",
    "for good, s",
    "warm-up, steps",
    "in s",
    "loss",
)


def show(result: Mapping[str, Any], console: Console) -> None:
    """One model's race as a table; ``*`` marks the best hand-tuned."""
    table = Table(title=result["title"], title_justify="left")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in result["candidates"]:
        name = row["title"] + (" *" if row["name"] == result["best_hand_tuned"] else "")
        if row["failure"] is not None or row["median_s"] is None:
            table.add_row(name, *[""] * len(COLUMNS))
            continue
        table.add_row(
            name,
            f"{row['median_s']:.3f}",
            f"{row['iqr_s']:.3f}",
            f"{len(row['seconds'])}",
            _number(row["ratio"], ".3f"),
            f"{row['ratio_iqr']:.3f}" if row["ratio"] is not None else "",
            _number(row["cpu_ratio"], ".3f"),
            _number(row["floor_share"], ".0%"),
            seconds(row["until_fast_s"]),
            seconds(row["fast_for_good_s"]),
            f"{len(row['warm_up_s'])}" + ("" if row["settled"] else "+"),
            seconds(sum(row["warm_up_s"])),
            _number(row["loss_difference"], ".0e"),
        )
    console.print(table)
    for row in result["candidates"]:
        if row["failure"] is not None:
            console.print(f"{row['title']}: {row['failure']}", markup=False, highlight=False)
    floor = result["floor"]
    if "flops" in floor:
        rates = ", ".join(f"{rate:,.0f} GFLOP/s in {name}" for name, rate in floor["rates_gflops"].items())
        least = ", ".join(f"{floor[f'{name}_s']:.3f} s in {name}" for name in floor["rates_gflops"])
        text = f"Floor: {floor['flops'] / 1e9:,.1f} GFLOP in products; at {rates} that takes {least}."
        if floor["alone_s"]:
            alone = ", ".join(f"{seconds:.3f} s in {name}" for name, seconds in floor["alone_s"].items())
            text += f" Eager's own products alone take {alone}."
        console.print(text, markup=False, highlight=False)
    elif floor["failure"] is not None:
        console.print(f"Floor: {floor['failure']}", markup=False, highlight=False)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def seconds(value: float | None) -> str:
    """For a table.

    >>> seconds(36.04), seconds(0.0312), seconds(None)
    ('36.0', '0.031', '')
    """
    return "" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.1f}"


def show_memory(result: Mapping[str, Any], console: Console) -> None:
    title = f"Peak of a step above weights, optimizer and batch, MB: {result['title']}"
    table = Table(title=title, title_justify="left")
    for column in ("", "allocated", "without gradients of parameters", "rise of resident memory"):
        table.add_column(column, justify="right" if column else "left")
    for name, peak in result["peaks"].items():
        sizes = (peak["peak"], peak["others"], peak["resident"])
        table.add_row(name, *("" if size is None else f"{size / 1e6:,.0f}" for size in sizes))
    console.print(table)


# --- the plot ----------------------------------------------------------------------------------


def plot(found: Sequence[Mapping[str, Any]]) -> Any:
    """A matplotlib ``Figure``: for each model a bar per candidate, its time relative to the best hand-tuned.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a plot needs matplotlib: pip install 'autofuse[plot]'") from error
    names = list(dict.fromkeys((row["name"], row["title"]) for r in found for row in r["candidates"]))
    height = 0.8 / max(1, len(names))
    figure = Figure(figsize=(9, 1.5 + 0.2 * len(found) * (len(names) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, title) in enumerate(names):
        ratios = [_ratio(result, name) for result in found]
        places = [place + (index - (len(names) - 1) / 2) * height for place in range(len(found))]
        bars = axes.barh(places, ratios, height, label=title)
        axes.bar_label(bars, ["" if not ratio else f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.axvline(NEVER_SLOWER, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(found)), [result["title"] for result in found])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, relative to the best hand-tuned (less is better)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)
    return figure


def _ratio(result: Mapping[str, Any], name: str) -> float:
    """0 for a candidate without figures: no bar."""
    return next((r["ratio"] or 0.0 for r in result["candidates"] if r["name"] == name), 0.0)


def save_plot(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw to a file; its ending says the format (png, svg, pdf)."""
    plot(found).savefig(path, dpi=150)
