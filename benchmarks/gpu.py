"""Everything about autofuse that only a GPU can tell, within eight minutes.

    python -m benchmarks.gpu [--out FOLDER] [--minutes 8] [--only checks,timings,gpt2,llama,bert] [--smoke]

First whether every usable provider of a fused operation gives the right numbers, then how long each
takes, then the training race in bf16. ``FOLDER/results.json`` and ``FOLDER/results.md`` (for
docs/benchmarks.md) are written after each part; a part that fails or for which no time is left says so
and costs the others nothing: each runs in processes of its own. Exit status: 0; 1 where a provider's
numbers are wrong or a part failed; 2 without CUDA. ``--smoke`` runs all of it at toy sizes on the CPU,
without Inductor, which tests this script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from autofuse.bench.apart import apart
from autofuse.bench.candidates import CANDIDATES, Candidate
from autofuse.bench.command import about
from autofuse.bench.figures import results
from autofuse.bench.race import race
from autofuse.bench.tables import seconds, show
from autofuse.bench.workloads import WORKLOADS, Transformers, Workload
from autofuse.errors import first_line, message
from autofuse.hardware import Hardware
from benchmarks import kernels

LEAST = 20.0  # seconds that a part must have left to begin
STEPS = 30

AUTOFUSE = CANDIDATES["autofuse"]
COMPETITORS = (
    Candidate("eager-bf16", "eager, bf16", "eager", "bf16"),
    CANDIDATES["fused-bf16"],
    CANDIDATES["compile-bf16"],
    AUTOFUSE,
)

_GPT2, _LLAMA, _BERT = (WORKLOADS[name] for name in ("gpt2", "llama", "bert-mlm"))
assert (
    isinstance(_GPT2, Transformers) and isinstance(_LLAMA, Transformers) and isinstance(_BERT, Transformers)
)

MODELS: Mapping[str, Transformers] = {
    "gpt2": replace(
        _GPT2,
        title="GPT-2 124M, 8x1024 tokens",
        options={**_GPT2.options, "n_positions": 1024, "n_layer": 12},
        rows=8,
        length=1024,
        floor_goal=None,
    ),
    "llama": replace(
        _LLAMA,
        title="Llama-like 300M, 4x1024 tokens",
        options={
            **_LLAMA.options,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
        },
        rows=4,
        length=1024,
        floor_goal=None,
    ),
    "bert": replace(
        _BERT,
        title="BERT base masked-LM, 15% of labels, 16x512 tokens",
        options={
            **_BERT.options,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
        rows=16,
        length=512,
    ),
}

TOY_OPTIONS = {
    "vocab_size": 96,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def toy(workload: Transformers) -> Transformers:
    """The same kind of model in very small."""
    options = {name: TOY_OPTIONS.get(name, value) for name, value in workload.options.items()}
    return replace(workload, title=f"toy of {workload.title}", options=options, rows=2, length=16)


# --- the parts ---------------------------------------------------------------------------------


@dataclass
class Run:
    """What is measured, and the time that is left for it.

    Args:
        seconds: for everything.
        smoke: at toy sizes on the CPU.
    """

    device: str
    seconds: float
    smoke: bool
    found: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    @property
    def providers(self) -> dict[str, str | None]:
        found: dict[str, str | None] = self.found["providers"]
        return found


def find_providers(run: Run) -> dict[str, str | None]:
    """In a process of its own: a provider may break whoever imports it."""
    found: dict[str, str | None] = apart(_providers, run.device, seconds=run.left)
    return found


def _providers(device: str) -> dict[str, str | None]:
    return dict(kernels.providers(Hardware.detect(device)))


def check(run: Run) -> list[dict[str, Any]]:
    """Every usable provider's numbers."""
    return list(_each_provider(run, kernels.check, 60.0))


def measure(run: Run) -> list[dict[str, Any]]:
    """Every usable provider's times, and eager's."""
    return list(_each_provider(run, kernels.timings, 60.0, kernels.EAGER))


def _each_provider(
    run: Run, function: Callable[..., Any], most: float, *more: str
) -> Iterator[dict[str, Any]]:
    for name in (*(name for name, why_not in run.providers.items() if why_not is None), *more):
        if run.left < LEAST:
            yield {"operation": "all", "provider": name, "skipped": "no time was left"}
            continue
        try:  # a kernel that accesses memory which is not its own ends its process, and no other
            yield from apart(function, name, run.device, run.smoke, seconds=min(most, run.left))
        except RuntimeError as error:
            yield {"operation": "all", "provider": name, "right": False, "failure": message(error)}


