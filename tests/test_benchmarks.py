"""The benchmark runs, on models so small that its figures say nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from rich.console import Console
from torch import nn

from autofuse.bench.candidates import CANDIDATES, Candidate, Job, named
from autofuse.bench.figures import (
    Goal,
    goals,
    goals_over_all,
    memory,
    memory_goals,
    results,
    until_fast,
)
from autofuse.bench.floor import Floor, count_flops, floor_of
from autofuse.bench.own import FromConfig, resolve
from autofuse.bench.race import Runner, best, race
from autofuse.bench.tables import plot, save_plot, show, show_memory
from autofuse.bench.turns import Ask, Finished, Turn, Turns
from autofuse.bench.workloads import (
    BIG_VOCABULARY,
    WORKLOADS,
    Legacy,
    Transformers,
    Workload,
    fused,
)
from benchmarks import train_step

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_local_experts": 2,
    "image_size": 16,
}


def tiny(workload: Workload) -> Workload:
    if isinstance(workload, Legacy):
        options = {"vocabulary": 64, "width": 16, "layers": 1, "heads": 2}
        return replace(workload, options=options, rows=4, length=16)
    assert isinstance(workload, Transformers)
    options = {name: TINY.get(name, value) for name, value in workload.options.items()}
    real = None if workload.real is None else (2, 6)
    digits = None if workload.digits is None else 16
    return replace(workload, options=options, rows=4, length=16, real=real, digits=digits)


GPT2 = tiny(WORKLOADS["gpt2"])
TOY = resolve("toys:classifier")


# --- workloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_each_time_and_their_losses_finite(name: str) -> None:
    workload = tiny(WORKLOADS[name])
    losses = []
    for _ in range(2):
        made = workload.make(2)
        assert made.model.training and len(made.batches) == 2
        torch.manual_seed(0)
        losses.append([workload.loss(made.model, batch).item() for batch in made.batches])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    assert all(map(isfinite, losses[0]))


@pytest.mark.parametrize("name", WORKLOADS)
def test_only_the_workloads_that_say_so_draw_random_numbers(name: str) -> None:
    workload = tiny(WORKLOADS[name])
    model, _, batches = workload.make(1)
    first, second = (workload.loss(model, batches[0]).item() for _ in range(2))
    assert (first != second) == workload.random


def test_batches_have_the_labels_the_padding_and_the_images_that_they_promise() -> None:
    some = WORKLOADS["bert-mlm"].batches(1)[0]["labels"]
    assert 0.1 < (some != -100).float().mean() < 0.2
    lengths = WORKLOADS["bert-padded"].batches(1)[0]["attention_mask"].sum(1)
    assert lengths.min() >= 20 and lengths.max() <= 120
    assert WORKLOADS["t5"].batches(1)[0]["labels"].shape == (8, 64)
    images = WORKLOADS["vit"].batches(1)[0]["pixel_values"]
    assert images.shape == (64, 3, 64, 64) and images.min() == -1 and images.max() <= 1.1


def test_the_hand_written_optimizer_is_tuned_to_one_of_the_same_steps() -> None:
    workload = tiny(WORKLOADS["legacy"])
    model, plain, batches = workload.make(1)
    other, unused, _ = workload.make(1)
    tuned = workload.tuned(unused)
    assert tuned.param_groups[0]["fused"] and not any("fused" in g for g in plain.param_groups)
    for net, optimizer in ((model, plain), (other, tuned)):
        net.double()  # a gradient that is zero but for rounding moves nothing then
        for _ in range(3):
            workload.loss(net, batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_optimizer_that_torch_does_not_know_is_left_as_it_is() -> None:
    class Own(torch.optim.AdamW):
        pass

    optimizer = Own([nn.Parameter(torch.zeros(1))])
    assert fused(optimizer) is optimizer


def test_a_folder_with_a_config_is_a_workload(tmp_path: Path) -> None:
    import transformers

    transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2).save_pretrained(
        tmp_path
    )
    workload = resolve(str(tmp_path))
    assert isinstance(workload, FromConfig)
    model, _, batches = workload.make(2)
    assert batches[0]["input_ids"].shape == (4, 8)
    assert isfinite(workload.loss(model, batches[0]).item())


def test_a_workload_whose_packages_are_missing_says_so() -> None:
    workload = replace(GPT2, needs=("transformers", "no_such_package"))
    assert workload.missing == ["no_such_package"]
    with pytest.raises(RuntimeError, match="GPT-2 needs no_such_package"):
        workload.make(1)


# --- candidates and the race -------------------------------------------------------------------


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which `work` sets: restored afterwards
    monkeypatch.setattr("autofuse.bench.race.Process", toys.InThread)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, and never another


def quickly(names: str) -> list[Candidate]:
    """The candidates without the minutes that Inductor takes."""
    return [replace(candidate, backend="eager") for candidate in named(names)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes of the candidates


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.usefixtures("in_threads")
def test_each_candidate_trains(name: str) -> None:
    (candidate,) = quickly(name)
    if candidate.missing:
        pytest.skip(candidate.missing)
    (runner,) = race(TOY, [candidate], steps=2)
    assert runner.failure is None
    assert len(runner.warm_up.seconds) >= 3 and len(runner.rounds) == 2
    assert all(map(isfinite, runner.losses)) and runner.setup > 0


@pytest.mark.parametrize("names", ["fused,autofuse-fp32", "accelerate-fp32", "trainer"])
@pytest.mark.usefixtures("in_threads")
def test_all_ways_train_alike_on_a_net_with_its_own_forward(names: str) -> None:
    workload = tiny(WORKLOADS["legacy"])
    eager, *rows = results(workload, race(workload, quickly(f"eager,{names}"), steps=1))["candidates"]
    for row in rows:
        assert row["failure"] is None
        if row["name"] == "trainer":
            assert row["loss_difference"] is None and row["computes_in"] == "bf16"
            assert row["losses"][0] == pytest.approx(eager["losses"][0], rel=0.02)
        else:
            assert row["loss_difference"] < 1e-4


@pytest.mark.usefixtures("in_threads")
def test_candidates_race_and_their_figures_and_failures_are_shown() -> None:
    broken = Candidate("broken", "broken", "autofuse", "fp64")  # type: ignore[arg-type]
    absent = Candidate("absent", "absent", "accelerate", needs=("no_such_package",))
    runners = race(GPT2, [*quickly("eager,fused,autofuse-fp32"), broken, absent], steps=3)
    result = results(GPT2, runners, Floor(10**6, {"fp32": 100.0}))
    assert result["best_hand_tuned"] == "fused"
    *good, bad, missing = result["candidates"]
    for row in good:
        assert row["failure"] is None and isfinite(row["ratio"])
        assert row["loss_difference"] < 1e-4
        assert row["until_fast_s"] is None or row["until_fast_s"] > 0
        assert row["floor_share"] == pytest.approx(1e-5 / row["median_s"])
    assert good[-1]["report"]["rows"]
    assert bad["failure"].startswith("ValueError: precision") and bad["ratio"] is None
    assert missing["failure"].startswith("not installed: no_such_package")
    assert [goal.met for goal in goals(result)] == [True]  # the losses; the default autofuse did not run
    text = StringIO()
    show(result, Console(file=text, width=170))
    shown = text.getvalue()
    assert "fused *" in shown and "broken: ValueError" in shown and "absent: not installed" in shown
    assert "Floor: 0.0 GFLOP" in shown and "alone" not in shown


def test_who_has_no_time_left_does_not_start() -> None:
    runners = race(GPT2, named("eager,fused"), steps=2, seconds=1e-3)
    assert [runner.failure is None for runner in runners] == [True, False] or all(
        runner.failure for runner in runners
    )
    assert runners[1].failure == "no time was left for it"


class Tuner:
    """Stands for a training step whose tuning is done after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, batch: Any) -> torch.Tensor:
        self.left -= 1
        return torch.tensor(1.0)

    @property
    def report(self) -> Any:
        state = "measuring" if self.left > 0 else "done"
        return SimpleNamespace(tuning=SimpleNamespace(state=state), to_dict=lambda: {"rows": []})


