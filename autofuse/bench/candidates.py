"""The ways to train that are compared, each as its user writes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autofuse
from autofuse.bench.turns import Turns
from autofuse.bench.workloads import Batch, Workload

__all__ = ["CANDIDATES", "Candidate", "Job", "named"]

RUN = 10_000  # steps of the run that autofuse is told to decide for

Kind = Literal["eager", "hand-tuned", "accelerate", "trainer", "autofuse"]


class Job(NamedTuple):
    """What a candidate is given: everything is on ``device``."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    batches: list[Batch]
    device: torch.device
    turns: Turns


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Args:
        name: what ``--candidates`` takes.
        title: what tables call it.
        kind: whose it is. "hand-tuned" ones, all with a fused optimizer, are what others are held against.
        compiled: the whole model by ``torch.compile``.
        needs: packages beside torch, of the extra "hf".
        backend: of ``torch.compile``; with any but "inductor", which tests use, autofuse compiles nothing.
    """

    name: str
    title: str
    kind: Kind
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    compiled: bool = False
    needs: tuple[str, ...] = ()
    backend: str = "inductor"

    @property
    def missing(self) -> str | None:
        """Which packages are not installed, and what to do; None if nothing is missing."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return f"not installed: {', '.join(absent)} (pip install 'autofuse[hf]')"

    def train(self, job: Job) -> None:
        """Take the steps that ``job.turns`` asks for, until it raises `Finished`."""
        TRAIN[self.kind](self, job)


def _loop(job: Job, step: Callable[[Batch], Tensor]) -> None:
    for batch in cycle(job.batches):
        job.turns.begin()
        job.turns.end(step(batch))


def _by_hand(candidate: Candidate, job: Job) -> None:
    workload, optimizer = job.workload, job.optimizer
    if candidate.kind == "hand-tuned":
        optimizer = workload.tuned(optimizer)
    model: Any = torch.compile(job.model, backend=candidate.backend) if candidate.compiled else job.model

    def step(batch: Batch) -> Tensor:
        with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=candidate.precision == "bf16"):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    _loop(job, step)


def _by_accelerate(candidate: Candidate, job: Job) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    accelerator = Accelerator(
        cpu=job.device.type == "cpu",
        mixed_precision="bf16" if candidate.precision == "bf16" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend=candidate.backend) if candidate.compiled else None,
    )
    model, optimizer = accelerator.prepare(job.model, job.workload.tuned(job.optimizer))

    def step(batch: Batch) -> Tensor:
        loss = job.workload.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    _loop(job, step)


def _by_trainer(candidate: Candidate, job: Job) -> None:
    """``trainer.train()`` itself, which waits before each of its steps; without clipping, as all others."""
    from tempfile import TemporaryDirectory

    from transformers import Trainer, TrainerCallback, TrainingArguments

    workload, turns = job.workload, job.turns

    class OneStep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(trainer.last)

    class Bench(Trainer):
        last: Tensor

        def get_train_dataloader(self) -> Any:
            return _Endless(job.batches)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.last = super().training_step(*args, **kwargs)
            return self.last

        def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
            if workload.forward is None:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return workload.forward(model, inputs)

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=10**9,
            torch_compile=candidate.compiled,
            torch_compile_backend=candidate.backend if candidate.compiled else None,
            bf16=candidate.precision == "bf16",
            use_cpu=job.device.type == "cpu",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Bench(
            job.model,
            arguments,
            callbacks=[OneStep()],
            optimizers=(workload.tuned(job.optimizer), None),
        )
        trainer.train()


class _Endless(torch.utils.data.IterableDataset[Batch]):
    """The batches again and again, as a Trainer's loader."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.dataset = batches, self

    def __iter__(self) -> Iterator[Batch]:
        return iter(cycle(self.batches))


def _by_autofuse(candidate: Candidate, job: Job) -> None:
    step = autofuse.optimize(
        job.model,
        job.optimizer,
        forward=job.workload.forward,
        precision=candidate.precision,
        compile="auto" if candidate.backend == "inductor" else False,
        steps=RUN,
    )

    def settled() -> bool:
        tuning = getattr(step.report, "tuning", None)
        return getattr(tuning, "state", "done") in ("done", "not measured")

    job.turns.settled = settled
    job.turns.report = lambda: step.report.to_dict()
    _loop(job, step)


TRAIN: Mapping[str, Callable[[Candidate, Job], None]] = {
    "eager": _by_hand,
    "hand-tuned": _by_hand,
    "accelerate": _by_accelerate,
    "trainer": _by_trainer,
    "autofuse": _by_autofuse,
}

_TRAINER = ("transformers", "accelerate")
CANDIDATES: Mapping[str, Candidate] = {
    row.name: row
    for row in (
        Candidate("eager", "eager", "eager"),
        Candidate("fused", "fused", "hand-tuned"),
        Candidate("fused-bf16", "fused, bf16", "hand-tuned", "bf16"),
        Candidate("compile", "fused, compile", "hand-tuned", compiled=True),
        Candidate("compile-bf16", "fused, compile, bf16", "hand-tuned", "bf16", compiled=True),
        Candidate("accelerate", "Accelerate, inductor, bf16", "accelerate", "bf16", True, ("accelerate",)),
        Candidate("accelerate-fp32", "Accelerate, inductor", "accelerate", "fp32", True, ("accelerate",)),
        Candidate("trainer", "HF Trainer, torch_compile, bf16", "trainer", "bf16", True, _TRAINER),
        Candidate("autofuse", "autofuse", "autofuse", "auto"),
        Candidate("autofuse-fp32", "autofuse, fp32", "autofuse"),
    )
}


def named(text: str) -> list[Candidate]:
    """The candidates of a comma-separated list of names.

    >>> [candidate.title for candidate in named("eager,compile")]
    ['eager', 'fused, compile']
    >>> named("apex")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: there is no candidate 'apex': expected some of eager, fused, ...
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CANDIDATES:
            raise ValueError(f"there is no candidate {name!r}: expected some of {', '.join(CANDIDATES)}")
    return [CANDIDATES[name] for name in names]
