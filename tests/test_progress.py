"""The live line while tuning."""

import io
import sys

import pytest

from autofuse.progress import Progress


class Terminal(io.StringIO):
    """What a terminal of one line shows after what was written."""

    encoding = "utf-8"

    def __init__(self, tty=True):
        super().__init__()
        self._tty = tty

    def isatty(self):
        return self._tty

    @property
    def screen(self):
        cells, column = [], 0
        for character in self.getvalue():
            if character == "\r":
                column = 0
            else:
                cells[column : column + 1] = [character]
                column += 1
        return "".join(cells).rstrip()


def make_terminal(monkeypatch):
    """Called in the test itself: pytest puts its own stderr in place after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("RANK", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_the_line_is_written_over_and_gone_in_the_end(monkeypatch):
    terminal = make_terminal(monkeypatch)
    progress = Progress()
    progress.update("loss: 3 pairs, 21% ± 6 faster")
    assert terminal.screen == "autofuse: loss: 3 pairs, 21% ± 6 faster"
    progress.update("norms")
    assert terminal.screen == "autofuse: norms"
    progress.update("x" * 500 + "\n")
    assert len(terminal.screen) == 59 and terminal.screen.endswith("…")
    progress.close()
    progress.close()
    assert terminal.screen == "" and "\n" not in terminal.getvalue()
    progress.update("again")
    assert terminal.screen == "autofuse: again"


@pytest.mark.parametrize("why", ["no terminal", "second process", "dumb", "disabled"])
def test_the_line_is_silent(monkeypatch, why):
    terminal = make_terminal(monkeypatch)
    if why == "no terminal":
        monkeypatch.setattr(terminal, "_tty", False)
    if why == "second process":
        monkeypatch.setenv("RANK", "1")
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    progress = Progress(False if why == "disabled" else None)
    progress.update("loss")
    progress.close()
    assert terminal.getvalue() == ""


def test_the_line_can_be_asked_for(monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "_tty", False)
    Progress(enabled=True).update("loss")
    assert "loss" in terminal.getvalue()


def test_a_broken_terminal_does_not_end_a_training(monkeypatch):
    terminal = make_terminal(monkeypatch)
    progress = Progress()
    terminal.close()
    progress.update("loss")
    progress.close()
    for stream in (None, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        Progress().update("loss")
        Progress(enabled=True).update("loss")


def test_a_terminal_without_unicode_gets_what_it_can_show(monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    Progress().update("21% ± 6")
    assert terminal.screen == "autofuse: 21% ? 6"
