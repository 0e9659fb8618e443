"""The padding patch: work on padding is left out, and nothing that a user sees is another number."""

import gc
import time
import weakref
from importlib.metadata import EntryPoint

import pytest
import torch
from cases import close
from families import FAMILIES
from padded import LENGTHS, WIDTH, MeanOfAll, Watched, ZeroGate, modernbert, of, padded
from torch import nn

import autofuse
from autofuse import packing, registry


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    entries = registry._entries()
    entries.setdefault("padding", EntryPoint("padding", "patchers.padding", registry.GROUP))
    monkeypatch.setattr(registry, "_entries", lambda: entries)


def assert_same_where_real(expected, outputs, mask):
    assert outputs.logits.shape == expected.logits.shape
    assert outputs.logits.dtype == expected.logits.dtype
    real = mask.bool()
    torch.testing.assert_close(outputs.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)
    assert not outputs.logits[~real].any()  # said in the docstring: zeros at padding


# --- columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind",
    [
        ("bert-cls", "classes"),
        ("bert-mlm", "masked"),
        ("roberta", "masked"),
        ("gpt2", "causal"),
        ("llama", "causal"),
        ("mamba", "causal"),
        ("t5", "seq2seq"),
        ("bart", "seq2seq"),
    ],
)
def test_padding_at_the_right_is_trimmed(name, kind):
    watched = Watched(of(name))
    batch = padded(kind)
    expected, outputs = watched(batch)
    assert watched.shape[1] == 32 and watched.sites()["right"]
    assert outputs.logits.shape == expected.logits.shape


@pytest.mark.parametrize("cls, kind", [("MaskedLM", "masked"), ("SequenceClassification", "classes")])
def test_modernbert(cls, kind):
    watched = Watched(lambda: modernbert(f"ModernBertFor{cls}"))
    expected, outputs = watched(padded(kind))
    assert watched.shape[1] == 32 and outputs.logits.shape == expected.logits.shape


@pytest.mark.parametrize(
    "name, kind, positions",
    [
        ("llama", "causal", False),
        ("gpt2", "causal", True),
        ("roberta", "masked", False),
        ("t5", "seq2seq", False),
    ],
)
def test_padding_at_the_left_is_trimmed_with_positions_where_they_matter(name, kind, positions):
    watched = Watched(of(name))
    expected, outputs = watched(padded(kind, "left"))
    assert watched.shape == (6, 32) and ("position_ids" in watched.seen[-1]) == positions
    assert outputs.logits.shape == expected.logits.shape


def test_a_label_right_after_padding_keeps_a_column_of_it():
    watched = Watched(of("llama"))
    watched(padded("causal", "left", lengths=(32, 7)))
    assert watched.shape == (2, 40)
    watched(padded("prompt", "left", lengths=(32, 30)))
    assert watched.shape == (2, 32)


def test_first_token_pooled_with_padding_at_the_left_is_left_alone():
    watched = Watched(of("bert-cls"))
    watched(padded("classes", "left"))
    assert watched.shape == (6, WIDTH)
    assert "changes the result" in watched.reason("left")


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_both_lengths_of_an_encoder_decoder(name):
    watched = Watched(of(name))
    expected, outputs = watched(padded("seq2seq"))
    assert watched.shape == (6, 32) and watched.seen[-1]["labels"].shape == (6, 16)
    assert outputs.logits.shape == expected.logits.shape
    assert outputs.encoder_last_hidden_state.shape == expected.encoder_last_hidden_state.shape


def test_a_decoder_mask_is_kept_to():
    batch = padded("seq2seq")
    batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
    batch["decoder_attention_mask"][:, 25:] = 0
    watched = Watched(of("t5"))
    watched(batch)
    assert watched.seen[-1]["labels"].shape == (6, 32)


def test_labels_that_count_forbid_trimming():
    batch = padded("masked")
    batch["labels"][0, 60] = 5
    watched = Watched(of("bert-mlm"))
    watched(batch)
    assert watched.shape == (6, WIDTH)
    batch["labels"][0, 60], batch["labels"][1, 40] = -100, 5  # up to there, and no further
    watched(batch)
    assert watched.shape == (6, 48)