def train(run: Run, workload: Workload, share: float, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The race; ``share`` of the time that is left is for it."""
    steps = 1 if run.smoke else STEPS
    return results(workload, race(workload, candidates, steps, seconds=share * run.left))


def parts(run: Run, only: Sequence[str]) -> list[tuple[str, Callable[[], Any]]]:
    """Name and function of each part, in order."""
    found: list[tuple[str, Callable[[], Any]]] = [
        ("checks", lambda: check(run)),
        ("timings", lambda: measure(run)),
    ]
    models = [name for name in MODELS if name in only]
    for number, name in enumerate(models):
        workload = toy(MODELS[name]) if run.smoke else MODELS[name]
        racing = COMPETITORS
        if run.smoke:  # without the minutes that Inductor takes; one way to compile is enough
            racing = tuple(
                replace(c, backend="eager")
                for c in COMPETITORS
                if c is AUTOFUSE or (c.compiled and number == 0)
            )
        share = 0.95 / (len(models) - number)
        found.append((name, lambda w=workload, s=share, r=racing: train(run, w, s, r)))  # type: ignore[misc]
    return [(name, function) for name, function in found if name in only]


def do(run: Run, only: Sequence[str], out: Path, console: Console) -> None:
    """All parts, each written down as soon as it is done."""
    try:
        run.found["providers"] = find_providers(run)
    except RuntimeError as error:
        run.found["providers"] = {name: None for name in kernels.ALWAYS if name != kernels.EAGER}
        run.found["failures"]["providers"] = message(error)
    for name, function in parts(run, only):
        start = time.monotonic()
        if run.left < LEAST:
            run.found["failures"][name] = "skipped: no time was left"
            console.print(f"{name}: skipped, no time was left")
            continue
        console.print(f"{name}: {run.left:.0f} s left")
        try:
            run.found["parts"][name] = function()
        except Exception as error:
            run.found["failures"][name] = first_line(error)
            console.print(f"{name} failed: {run.found['failures'][name]}", style="bold red", markup=False)
        run.found["took_s"][name] = time.monotonic() - start
        if name in MODELS and name in run.found["parts"]:
            show(run.found["parts"][name], console)
        write(run.found, out)
    write(run.found, out)


def wrong(found: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, one line each."""
    lines = [f"{name}: {reason}" for name, reason in found["failures"].items()]
    for name in ("checks", "timings"):
        for row in found["parts"].get(name, ()):
            if row.get("right") is False or (row.get("failure") and row.get("right", False) is not None):
                why = row.get("failure") or f"error {row['error']:.1e}, allowed {row['allowed']:.1e}"
                lines.append(f"{row['provider']}, {row['operation']}: {why}")
    for name in MODELS:
        for row in found["parts"].get(name, {}).get("candidates", ()):
            if row["failure"] is not None:
                lines.append(f"{name}, {row['title']}: {row['failure']}")
    return lines


# --- what is written ---------------------------------------------------------------------------


def write(found: Mapping[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "results.md").write_text(markdown(found))


def markdown(found: Mapping[str, Any]) -> str:
    """The figures as docs/benchmarks.md has them."""
    where = f"{found['hardware']}, PyTorch {found['torch']}"
    lines = [f"Measured on {where}." if not found["smoke"] else f"Toy sizes on {where}: no figures.", ""]
    lines += _table(
        ("provider", "usable"),
        [(name, why_not or "yes") for name, why_not in found.get("providers", {}).items()],
    )
    if "checks" in found["parts"]:
        rows = [
            (
                row["operation"],
                row["provider"],
                {True: "yes", False: "NO", None: "-"}[row.get("right")],
                _form(row.get("error"), ".1e"),
                _form(row.get("allowed"), ".1e"),
                row.get("failure") or row.get("skipped") or "",
            )
            for row in found["parts"]["checks"]
        ]
        lines += _table(("operation", "provider", "right", "error", "allowed", ""), rows)
    if "timings" in found["parts"]:
        rows = [
            (
                row["operation"],
                row["provider"],
                _form(row.get("ms"), ".3f"),
                _form(_megabytes(row.get("peak_bytes")), ",.0f"),
                row.get("failure") or row.get("skipped") or "",
            )
            for row in sorted(found["parts"]["timings"], key=lambda row: row["operation"])
        ]
        lines += _table(("operation", "provider", "ms", "peak, MB", ""), rows)
    for name in MODELS:
        if name in found["parts"]:
            lines += _race(found["parts"][name])
    problems = wrong(found)
    lines += ["Nothing failed." if not problems else "Not as it should be:", ""]
    return "\n".join(lines + [f"- {line}" for line in problems]) + "\n"


def _race(result: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["title"] + (" (best by hand)" if row["name"] == result["best_hand_tuned"] else ""),
            _form(None if row["median_s"] is None else row["median_s"] * 1e3, ".1f"),
            _form(row["ratio"], ".3f"),
            seconds(row["until_fast_s"]),
            _form(_megabytes(row["cuda_peak_bytes"]), ",.0f"),
            row["failure"] or "",
        )
        for row in result["candidates"]
    ]
    columns = ("", "ms per step", "x best by hand", "fast after, s", "peak, MB", "")
    return [f"**{result['title']}**", "", *_table(columns, rows)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows), ""]


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


# --- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything; the exit status is 0, 1 where something is wrong, 2 without CUDA."""
    names = ("checks", "timings", *MODELS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark"), help="where results are written")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (8)")
    parser.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--smoke", action="store_true", help="at toy sizes on the CPU: tests this script")
    options = parser.parse_args(arguments)
    only = options.only.split(",")
    if not set(only) <= set(names):
        parser.error(f"--only takes some of {','.join(names)}, not {options.only}")
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes of the candidates
    elif not torch.cuda.is_available():
        console.print(
            f"PyTorch {torch.__version__} sees no CUDA device here, and all of this is about one. "
            "Run it where there is one, or with --smoke to test the script itself."
        )
        return 2
    device = "cpu" if options.smoke else "cuda"
    run = Run(device, options.minutes * 60, options.smoke)
    run.found |= about(device) | {"smoke": options.smoke, "parts": {}, "failures": {}, "took_s": {}}
    do(run, only, options.out, console)
    problems = wrong(run.found)
    for line in problems:
        console.print(line, style="bold red", markup=False, highlight=False)
    console.print(f"Written: {options.out / 'results.json'}, {options.out / 'results.md'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
