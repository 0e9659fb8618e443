"""What a profile says, and what it refuses: its advice follows the report's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import PAIR, Words, as_calls, in_pieces, mse_step, net, step_of, words_batches

import autofuse
from autofuse.advice import refused
from autofuse.costs import BETWEEN, COMPILED, OPTIMIZER, OTHERS, PRODUCTS, Cost
from autofuse.profile import Profile


def test_in_a_notebook_nothing_is_shown_twice(monkeypatch: Any) -> None:
    import rich.jupyter

    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *args: shown.append(args))
    step = mse_step(net())
    profile = Profile("cpu", "Net", steps=1, groups={OTHERS: 1.0}, operations=[Cost("gelu", group=OTHERS)])
    for thing in (profile, step.plan, step.report):
        assert str(thing) and "\x1b" not in str(thing)
        assert thing._repr_html_()
    assert "gelu" in str(profile) and "gelu" in profile._repr_html_() and "norms" in str(step.report)
    assert shown == []


# --- advice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", [True, False])
def test_an_optimizer_that_is_fused_is_not_to_be_fused(tuned: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = autofuse.optimize(
        model, optimizer, loss_fn=nn.functional.mse_loss, measure=False, only=["optimizer"] if tuned else []
    )
    with step.profile() as profile:
        [step(*PAIR) for _ in range(7)]
    profile.groups = {OPTIMIZER: 1.0}
    assert profile.fused_optimizer and "it is fused already" in str(profile)
    assert "gradient_accumulation_steps" in str(profile) and "is faster" not in str(profile)


def test_a_fused_one_that_was_rejected_is_not_advised() -> None:
    profile = Profile(steps=1, groups={OPTIMIZER: 1.0}, refused={"optimizer": "no clear gain"})
    assert "a fused one was rejected (no clear gain)" in str(profile)


@pytest.mark.parametrize("group", [OTHERS, BETWEEN])
def test_compile_is_advised_only_where_it_was_not_rejected(group: str) -> None:
    profile = Profile(steps=1, groups={group: 1.0})
    assert "compile=True" in str(profile)
    profile.refused = {"compile": "it is slower: 3%"}
    assert "compile=True" not in str(profile) and "was rejected (it is slower: 3%)" in str(profile)
    profile.applied = ["compile"]
    assert "compil" not in str(profile)


def test_the_rows_of_the_report_decide() -> None:
    step = mse_step(net(), measure=True, compile="auto")
    report = step.report
    report["compile"].status, report["compile"].reason = "rejected", "would not pay"
    report["norms"].status, report["norms"].reason = "rejected", "undone"
    report.tuning.notes.append("Tuning was stopped: enough.")
    report["optimizer"].status, report["optimizer"].reason = "rejected", "enough"
    assert refused(report)["compile"] == "would not pay"
    assert not {"norms", "optimizer"} & refused(report).keys()


# --- what it is taken in the midst of ------------------------------------------------------------


def test_a_profile_during_tuning_says_so() -> None:
    step = mse_step(net(), measure=True)
    with step.profile() as early:
        [step(*PAIR) for _ in range(3)]
    assert 'once step.report.tuning.state is "done"' in str(early)
    step.stop_tuning()
    with step.profile() as late:
        [step(*PAIR) for _ in range(3)]
    assert "tuner" not in str(late)


@pytest.mark.parametrize("seen", [2, 4, 7])
def test_ctrl_c_keeps_what_was_measured(seen: int, tmp_path: Path) -> None:
    step = mse_step(net())
    step(*PAIR)
    with pytest.raises(KeyboardInterrupt), step.profile(trace=tmp_path / "trace.json") as profile:
        for _ in range(seen):
            step(*PAIR)
        raise KeyboardInterrupt
    assert profile.steps and profile.step_s and "(KeyboardInterrupt)" in str(profile)
    assert not step.clock.listened and not torch.autograd._profiler_enabled()
    if seen > 3:
        assert profile.profiled and profile.groups and "The FLOPs were not counted" in str(profile)
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert profile.trace
    else:
        assert "trace.json was not written" in str(profile) and not (tmp_path / "trace.json").exists()


def test_what_fails_on_the_way_out_does_not_hide_the_error(monkeypatch: Any, tmp_path: Path) -> None:
    step = mse_step(net())
    monkeypatch.setattr("autofuse.costs.Recorder.export", lambda *args: 1 / 0)
    with pytest.raises(KeyboardInterrupt), step.profile(trace=tmp_path / "t.json") as profile:
        [step(*PAIR) for _ in range(5)]
        raise KeyboardInterrupt
    assert "ZeroDivisionError" in str(profile) and profile.groups


@pytest.mark.parametrize("loop", [as_calls, in_pieces])
def test_tokens_are_known_however_the_model_is_called(loop: Any) -> None:
    step = step_of(Words())
    with step.profile() as profile:
        loop(step, words_batches(4))
    assert profile.tokens_per_second and profile.step_s
    assert profile.tokens_per_second == pytest.approx(6 / profile.step_s, rel=0.9)


@pytest.mark.parametrize("steps", ["3", 4.0, True, 1])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(ValueError, match="whole number of at least 2"), mse_step(net()).profile(steps=steps):
        raise AssertionError("the block must not be entered")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"), mse_step(net()).profile(trace=tmp_path):
        raise AssertionError("the block must not be entered")


# --- a run that did not measure ------------------------------------------------------------------


def test_a_resumed_run_says_that_it_did_not_measure() -> None:
    first = mse_step(net())
    [first(*PAIR) for _ in range(2)]
    resumed = mse_step(net(), measure=True)
    resumed.load_state_dict(first.state_dict())
    [resumed(*PAIR) for _ in range(2)]
    report = resumed.report
    assert report.tuning.state == "not measured" and report["optimizer"].status == "kept"
    assert "How much faster it is was not measured." in report.lines()
    for ask in (lambda: report.savings(24), report.plot):
        with pytest.raises(RuntimeError, match="measure=True"):
            ask()


def test_what_was_stopped_untried_did_not_fail_to_help() -> None:
    step = mse_step(net(), measure=True, skip=["norms"])
    step.stop_tuning("enough")
    lines = " ".join(step.report.lines())
    assert "Tuning was stopped: enough." in lines and "Nothing helped" not in lines
    assert "Nothing was kept: the loop is as it was." in lines
    with pytest.raises(RuntimeError, match="Tuning was stopped: enough"):
        step.report.savings(24)


@pytest.mark.parametrize("group", [PRODUCTS, COMPILED])
@pytest.mark.parametrize(
    "known", [{"dtype": "bfloat16"}, {"refused": {"precision": "it is slower"}}, {"applied": ["precision"]}]
)
def test_lower_precision_is_advised_only_where_it_is_open(group: str, known: dict[str, Any]) -> None:
    assert "or lower precision" in str(Profile(steps=1, groups={group: 1.0}, dtype="float32"))
    assert "precision" not in str(Profile(steps=1, groups={group: 1.0}, **known))


def test_what_was_asked_for_is_no_rejection() -> None:
    report = step_of(Words(), precision="fp32", compile=False).report
    assert report["compile"].status == report["precision"].status == "rejected"
    assert not {"compile", "precision"} & refused(report).keys()
