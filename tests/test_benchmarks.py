"""The benchmark of a training step runs, on models so small that its figures say nothing."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from math import isfinite

import pytest
from rich.console import Console

from benchmarks.models import BIG_VOCABULARY, WORKLOADS, Workload
from benchmarks.train_step import (
    CANDIDATES,
    Candidate,
    goals,
    memory,
    memory_goals,
    race,
    results,
    show,
    show_memory,
)

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
}


def tiny(workload: Workload) -> Workload:
    options = {name: TINY.get(name, value) for name, value in workload.options.items()}
    real = None if workload.real is None else (2, 6)
    return replace(workload, options=options, rows=4, length=16, real=real)


def named(*names: str) -> list[Candidate]:
    return [candidate for candidate in CANDIDATES if candidate.name in names]


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_and_batches_are_the_same_each_time(name: str) -> None:
    workload = tiny(WORKLOADS[name])
    losses = [workload.build()(**batch).loss.item() for batch in workload.batches(2)]
    again = [workload.build()(**batch).loss.item() for batch in workload.batches(2)]
    assert losses == again and losses[0] != losses[1]


def test_batches_have_the_labels_and_the_padding_that_they_promise() -> None:
    some = WORKLOADS["bert-mlm"].batches(1)[0]["labels"]
    assert 0.1 < (some != -100).float().mean() < 0.2
    lengths = WORKLOADS["bert-padded"].batches(1)[0]["attention_mask"].sum(1)
    assert lengths.min() >= 20 and lengths.max() <= 120


def test_candidates_race_and_their_figures_and_failures_are_shown() -> None:
    broken = Candidate("broken", "autofuse", "fp64")  # type: ignore[arg-type]
    workload = tiny(WORKLOADS["gpt2"])
    runners = race(workload, [*named("eager", "fused", "autofuse, fp32"), broken], steps=3)
    result = results(workload, runners)
    assert result["best_hand_tuned"] == "fused"
    *good, bad = result["candidates"]
    for row in good:
        assert row["failure"] is None and isfinite(row["ratio"])
        assert row["loss_difference"] < 1e-4
    assert good[-1]["report"]
    assert bad["failure"].startswith("ValueError: precision") and bad["ratio"] is None
    assert [goal.met for goal in goals(result)] == [True]  # the losses; the default autofuse did not run
    text = StringIO()
    show(result, Console(file=text, width=130))
    assert "fused *" in text.getvalue() and "failed" in text.getvalue()


def test_the_memory_of_a_step_is_that_of_its_gradients_and_others() -> None:
    workload = tiny(BIG_VOCABULARY)
    gradients = sum(p.numel() * p.element_size() for p in workload.build().parameters())
    result = memory(workload)
    for peak in result["peaks"].values():
        assert peak["peak"] >= gradients and 0 < peak["others"] <= peak["peak"]
    assert len(list(memory_goals(result))) == 2
    text = StringIO()
    show_memory(result, Console(file=text, width=130))
    assert "autofuse" in text.getvalue()
