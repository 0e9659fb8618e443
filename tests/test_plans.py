"""The plan for every architecture, as readable snapshots: ``AUTOFUSE_SNAPSHOTS=write`` writes them anew."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import autofuse
from autofuse.registry import patcher_names

SNAPSHOTS = Path(__file__).parent / "snapshots"
MACHINES = ["P100", "V100", "T4", "A100", "L4", "H100", "B200", "cpu-avx2", "cpu-avx512-bf16", "cpu-amx"]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.mlp(self.mlp_norm(self.attention_norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "118")  # a plan is as wide as the terminal


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters())


def snapshot(name, text):
    path = SNAPSHOTS / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("AUTOFUSE_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs: AUTOFUSE_SNAPSHOTS=write writes it anew"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_plan_for_another_machine(machine):
    plan = autofuse.plan(*make(), hardware=autofuse.Hardware.named(machine))
    snapshot(machine, str(plan))


def test_apex_and_liger_are_planned_where_they_are_usable():
    hardware = autofuse.Hardware.named("A100", providers={"apex": None, "liger": None})
    plan = autofuse.plan(*make(), hardware=hardware)
    assert {site.provider for site in plan["norms"].accepted} == {"apex", "liger"}
    snapshot("A100-with-apex-and-liger", str(plan))


def test_the_plan_for_this_cpu():
    plan = autofuse.plan(*make())
    assert plan.hardware == autofuse.Hardware.detect("cpu").name
    assert plan["tf32"].status == "rejected"
    assert plan["norms"].status == plan["optimizer"].status == "planned"
    measured = re.findall(r"[\d,.]+ GFLOP/s", str(plan))
    assert measured or "bf16" in plan["precision"].reason, plan["precision"].reason


def test_a_plan_changes_nothing_and_says_everything():
    model, optimizer = make()
    before = [(type(m), dict(vars(m))) for m in model.modules()], str(optimizer.state_dict())
    rng = torch.get_rng_state()
    plan = autofuse.plan(model, optimizer, hardware=autofuse.Hardware.named("H100"))
    assert before == ([(type(m), dict(vars(m))) for m in model.modules()], str(optimizer.state_dict()))
    assert torch.equal(rng, torch.get_rng_state())
    assert {row.name for row in plan.rows} == set(patcher_names())
    assert all(row.reason for row in plan.rows)


def test_save_load_and_repeat(tmp_path):
    model, optimizer = make()
    plan = autofuse.plan(model, optimizer, skip=["compile"])
    plan["norms"].sites[0] = plan["norms"].sites[0].rejected("by hand")
    plan.save(tmp_path / "plan.json")
    loaded = autofuse.Plan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == {**plan.to_dict(), "torch": torch.__version__}
    step = autofuse.optimize(model, optimizer, plan=tmp_path / "plan.json", loss_fn=nn.functional.mse_loss)
    assert type(model.blocks[0].attention_norm) is nn.LayerNorm
    assert type(model.blocks[1].attention_norm) is not nn.LayerNorm
    assert step.plan["compile"].reason == "not in the plan that was given"
    with pytest.raises(ValueError, match="not a saved plan"):
        (tmp_path / "no.json").write_text("{}")
        autofuse.Plan.load(tmp_path / "no.json")


def test_rows_and_sites_are_json():
    plan = autofuse.plan(*make())
    for row in plan.rows:
        assert json.loads(row.to_json())["name"] == row.name
    for site in plan["norms"].sites:
        assert set(site.to_dict()) == {"path", "cls", "operation", "provider", "reason"}


def test_html():
    assert "<table" in autofuse.plan(*make())._repr_html_()


def test_no_patcher_is_said(monkeypatch):
    monkeypatch.setattr("autofuse.registry._entries", dict)
    assert "no patcher was found" in str(autofuse.plan(*make()))


def test_a_bare_checkout_finds_its_own_patchers(monkeypatch):
    monkeypatch.setattr("autofuse.registry.entry_points", lambda group: ())
    assert {"norms", "optimizer", "compile"} <= set(patcher_names())


def test_a_broken_patcher_is_a_rejection(monkeypatch):
    from importlib.metadata import EntryPoint

    entries = {"broken": EntryPoint("broken", "no_such_module", "autofuse.patchers")}
    monkeypatch.setattr("autofuse.registry._entries", lambda: entries)
    row = autofuse.plan(*make())["broken"]
    assert row.status == "rejected" and "no_such_module" in row.reason


def test_what_is_no_plan_is_refused_with_what_it_is(tmp_path):
    plan, path = autofuse.plan(*make()), tmp_path / "plan.json"

    def refusal(data):
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        with pytest.raises(ValueError) as error:
            autofuse.Plan.load(path)
        assert str(path) in str(error.value)
        return str(error.value)

    data = plan.to_dict()
    assert "not a saved plan (KeyError: 'hardware')" in refusal({"rows": []})
    assert "report's JSON" in refusal(autofuse.optimize(*make(), measure=False).report.to_json())
    assert "version 2" in refusal({**data, "version": 2}) and "version None" in refusal(
        {key: value for key, value in data.items() if key != "version"}
    )
    for other in ("[1]", "3", "no json", '{"rows": [3]}', '{"rows": [{"name": "norms", "colour": 1}]}'):
        assert "not a saved plan" in refusal(other)


def test_a_plan_for_another_model_says_what_was_not_found():
    model, optimizer = make()
    saved = autofuse.plan(model, optimizer, skip=["compile", "precision", "memory"])
    assert autofuse.optimize(model, optimizer, plan=saved).plan.note == ""

    class Smaller(Net):
        def __init__(self):
            super().__init__()
            self.blocks = self.blocks[:2]

    other = Smaller()
    step = autofuse.optimize(other, torch.optim.AdamW(other.parameters()), plan=saved)
    assert "was made for Net, and this model is Smaller." in step.plan.note
    assert re.search(r"2 of the \d+ sites .* blocks.2.attention_norm \(norms\)", step.plan.note)
    assert step.plan.note in str(step.report).replace("\n", " ")
    without = autofuse.optimize(Smaller(), None, plan=saved, skip=["norms"])
    assert "blocks" not in without.plan.note and "(optimizer)" in without.plan.note


def test_a_row_that_is_not_there_is_named_with_its_neighbour():
    step = autofuse.optimize(*make(), measure=False)
    for rows in (step.plan, step.report):
        with pytest.raises(KeyError, match="no row 'nrms'; did you mean 'norms'"):
            rows["nrms"]
    with pytest.raises(KeyError, match="There are: none"):
        autofuse.Plan([], "cpu")["norms"]
