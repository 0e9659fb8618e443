"""The same training twice: a loop written by hand, and the same loop with autofuse's one line.

A small GPT-2 learns to write Python, from the text of Python's own standard library, with a BPE
vocabulary that is trained on the spot. Both loops run in processes of their own and take turns,
one step each, so that whatever else the machine does hits both alike. They start from the same
seed and see the same batches, with dropout on; so their loss curves must be the same. While they
train, autofuse tries its patches one at a time; what is timed in the end are the rounds after that.

    python examples/demo.py            # what `make demo` does
    python examples/demo.py --steps 20 # a quick look
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autofuse
from autofuse.report import Report

SEED = 0
BATCH, LENGTH = 4, 256
VOCABULARY = 12_288
RUN = 2_000  # what is shown is the beginning of a run of so many steps: autofuse decides for the whole of it
ROUNDS = 10  # that are timed, after everything is decided
FIRST, FIRST_TOLERANCE, TOLERANCE = 10, 1e-5, 1e-4  # the promise for the first steps, and for all

console = Console(width=None if sys.stdout.isatty() else 120)


# --- the data ----------------------------------------------------------------------------------


def corpus(files: int = 400) -> list[str]:
    """The text of some files of Python's standard library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    paths = [p for p in sorted(library.rglob("*.py")) if not left_out & {*p.relative_to(library).parts}]
    random.Random(SEED).shuffle(paths)
    return [path.read_text("utf-8", errors="replace") for path in paths[:files]]


