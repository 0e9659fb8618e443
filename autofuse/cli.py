"""The command line: ``autofuse doctor`` says what this machine can do and what autofuse would choose,
``autofuse bench`` what a training step costs with it and without."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autofuse.bench.command import add_options, run
from autofuse.bench.own import resolve
from autofuse.bench.workloads import WORKLOADS
from autofuse.hardware import Hardware
from autofuse.providers import PROVIDERS

__all__ = ["doctor", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for an error, 2 for a wrong command line."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit:  # argparse has said why
        return exit.code if isinstance(exit.code, int) else 2
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head`: the reader has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(f"autofuse {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autofuse", description="Makes PyTorch training loops faster.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    _add_doctor(commands)
    _add_bench(commands)
    return parser


# --- doctor ------------------------------------------------------------------------------------


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="what this machine can do, what would be chosen, and what is missing"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--device", help="a device of this machine, as torch names it: cpu, cuda:0, ...")
    which.add_argument("--hardware", metavar="NAME", help="a machine elsewhere: V100, T4, A100, H100, ...")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.hardware:
        hardware = Hardware.named(arguments.hardware)
    else:  # this process trains nothing, so it may initialise CUDA to know more
        hardware = Hardware.detect(arguments.device or ("cuda" if torch.cuda.is_available() else None))
    findings = doctor(hardware)
    if arguments.json:
        print(json.dumps(findings, indent=2))
    else:
        _print_doctor(hardware, findings)
    return 0


def doctor(hardware: Hardware) -> dict[str, Any]:
    """What the doctor finds, as JSON can hold it. Rates are in GFLOP/s, memory is in bytes.

    >>> findings = doctor(Hardware.named("T4"))
    >>> findings["choices"]["autocast"]["dtype"], findings["choices"]["tf32"]["use"]
    ('fp16', False)
    """
    dtype, why = hardware.autocast_dtype()
    tf32, tf32_why = hardware.tf32_choice()
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", None: None}
    notes = {name: row.note() for name, row in PROVIDERS.items() if hardware.measured}
    return {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        },
        "hardware": hardware.to_dict(),
        "rates": {
            "unit": "GFLOP/s",
            "source": "measured" if hardware.measured else "published",
            "threads": 1 if hardware.kind == "cpu" else None,
            "matmul": {name: round(rate, 1) for name, rate in hardware.rates().items()},
        },
        "choices": {
            "autocast": {"dtype": names[dtype], "reason": why},
            "tf32": {"use": tf32, "reason": tf32_why},
        },
        "will_not_pay": hardware.will_not_pay(),
        "notes": {name: note for name, note in notes.items() if note},
    }


def _print_doctor(hardware: Hardware, findings: dict[str, Any]) -> None:
    # Not a terminal: nobody's window limits the width, and a pipe to grep wants whole sentences.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    for table in (
        _hardware_table(hardware, findings["torch"]),
        _rates_table(findings["rates"]),
        _choices_table(findings["choices"]),
        _providers_table(hardware, findings["notes"]),
    ):
        console.print(table)
    if findings["will_not_pay"]:
        console.print(findings["will_not_pay"], style="yellow", markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))  # Text: brackets in a reason are no markup


def _hardware_table(hardware: Hardware, versions: dict[str, Any]) -> Table:
    capability = hardware.to_dict()["compute_capability"]
    build = f"CUDA {versions['cuda']}" if versions["cuda"] else f"ROCm {versions['hip']}"
    facts = {
        "name": hardware.name,
        "kind": hardware.kind,
        "architecture": hardware.architecture,
        "compute capability": capability,
        "memory": None if hardware.memory is None else f"{hardware.memory / 2**30:.1f} GiB",
        "multiprocessors": hardware.multiprocessors,
        "cores of this process": hardware.cores,
        "instruction sets": " ".join(hardware.instruction_sets) or None,
        "computes in": ", ".join(
            ["fp32", *(name for name in ("tf32", "bf16", "fp16") if getattr(hardware, name))]
        ),
        "PyTorch": f"{versions['version']} ({build if versions['cuda'] or versions['hip'] else 'CPU only'})",
        "PyTorch's CPU kernels": versions["cpu_kernels"],
    }
    table = _table("Hardware")
    for fact, value in facts.items():
        if value is not None:
            _row(table, fact, value)
    return table


def _rates_table(rates: dict[str, Any]) -> Table:
    how = "measured here" if rates["source"] == "measured" else "published dense peak"
    how += ", one thread" if rates["threads"] else ""
    table = _table("Matrix products", "dtype", f"{rates['unit']} ({how})")
    for name, rate in rates["matmul"].items():
        _row(table, name, f"{rate:,.0f}")
    if not rates["matmul"]:
        _row(table, "-", "not known")
    return table


def _choices_table(choices: dict[str, Any]) -> Table:
    autocast, tf32 = choices["autocast"], choices["tf32"]
    table = _table("What autofuse would choose", "what", "choice", "why")
    _row(table, "autocast", autocast["dtype"] or "none (fp32)", autocast["reason"])
    _row(table, "TF32", "on" if tf32["use"] else "off", tf32["reason"])
    return table


def _providers_table(hardware: Hardware, notes: dict[str, str]) -> Table:
    table = _table("Providers", "provider", "usable", "version", "why not, or what to know")
    for name, reason in hardware.providers.items():
        version = PROVIDERS[name].version if hardware.measured and name != "inductor" else None
        _row(table, name, "no" if reason else "yes", version or "", reason or notes.get(name, ""))
    return table


# --- bench -------------------------------------------------------------------------------------


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="a training step by autofuse, by hand and by other libraries, side by side",
        description="Races autofuse against the same training by hand and by other libraries. Of a function "
        "of your own: it must return the same each time it is called (each candidate calls it in a "
        "process of its own); batches are mappings of tensors; model(**batch) must return a loss: an "
        'object with .loss, or a mapping with "loss".',
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(WORKLOADS)}; or package.module:function that returns (model, batches) or "
        "(model, optimizer, batches); or a folder with a transformers config.json",
    )
    add_options(parser)
    parser.set_defaults(run=_run_bench)


def _run_bench(arguments: argparse.Namespace) -> int:
    return run({arguments.model: resolve(arguments.model)}, arguments)


if __name__ == "__main__":
    sys.exit(main())
