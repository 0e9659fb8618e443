"""Patches in company: proved together, there from the first step on, judged by what they do there."""

import random

import pytest
from doubles import Entry, forward_patcher, register
from torch import nn
from tuned import batch, net, plain, takes, tune

import autofuse


@pytest.mark.parametrize("wrong, runs", [(False, 2), (True, 5)])
def test_what_passes_together_takes_one_run_to_prove(monkeypatch, time, wrong, runs):
    """Without and with all; where that fails, once more without, to see whether a step repeats, and each."""
    factor = 1.1 if wrong else 1.0
    other = forward_patcher("1", lambda forward: lambda x: forward(x) * factor)
    register(monkeypatch, good=takes("0", 0.4), other=other)
    model, calls = net(time), []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    options = {"loss_fn": nn.functional.mse_loss, "only": ["good", "other"], "precision": "fp32"}
    step = autofuse.optimize(model, measure=False, **options)
    step(*batch())
    assert len(calls) == runs + 1
    assert step.report["good"].status == "kept" and step.report["good"].error == 0.0
    assert (step.report["other"].status == "kept") is not wrong
    assert ("changes the result" in step.report["other"].reason) is wrong


def test_the_first_steps_do_not_count_while_they_get_faster(monkeypatch, time):
    register(monkeypatch, one=takes("0", 0.5), two=takes("1", 0.5))
    model, seen = net(time), []
    warm = iter([2.0, 1.0, 0.5])
    model[2].register_forward_hook(lambda *_: time.passes(next(warm, 0.0) if seen else 0.0))
    options = {"loss_fn": nn.functional.mse_loss, "only": ["one", "two"], "precision": "fp32"}
    step = autofuse.optimize(model, **options)
    for number in range(60):
        step(*batch(number))
        seen.append(model[0].seconds == model[1].seconds == 0.5)
    assert not step.tuning and seen[:6] == [True] * 6
    assert step.report.tuning.final_ms == pytest.approx(1000)


def test_what_outlasts_its_undo_is_not_left_out_alone(monkeypatch, time):
    register(monkeypatch, lasts=takes("0", 0.5, lasting=True), much=takes("1", 0.2))
    model, seen = net(time), []
    model[2].register_forward_hook(lambda *_: seen.append((model[0].seconds, model[1].seconds)))
    step, _ = tune(model, names=["lasts", "much"])
    assert (1.0, 0.2) not in seen and (0.5, 1.0) in seen
    row = step.report["lasts"]
    assert row.status == "kept" and row.gain is None and "outlasts being undone" in row.reason


def test_a_form_that_saves_little_has_no_dearer_one(monkeypatch, time):
    def find(context):
        def upgrade(seconds):
            raise AssertionError("it was asked for")

        return takes("0", 0.94, upgrade=upgrade, encloses=True)(context)

    register(monkeypatch, dear=Entry(find, order=90))
    model = net(time)
    step, _ = tune(model, names=["dear"])
    assert step.report["dear"].status == "kept" and model[0].seconds == 0.94
    assert "saves less than 5%" in step.report["dear"].reason


@pytest.mark.parametrize("seconds, kept", [(0.9, True), (1.2, False)])
def test_in_company_that_helps_what_probably_helps_stays(monkeypatch, time, seconds, kept):
    """Together they are far faster; what one of them does is lost in the noise of the machine."""
    register(monkeypatch, much=takes("0", 0.1), little=takes("1", seconds))
    noise, model = random.Random(0), net(time)
    model[1].register_forward_hook(lambda *_: time.passes(noise.uniform(0.0, 0.6)))
    step, _ = tune(model, names=["much", "little"], steps=400)
    little = step.report["little"]
    assert not step.tuning and step.report["much"].status == "kept"
    assert (little.status == "kept") is kept and ("probably" in little.reason) is kept, step.report


@pytest.mark.parametrize("seconds, kept", [(0.8, True), (0.95, False)])
def test_a_change_of_precision_is_judged_in_company(monkeypatch, time, seconds, kept):
    """Alone it saves less than it must; of what the others leave of a step it saves more."""
    narrow = takes("0", seconds, exact=False, worth=0.13)
    register(monkeypatch, narrow=narrow, much=takes("1", 0.2))
    model = net(time)
    step, losses = tune(model, names=["narrow", "much"])
    row = step.report["narrow"]
    assert (row.status == "kept") is kept and row.before_ms == pytest.approx(1200), step.report
    assert step.report["much"].status == "kept" and model[1].seconds == 0.2
    assert losses == plain(net(time), len(losses))


def test_what_is_stopped_in_company_says_what_all_together_saved(monkeypatch, time):
    register(monkeypatch, one=takes("0", 0.5), two=takes("1", 0.5))
    model = net(time)
    options = {"loss_fn": nn.functional.mse_loss, "only": ["one", "two"], "precision": "fp32"}
    step = autofuse.optimize(model, **options)
    number = 0
    while step.report.tuning.baseline_ms is None:
        step(*batch(number))
        number += 1
    step.stop_tuning("enough")
    assert [step.report[name].status for name in ("one", "two")] == ["kept"] * 2
    tuning = step.report.tuning
    assert (tuning.baseline_ms, tuning.final_ms) == (pytest.approx(2000), pytest.approx(1000))
    assert "2.00 times as fast" in str(step.report) and "stopped: enough" in str(step.report)


def test_what_was_found_beside_a_patch_that_went_is_not_taken_for_the_whole(monkeypatch, time):
    """Each was left out while the other, which costs time, was still there."""
    register(monkeypatch, bad=takes("0", 1.3), good=takes("1", 0.4))
    step, _ = tune(net(time), names=["bad", "good"])
    assert [step.report[name].status for name in ("bad", "good")] == ["rejected", "kept"]
    tuning = step.report.tuning
    assert (tuning.baseline_ms, tuning.final_ms) == (pytest.approx(2000), pytest.approx(1400))


def test_what_is_there_for_the_proof_is_not_there_for_the_loop_as_it_was(monkeypatch, time):
    register(monkeypatch, lasts=takes("0", 0.5, lasting=True, in_forward=False))
    model, seen = net(time), []
    model[2].register_forward_hook(lambda *_: seen.append(model[0].seconds))
    step, _ = tune(model, names=["lasts"])
    tuning = step.report.tuning
    assert step.report["lasts"].status == "kept" and 1.0 in seen
    assert (tuning.baseline_ms, tuning.final_ms) == (pytest.approx(2000), pytest.approx(1500))
