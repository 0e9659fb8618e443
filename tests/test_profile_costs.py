"""step.profile: times, costs and words."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched import (
    PAIR,
    Words,
    as_calls,
    hand_count,
    mse_step,
    net,
    step_of,
    words_batches,
)

from autofuse.clock import Sample
from autofuse.costs import BETWEEN, COMMUNICATION, OPTIMIZER, OTHERS, PRODUCTS, Cost, _Attribution
from autofuse.profile import Profile

# --- time ----------------------------------------------------------------------------------------


def test_a_slow_loader_is_detected_and_a_quick_one_is_not_blamed() -> None:
    step = mse_step(net())
    with step.profile() as slow:
        for _ in range(8):
            time.sleep(0.05)
            step(*PAIR)
    assert slow.waited_s >= 0.05 and slow.waited_s > slow.step_s
    assert "the loop waits" in str(slow) and "num_workers" in str(slow)

    def loss_that_takes_its_time(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.05)
        return F.mse_loss(outputs, targets)

    step = step_of(net(), loss_fn=loss_that_takes_its_time)
    with step.profile() as quick:
        [step(*PAIR) for _ in range(8)]
    assert quick.step_s >= 0.05 > 10 * quick.waited_s
    assert "the loop waits" not in str(quick)
    assert quick.groups[BETWEEN] > 0.5  # a sleep is no operation
    assert "between operations" in str(quick)


def test_the_times_are_those_of_the_steps_that_count() -> None:
    step = mse_step(net())
    with step.profile() as profile:
        (listener,) = step.clock._exact
        seconds = [9.0, 0.1, 0.5, 5.0, 5.0, 5.0, 9.0, 0.3]  # first; 2 timed; 3 profiled; after them; timed
        for second in seconds:
            listener(Sample(second, waited=0.02 * second, tokens=30, shape=()))
        listener(Sample(9.0, waited=9.0, tokens=1, shape=(), one_off=True))
    assert (profile.steps, profile.profiled) == (3, 3)
    assert profile.step_s == 0.3 and profile.waited_s == pytest.approx(0.006)
    assert profile.tokens_per_second == pytest.approx(90 / 0.9)


def test_a_number_of_steps_is_kept_to() -> None:
    step = mse_step(net())
    with step.profile(steps=6) as profile:
        [step(*PAIR) for _ in range(6)]
        assert "start" not in vars(step.clock)
        [step(*PAIR) for _ in range(4)]
    assert (profile.steps, profile.profiled) == (3, 2)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_loop_that_is_too_short_says_what_was_not_measured(length: int) -> None:
    step = mse_step(net())
    with step.profile(trace=None) as profile:
        [step(*PAIR) for _ in range(length)]
    text = str(profile)
    assert f"ended after {length} optimizer steps" in text
    assert ("No step was timed" in text) == (length < 2)
    assert profile.flops is None and profile.groups == {}


# --- costs ---------------------------------------------------------------------------------------


def test_costs_belong_to_the_module_and_its_backward_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(8, 512)
            self.large = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(self.small(x)).mean(1, keepdim=True)

    step = mse_step(Two())
    inputs, targets = torch.randn(256, 8), torch.zeros(256, 1)
    with step.profile() as profile:
        [step(inputs, targets) for _ in range(8)]
    costs = {cost.name: cost for cost in profile.modules}
    large, small = costs["large"], costs["small"]
    assert large.calls == small.calls == 1
    assert 0 < large.backward_ms < large.ms
    assert large.ms > small.ms
    assert costs[OPTIMIZER].ms > 0
    assert sum(profile.groups.values()) == pytest.approx(1, abs=1e-6)
    operations = {cost.name: cost for cost in profile.operations}
    assert operations["aten::addmm"].calls == 2 and operations["aten::addmm"].backward_ms == 0
    assert operations["aten::mm"].calls == 3  # 2 weights' gradients and 1 input's
    assert operations["aten::mm"].backward_ms == pytest.approx(operations["aten::mm"].ms)


def test_repeated_blocks_share_a_row() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 1))
    step = mse_step(model)
    with step.profile() as profile:
        [step(*PAIR) for _ in range(5)]
    assert {cost.name: cost.calls for cost in profile.modules}["*.*"] == 6


def test_what_runs_between_two_steps_is_not_counted() -> None:
    step = mse_step(net())
    with step.profile() as profile:
        for _ in range(6):
            step(*PAIR)
            torch.linalg.cholesky(torch.eye(8))
            with torch.no_grad():
                step.model(PAIR[0])
    assert not [cost for cost in profile.operations if "cholesky" in cost.name]
    assert {cost.name: cost.calls for cost in profile.operations}["aten::addmm"] == 2


def device_event(name: str, start: float, end: float, parent: Any = None, **values: Any) -> Any:
    """A profiler's event of the CPU's thread; ``kernels`` in microseconds."""
    values = {"seq": -1, "forward": 0, "thread": 1, "kernels": (), "range": False} | values
    event = SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        cpu_parent=parent,
        cpu_children=[],
        sequence_nr=values["seq"],
        fwd_thread=values["forward"],
        thread=values["thread"],
        kernels=[SimpleNamespace(duration=us) for us in values["kernels"]],
        is_user_annotation=values["range"],
    )
    if parent is not None:
        parent.cpu_children.append(event)
    return event


def test_on_a_gpu_the_kernels_count_and_the_backwards_thread_finds_its_module() -> None:
    step = device_event("autofuse.step", 0, 100, range=True, kernels=[90])
    module = device_event("autofuse.module:head", 1, 20, step, range=True, kernels=[30])
    linear = device_event("aten::linear", 2, 10, module, seq=5)
    addmm = device_event("aten::addmm", 3, 9, linear, seq=5, kernels=[30])
    node = device_event("autograd::engine::evaluate_function: B", 40, 60, seq=5, forward=1, thread=2)
    mm = device_event("aten::mm", 41, 59, node, thread=2, kernels=[15, 5])
    optimizer = device_event("Optimizer.step#AdamW.step", 70, 90, step, range=True, kernels=[10])
    adam = device_event("aten::_fused_adamw_", 71, 89, optimizer, kernels=[10])
    later = device_event("aten::mm", 200, 210, kernels=[500])
    events = [step, module, linear, addmm, node, mm, optimizer, adam, later]
    costs = _Attribution(events, on_device=True).costs(1)
    head, adamw = costs.modules
    assert (head.name, head.ms, head.backward_ms, head.share) == ("head", 0.05, 0.02, 0.5)
    assert (adamw.name, adamw.ms) == (OPTIMIZER, 0.01)
    shares = {name: round(share, 9) for name, share in costs.groups.items() if share}
    assert shares == {PRODUCTS: 0.5, OPTIMIZER: 0.1, BETWEEN: 0.4}


def test_what_processes_exchange_counts_with_its_copies() -> None:
    step = device_event("autofuse.step", 0, 100, range=True)
    gather = device_event("FSDP::all_gather (layers.0)", 1, 20, step, range=True)
    device_event("aten::copy_", 2, 10, gather, kernels=[10])
    device_event("c10d::allreduce_", 21, 30, step, kernels=[20])
    device_event("nccl:all_reduce", 31, 40, step, kernels=[5])
    optimizer = device_event("Optimizer.step#AdamW.step", 50, 60, step, range=True)
    device_event("_c10d_functional::all_reduce", 51, 59, optimizer, kernels=[15])
    costs = _Attribution([step], on_device=True).costs(1)
    shares = {name: round(share, 9) for name, share in costs.groups.items() if share}
    assert shares == {COMMUNICATION: 0.35, OPTIMIZER: 0.15, BETWEEN: 0.5}
    assert "between the processes" in str(Profile(steps=1, groups={COMMUNICATION: 1.0}))


def test_a_trace_of_the_profiled_steps(tmp_path: Path) -> None:
    step = mse_step(net())
    with step.profile(trace=tmp_path / "trace.json") as profile:
        [step(*PAIR) for _ in range(6)]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("autofuse.step") == 3 and names.count("autofuse.module:2") == 3
    assert profile.trace == str(tmp_path / "trace.json")


def test_another_profiler_is_left_alone() -> None:
    step = mse_step(net())
    with torch.profiler.profile(), step.profile() as profile:
        [step(*PAIR) for _ in range(7)]
    assert "another profiler is running" in str(profile)
    assert profile.steps == 6 and profile.groups == {}


# --- in words ------------------------------------------------------------------------------------


def profile_with(**shares: float) -> Profile:
    names = {"products": PRODUCTS, "optimizer": OPTIMIZER, "others": OTHERS, "between": BETWEEN}
    return Profile(
        "a CPU",
        "Net",
        steps=5,
        step_s=0.1,
        waited_s=0.0,
        flops=5 * 10**9,
        rate=100.0,
        dtype="float32",
        groups={names[name]: share for name, share in shares.items()},
        profiled_ms=100.0,
        operations=[Cost("aten::gelu", 1, 10, 0, 0.1, OTHERS)],
    )


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"products": 0.6, "others": 0.4}, "60% of the step is matrix products: at 83% of the measured rate"),
        ({"products": 0.9, "others": 0.1}, "would use the machine better"),
        ({"products": 0.5, "optimizer": 0.3}, "The optimizer is 30%: a fused one"),
        ({"products": 0.3, "others": 0.7}, "above all aten::gelu; compile=True"),
        ({"products": 0.2, "between": 0.8}, "80% of the step is between operations: Python"),
        ({"optimizer": 0.6, "others": 0.4}, "60% of the step is the optimizer: a fused one"),
    ],
)
def test_what_dominates_is_said_in_a_sentence(shares: dict[str, float], says: str) -> None:
    assert says in " ".join(profile_with(**shares).lines())


def test_waiting_is_said_with_its_size() -> None:
    profile = profile_with(products=1.0)
    profile.waited_s = 0.14
    assert "waits 140 ms, 1.4 times the step's own time" in " ".join(profile.lines())
    profile.waited_s = 0.02
    assert "waits 20 ms, 20% of the step's own time" in " ".join(profile.lines())


def test_text_html_and_json(tmp_path: Path) -> None:
    step = step_of(Words())
    with step.profile() as profile:
        assert "Nothing is measured yet." in str(profile)
        as_calls(step, words_batches(6))
    text, html, data = str(profile), profile._repr_html_(), json.loads(profile.to_json())
    assert "A step takes" in text and "head" in text and "FLOP a step" in text
    assert html.count("<pre") == 3 and "A step takes" in html
    assert data["flops"] == hand_count() and data["floor_s"] == profile.floor_s
    assert data["modules"][0]["name"] == profile.modules[0].name
