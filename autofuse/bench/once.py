"""One step of a user's own workload before the race, so that what is wrong in it is said once, and where."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

import autofuse
from autofuse.bench.apart import apart, first_line
from autofuse.bench.workloads import Workload

__all__ = ["problem", "try_once"]

LIBRARIES = [
    Path(folder).resolve()
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
        *autofuse.__path__,
        *torch.__path__,
    )
]


def try_once(workload: Workload) -> None:
    """Make it and take its first loss and gradients, in a process of its own.

    Raises:
        RuntimeError: it cannot, with the reason and the place in the user's code.
    """
    reason = apart(problem, workload)
    if reason is not None:
        raise RuntimeError(reason)


def problem(workload: Workload) -> str | None:
    """Why not even one step can be taken, and where; None if it can."""
    try:
        model, _, batches = workload.make(1)
        workload.loss(model, batches[0]).backward()
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"{workload.title}: {name}{first_line(error)}{_place(error.__traceback__)}"
    return None


def _place(trace: TracebackType | None) -> str:
    """The innermost frame that is in no library."""
    own = [frame for frame in traceback.extract_tb(trace) if not _is_library(frame.filename)]
    return f" (in {own[-1].name}, {own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(map(Path(file).resolve().is_relative_to, LIBRARIES))