def tokenize(texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """(all tokens one after the other, the size of the vocabulary), by a BPE trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokens = [token for text in tokenizer.encode_batch(list(texts)) for token in (*text.ids, end)]
    return np.array(tokens), tokenizer.get_vocab_size()


def make_batches(tokens: np.ndarray, steps: int) -> np.ndarray:
    """(steps, BATCH, LENGTH) tokens, each row from a random place."""
    starts = np.random.default_rng(SEED).integers(0, len(tokens) - LENGTH, (steps, BATCH, 1))
    return tokens[starts + np.arange(LENGTH)]


# --- the two loops -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a process is to train; ``precision`` is None for the loop without autofuse."""

    precision: str | None
    batches: np.ndarray
    vocabulary: int
    layers: int
    hidden: int


def build(job: Job) -> tuple[GPT2LMHeadModel, torch.optim.Optimizer, Any]:
    """The model with random weights and GPT-2's own dropout, AdamW, and a schedule with warm-up."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=job.vocabulary,
        n_positions=LENGTH,
        n_embd=job.hidden,
        n_layer=job.layers,
        n_head=job.hidden // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    return model, optimizer, scheduler


def plain_step(job: Job) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A training step as anybody writes it."""
    model, optimizer, scheduler = build(job)

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def autofuse_step(job: Job) -> autofuse.TrainingStep:
    """The same with the one line."""
    model, optimizer, scheduler = build(job)
    precision = job.precision or "auto"
    return autofuse.optimize(model, optimizer, scheduler=scheduler, precision=precision, steps=RUN)


def work(job: Job, parent: Connection) -> None:
    """A process's life: one step each time that the parent asks, and the report when it has enough.

    Asked to "decide" it ends the tuning; it says with each step whether it is still tuning.
    """
    step = plain_step(job) if job.precision is None else autofuse_step(job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for tokens in job.batches:
        ids = torch.from_numpy(tokens).to(device)
        request = parent.recv()
        if request == "enough":
            break
        if request == "decide" and isinstance(step, autofuse.TrainingStep):
            step.stop_tuning("the demo's time was up")
        start = time.perf_counter()
        loss = step({"input_ids": ids, "labels": ids}).item()
        if device == "cuda":
            torch.cuda.synchronize()
        parent.send((loss, time.perf_counter() - start, getattr(step, "tuning", False)))
    else:
        parent.recv()
    parent.send(step.report.to_dict() if isinstance(step, autofuse.TrainingStep) else None)


class Trainer:
    """A loop in a process of its own, that goes one step when it is told to."""

    def __init__(self, name: str, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.report: Report | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.tuning = job.precision is not None
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that a process that dies is noticed here

    def step(self, request: str = "step") -> None:
        self._connection.send(request)
        loss, seconds, self.tuning = self._receive()
        self.losses.append(loss)
        self.seconds.append(seconds)

    def finish(self) -> None:
        self._connection.send("enough")
        report = self._receive()
        self.report = None if report is None else Report.from_dict(report)
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process that trains {self.name!r} has died; see above") from None

    @property
    def typical(self) -> float:
        """The median seconds of a step, after everything is decided."""
        return median(self.seconds[-ROUNDS:])


def train(trainers: Sequence[Trainer], steps: int, seconds: float) -> None:
    """All trainers in turns until everything is decided or time is up, and the timed rounds; with a
    progress bar where there is a terminal."""
    end = time.monotonic() + seconds
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("first step", total=steps, now="")
        left = ROUNDS
        for index in range(steps):
            late = time.monotonic() > end or index + ROUNDS >= steps
            for trainer in trainers:
                if index == 0:
                    progress.update(task, description=f"first step, {trainer.name}")
                trainer.step("decide" if late else "step")
            now = "  ".join(f"{t.name} {t.losses[-1]:.4f} ({t.seconds[-1]:.2f} s)" for t in trainers)
            tuning = any(trainer.tuning for trainer in trainers)
            progress.update(task, advance=1, description="tuning" if tuning else "timing", now=now)
            left -= not tuning
            if left < 0:
                break
        console.print(f"{index + 1} steps of each; the last {ROUNDS} rounds are timed.")
    for trainer in trainers:
        trainer.finish()


# --- what is shown -----------------------------------------------------------------------------


def differences(plain: Trainer, fused: Trainer) -> list[float]:
    """The relative difference of the losses, step by step."""
    return [abs(a - b) / abs(a) for a, b in zip(plain.losses, fused.losses, strict=True)]


def losses_table(trainers: Sequence[Trainer]) -> Table:
    table = Table(title="Loss", title_justify="left")
    table.add_column("step", justify="right")
    for trainer in trainers:
        table.add_column(trainer.name, justify="right")
    table.add_column("relative difference in fp32", justify="right")
    difference = differences(*trainers[:2])
    last = len(difference)
    for number in sorted({1, 2, 5, FIRST, last, *range(25, last, 25)}):
        if number <= last:
            losses = (f"{t.losses[number - 1]:.6f}" for t in trainers)
            table.add_row(str(number), *losses, f"{difference[number - 1]:.1e}")
    return table


def seconds_table(trainers: Sequence[Trainer]) -> Table:
    table = Table(title="Time", title_justify="left")
    for column in ("", "seconds per step", "times as fast", "all steps"):
        table.add_column(column, justify="right" if column else "left")
    plain = trainers[0]
    for trainer in trainers:
        table.add_row(
            trainer.name,
            f"{trainer.typical:.3f}",
            f"{plain.typical / trainer.typical:.2f}",
            f"{sum(trainer.seconds):.0f} s",
        )
    return table


def plot(trainers: Sequence[Trainer], path: Path) -> None:
    """The loss curves, their difference against what is promised, and the seconds of each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, difference, seconds) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    styles = [("#f4a259", "-", 5.0), ("#1d4e89", "-", 1.5), ("#8cb369", "--", 1.5)]
    for trainer, (color, line, width) in zip(trainers, styles, strict=False):
        steps = range(1, len(trainer.losses) + 1)
        curves.plot(steps, trainer.losses, line, color=color, linewidth=width, label=trainer.name)
        seconds.plot(
            steps,
            trainer.seconds,
            ".",
            color=color,
            label=f"{trainer.name}: {trainer.typical:.3f} s in the median",
        )
        seconds.axhline(trainer.typical, color=color, linewidth=1)
    curves.set(title="Loss", xlabel="step")
    seconds.set(title="Seconds per step (some also prove or compile)", xlabel="step")
    seconds.set_ylim(0, 2 * max(t.typical for t in trainers))
    for axes in (curves, seconds):
        axes.legend()

    found = differences(*trainers[:2])
    steps = range(1, len(found) + 1)
    difference.semilogy(steps, [max(d, 1e-9) for d in found], ".", color=styles[1][0], label="measured")
    difference.step(
        steps,
        [FIRST_TOLERANCE if n <= FIRST else TOLERANCE for n in steps],
        where="mid",
        color="firebrick",
        label="promised",
    )
    difference.set(title="Relative difference of the fp32 losses (0 is drawn at 1e-9)", xlabel="step")
    difference.legend(loc="center right")
    for axes in (curves, difference, seconds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def verdict(plain: Trainer, fused: Trainer) -> bool:
    """Say whether the two curves are the same, and whether they are within the promise."""
    found = differences(plain, fused)
    first, whole = max(found[:FIRST]), max(found)
    equal = first <= FIRST_TOLERANCE and whole <= TOLERANCE
    console.print(
        f"Largest relative difference of the two fp32 losses: {first:.1e} in the first "
        f"{min(FIRST, len(found))} steps ({FIRST_TOLERANCE:.0e} is promised), {whole:.1e} in all "
        f"{len(found)} ({TOLERANCE:.0e}: what rounding differently adds up to as weights drift apart)."
    )
    if not equal:
        console.print("[bold red]The loss curves differ by more than that.")
    return equal


def say_savings(report: Report) -> None:
    """What a run of 100 hours would save, at an example's prices."""
    try:
        saved = report.savings(hours=100, price_per_hour=2.5, kilowatts=0.7, grams_co2_per_kwh=380)
    except (RuntimeError, ValueError) as error:
        console.print(str(error))
    else:
        console.print(f"Of 100 hours at 2.50 an hour, 0.7 kW and 380 g CO2 per kWh: {saved}")


# --- the demo ----------------------------------------------------------------------------------


def lower_precision(job: Job) -> str | None:
    """What precision="auto" plans that is less exact than fp32; says it, or why there is nothing."""
    model, optimizer, _ = build(job)
    plan = autofuse.plan(model, optimizer)
    rows = [row for row in plan.rows if row.name in ("precision", "tf32")]
    planned = [row for row in rows if row.status == "planned"]
    for row in planned or rows:
        console.print(f'precision="auto", {row.name}: {row.status}: {row.reason}', style="dim")
    return "auto" if planned else None


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """The trainings to do, each with its name."""
    start = time.perf_counter()
    texts = corpus()
    tokens, vocabulary = tokenize(texts)
    console.print(
        f"A BPE vocabulary of {vocabulary:,} entries, trained on {len(texts)} files of Python's standard "
        f"library ({len(tokens):,} tokens), in {time.perf_counter() - start:.1f} s."
    )
    common = (make_batches(tokens, arguments.steps), vocabulary, arguments.layers, arguments.hidden)
    model = build(Job(None, *common))[0]
    console.print(
        f"GPT-2 of {model.num_parameters() / 1e6:.1f} M parameters ({arguments.layers} layers of "
        f"{arguments.hidden}), dropout 0.1, AdamW: the first {arguments.steps} of {RUN:,} steps of "
        f"{BATCH}x{LENGTH} tokens."
    )
    yield "by hand", Job(None, *common)
    yield "autofuse", Job("fp32", *common)
    if lower_precision(Job(None, *common)):
        yield "autofuse, auto precision", Job("auto", *common)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 1 where the loss curves differ by more than is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=240, help="no more steps after so long")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    options = parser.parse_args(arguments)

    start = time.perf_counter()
    trainers = [Trainer(name, job) for name, job in jobs(options)]
    try:
        train(trainers, options.steps, options.seconds)
    except RuntimeError as error:
        console.print(str(error), style="bold red")
        return 1

    options.output.mkdir(parents=True, exist_ok=True)
    for number, trainer in enumerate(trainers[1:], 1):
        if trainer.report is not None:
            console.print(f"\n{trainer.name}", style="bold")
            console.print(trainer.report)
            say_savings(trainer.report)
            trainer.report.plot(options.output / f"gain-{number}.png")
    console.print(losses_table(trainers), seconds_table(trainers))
    equal = verdict(*trainers[:2])
    plot(trainers, options.output / "curves.png")
    results = {
        t.name: {"losses": t.losses, "seconds": t.seconds, "report": t.report and t.report.to_dict()}
        for t in trainers
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(
        f"{options.output}: curves.png, gain-*.png (what each patch brings), results.json (every figure). "
        f"The demo took {time.perf_counter() - start:.0f} s."
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
