"""step.profile: the FLOPs of the model as it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from watched import (
    CLASSES,
    PAIR,
    Words,
    as_calls,
    hand_count,
    in_pieces,
    mse_step,
    net,
    step_of,
    words_batches,
)

import autofuse
from autofuse.profile import Profile


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_not_disturbed_and_what_it_computes_again_counts(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            inner = lambda x: self.b(self.drop(F.gelu(self.a(x))))  # noqa: E731
            return x + checkpoint(inner, x, use_reentrant=reentrant)

    def train(watched: bool) -> tuple[list[Tensor], Profile | None]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
        step = mse_step(model)
        with step.profile() if watched else contextlib.nullcontext() as profile:
            [step(*PAIR) for _ in range(6)]
        return [*model.parameters(), torch.get_rng_state()], profile

    (plain, _), (watched, profile) = train(False), train(True)
    assert all(map(torch.equal, plain, watched))
    product = 2 * 4 * 8 * 8
    again = 2 if reentrant else 1  # without reentry the last product need not be computed again
    assert profile.flops == product * (2 + 2 * 3 + again) + 3 * 2 * 4 * 8
    assert {cost.name: cost.calls for cost in profile.modules}["*.a"] == 2


def test_the_floor_is_the_flops_at_the_measured_rate() -> None:
    step = mse_step(net())
    with step.profile() as profile:
        [step(*PAIR) for _ in range(7)]
    rate = autofuse.Hardware.detect("cpu").matmul_rate(torch.float32, torch.get_num_threads())
    assert profile.rate == rate and profile.dtype == "float32"
    assert profile.floor_s == pytest.approx(profile.flops / (rate * 1e9))
    assert profile.share_of_floor == pytest.approx(profile.floor_s / profile.step_s)


def test_without_a_rate_there_is_no_floor_and_it_is_said() -> None:
    step = mse_step(net().double())
    with step.profile() as profile:
        [step(PAIR[0].double(), PAIR[1].double()) for _ in range(5)]
    assert profile.flops and profile.dtype == "float64"
    assert profile.rate is None and profile.floor_s is None and profile.share_of_floor is None
    assert "The rate of matrix products in float64 could not be measured." in str(profile)


def test_a_loop_that_calls_parts_of_the_model_is_told_that_nothing_was_counted() -> None:
    parts = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 1)})
    step = step_of(parts)
    with step.profile() as profile:
        for _ in range(5):
            with step.autocast():
                loss = parts["second"](parts["first"](PAIR[0])).mean()
            step.backward(loss)
            step.update()
    assert profile.flops is None and "never the model itself" in str(profile)
    assert {"first", "second"} <= {cost.name for cost in profile.modules}


def test_patches_are_applied_again_when_counting_fails(monkeypatch: Any) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    step = step_of(Words())
    with step.profile() as profile:
        as_calls(step, words_batches(5))
        applied = [type(module) for module in step.model.modules()]
        monkeypatch.setattr("autofuse.flops.evaluate", fails)
    assert [type(module) for module in step.model.modules()] == applied
    assert any(cls.__name__ == "FusedLinear" for cls in applied)
    assert "The FLOPs were not counted: RuntimeError: out of memory" in str(profile)
