"""Tables: how the rows of a plan or a report look, as text and in a notebook."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from autofuse.plan import Row

__all__ = ["arrow", "content", "measured_gain", "render", "share", "to_html"]

WIDTH = 118  # of a text that goes to no terminal
NARROWEST = 20  # a terminal that says less is not believed
_WORTH_A_COLUMN = 44  # with less room than that "what and why" goes below the table


# --- figures -------------------------------------------------------------------------------------


def arrow(before: float | None, after: float | None) -> str:
    """Two measurements with the digits that the larger deserves.

    >>> arrow(812.3, 560.04), arrow(1.5, 0.75), arrow(12.0, None)
    ('812 → 560', '1.50 → 0.75', '')
    """
    if before is None or after is None:
        return ""
    largest = max(abs(before), abs(after))
    digits = sum(largest < limit for limit in (100, 10, 1))
    return f"{before:,.{digits}f} → {after:,.{digits}f}"


def share(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A share in percent with its interval.

    >>> share(0.312, (0.27, 0.35)), share(-0.004, (-0.009, 0.001)), share(None)
    ('31% (27 to 35)', '-0.4% (-0.9 to 0.1)', '')
    """
    if value is None:
        return ""
    spread = abs(value) / 5 if interval is None else (interval[1] - interval[0]) / 2
    digits = 0 if spread >= 0.01 else 1

    def percent(part: float) -> str:
        return f"{round(100 * part, digits) + 0.0:.{digits}f}"  # + 0.0: no "-0"

    return f"{percent(value)}%" + ("" if interval is None else " ({} to {})".format(*map(percent, interval)))


def measured_gain(row: Row) -> float | None:
    """The share of a step's time that a patch saves, if it was measured."""
    if row.gain is None and row.before_ms and row.after_ms is not None:
        return 1 - row.after_ms / row.before_ms
    return row.gain


# Header of a column, what is in it, and how it is told where the column has no room.
_FIGURES: list[tuple[str, Callable[[Row], str], str]] = [
    ("ms per step", lambda row: arrow(row.before_ms, row.after_ms), "{} ms per step"),
    ("saves (95%)", lambda row: share(measured_gain(row), row.interval), "saves {}"),
    ("error", lambda row: "" if row.error is None else f"{row.error:.1e}", "error {}"),
    ("peak MB", lambda row: arrow(row.peak_before_mb, row.peak_after_mb), "peak {} MB"),
]


@dataclass
class _Column:
    header: str
    cells: list[str]
    told: str = "{}"

    @property
    def width(self) -> int:
        return 3 + max(cell_len(text) for text in [self.header, *self.cells])

    def tell(self, index: int) -> str:
        return self.told.format(self.cells[index]) if self.cells[index] else ""


def _figures(rows: Sequence[Row]) -> list[_Column]:
    """The columns of figures in which there is anything."""
    columns = [_Column(header, [text(row) for row in rows], told) for header, text, told in _FIGURES]
    return [column for column in columns if any(column.cells)]


def _count(row: Row) -> str:
    return f"{len(row.accepted)}/{len(row.sites)}" if row.sites else ""


