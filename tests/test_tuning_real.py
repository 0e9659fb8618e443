"""Tuning with the real patches and the real clock: the losses are the plain loop's; the Trainer's loop."""

import pytest
import torch
from doubles import register
from test_wrappers import trainer
from tuned import Time

import autofuse
import autofuse.clock
from autofuse.patch import Patch, Site

transformers = pytest.importorskip("transformers")

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
VOCABULARY = 5000  # large enough that the logits are worth leaving out


def gpt2(dropout):
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **SIZES, **dropouts)
    ).train()


def text(number):
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[:, :: 2 + number % 3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_loss_over_100_steps_is_the_plain_loops(dropout):
    model = gpt2(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    expected = []
    for number in range(100):
        loss = model(**text(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model = gpt2(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    step = autofuse.optimize(model, optimizer, precision="fp32", compile=False)
    losses, tried = [], set()
    for number in range(100):
        tried |= {patch.name for patch in step._patches if patch.applied}
        losses.append(step(text(number)).item())
    assert tried >= {"loss", "norms", "optimizer"}, str(step.report)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-5)


@pytest.mark.parametrize("saves", [True, False])
def test_inside_the_trainers_loop(monkeypatch, tmp_path, saves):
    time, cost = Time(), {"seconds": 1.0}
    monkeypatch.setattr(autofuse.clock, "time", time)

    def find(context):
        def change(transaction, sites):
            transaction.set_item(cost, "seconds", 0.5 if saves else 1.5)

        return Patch([Site("", "GPT2", "double", "tests")], change, reason="for a test")

    register(monkeypatch, double=find)
    plain = trainer(tmp_path)
    plain.args.max_steps = 20
    plain.train()
    tuned = trainer(tmp_path)
    tuned.args.max_steps = 20
    step = autofuse.optimize(tuned, only=["double"], precision="fp32")
    tuned.model.register_forward_pre_hook(lambda *_: time.passes(cost["seconds"]))
    tuned.train()
    row = step.report["double"]
    assert not step.tuning and row.status == ("kept" if saves else "rejected"), str(step.report)
    assert row.before_ms == pytest.approx(2000)  # two micro-batches
    assert row.after_ms == pytest.approx(1000 if saves else 3000)
    assert step.report.counters.steps == 20
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, tuned)]
    assert losses[0] == losses[1]