def test_every_tensor_of_the_length_is_trimmed():
    batch = padded("masked")
    batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    batch["position_ids"] = torch.arange(WIDTH).expand(1, -1)
    watched = Watched(of("bert-mlm"))
    watched(batch)
    shapes = {name: tuple(value.shape) for name, value in watched.seen[-1].items() if name in batch}
    assert shapes.pop("position_ids") == (1, 32) and set(shapes.values()) == {(6, 32)}


def test_embeddings_instead_of_ids():
    batch = padded("classes")
    embedding = FAMILIES["bert-cls"].model().get_input_embeddings().weight.detach()
    batch["inputs_embeds"] = embedding[batch.pop("input_ids")]
    watched = Watched(of("bert-cls"))
    watched(batch)
    assert watched.seen[-1]["inputs_embeds"].shape == (6, 32, 32)


@pytest.mark.parametrize("floating", [False, True])
def test_masks_of_four_dimensions(floating):
    batch = padded("masked")
    real = batch["attention_mask"].bool()
    mask = real[:, None, None, :].expand(-1, 1, WIDTH, -1)
    if floating:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    watched = Watched(of("bert-mlm"))
    watched({**batch, "attention_mask": mask})
    assert watched.seen[-1]["attention_mask"].shape == (6, 1, 32, 32)


def test_multi_label_targets_as_many_as_tokens_are_not_tokens():
    batch = padded("classes", width=48)
    batch["labels"] = torch.rand(6, 48)
    watched = Watched(of("bert-cls", num_labels=48, problem_type="multi_label_classification"))
    watched(batch)
    assert watched.seen[-1]["labels"].shape == (6, 48)


def test_without_a_mask_nothing_changes():
    batch = padded("causal")
    del batch["attention_mask"]
    watched = Watched(of("gpt2"))
    watched(batch)
    assert all(seen["input_ids"].shape == (6, WIDTH) for seen in watched.seen)


def test_padding_of_several_values_is_left_alone():
    batch = padded("masked")
    batch["input_ids"][:, 40:] = 9
    watched = Watched(of("bert-mlm"))
    watched(batch)
    assert watched.shape == (6, WIDTH)


@pytest.mark.parametrize("most", [packing.LENGTHS, packing.FEW_LENGTHS])
def test_few_lengths(most):
    for width in (20, 62, 128, 200, 512, 2048):
        kept = {n: packing.kept_length(n, width, most) for n in range(1, width + 1)}
        assert len({*kept.values()}) <= most and all(k % 8 == 0 or k == width for k in kept.values())
        assert all(n <= k < n + max(8, width / most + 8) for n, k in kept.items())


def test_a_model_compiled_by_its_owner_gets_few_lengths():
    def compiled():
        model = FAMILIES["bert-cls"].model(max_position_embeddings=256)
        model.compile(backend="eager", dynamic=False)
        return model

    watched = Watched(compiled)
    watched(padded("classes", width=256))
    assert watched.shape == (6, 32)
    watched(padded("classes", lengths=(40, 30), width=256))
    assert watched.shape == (2, 64) and "is compiled" in watched.reason("body")


# --- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_outputs_have_the_size_they_would_have_had(side):
    asked = {"output_hidden_states": True, "output_attentions": True}
    batch = padded("prompt", side, lengths=(30, 29, 28, 30))  # nothing to pack
    watched = Watched(of("llama", attn_implementation="eager"))
    watched.fast(**batch, **asked)  # transformers installs the hooks for it now, outside of a proof
    expected, outputs = watched({**batch, **asked})
    assert watched.shape == (4, 32) and list(outputs) == list(expected)
    real = batch["attention_mask"].bool()
    for a, b in zip(expected.hidden_states, outputs.hidden_states, strict=True):
        torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)
    for a, b in zip(expected.attentions, outputs.attentions, strict=True):
        a, b = a.transpose(1, 2)[real], b.transpose(1, 2)[real]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_other_outputs_later_on():
    watched = Watched(of("bert-mlm"))
    batch = padded("masked")
    watched(batch)
    watched.plain.config.output_hidden_states = watched.fast.config.output_hidden_states = True
    expected, outputs = watched(batch)
    assert [h.shape for h in outputs.hidden_states] == [h.shape for h in expected.hidden_states]