class Pipe:
    """The parent's side, told beforehand what it asks."""

    def __init__(self, *asks: Ask) -> None:
        self.asks, self.sent = list(asks), []  # type: ignore[var-annotated]

    def recv(self) -> Ask:
        return self.asks.pop(0)

    def send(self, answer: Any) -> None:
        self.sent.append(answer)


@pytest.mark.parametrize(("most", "steps", "settled"), [(150, 9, True), (5, 5, False)])
def test_autofuse_warms_up_until_it_has_tuned(
    most: int, steps: int, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofuse.optimize", lambda *args, **options: Tuner(9))
    pipe = Pipe(Ask(3, most), Ask(1), Ask(0))
    turns = Turns(pipe, "cpu")  # type: ignore[arg-type]
    made = TOY.make(1)
    with pytest.raises(Finished):
        CANDIDATES["autofuse"].train(Job(TOY, *made, torch.device("cpu"), turns))
    setup, warm_up, turn, report = pipe.sent
    assert setup >= 0 and report == {"rows": []}
    assert (len(warm_up.seconds), warm_up.settled, len(turn.seconds)) == (steps, settled, 1)


def runner(name: str, *rounds: float, failure: str | None = None) -> Runner:
    turns = [Turn([seconds], [seconds], [1.0]) for seconds in rounds]
    return Runner(GPT2, CANDIDATES[name], Turn([9.0, 1.0, 1.0], [], [1.0] * 3), turns, failure=failure)


def test_the_best_by_hand_is_found_round_by_round() -> None:
    slow, quick = runner("fused", 2.0, 2.0, 4.0), runner("compile", 1.0, 1.0, 3.0)
    lucky = runner("fused-bf16", 0.5)  # fell out: it took fewer turns
    assert best([runner("eager", 0.1, 0.1, 0.1), slow, quick, lucky]) is quick
    assert best([runner("eager", 0.1)]) is None


# --- figures and goals -------------------------------------------------------------------------


def figures(**ours: Any) -> dict[str, Any]:
    found = results(GPT2, [runner("eager", 3.0), runner("compile", 1.0), runner("autofuse", 1.0)])
    by_name = {row["name"]: row for row in found["candidates"]}
    by_name["compile"]["until_fast_s"] = 30.0
    by_name["autofuse"] |= {"until_fast_s": 9.0, "floor_share": 0.9} | ours
    return found


def test_goals_of_one_model() -> None:
    assert [goal.met for goal in goals(figures())] == [True] * 4
    for change, missed in (
        ({"ratio": 1.04}, "over compile"),
        ({"ratio": None}, "over compile"),
        ({"ratio": nan}, "over compile"),
        ({"until_fast_s": 11.0}, "time until fast"),
        ({"until_fast_s": None}, "time until fast"),
        ({"floor_share": 0.84}, "share of the floor"),
        ({"floor_share": None}, "share of the floor"),
        ({"loss_difference": 1e-3}, "difference of an fp32 loss"),
    ):
        failed = [goal.what for goal in goals(figures(**change)) if not goal.met]
        assert len(failed) == 1 and missed in failed[0], change


def test_goals_need_what_they_compare() -> None:
    alone = results(GPT2, [runner("autofuse", 1.0)])
    assert [goal.what for goal in goals(alone)] == ["GPT-2: autofuse's share of the floor in fp32"]
    assert list(goals(results(GPT2, [runner("fused", 1.0)]))) == []


def test_half_of_the_models_must_be_faster() -> None:
    fast, even = figures(ratio=0.84), figures(ratio=0.86)
    assert [goal.met for goal in goals_over_all([fast, even])] == [True]
    assert [goal.met for goal in goals_over_all([fast, even, even])] == [False]
    assert list(goals_over_all([fast])) == []


@pytest.mark.parametrize(
    ("warm_up", "fast_after", "for_good"),
    [
        ([5.0, 1.0, 1.0], 8.0, 8.0),
        ([200.0, 1.0, 1.0], 203.0, 203.0),
        ([1.0, 1.0, 9.0], 12.0, 12.0),  # nothing of the warm-up is left
        ([1.0, 9.0, 9.0, 1.0, 1.0], 22.0, 22.0),  # one quick step is luck
        ([1.0, 1.0, 1.0, *[2.0] * 20, 1.0, 1.0], 4.0, 46.0),  # the early steps were of a trial
        ([1.0, 1.0, 1.0, 30.0, 1.0, 1.0, 1.0], 4.0, 34.0),  # a compilation was to come
        ([2.0, 1.0] * 10 + [1.0] * 30, 7.0, 22.0),  # 3 slow steps of the trial are left in 36
        ([1.0, 1.5] * 10, 4.5, 27.0),  # a trial that goes on to the end: half of the steps are slow
        ([3.0, 3.0, 3.0], 12.0, 12.0),  # only the rounds are fast
    ],
)
def test_fast_and_fast_for_good(warm_up: list[float], fast_after: float, for_good: float) -> None:
    rounds = [1.0, 1.0, 1.0]
    assert until_fast(1.0, warm_up, rounds, 1.0) == fast_after
    assert until_fast(1.0, warm_up, rounds, 1.0, for_good=True) == for_good


def test_too_few_steps_are_never_fast() -> None:
    assert until_fast(1.0, [1.0], [1.0], 1.0) is None
    assert until_fast(1.0, [3.0, 3.0], [3.0], 1.0) is None
    assert until_fast(1.0, [], [], None) is None


def test_a_goal_that_is_not_a_number_is_not_met() -> None:
    assert not Goal("x", nan, 1.0).met and not Goal("x", nan, 1.0, at_least=True).met
    assert Goal("x", inf, 1.0, at_least=True).met


def test_the_floor_counts_the_products_of_forward_and_backward() -> None:
    workload = tiny(WORKLOADS["legacy"])
    model, _, _ = workload.make(1)
    tokens = 4 * 16
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 3 * 2 * 2 * 4 * 16 * 16 * 16  # two products of (16, 16) by (16, 16) for 4 rows
    assert count_flops(workload) == 6 * tokens * weights + attention
    floor = floor_of(workload)
    assert isinstance(floor, Floor) and floor.flops == count_flops(workload)
    assert floor.seconds("fp32") == pytest.approx(floor.flops / floor.rates["fp32"] / 1e9)
    assert floor.seconds("fp8") is None
    assert floor.alone.keys() == floor.rates.keys() and all(seconds > 0 for seconds in floor.alone.values())


def test_a_floor_that_cannot_be_found_is_a_reason() -> None:
    found = floor_of(replace(GPT2, needs=("no_such_package",)))
    assert isinstance(found, str) and "no_such_package" in found


@pytest.mark.usefixtures("in_threads")
def test_the_memory_of_a_step_is_that_of_its_gradients_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in quickly("eager,autofuse,autofuse-fp32")}
    monkeypatch.setattr("autofuse.bench.figures.CANDIDATES", rows)
    workload = tiny(BIG_VOCABULARY)
    gradients = sum(p.numel() * p.element_size() for p in workload.make(1).model.parameters())
    result = memory(workload)
    for peak in result["peaks"].values():
        assert peak["peak"] >= gradients and 0 < peak["others"] <= peak["peak"]
    assert len(list(memory_goals(result))) == 2
    text = StringIO()
    show_memory(result, Console(file=text, width=130))
    assert "autofuse" in text.getvalue()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plot_has_a_bar_for_each_candidate_of_each_model(tmp_path: Path) -> None:
    found = [figures(), figures(ratio=None)]
    (axes,) = plot(found).axes
    assert [len(container) for container in axes.containers] == [2, 2, 2]
    assert axes.containers[-1][1].get_width() == 0  # no figures, no bar
    save_plot(found, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--models", "gpt3"], ["--candidates", "apex"], ["--steps", "0"]):
        with pytest.raises(SystemExit) as exit:
            train_step.main(arguments)
        assert exit.value.code == 2
    assert "there is no candidate 'apex'" in capsys.readouterr().err