def _sites(row: Row) -> list[str]:
    """The sites of a row, grouped by what was found there."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for site in row.sites:
        if site.reason == row.reason:
            continue
        groups.setdefault((site.cls, site.operation, site.provider, site.reason), []).append(site.path)
    lines = []
    for (cls, operation, provider, reason), paths in groups.items():
        what = f"{operation} by {provider}" if operation else f"left alone: {reason}"
        name = " ".join(filter(None, [cls.rsplit(".", 1)[-1], _compact(paths)]))
        lines.append(f"· {name}: {what}")
    return lines


def _compact(paths: list[str]) -> str:
    """``h.0.ln_1 … (12)`` instead of twelve names."""
    named = [path for path in paths if path]
    if not named:
        return ""
    return named[0] if len(paths) == 1 else f"{named[0]} … ({len(paths)})"


# --- text ----------------------------------------------------------------------------------------

_STYLE = {"kept": "green", "planned": "cyan", "rejected": "yellow", "skipped": "dim"}


def render(rows: Iterable[Row], title: str, lines: Iterable[str] = (), width: int | None = None) -> str:
    """The rows as plain text, as wide as the terminal (`WIDTH` where there is none), then ``lines``."""
    width = max(width or shutil.get_terminal_size((WIDTH, 0)).columns, NARROWEST)
    # Not forced, rich shows in a notebook's own way whatever it prints to any file.
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_jupyter=False, legacy_windows=False
    )
    console.print(*content(rows, title, lines, width), sep="\n")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in printed.splitlines()).rstrip()


def content(
    rows: Iterable[Row], title: str, lines: Iterable[str] = (), width: int = WIDTH
) -> list[RenderableType]:
    """What rich prints: a table of what fits in ``width``, what does not fit below it, then ``lines``."""
    rows = list(rows)
    columns = [
        _Column("patch", [row.name for row in rows]),
        _Column("status", [row.status for row in rows]),
        _Column("sites", [_count(row) for row in rows], "{} sites"),
        *_figures(rows),
    ]
    ends = [*accumulate((column.width for column in columns), initial=1)]
    what = [[line for line in (row.reason, *_sites(row)) if line] for row in rows]
    sentences = [Text(line) for line in lines if line]
    if width - ends[-1] - 3 >= _WORTH_A_COLUMN:
        told = [Text("\n".join(texts)) for texts in what]
        return [_table(rows, title, columns, told), *sentences]
    fitting = sum(end <= width for end in ends) - 1
    if fitting < 3:
        return [Text(title, style="italic"), *_blocks(rows, columns, what), *sentences]
    below = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for index, (row, texts) in enumerate(zip(rows, what, strict=True)):
        rest = "; ".join(filter(None, [column.tell(index) for column in columns[fitting:]]))
        text = "\n".join(filter(None, [rest, *texts]))
        if text:
            below.add_row(Text(row.name, style=_STYLE.get(row.status, "")), Text(text))
    return [_table(rows, title, columns[:fitting]), below, *sentences]


def _table(
    rows: Sequence[Row], title: str, columns: Sequence[_Column], what: Sequence[Text] | None = None
) -> Table:
    table = Table(title=Text(title, style="table.title"), title_justify="left", expand=False)
    for column in columns[:3]:
        table.add_column(column.header, no_wrap=True)
    if what is not None:
        table.add_column("what and why", overflow="fold")
    for column in columns[3:]:
        table.add_column(column.header, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        cells = [Text(column.cells[index]) for column in columns]
        cells[1].stylize(_STYLE.get(row.status, ""))
        table.add_row(*cells[:3], *([] if what is None else [what[index]]), *cells[3:])
    return table


def _blocks(
    rows: Sequence[Row], columns: Sequence[_Column], what: Sequence[Sequence[str]]
) -> Iterator[RenderableType]:
    for index, (row, texts) in enumerate(zip(rows, what, strict=True)):
        told = "; ".join(filter(None, [column.tell(index) for column in columns[1:]]))
        yield Text(f"{row.name}: {told}", style=_STYLE.get(row.status, ""))
        for text in texts:
            yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2), expand=False)


# --- notebook ------------------------------------------------------------------------------------

# White on these can be read in a light theme and in a dark one; all else has the theme's own colours.
BADGES = {"kept": "#1a7f37", "planned": "#0969da", "rejected": "#9a6700", "skipped": "#656d76"}
_LINE = "1px solid rgba(128, 128, 128, .4)"
_CELL = f"padding: .35em .8em; border-bottom: {_LINE}; vertical-align: top; color: inherit; text-align: "


def to_html(rows: Iterable[Row], title: str, lines: Iterable[str] = (), picture: str = "") -> str:
    """The rows as an HTML table that needs no stylesheet, then ``lines``, then ``picture`` (SVG)."""
    rows = list(rows)
    figures = _figures(rows)
    head = "".join(_cell("th", name) for name in ("patch", "status"))
    head += "".join(_cell("th", column.header, number=True) for column in figures)
    head += "".join(_cell("th", name) for name in ("sites", "what and why"))
    body = ""
    for index, row in enumerate(rows):
        cells = [_cell("td", f"<b>{escape(row.name)}</b>"), _cell("td", _badge(row.status))]
        cells += [_cell("td", escape(column.cells[index]), number=True) for column in figures]
        cells += [_cell("td", _count(row)), _cell("td", _details(row))]
        body += f"<tr>{''.join(cells)}</tr>\n"
    sentences = "".join(f"<div>{escape(line)}</div>\n" for line in lines if line)
    return (
        f'<div class="autofuse" style="overflow-x: auto; line-height: 1.5">\n<b>{escape(title)}</b>\n'
        f'<table style="border-collapse: collapse; margin: .6em 0; color: inherit">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n{sentences}{picture}</div>"
    )


def _cell(tag: str, content: str, number: bool = False) -> str:
    style = _CELL + ("right; white-space: nowrap; font-variant-numeric: tabular-nums" if number else "left")
    return f'<{tag} style="{style}">{content}</{tag}>'


def _badge(status: str) -> str:
    colour = BADGES.get(status, BADGES["skipped"])
    style = f"background: {colour}; color: #fff; border-radius: .8em; padding: .1em .7em; white-space: nowrap"
    return f'<span style="{style}">{escape(status)}</span>'


def _details(row: Row) -> str:
    reason, sites = escape(row.reason), "".join(f"<div>{escape(line)}</div>" for line in _sites(row))
    return f"<details><summary>{reason or 'sites'}</summary>{sites}</details>" if sites else reason


def as_text(table: Table, width: int = 118) -> str:
    """Any table, as it prints."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(table)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def as_html(table: Table) -> str:
    """Any table, as a notebook shows it."""
    console = Console(file=io.StringIO(), width=118, record=True, force_jupyter=False)
    console.print(table)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
