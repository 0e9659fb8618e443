"""The state and the plan of a step: saved, loaded, repeated."""

import pickle

import pytest
import torch
from cases import (
    CASES,
    PLAIN,
    adamw,
    arguments,
    close,
    fast_loop,
    optimize,
)

import autofuse


def test_state_dict_round_trip():
    case = CASES["gpt2"]
    through, first, second = (case.model() for _ in range(3))
    expected = fast_loop(case, optimize(case, through, adamw(through), measure=False), 5)
    optimizer = adamw(first)
    step = optimize(case, first, optimizer, measure=False)
    losses = fast_loop(case, step, 3)
    saved = pickle.dumps([first.state_dict(), optimizer.state_dict(), step.state_dict()])
    weights, state, own = pickle.loads(saved)
    second.load_state_dict(weights)
    optimizer = adamw(second)
    optimizer.load_state_dict(state)
    step = optimize(case, second, optimizer, measure=False)
    step.load_state_dict(own)
    assert step.report.counters.steps == 3
    losses += [step(*arguments(case, number)).item() for number in (3, 4)]
    assert close(losses, expected)
    assert step.report["norms"].status == "kept" and step.report.counters.steps == 5


@pytest.mark.filterwarnings('ignore:precision="fp16"')
def test_state_dict_can_be_saved_with_weights_only(tmp_path):
    case = CASES["rms"]
    model = case.model()
    step = optimize(case, model, adamw(model), precision="fp16", measure=False)
    fast_loop(case, step, 2)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    state = torch.load(tmp_path / "step.pt", weights_only=True)
    other = case.model()
    resumed = optimize(case, other, adamw(other), precision="fp16", measure=False)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["scaler"] == step.state_dict()["scaler"]
    assert resumed.state_dict()["counters"] == step.state_dict()["counters"]


def test_a_rejection_is_remembered_across_a_restart():
    case = CASES["rms"]
    model = case.model()
    step = optimize(case, model, adamw(model), skip=["norms"], measure=False)
    fast_loop(case, step, 1)
    other = case.model()
    resumed = optimize(case, other, adamw(other), measure=False)
    resumed.load_state_dict(step.state_dict())
    assert resumed.report["norms"].status == "rejected"
    assert [type(m) for m in other.modules()] == [type(m) for m in case.model().modules()]


def test_a_saved_plan_makes_exactly_its_patches(tmp_path):
    case = CASES["bert-cls"]
    model = case.model()
    plan = autofuse.plan(model, adamw(model), skip=["optimizer"], **PLAIN)
    assert [type(m) for m in model.modules()] == [type(m) for m in case.model().modules()]
    plan.save(tmp_path / "plan.json")
    assert autofuse.Plan.load(tmp_path / "plan.json").to_dict() == plan.to_dict()
    step = optimize(case, model, adamw(model), plan=tmp_path / "plan.json")
    assert step.report["optimizer"].status == "skipped"
    assert [s.path for s in step.report["norms"].accepted] == [s.path for s in plan["norms"].accepted]


@pytest.mark.parametrize("only, skip", [(["norms"], ()), (None, ["norms"]), ("norms", ()), ([], ())])
def test_only_and_skip(only, skip):
    case = CASES["rms"]
    model = case.model()
    step = optimize(case, model, adamw(model), only=only, skip=skip, measure=False)
    step(*arguments(case))
    status = {row.name: row.status for row in step.report.rows}
    chosen = {"norms"} if only else set() if only == [] else {"optimizer"}
    assert {n for n in ("norms", "optimizer") if status[n] == "kept"} == chosen
    assert {n for n in ("norms", "optimizer") if status[n] == "skipped"} == {"norms", "optimizer"} - chosen


def test_the_report_says_what_happened():
    case = CASES["bert-cls"]
    model = case.model()
    step = optimize(case, model, adamw(model), measure=False)
    assert "Not yet proved" in str(step.report)
    fast_loop(case, step, 2)
    report = step.report
    assert "2 optimizer steps" in str(report) and "Not yet proved" not in str(report)
    assert report["norms"].error is not None and report["norms"].error < 1e-4
    assert pickle.loads(pickle.dumps(report.to_dict())) == report.to_dict()
    assert "<table" in report._repr_html_() and '"norms"' in report.to_json()
    assert {site.path for site in report["norms"].sites} >= {"bert.embeddings.LayerNorm"}


@pytest.mark.filterwarnings('ignore:precision="fp16"')
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_saved_plan_repeats_its_precision(tmp_path, precision):
    case = CASES["gpt2"]
    model = case.model()
    step = autofuse.optimize(model, adamw(model), precision=precision, compile=False, measure=False)
    step(*arguments(case))
    step.plan.save(tmp_path / "plan.json")
    again = case.model()
    step = autofuse.optimize(again, adamw(again), plan=tmp_path / "plan.json")
    step(*arguments(case))
    assert step.plan.precision == precision


@pytest.mark.filterwarnings('ignore:precision="fp16"')
def test_fp16_goes_on_from_a_state_with_the_right_scale():
    case = CASES["rms"]
    first, second = case.model(), case.model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second)]
    one = optimize(case, first, optimizers[0], precision="fp16", measure=False)
    one(*arguments(case, 0))
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    two = optimize(case, second, optimizers[1], precision="fp16", measure=False)
    two.load_state_dict(one.state_dict())
    one(*arguments(case, 1)), two(*arguments(case, 1))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)
