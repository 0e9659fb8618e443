"""The step's time, throughput and report in TensorBoard or Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autofuse.clock import Sample, StepClock
from autofuse.tables import arrow, measured_gain, share

if TYPE_CHECKING:
    from autofuse.report import Report
    from autofuse.step import TrainingStep

__all__ = ["LogHandle", "log_to"]

_SPEEDUP = "autofuse/speedup"


def log_to(step: TrainingStep, target: Any, *, every: int = 10) -> LogHandle:
    """Log ``autofuse/step_ms``, ``autofuse/tokens_per_second`` and ``autofuse/waited_ms``, each over the
    last ``every`` optimizer steps, and the report once after each change of it: each row's status, reason,
    milliseconds and gain, and ``autofuse/speedup``, how many times as fast the whole step is, once measured.

    A GPU is never waited for. Steps with something that happens once in them (a compilation) are
    left out.

    Args:
        target: a ``SummaryWriter`` (anything with ``add_scalar``), or a W&B run or the ``wandb`` module
            (anything with ``log``). W&B is given ``autofuse/step`` as its own horizontal axis, so that
            the run's step count stays the caller's; give ``run.log`` no ``step=`` of your own then.

    Returns:
        A handle: ``handle.remove()`` ends it.

    Raises:
        TypeError: ``target`` is neither.
        ValueError: ``every`` is below 1.

    >>> import torch, autofuse
    >>> class Writer:
    ...     def add_scalar(self, tag, value, global_step=None):
    ...         print(tag, global_step)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = autofuse.optimize(model, optimizer, loss_fn=torch.nn.functional.mse_loss)
    >>> handle = log_to(step, Writer(), every=2)
    >>> for _ in range(2):
    ...     _ = step(torch.ones(4, 2), torch.zeros(4, 1))
    autofuse/step_ms 2
    autofuse/waited_ms 2
    autofuse/tokens_per_second 2
    >>> handle.remove()
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: expected a number of optimizer steps, at least 1")
    return LogHandle(step, _sink(target), every)


class LogHandle:
    """Listens to the step's clock until it is removed."""

    def __init__(self, step: TrainingStep, sink: _TensorBoard | _Wandb, every: int) -> None:
        self._step, self._sink, self._every = step, sink, every
        self._clock: StepClock = step.clock
        self._samples: list[Sample] = []
        self._seen = 0
        self._reported: Any = None
        self._clock.listen(self._on_sample, exact=False)

    def remove(self) -> None:
        """Log no more."""
        self._clock.unlisten(self._on_sample)

    def _on_sample(self, sample: Sample) -> None:
        self._seen += 1
        if not sample.one_off:
            self._samples.append(sample)
        if self._seen % self._every:
            return
        report = self._step.report
        scalars = _means(self._samples)
        self._samples = []
        if scalars:
            self._sink.scalars(scalars, report.counters.steps)
        rows = [
            (row.name, row.status, row.reason, row.before_ms, row.after_ms, row.gain) for row in report.rows
        ]
        if (rows, report.tuning.speedup) != self._reported:
            self._reported = (rows, report.tuning.speedup)
            self._sink.report(report, report.counters.steps)


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    seconds, tokens = sum(s.seconds for s in samples), sum(s.tokens for s in samples)
    waits = [s.waited for s in samples if s.waited is not None]
    found = {"autofuse/step_ms": seconds / len(samples) * 1e3}
    if waits:
        found["autofuse/waited_ms"] = sum(waits) / len(waits) * 1e3
    if tokens and seconds:
        found["autofuse/tokens_per_second"] = tokens / seconds
    return found


def _sink(target: Any) -> _TensorBoard | _Wandb:
    if callable(getattr(target, "add_scalar", None)):
        return _TensorBoard(target)
    if callable(getattr(target, "log", None)) and not isinstance(target, logging.Logger):
        return _Wandb(target)
    raise TypeError(
        "log_to expects a torch.utils.tensorboard.SummaryWriter (add_scalar), a W&B run or the wandb module "
        f"(log), not {type(target).__name__}: install autofuse[tensorboard] or autofuse[wandb], and pass "
        "SummaryWriter() or wandb.init()"
    )


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def report(self, report: Report, step: int) -> None:
        speedup = report.tuning.speedup
        if speedup is not None:
            self._writer.add_scalar(_SPEEDUP, speedup, step)
        if not callable(getattr(self._writer, "add_text", None)):
            return
        lines = [
            "| patch | status | ms per step | saves (95%) | what and why |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in report.rows:
            ms, saves = arrow(row.before_ms, row.after_ms), share(measured_gain(row), row.interval)
            cells = (row.name, row.status, ms, saves, row.reason.replace("|", "&#124;"))
            lines.append(f"| {' | '.join(cells)} |")
        if speedup is not None:
            lines += ["", f"{speedup:.2f} times as fast as the loop was."]
        self._writer.add_text("autofuse/report", "\n".join(lines), step)


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run
        define_metric = getattr(run, "define_metric", None)
        if callable(define_metric):
            define_metric("autofuse/step")
            define_metric("autofuse/*", step_metric="autofuse/step")

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "autofuse/step": step})

    def report(self, report: Report, step: int) -> None:
        found: dict[str, Any] = {}
        for row in report.rows:
            name = f"autofuse/{row.name}"
            found[name] = f"{row.status}: {row.reason}"
            figures = {"before_ms": row.before_ms, "after_ms": row.after_ms, "gain": measured_gain(row)}
            found |= {f"{name}/{key}": value for key, value in figures.items() if value is not None}
        if report.tuning.speedup is not None:
            found[_SPEEDUP] = report.tuning.speedup
        summary = getattr(self._run, "summary", None)
        if callable(getattr(summary, "update", None)):
            summary.update(found)  # type: ignore[union-attr]
        else:
            self._run.log({**found, "autofuse/step": step})
