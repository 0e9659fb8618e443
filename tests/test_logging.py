"""step.log_to: TensorBoard, read back from its event file, and Weights & Biases, by a double."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofuse
from autofuse.clock import Sample

NAMES = {"autofuse/step_ms", "autofuse/tokens_per_second", "autofuse/waited_ms"}


def make_step() -> Any:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return autofuse.optimize(
        model, optimizer, loss_fn=F.mse_loss, precision="fp32", compile=False, measure=False
    )


def train(step: Any, count: int) -> None:
    for _ in range(count):
        step(torch.ones(4, 8), torch.ones(4, 1))


class Run:
    """Takes what `wandb.sdk.wandb_run.Run` takes, by its signatures."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: dict[str, str | None] = {}
        self.summary: dict[str, Any] = {}

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "the run's own step count is the caller's"
        self.logged.append(data)

    def define_metric(self, name: str, step_metric: str | None = None, **options: Any) -> None:
        self.metrics[name] = step_metric


def scalar_writer() -> Any:
    class Writer:
        """Anything with add_scalar."""

        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            self.scalars.append((tag, value, global_step))

    return Writer()


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    step = make_step()
    with SummaryWriter(tmp_path) as writer:
        handle = step.log_to(writer, every=3)
        train(step, 7)
        handle.remove()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == NAMES
    for tag in NAMES:
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [3, 6]
        assert all(scalar.value > 0 for scalar in scalars)
    (report,) = events.Tensors("autofuse/report/text_summary")
    text = report.tensor_proto.string_val[0].decode()
    assert report.step == 3
    assert "| norms | kept |" in text and "| optimizer | kept |" in text


def test_wandb_is_given_its_own_axis_and_a_summary() -> None:
    step, run = make_step(), Run()
    step.log_to(run, every=2)
    train(step, 5)
    assert [row["autofuse/step"] for row in run.logged] == [2, 4]
    assert all(row.keys() == NAMES | {"autofuse/step"} for row in run.logged)
    assert run.metrics == {"autofuse/step": None, "autofuse/*": "autofuse/step"}
    assert run.summary["autofuse/norms"].startswith("kept: ")


def test_whatever_has_log_alone_gets_the_report_as_a_row() -> None:
    class Log:
        rows: list[dict[str, Any]] = []  # noqa: RUF012

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            self.rows.append(data)

    step, target = make_step(), Log()
    step.log_to(target, every=1)
    train(step, 3)
    reports = [row for row in target.rows if "autofuse/norms" in row]
    assert len(reports) == 1 and reports[0]["autofuse/step"] == 1


def test_the_figures_are_means_over_the_steps_between_two_rows() -> None:
    step, writer = make_step(), scalar_writer()
    step.log_to(writer, every=3)
    (listener,) = step.clock._rough
    listener(Sample(seconds=9.0, waited=None, tokens=1, shape=(), one_off=True))
    listener(Sample(seconds=0.1, waited=0.02, tokens=30, shape=()))
    listener(Sample(seconds=0.3, waited=0.04, tokens=50, shape=()))
    values = {tag: value for tag, value, _ in writer.scalars}
    assert values == pytest.approx(
        {"autofuse/step_ms": 200, "autofuse/waited_ms": 30, "autofuse/tokens_per_second": 200}
    )
    for _ in range(3):
        listener(Sample(seconds=9.0, waited=None, tokens=1, shape=(), one_off=True))
    assert len(writer.scalars) == 3  # nothing to say of them


def test_the_report_is_logged_again_after_a_change() -> None:
    step, run = make_step(), Run()
    step.log_to(run, every=1)
    train(step, 2)
    assert run.summary["autofuse/norms"].startswith("kept")
    run.summary.clear()
    train(step, 1)
    assert run.summary == {}
    step.undo()
    train(step, 1)
    assert run.summary["autofuse/norms"] == "rejected: undone"


def test_remove_ends_it() -> None:
    step, writer = make_step(), scalar_writer()
    train(step, 1)  # the first has the proof in it, and is no row
    handle = step.log_to(writer, every=1)
    train(step, 1)
    count = len(writer.scalars)
    assert count
    handle.remove()
    handle.remove()
    train(step, 2)
    assert len(writer.scalars) == count and not step.clock.listened


def test_two_targets_do_not_disturb_each_other() -> None:
    step, first, second = make_step(), scalar_writer(), scalar_writer()
    train(step, 1)
    one = step.log_to(first, every=1)
    step.log_to(second, every=1)
    train(step, 1)
    one.remove()
    train(step, 1)
    assert {at for _, _, at in first.scalars} == {2} and {at for _, _, at in second.scalars} == {2, 3}


def test_the_gpu_is_never_waited_for(monkeypatch: Any) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    step = make_step()
    step.clock._device = torch.device("cuda")
    step.log_to(Run(), every=1)
    train(step, 2)
    assert waits == []
    step.clock.listen(lambda sample: None)  # an exact listener does wait
    train(step, 1)
    assert waits


@pytest.mark.parametrize("target", [None, object(), "runs/1", logging.getLogger("x")])
def test_another_target_is_refused_with_what_is_expected(target: Any) -> None:
    step = make_step()
    with pytest.raises(TypeError, match=r"SummaryWriter \(add_scalar\).*W&B run") as error:
        step.log_to(target)
    assert type(target).__name__ in str(error.value)
    assert not step.clock.listened


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_every_must_be_a_number_of_steps(every: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_step().log_to(Run(), every=every)


class TextWriter:
    """A SummaryWriter's two methods that are used."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.texts: list[str] = []

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.scalars[tag] = value

    def add_text(self, tag: str, text: str, global_step: int) -> None:
        self.texts.append(text)


def test_the_report_has_what_was_measured() -> None:
    """The figures are put into a tuner's report by hand: how they are measured is not the log's."""
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    step = autofuse.optimize(model, optimizer, loss_fn=F.mse_loss, precision="fp32", compile=False)
    step.stop_tuning()
    run, writer = Run(), TextWriter()
    step.log_to(run, every=1)
    step.log_to(writer, every=1)
    train(step, 2)
    assert "autofuse/speedup" not in run.summary and "autofuse/speedup" not in writer.scalars
    assert "autofuse/norms/gain" not in run.summary
    row, tuning = step.plan["norms"], step._tuner.tuning  # a report is a snapshot
    row.before_ms, row.after_ms, row.gain, row.interval = 812.3, 609.2, 0.25, (0.2, 0.3)
    tuning.baseline_ms, tuning.final_ms = 812.3, 406.15
    train(step, 1)
    figures = {name: run.summary[f"autofuse/norms/{name}"] for name in ("before_ms", "after_ms", "gain")}
    assert figures == {"before_ms": 812.3, "after_ms": 609.2, "gain": 0.25}
    assert run.summary["autofuse/speedup"] == writer.scalars["autofuse/speedup"] == 2.0
    assert "| 812 → 609 | 25% (20 to 30) |" in writer.texts[-1]
    assert "2.00 times as fast as the loop was." in writer.texts[-1]
    assert len(writer.texts) == 2
    assert {line.count("|") for line in writer.texts[-1].splitlines() if line.startswith("|")} == {6}
