"""Compile's dearer forms, asked for and found again in a saved plan; storms of graphs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compile import Block, Counter, Net, assert_same_step, batch, context, found, step
from test_compile import graphs as graphs  # the fixture
from torch import Tensor, nn

import autofuse
import patchers.compile as compiler
from autofuse import compiled
from autofuse.patch import Patch, Rejected
from autofuse.plan import Plan


class Model(nn.Module):
    """Blocks in a body in a model: three forms."""

    def __init__(self, body: type[nn.Module] = Net) -> None:
        super().__init__()
        self.before, self.body = nn.Linear(4, 4), body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.before(x))


def forms(patch: Patch) -> list[list[str]]:
    """The accepted paths of a patch and of every upgrade of it, whatever they cost."""
    paths = [[site.path for site in patch.accepted]]
    upgraded = None if patch.upgrade is None else patch.upgrade(math.inf)
    return paths + (forms(upgraded) if isinstance(upgraded, Patch) else [])


# --- the dearer forms ----------------------------------------------------------------------------


def test_every_form_is_larger_than_the_one_before() -> None:
    blocks = [f"body.blocks.{i}" for i in range(4)]
    assert forms(found(Model())) == [blocks, ["body"], [""]]
    assert forms(found(Net())) == [
        [path.removeprefix("body.") for path in blocks],
        [""],
    ]  # its body is itself
    assert forms(found(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))) == [[""]]


def test_an_upgrade_gives_the_same_step(graphs: Counter) -> None:
    model = Model()
    reference = copy.deepcopy(model)
    patch: Any = found(model)
    patch.apply()
    assert_same_step(model, reference, batch())
    for number in (2, 3):
        upgraded = patch.upgrade(math.inf)  # asked for while the cheaper form is applied
        patch.undo()
        upgraded.apply()
        assert_same_step(model, reference, batch())
        assert graphs.graphs == number and not upgraded.pays
        patch = upgraded
    assert patch.upgrade is None
    patch.undo()
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_an_upgrade_must_pay_by_what_it_saves_beyond_the_form_before() -> None:
    patch = compiler.find(context(Model(), "auto", steps=10_000))
    assert isinstance(patch, Patch) and patch.upgrade is not None
    cost, share = compiler._COLD_SECONDS["body"], compiler._FURTHER_SAVING["body"]
    enough = cost / share / 10_000
    assert isinstance(patch.upgrade(enough * 1.01), Patch)
    verdict = patch.upgrade(enough * 0.99)
    assert isinstance(verdict, Rejected)
    for part in ("body would not pay", f"about {cost:.0f} s", f"{share:.0%} of 10,000 steps"):
        assert part in verdict.reason
    assumed: Any = compiler.find(context(Model(), "auto"))
    assert "an assumed number" in assumed.upgrade(1e-3).reason


def test_an_upgrade_with_a_hook_inside_is_refused() -> None:
    model = Model()
    patch: Any = found(model)
    model.body.head.register_forward_hook(lambda *_: None)  # outside the blocks, inside the body
    verdict = patch.upgrade(math.inf)
    assert isinstance(verdict, Rejected) and "forward hook on 'head'" in verdict.reason


@pytest.mark.parametrize("upgrades", [0, 1, 2])
def test_a_saved_plan_finds_its_form_again(upgrades: int, tmp_path: Path) -> None:
    model = Model()
    plan = autofuse.plan(model, compile=True, precision="fp32")
    patch: Any = plan.patches["compile"]
    for _ in range(upgrades):
        patch = patch.upgrade(math.inf)
    plan["compile"].sites = patch.sites
    plan.save(tmp_path / "plan.json")
    step = autofuse.optimize(copy.deepcopy(model), plan=tmp_path / "plan.json")
    again = step.plan["compile"]
    assert again.status == "planned" and again.accepted == patch.accepted
    form = step.plan.patches["compile"]
    assert form.name == "compile" and form.pays is form.upgrade is None and form.applied
    assert Plan.load(tmp_path / "plan.json")["compile"].accepted == patch.accepted


# --- storms --------------------------------------------------------------------------------------


class Remembering(Block):
    """Takes six memories, each of a length of its own."""

    def forward(self, x: Tensor, *, memory: Any = ()) -> Tensor:
        return super().forward(x) + sum(each.mean() for each in memory)


class Feeding(Net):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(2, Remembering, **kwargs)

    def forward(self, x: Tensor, *memory: Tensor) -> Tensor:
        x = self.inp(x).relu()
        for block in self.blocks:
            x = block(x, memory=memory)
        return self.head(x).square().mean()


def test_a_storm_of_shapes_ends_with_dynamic_shapes(graphs: Counter) -> None:
    net = Feeding()
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    lengths = [3] * 6
    for number in range(12):  # one memory after the other begins to vary: a graph for each
        lengths[number % 6] += 2
        assert_same_step(net, reference, batch(), *(torch.randn(length) for length in lengths))
    assert len(patch.accepted) == 2
    assert patch.reason.endswith(f"blocks.0 …: dynamic shapes after {compiled.RECOMPILE_LIMIT} graphs")
    assert compiled.RECOMPILE_LIMIT < graphs.graphs <= compiled.RECOMPILE_LIMIT + 2


def test_a_storm_that_dynamic_shapes_cannot_end_is_left_to_eager(
    graphs: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    class Storm(Block):
        mood = ""

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(x) * len(self.mood)

    net = Net(2, Storm)
    reference = copy.deepcopy(net)
    patch, filters = found(net), list(compiled.OwnStorms.logger.filters)
    patch.apply()
    for mood in range(12):
        for each in (*net.blocks, *reference.blocks):
            each.mood = "x" * mood
        assert_same_step(net, reference, batch())
    assert not patch.accepted
    assert patch.reason == "more than 4 graphs, for inputs of the same shapes"
    assert graphs.graphs == compiled.RECOMPILE_LIMIT
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]
    patch.undo()
    assert compiled.OwnStorms.logger.filters == filters


def test_a_storm_of_shapes_and_of_something_else(graphs: Counter) -> None:
    class Storm(Remembering):
        mood = ""

        def forward(self, x: Tensor, *, memory: Any = ()) -> Tensor:
            return super().forward(x, memory=memory) * len(self.mood)

    net = Feeding()
    net.blocks = nn.ModuleList(Storm() for _ in range(2))
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    for mood in range(1, 16):
        for each in (*net.blocks, *reference.blocks):
            each.mood = "x" * mood
        assert_same_step(net, reference, batch(), torch.randn(mood + 2))
    assert not patch.accepted
    assert patch.reason == "more than 4 graphs, and as many again with dynamic shapes"


def test_a_float_that_changes_each_step_is_no_storm_or_ends_in_eager(graphs: Counter) -> None:
    class Annealed(Block):
        temperature = 1.0

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(x) * self.temperature

    net = Net(2, Annealed)
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    for number in range(12):
        for each in (*net.blocks, *reference.blocks):
            each.temperature = 0.9**number
        assert_same_step(net, reference, batch())
    print(graphs.graphs, patch.reason)


def test_the_storm_of_one_stack_leaves_the_other_alone(graphs: Counter) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calm, self.wild = Net(2), Feeding()

        def forward(self, x: Tensor, *memory: Tensor) -> Tensor:
            return self.calm(x) + self.wild(x, *memory)

    net = Two()
    patch = found(net)
    patch.apply()
    for number in range(compiled.RECOMPILE_LIMIT + 1):
        step(net, batch(), *(torch.randn(3 + 2 * (i < number)) for i in range(6)))
    assert patch.reason.count("dynamic shapes") == 1 and "wild.blocks.0" in patch.reason
    assert graphs.graphs == 1 + compiled.RECOMPILE_LIMIT + 1 and len(patch.accepted) == 4
