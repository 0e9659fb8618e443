"""step.profile changes nothing, and says what it cannot do."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import (
    PAIR,
    Words,
    as_calls,
    in_pieces,
    mse_step,
    net,
    step_of,
    words_batches,
)

from autofuse.clock import StepClock, _graphs

# --- it changes nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loop", [as_calls, in_pieces])
def test_losses_weights_and_generators_are_bit_equal(
    loop: Callable[..., list[Tensor]], accumulate: int
) -> None:
    def train(watched: bool) -> tuple[Any, ...]:
        torch.manual_seed(7)
        model = Words(dropout=0.3)
        step = step_of(model, accumulate=accumulate)
        batches = words_batches(9 * accumulate)
        if watched:
            with step.profile() as profile:
                losses = loop(step, batches)
            assert profile.profiled == 3 and profile.flops
        else:
            losses = loop(step, batches)
        return losses, list(model.parameters()), torch.get_rng_state(), step.report.to_dict()

    losses, weights, state, report = train(watched=False)
    watched_losses, watched_weights, watched_state, watched_report = train(watched=True)
    assert all(map(torch.equal, losses, watched_losses))
    assert all(map(torch.equal, weights, watched_weights))
    assert torch.equal(state, watched_state)
    assert report["counters"] == watched_report["counters"]
    assert [row["status"] for row in report["rows"]] == [row["status"] for row in watched_report["rows"]]


def test_buffers_are_those_of_an_unwatched_run() -> None:
    def train(watched: bool) -> nn.Module:
        torch.manual_seed(1)
        model = net(nn.BatchNorm1d(32))
        step = mse_step(model)
        if watched:
            with step.profile():
                [step(*PAIR) for _ in range(7)]
        else:
            [step(*PAIR) for _ in range(7)]
        return model

    plain, watched = train(False).state_dict(), train(True).state_dict()
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


@pytest.mark.parametrize("seen", [1, 4, 7])
def test_everything_is_put_back_when_the_loop_raises(seen: int) -> None:
    model = net()
    step = mse_step(model)
    step(*PAIR)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), step.profile() as profile:
        for index in itertools.count():
            if index == seen:
                raise ZeroDivisionError("the loop's own")
            step(*PAIR)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert not torch.autograd._profiler_enabled()
    assert not step.clock.listened and "start" not in vars(step.clock) and "stop" not in vars(step.clock)
    assert "ZeroDivisionError: the loop's own" in str(profile)
    with step.profile() as again:
        [step(*PAIR) for _ in range(7)]
    assert again.profiled == 3 and again.steps == 2


def test_an_error_inside_a_step_leaves_the_clock_right() -> None:
    step = mse_step(net())
    with pytest.raises(ValueError), step.profile():
        for _ in range(4):
            step(*PAIR)
        step(torch.ones(0, 8), torch.ones(0, 1))
    with step.profile() as profile:
        [step(*PAIR) for _ in range(7)]
    assert profile.steps == 2 and profile.flops


class Own(nn.Sequential):
    """Dynamo compiles no forward of torch.nn's own."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@pytest.mark.parametrize("make", [Own, nn.Sequential], ids=["whole", "in parts"])
def test_a_compiled_module_is_neither_disturbed_nor_compiled_again(make: Any) -> None:
    """Dynamo traces inside the watched steps too: here for a new shape, which the recording leaves out."""
    rows = (4, 4, 4, 4, 4, 3, 4, 3, 4, 4, 4, 3)

    def train(watched: bool) -> list[int]:
        torch._dynamo.reset()
        model = make(*net())
        model.compile(backend="eager", dynamic=False)
        compiled = model._compiled_call_impl
        step, graphs = mse_step(model, only=["optimizer"]), []
        with step.profile() if watched else contextlib.nullcontext() as profile:
            for count in rows:
                step(PAIR[0][:count], PAIR[1][:count])
                graphs.append(_graphs())
        step(*PAIR)
        if watched:
            assert profile.profiled == 3
            assert not any("dynamo_timed" in cost.name for cost in profile.operations)
        assert model._compiled_call_impl is compiled
        return [count - graphs[0] for count in (*graphs, _graphs())]

    assert train(watched=True) == train(watched=False)
    assert make is not Own or train(watched=False)[-1] > 0


