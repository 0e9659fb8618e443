"""One step of a user's own workload before the race, so that what is wrong in it is said once, and where."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

import autofuse
from autofuse.bench.apart import apart
from autofuse.bench.race import device_type
from autofuse.bench.workloads import Workload
from autofuse.errors import first_line, message

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
    try:
        reason = apart(problem, workload)
    except RuntimeError as error:  # not even an error came back
        raise RuntimeError(f"{workload.title}: {error}") from error
    if reason is not None:
        raise RuntimeError(reason)


def problem(workload: Workload) -> str | None:
    """Why not even one step can be taken, and where; None if it can."""
    device = device_type()
    try:
        model, _, batches = workload.make(1)
        batch = {name: tensor.to(device) for name, tensor in batches[0].items()}
        workload.loss(model.to(device), batch).backward()
    except Exception as error:
        place, text = _place(error.__traceback__), message(error)
        if place or not isinstance(error, ValueError):  # ours are sentences, which need no class
            text = first_line(error)
        return text if text.startswith(workload.title) else f"{workload.title}: {text}{place}"
    return None


def _place(trace: TracebackType | None) -> str:
    """The innermost frame that is in no library."""
    own = [frame for frame in traceback.extract_tb(trace) if not _is_library(frame.filename)]
    return f" (in {own[-1].name}, {own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(map(Path(file).resolve().is_relative_to, LIBRARIES))
