"""The benchmark as a command, for ``autofuse bench`` and ``python -m benchmarks.train_step``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import autofuse
from autofuse.bench.candidates import CANDIDATES, Candidate, named
from autofuse.bench.figures import Goal, goals, goals_over_all, memory, memory_goals, results
from autofuse.bench.floor import floor_of
from autofuse.bench.once import try_once
from autofuse.bench.race import STEPS, device_type, race
from autofuse.bench.tables import save_plot, show, show_memory
from autofuse.bench.workloads import WORKLOADS, Workload
from autofuse.hardware import Hardware
from autofuse.registry import patcher_names

__all__ = ["add_options", "run"]

PICTURES = (".png", ".svg", ".pdf")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both commands take beside the models."""
    parser.add_argument("--steps", type=_positive, default=STEPS, help=f"timed steps of each ({STEPS})")
    parser.add_argument(
        "--candidates",
        type=_candidates,
        default=list(CANDIDATES.values()),
        metavar="NAMES",
        help=f"some of {','.join(CANDIDATES)}; all by default",
    )
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw the ratios there (png, svg, pdf)")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a step too")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of steps, 1 at least, not {text!r}")
    return int(text)


def _candidates(text: str) -> list[Candidate]:
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _writable(text: str) -> Path:
    """Refused before the race, not after it."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"cannot write {text}: {what}; expected a file in a folder")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}: no permission")
    return path


def _picture(text: str) -> Path:
    path = _writable(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"cannot draw {text}: its name must end in {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install 'autofuse[plot]'")
    return path


def run(workloads: Mapping[str, Workload], options: argparse.Namespace, big: Workload | None = None) -> int:
    """Measure, print and write; returns 1 where a goal is not met or a model's race gave no figures.

    Args:
        options: those of `add_options`.
        big: what ``--memory`` measures; by default the workloads themselves.

    Raises:
        RuntimeError: no workload can run here, or a user's own cannot take a step.
    """
    console = Console(width=None if sys.stdout.isatty() else 170)
    figures: dict[str, Any] = {}
    found = {**about(device_type()), "models": figures}
    promised: list[Goal] = []
    failed = False
    for name, workload in workloads.items():
        if workload.missing:
            console.print(f"{workload.title}: skipped, not installed: {', '.join(workload.missing)}\n")
            figures[name] = {"title": workload.title, "skipped": workload.missing}
            continue
        if name not in WORKLOADS:
            try_once(workload)
        figures[name] = one_model(workload, options.candidates, options.steps, console)
        failed |= not any(row["median_s"] for row in figures[name]["candidates"])
        promised += goals(figures[name])
        _write(options.json, found)
    raced = [result for result in figures.values() if "skipped" not in result]
    if not raced:
        raise RuntimeError("no model can run here: pip install 'autofuse[hf]' scikit-learn")
    promised += goals_over_all(raced)
    if options.memory:
        found["memory"] = []
        for workload in [big] if big is not None else workloads.values():
            result = memory(workload)
            found["memory"].append(result)
            show_memory(result, console)
            promised += memory_goals(result) if workload is big else []
    found["goals"] = [{**vars(goal), "met": goal.met} for goal in promised]
    _write(options.json, found)
    if options.plot is not None:
        save_plot(raced, options.plot)
    for goal in promised:
        console.print(str(goal), style=None if goal.met else "bold red", highlight=False, markup=False)
    return 0 if all(goal.met for goal in promised) and not failed else 1


def one_model(
    workload: Workload,
    candidates: Sequence[Candidate],
    steps: int,
    console: Console,
) -> dict[str, Any]:
    """A race, shown."""
    start, load = time.monotonic(), _load()
    with console.status(f"{workload.title}: the floor") as status:

        def say(text: str, passing: bool = False) -> None:
            if console.is_terminal:
                status.update(text)
            elif not passing:  # a log gets a line for each candidate, not for each round
                console.print(text, markup=False, highlight=False)

        floor = floor_of(workload)
        runners = race(workload, candidates, steps, say)
    result = results(workload, runners, floor)
    result |= {"took_s": time.monotonic() - start, "load": [load, _load()]}
    show(result, console)
    console.print(f"{workload.title} took {result['took_s']:.0f} s; the load was {load:.1f} before it.\n")
    return result


def about(device: str) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    return {
        "autofuse": autofuse.__version__,
        "torch": torch.__version__,
        "hardware": str(Hardware.detect(device)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "patchers": patcher_names(),
    }


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    """After each model, so that a run that is stopped has shown what it found."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