def test_a_compiled_module_that_gives_itself_up_meanwhile_is_not_put_back() -> None:
    model = net()
    model.compile(backend="eager")
    step = mse_step(model, only=["optimizer"])
    with step.profile():
        for index in range(5):
            step(*PAIR)
            if index == 3:
                model._compiled_call_impl = None
    assert model._compiled_call_impl is None


def test_while_nobody_listens_the_clock_does_nothing() -> None:
    clock = StepClock(torch.device("cpu"))
    batch = next(words_batches(1))

    def once() -> float:
        started = time.perf_counter()
        for _ in range(1000):
            with clock.running(batch):
                pass
            clock.step_done()
        return (time.perf_counter() - started) / 1000

    assert min(once() for _ in range(5)) < 20e-6  # 2 us on an idle machine
    assert clock._shapes == [] and clock._tokens == 0 and clock._ended is None


def test_a_listener_that_leaves_inside_a_step_leaves_no_trace() -> None:
    clock = StepClock(torch.device("cpu"))
    seen: list[Any] = []
    clock.listen(seen.append)
    with clock.running():
        clock.unlisten(seen.append)
    clock.listen(seen.append)
    with clock.running():
        time.sleep(0.01)
    clock.step_done()
    assert seen[0].seconds >= 0.01


# --- NVTX ----------------------------------------------------------------------------------------


class Nvtx:
    """torch.cuda.nvtx, noting what it is told."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.open: dict[int, str] = {}
        self.pushed: list[str] = []
        self.started: list[str] = []

    def range_push(self, msg: str) -> int:
        self.stack.append(msg)
        self.pushed.append("/".join(self.stack))
        return len(self.stack)

    def range_pop(self) -> int:
        self.stack.pop()
        return len(self.stack)

    def range_start(self, msg: str) -> int:
        self.started.append(msg)
        self.open[len(self.started)] = msg
        return len(self.started)

    def range_end(self, range_id: int) -> None:
        del self.open[range_id]


def test_nvtx_marks_every_module_forward_and_backward(monkeypatch: Any) -> None:
    nvtx = Nvtx()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    step = mse_step(net())
    with step.profile(nvtx=True) as profile:
        for _ in range(3):
            step(*PAIR)
            assert nvtx.stack == [] and nvtx.open == {}
    whole = "(the model itself)"
    assert nvtx.pushed == 2 * [whole, f"{whole}/0", f"{whole}/1", f"{whole}/2"]  # not in the first step
    assert sorted(nvtx.started) == sorted(2 * [f"{name} backward" for name in (whole, "0", "1", "2")])
    order = [name for name in nvtx.started[:4] if name != f"{whole} backward"]
    assert order == ["2 backward", "1 backward", "0 backward"]
    assert profile.flops == 4 * 2 * (2 * 8 * 32 + 3 * 32)
    assert "Nsight" in str(profile)


def test_nvtx_changes_no_number(monkeypatch: Any) -> None:
    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(5)
        model = Words(dropout=0.5)
        step = step_of(model)
        if watched:
            with step.profile(nvtx=True):
                as_calls(step, words_batches(5))
        else:
            as_calls(step, words_batches(5))
        return list(model.parameters())

    plain = train(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", Nvtx())
    assert all(map(torch.equal, plain, train(True)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nvtx": True}, "needs CUDA"),
        ({"steps": 1}, "at least 2"),
        ({"trace": "/no/such/folder/trace.json"}, "does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(options: dict[str, Any], says: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = mse_step(net())
    with pytest.raises(ValueError, match=says), step.profile(**options):
        raise AssertionError("the block must not be entered")
    assert not step.clock.listened


def test_nvtx_and_a_trace_exclude_each_other(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="exclude"), mse_step(net()).profile(nvtx=True, trace=tmp_path / "t"):
        pass
