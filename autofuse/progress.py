"""Progress: one line at the bottom of the terminal while the tuner works."""

from __future__ import annotations

import os
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console

__all__ = ["Progress"]


class Progress:
    """A line on stderr that is written over and gone in the end.

    No thread, no redirection, and nothing of the terminal is changed: a loop that dies leaves it as
    it was. What the loop prints would land behind the line: `close` it before the loop goes on, and
    `update` it in the next step. A loop's own bar comes back when it is drawn anew.

    Args:
        enabled: True or False; None shows the line in a terminal or a notebook, and of several
            processes (torchrun) in the first alone.

    >>> progress = Progress(enabled=False)
    >>> progress.update("loss: 3 pairs, 21% ± 6 faster")
    >>> progress.close()
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._console = Console(stderr=True)
        self._shown = 0  # cells that are on the screen
        try:
            self._enabled = _wanted(self._console) if enabled is None else enabled
        except Exception:
            self._enabled = False

    def update(self, text: str) -> None:
        """Show ``text`` instead of what was shown before; never raises."""
        line = f"autofuse: {' '.join(text.split())}"
        room = max(self._console.width - 1, 1)  # a full line would scroll
        self._write(set_cell_size(line, room - 1) + "…" if cell_len(line) > room else line)

    def close(self) -> None:
        """Remove the line. `update` may be called again."""
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        if not self._enabled:
            return
        try:
            stream: TextIO = self._console.file  # type: ignore[assignment]  # sys.stderr of this moment
            encoding = getattr(stream, "encoding", None) or "utf-8"
            line = line.encode(encoding, "replace").decode(encoding)
            cells = cell_len(line)
            blank = " " * max(self._shown - cells, 0)  # an escape code would not do in every notebook
            stream.write(f"\r{line}{blank}" + ("" if line else "\r"))
            stream.flush()
            self._shown = cells
        except Exception:  # a closed or broken stderr is no reason to end a training
            self._enabled = False


def _wanted(console: Console) -> bool:
    if os.environ.get("RANK", "0") != "0":
        return False
    return bool(console.is_jupyter or (console.file.isatty() and not console.is_dumb_terminal))
