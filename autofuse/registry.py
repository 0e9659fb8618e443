"""The patchers that are installed: ours and anybody else's, through one entry-point group."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from autofuse.patch import Context, Patch, Rejected

__all__ = ["GROUP", "check_names", "find_patches", "patcher_names"]

GROUP = "autofuse.patchers"


def _entries() -> dict[str, EntryPoint]:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {**_from_checkout(), **found}


def _from_checkout() -> dict[str, EntryPoint]:
    """The entry-point table of a bare checkout, which has no package metadata."""
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not pyproject.is_file():
        return {}
    project = tomllib.loads(pyproject.read_text()).get("project", {})
    if project.get("name") != "autofuse":
        return {}
    table = project.get("entry-points", {}).get(GROUP, {})
    return {name: EntryPoint(name, value, GROUP) for name, value in table.items()}


def patcher_names() -> list[str]:
    """The names that ``only`` and ``skip`` take.

    >>> "norms" in patcher_names()
    True
    """
    return sorted(_entries())


def check_names(names: Iterable[str], argument: str) -> None:
    """Raise a ValueError for a name that no patcher has, with the nearest right ones."""
    known = patcher_names()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
            meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"{argument}: no patch is called {name!r}.{meant} There are: {', '.join(known)}."
            )


def find_patches(
    context: Context, wanted: Callable[[str], str | None]
) -> list[tuple[str, Patch | Rejected | str]]:
    """Every patcher's answer, in the order in which patches are applied.

    ``wanted(name)`` gives the reason to skip a patcher, or None. A patcher that cannot be imported
    or that raises has rejected, with the error as its reason: it never breaks the user's loop.
    """
    answers: list[tuple[float, str, Patch | Rejected | str]] = []
    for name, entry in sorted(_entries().items()):
        position, answer = 50.0, wanted(name) or ""
        if answer:
            answers.append((position, name, answer))
            continue
        found: Patch | Rejected
        try:
            patcher = entry.load()
            position = getattr(patcher, "order", position)
            found = patcher.find(context)
        except Exception as error:
            found = Rejected(f"its patcher failed: {type(error).__name__}: {error}")
        if isinstance(found, Patch):
            found.name = name
        answers.append((position, name, found))
    return [(name, answer) for _, name, answer in sorted(answers, key=lambda a: (a[0], a[1]))]
