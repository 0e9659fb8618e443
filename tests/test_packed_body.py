"""Rows packed inside a model, for its repeated blocks alone: what cannot be packed as a whole is."""

import gc
import weakref
from importlib.metadata import EntryPoint

import pytest
import torch
import transformers as hf
from families import FAMILIES, VOCABULARY
from padded import WIDTH, Pooled, Watched, modernbert, of, padded

from autofuse import registry
from autofuse.packed_body import body_path
from autofuse.regions import find_stacks

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "num_labels": 3, "max_position_embeddings": 80, "pad_token_id": 0,
}  # fmt: skip
OPTIONS = {"Mistral": {"sliding_window": 6, "num_key_value_heads": 2}}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    entries = registry._entries()
    entries.setdefault("padding", EntryPoint("padding", "patchers.padding", registry.GROUP))
    monkeypatch.setattr(registry, "_entries", lambda: entries)


@pytest.fixture
def blocks(monkeypatch):
    """``blocks(model)`` -> the list of the shapes that its repeated blocks get from then on."""

    def watch(model):
        shapes, cls = [], type(find_stacks(model)[0].blocks[0])
        forward = cls.forward

        def noting(self, x, *args, **kwargs):
            shapes.append(tuple(x.shape[:2]))
            return forward(self, x, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", noting)
        return shapes

    return watch


def classifier(name, **options):
    def build():
        torch.manual_seed(0)
        config = getattr(hf, f"{name}Config")(**SMALL, **dict.fromkeys(DROPOUTS, 0.0), **options)
        return getattr(hf, f"{name}ForSequenceClassification")(config).train()

    return build


def test_the_body_is_what_holds_the_blocks():
    assert body_path(FAMILIES["bert-cls"].model()) == "bert.encoder"
    assert body_path(FAMILIES["gpt2"].model()) == "transformer"
    assert body_path(FAMILIES["t5"].model()) is None  # there are two
    assert body_path(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    "name, sides", [("Bert", "r"), ("Roberta", "rl"), ("GPT2", "rl"), ("Llama", "rl"), ("Mistral", "rl")]
)
def test_one_label_a_row(name, sides, blocks):
    for side in ("right", "left")[: len(sides)]:
        watched = Watched(classifier(name, **OPTIONS.get(name, {})))
        watched(padded("classes", side))
        shapes = blocks(watched.fast)
        expected, outputs = watched(padded("classes", side))  # first the plain model
        packed = shapes == [(6, WIDTH)] * 2 + [(3, 32)] * 2
        assert packed == watched.sites()["body"] and watched.shape == (6, 32)
        assert packed or (name, side) == ("Roberta", "left")  # pools what is padding
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_local_attention_without_a_mask_of_pairs():
    watched = Watched(lambda: modernbert("ModernBertForSequenceClassification"))
    watched(padded("classes"))
    assert "changes the result" in watched.reason("body")


def test_whole_rows_are_packed_where_that_works(blocks):
    watched = Watched(of("bert-mlm"))
    watched(padded("masked"))
    assert watched.shape == (3, 32)  # the batch itself


def test_labels_of_tokens_and_of_rows(blocks):
    def build():
        torch.manual_seed(0)
        return hf.BertForPreTraining(hf.BertConfig(**SMALL, **dict.fromkeys(DROPOUTS, 0.0))).train()

    watched, batch = Watched(build), padded("masked")
    shapes = blocks(watched.fast)
    batch["next_sentence_label"] = torch.tensor([0, 1, 1, 0, 1, 0])
    expected, outputs = watched(batch)
    assert shapes[-1] == (3, 32)
    real = batch["attention_mask"].bool()
    got, wanted = outputs.prediction_logits, expected.prediction_logits
    assert got.shape == wanted.shape
    torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-5)


def test_a_later_batch_of_the_kind_is_not_proved_again(blocks):
    watched = Watched(of("bert-cls"))
    watched(padded("classes"))
    shapes = blocks(watched.fast)
    assert watched.calls(padded("classes", seed=8)) == 1 and shapes[-1] == (3, 32)


def test_outputs_that_are_asked_for(blocks):
    batch = padded("classes")
    watched = Watched(of("bert-cls", attn_implementation="eager"))
    watched.fast(**batch, output_hidden_states=True)  # transformers installs its hooks now
    shapes = blocks(watched.fast)
    expected, outputs = watched({**batch, "output_hidden_states": True})
    assert shapes[-1] == (3, 32)
    real = batch["attention_mask"].bool()
    for a, b in zip(expected.hidden_states, outputs.hidden_states, strict=True):
        torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)
    expected, outputs = watched({**batch, "output_attentions": True})
    assert [a.shape for a in outputs.attentions] == [a.shape for a in expected.attentions]


def test_checkpointed_blocks(blocks):
    watched = Watched(of("bert-cls"))
    for model in (watched.plain, watched.fast):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shapes = blocks(watched.fast)
    watched(padded("classes"))
    assert shapes[-1] == (3, 32) and watched.sites()["body"]


def test_a_second_call_for_other_tokens_is_left_alone(blocks):
    watched = Watched(lambda: Pooled("first"))
    shapes, batch = blocks(watched.fast), padded("classes", width=32)
    batch["other_ids"] = torch.randint(3, VOCABULARY, (6, 32))
    batch["other_mask"] = torch.ones_like(batch["other_ids"])
    watched(batch)
    assert shapes[-4:] == [(3, 32), (3, 32), (6, 32), (6, 32)]
    batch["other_mask"] = batch["attention_mask"]  # the very same tokens are packed both times
    watched(batch)
    assert shapes[-4:] == [(3, 32)] * 4


@pytest.mark.parametrize(
    "pool, why", [("mean of all", "changes the result"), ("no mask", "not called with a mask")]
)
def test_what_cannot_be_packed_says_why(pool, why, blocks):
    watched = Watched(lambda: Pooled(pool))
    shapes = blocks(watched.fast)
    watched(padded("classes", width=32))
    assert shapes[-1] == (6, 32) and why in watched.reason("body")


def test_rows_stay_apart_where_it_is_not_faster(blocks):
    watched = Watched(lambda: Pooled("first", nap=0.1), timed=True)
    shapes = blocks(watched.fast)
    watched(padded("classes", width=32))
    assert shapes[-1] == (6, 32) and "does not pay" in watched.reason("body")


def test_no_trace_and_undo(blocks):
    watched = Watched(of("bert-cls"))
    shapes, encoder = blocks(watched.fast), watched.fast.bert.encoder
    before = {**vars(encoder)}
    watched(padded("classes"))
    assert shapes[-1] == (3, 32) and vars(encoder).keys() == before.keys()
    with torch.no_grad():
        watched.fast(**padded("classes"))
    assert shapes[-1] == (6, WIDTH)
    watched.step.undo()
    watched(padded("classes"))
    assert shapes[-1] == (6, WIDTH)


def test_an_error_inside_leaves_no_trace():
    watched = Watched(of("bert-cls"))
    watched(padded("classes"))
    watched.fast.classifier = torch.nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        watched.step(padded("classes"))
    assert "forward" not in vars(watched.fast.bert.encoder)


def test_the_model_is_not_kept_alive():
    watched = Watched(of("bert-cls"))
    watched(padded("classes"))
    reference = weakref.ref(watched.fast)
    del watched
    gc.collect()
    assert reference() is None
