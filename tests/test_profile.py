"""step.profile: what it measures, and that it changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autofuse
from autofuse.clock import Sample, StepClock, _graphs
from autofuse.costs import BETWEEN, OPTIMIZER, OTHERS, PRODUCTS, Cost, _Attribution
from autofuse.profile import Profile

ROWS, WIDTH, CLASSES = 6, 16, 2048


class Words(nn.Module):
    """A language model without anything between its embedding and its output layer but dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.norm(self.embedding(input_ids))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def words_batches(count: int, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(CLASSES, (2, rows // 2), generator=random)
        labels = ids.clone()
        labels[:, 0] = -100
        yield {"input_ids": ids, "labels": labels}


def step_of(model: nn.Module, **options: Any) -> Any:
    options = {"precision": "fp32", "compile": False, "measure": False} | options
    return autofuse.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *extra, nn.Linear(32, 1))


def mse_step(model: nn.Module, **options: Any) -> Any:
    return step_of(model, loss_fn=F.mse_loss, **options)


PAIR = (torch.linspace(-1, 1, 32).view(4, 8), torch.ones(4, 1))


def hand_count(rows: int = ROWS) -> int:
    """Forward, the weight's gradient and the input's, of the output layer."""
    return 3 * 2 * rows * WIDTH * CLASSES


# --- it changes nothing --------------------------------------------------------------------------


def as_calls(step: Any, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
    return [step(batch) for batch in batches]


def in_pieces(step: Any, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
    losses = []
    for batch in batches:
        with step.autocast():
            loss = step.model(**batch)["loss"]
        step.backward(loss)
        step.update()
        losses.append(loss.detach())
    return losses


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
    assert step.clock._idle and "start" not in vars(step.clock) and "stop" not in vars(step.clock)
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


# --- FLOPs ---------------------------------------------------------------------------------------


def flops_of(step: Any, batches: Iterator[Any]) -> int | None:
    with step.profile() as profile:
        for batch in batches:
            step(batch)
    assert not [note for note in profile.notes if "FLOPs" in note], profile.notes
    return profile.flops


def test_flops_are_those_of_a_count_by_hand_with_and_without_lazy_logits() -> None:
    lazy, plain = step_of(Words()), step_of(Words(), only=[])
    assert flops_of(lazy, words_batches(5)) == hand_count()
    assert flops_of(plain, words_batches(5)) == hand_count()
    assert lazy.report["loss"].status == "kept"


def test_flops_of_a_window_are_those_of_all_its_micro_batches() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        for short, long in zip(words_batches(5, rows=4), words_batches(5, rows=10), strict=True):
            yield from (short, long)

    assert flops_of(step_of(Words(), accumulate=2), batches()) == hand_count(14)


def test_flops_of_a_loop_in_pieces() -> None:
    step = step_of(Words())
    with step.profile() as profile:
        in_pieces(step, words_batches(5))
    assert profile.flops == hand_count()


def test_flops_of_batches_that_differ_are_scaled_to_the_median_one() -> None:
    step = step_of(Words())
    with step.profile() as profile:
        for rows in (4, 8, 8, 4):  # timed with 8 twice, counted with 4
            step(next(words_batches(1, rows=rows)))
    assert profile.flops == hand_count(8)
    assert any("scaled by its tokens" in note for note in profile.notes)


def test_flops_of_gpt2_do_not_depend_on_the_patches() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=CLASSES,
        n_positions=32,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )

    def batches() -> Iterator[dict[str, Tensor]]:
        return ({"input_ids": b["input_ids"], "labels": b["input_ids"]} for b in words_batches(5, rows=32))

    patched, plain = (step_of(transformers.GPT2LMHeadModel(config), only=only) for only in (None, []))
    found = flops_of(patched, batches())
    assert patched.report["loss"].status == "kept" and patched.report["norms"].status == "kept"
    assert found == flops_of(plain, batches())
    # By hand: 4 linear layers of (1, 3), (1, 1), (1, 4) and (4, 1) times 32 a block, attention in its
    # forward (2 products) and its backward (5), and the output layer, for 2 rows of 16 tokens.
    products = 2 * (3 + 1 + 4 + 4) * 32 * 32 + CLASSES * 32
    attention = 2 * (2 + 5) * 2 * 2 * (16 * 16 * 16) * 2
    assert found == 3 * 2 * 32 * products + attention


def test_padding_that_is_cut_counts() -> None:
    """The model as it is written computes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.zeros(4, 24, dtype=torch.long)
    mask[:, :9] = 1
    ids = torch.randint(1, 64, (4, 24)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0, 1])}
    counted = []
    for only in (["padding"], []):
        step = step_of(transformers.BertForSequenceClassification(config), only=only)
        counted.append(flops_of(step, iter([batch] * 5)))
        assert not only or step.report["padding"].status == "kept"
    assert counted[0] == counted[1]


def test_counting_agrees_with_the_counter_on_a_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    images, targets = torch.randn(2, 3, 8, 8), torch.zeros(2, 2)
    with FlopCounterMode(display=False) as counter:
        F.mse_loss(model(images), targets).backward()
    model.zero_grad()
    step = mse_step(model)
    with step.profile() as profile:
        [step(images, targets) for _ in range(4)]
    assert profile.flops == counter.get_total_flops()


def test_the_floor_is_the_flops_at_the_measured_rate() -> None:
    step = mse_step(net())
    with step.profile() as profile:
        [step(*PAIR) for _ in range(7)]
    rate = autofuse.Hardware.detect("cpu").matmul_rate(torch.float32, torch.get_num_threads())
    assert profile.rate == rate and profile.dtype == "float32"
    assert profile.floor_s == pytest.approx(profile.flops / (rate * 1e9))
    assert profile.share_of_floor == pytest.approx(profile.floor_s / profile.step_s)


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
    assert step.clock._idle


def test_nvtx_and_a_trace_exclude_each_other(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="exclude"), mse_step(net()).profile(nvtx=True, trace=tmp_path / "t"):
        pass


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