def test_an_output_of_another_kind_with_the_same_size_is_not_widened():
    batch = padded("classes")
    watched = Watched(of("bert-cls", hidden_size=32, num_labels=32))  # as wide as what is kept
    expected, outputs = watched(batch)
    assert watched.shape == (6, 32) and outputs.logits.shape == expected.logits.shape == (6, 32)


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, attention",
    [("gpt2", "sdpa"), ("gpt2", "eager"), ("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager")],
)
def test_causal_models_are_packed(name, attention):
    watched = Watched(of(name, attn_implementation=attention))
    batch = padded("causal")
    expected, outputs = watched(batch)
    assert watched.shape == (3, 32) and watched.sites()["rows"]
    assert_same_where_real(expected, outputs, batch["attention_mask"])


def test_sliding_windows_are_kept_within_packed_rows():
    watched = Watched(of("mistral", sliding_window=6))
    watched(padded("causal"))
    assert watched.shape == (3, 32)


@pytest.mark.parametrize("name", ["bert-mlm", "roberta"])
def test_encoders_are_packed_with_a_block_mask(name):
    watched = Watched(of(name))
    batch = padded("masked")
    expected, outputs = watched(batch)
    assert watched.shape == (3, 32) and watched.seen[-1]["attention_mask"].shape == (3, 1, 32, 32)
    assert_same_where_real(expected, outputs, batch["attention_mask"])


def test_padding_at_the_left_is_packed_where_nothing_is_predicted_from_it():
    watched = Watched(of("llama"))
    watched(padded("prompt", "left"))
    assert watched.shape == (3, 32)
    watched(padded("causal", "left"))
    assert watched.shape == (6, 32)


@pytest.mark.parametrize(
    "name, kind, why",
    [("mamba", "causal", "changes the result"), ("bert-cls", "classes", "not about single tokens")],
)
def test_what_cannot_be_packed_says_why(name, kind, why):
    watched = Watched(of(name))
    watched(padded(kind))
    assert watched.shape == (6, 32) and why in watched.reason("rows")


def test_positions_that_are_given_are_kept():
    watched = Watched(of("gpt2"))
    batch = padded("prompt", "left")
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    watched(batch)
    assert watched.shape == (3, 32)
    batch["position_ids"] = batch["position_ids"] * 2  # a packed row would fall apart
    watched(batch)
    assert watched.shape == (6, 32)


def test_rows_stay_apart_where_it_is_not_faster():
    def slow_when_packed(module, args, kwargs):
        time.sleep(0.2 * (len(kwargs["input_ids"]) < 6))

    watched = Watched(of("gpt2"), timed=True)
    watched.fast.register_forward_pre_hook(slow_when_packed, with_kwargs=True)
    watched(padded("causal"))
    assert watched.shape == (6, 32) and "does not pay" in watched.reason("rows")


def test_holes_and_little_padding_are_not_packed():
    watched = Watched(of("gpt2"))
    watched(padded("causal", lengths=(30, 28, 30, 29)))
    assert watched.shape == (4, 32)
    batch = padded("causal")
    watched(batch)
    assert watched.shape == (3, 32)
    batch["attention_mask"][0, 10] = batch["input_ids"][0, 10] = 0
    batch["labels"][0, 10:12] = -100
    watched(batch)
    assert watched.shape == (6, 32) and watched.sites()["rows"]


def test_a_window_that_only_later_rows_reach_is_not_missed():
    """ModernBERT's local layers take a mask of four dimensions for the whole truth."""
    watched = Watched(modernbert)
    watched(padded("masked", lengths=(4, 3, 4, 2, 3, 4, 4, 4), width=16))  # no longer than the window
    assert watched.shape == (4, 8)
    watched(padded("masked", lengths=(14, 7, 5, 3, 4, 4, 3, 4), width=16))
    assert watched.shape == (8, 16) and "changes the result" in watched.reason("rows")


# --- what the first batch did not show ---------------------------------------------------------


def test_a_kind_that_comes_later_is_proved_then_and_once():
    watched = Watched(of("gpt2"))
    full = padded("causal", lengths=(30,) * 4, width=30)
    watched(full)
    assert watched.calls(full) == 1
    assert watched.calls(padded("causal")) > 1
    assert watched.calls(padded("causal", seed=4)) == 1 and watched.shape == (3, 32)
    assert watched.calls(padded("prompt")) > 1  # no label at the beginning of a row
    assert watched.calls(padded("prompt", "left")) > 1
    assert watched.calls(padded("prompt", "left", seed=4)) == 1


def test_a_batch_that_shows_nothing_proves_nothing():
    watched = Watched(of("bert-mlm"))
    watched(padded("masked", lengths=(16,) * 4, width=16))
    nothing = padded("masked")
    nothing["labels"][:] = -100
    for _ in range(2):
        assert not watched.step(nothing).isfinite()
        assert watched.shape == (6, WIDTH)
    watched(padded("masked"))
    assert watched.shape == (3, 32)


def test_what_fails_later_stays_off_and_says_so():
    watched = Watched(lambda: MeanOfAll(threshold=10**6))
    watched(padded("classes", lengths=(16,) * 3, width=16))
    watched(padded("classes"))
    assert watched.shape == (6, WIDTH) and "changes the result" in watched.reason("right")
    assert watched.calls(padded("classes")) == 1


def test_a_proof_counts_for_the_lengths_that_it_compared():
    """A model that is another one up to 20 tokens (as with rope scaling, or block-sparse attention)."""
    watched = Watched(lambda: MeanOfAll(threshold=20))
    watched(padded("classes", lengths=(30, 20)))
    assert watched.shape == (2, 32)
    watched(padded("classes", lengths=(12, 9)))  # 16 would do, and is wrong
    assert watched.shape == (2, WIDTH)


def test_a_proof_is_made_again():
    watched = Watched(ZeroGate)
    batch = padded("classes")
    for _ in range(4):
        watched(batch)
    assert watched.shape == (6, 32)
    with torch.no_grad():
        watched.plain.gate.fill_(1.0), watched.fast.gate.fill_(1.0)
    for _ in range(97):
        watched.step(batch)
    assert watched.shape == (6, WIDTH) and not watched.sites()["right"]
    watched(batch)


# --- randomness, traces, undo -------------------------------------------------------------------


def test_active_dropout_is_a_reason_to_leave_it():
    model = FAMILIES["bert-cls"].model(dropout=0.1)
    row = autofuse.plan(model, only=["padding"])["padding"]
    assert row.status == "rejected" and "dropout is active" in row.reason


def test_attention_dropout_that_is_no_module_is_found_by_the_proof():
    watched = Watched(of("llama", dropout=0.2))
    batch = padded("causal")
    torch.manual_seed(7)
    expected = watched.plain(**batch).loss
    torch.manual_seed(7)
    assert close(watched.step(batch).item(), expected.item())
    assert "dropout is active" in watched.reason("right")


def test_dropout_switched_on_later():
    watched = Watched(of("bert-mlm"))
    batch = padded("masked")
    watched(batch)
    for model in (watched.plain, watched.fast):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
    torch.manual_seed(7)
    expected = watched.plain(**batch).loss
    torch.manual_seed(7)
    assert close(watched.step(batch).item(), expected.item())
    assert watched.shape == (6, WIDTH)


def test_no_trace():
    watched = Watched(of("bert-mlm"))
    batch = padded("masked")
    copies = {name: value.clone() for name, value in batch.items()}
    state = torch.get_rng_state()
    watched(batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(batch[name], copies[name]) for name in copies) and list(batch) == list(copies)


def test_undo():
    watched = Watched(of("gpt2"))
    batch = padded("causal")
    watched(batch)
    assert watched.shape == (3, 32)
    watched.step.undo()
    watched(batch)
    assert watched.shape == (6, WIDTH) and watched.step._settings.shrink is None


def test_the_model_is_not_kept_alive():
    watched = Watched(of("gpt2"))
    watched(padded("causal"))
    reference = weakref.ref(watched.fast)
    del watched
    gc.collect()
    assert reference() is None


def test_training_goes_the_same_way():
    plain, fast = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, fast)]
    step = autofuse.optimize(
        fast, optimizers[1], precision="fp32", compile=False, only=["padding"], measure=False, accumulate=2
    )
    for window in range(3):
        batches = [
            padded("causal", seed=s, lengths=n) for s, n in ((window, LENGTHS), (9, (5, 18, 3, 3, 3, 3)))
        ]
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        for batch, count in zip(batches, counts, strict=True):
            (plain(**batch).loss * count / sum(counts)).backward()
            step(batch)
        optimizers[0].step(), optimizers[0].zero_grad()
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
