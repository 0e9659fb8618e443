"""The loss patch in the training step: through the one line, on whole models."""

import copy

import pytest
import torch

import autofuse
from autofuse.functional import linear_cross_entropy as operation

transformers = pytest.importorskip("transformers")
VOCABULARY = 4096


def model(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def batch(number=0, kept=1.0, rows=2):
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (rows, 24), generator=draw)
    ignored = torch.rand(ids.shape, generator=draw) >= kept
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def optimize(net, optimizer=None, **options):
    options = {"precision": "fp32", "compile": False, **options}
    return autofuse.optimize(net, optimizer, **{"measure": False, **options})


@pytest.mark.parametrize("kept", [1.0, 0.15])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_losses_equal_the_plain_loops(kept, dropout):
    plain, fast = model(dropout), model(dropout)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    torch.manual_seed(1)
    expected = []
    for number in range(4):
        loss = plain(**batch(number, kept)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    step = optimize(fast, torch.optim.AdamW(fast.parameters(), lr=1e-2), measure=False)
    torch.manual_seed(1)
    assert [step(batch(number, kept)).item() for number in range(4)] == pytest.approx(expected, rel=1e-5)
    row = step.report["loss"]
    assert row.status == "kept" and row.error <= 1e-4, row.reason


def test_the_outputs_that_are_returned_stay_right():
    net = model()
    before = copy.deepcopy(net)
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=1.0), measure=False)
    loss, outputs = step(batch(), return_outputs=True)
    expected = before(**batch())
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert type(outputs) is type(expected) and list(outputs) == list(expected)
    torch.testing.assert_close(outputs.logits, expected.logits)
    assert type(outputs.logits) is torch.Tensor
    assert not torch.allclose(net(**batch()).loss, expected.loss)  # the weights have moved since


def test_logits_that_the_loop_still_holds_stay_that_forwards():
    """The legacy way to count accuracy: read after the step. The loop holds them, so they are built."""
    net = model()
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=1.0), measure=False)
    held = []
    for number in range(3):
        expected = copy.deepcopy(net)(**batch(number)).logits
        with step.autocast():
            outputs = net(**batch(number))
        step.backward(outputs.loss)
        step.update()
        torch.testing.assert_close(outputs.logits.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        held.append((outputs.logits, expected))
    for logits, expected in held:
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert step.report["loss"].status == "kept"


def test_logits_that_nobody_holds_are_never_built(monkeypatch):
    monkeypatch.setattr(operation, "_budget", lambda device: 1 << 20)
    monkeypatch.setattr(operation, "LEAST_ROWS", 16)
    net = model()
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=1.0), measure=False)
    step(batch())
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            real = type(out) is torch.Tensor and out.device.type != "meta"
            if real and out.dim() > 1 and out.shape[-1] == VOCABULARY:
                largest[0] = max(largest[0], out.numel())
            return out

    big = batch(rows=64)
    with Watch():
        step(big)
    assert 0 < largest[0] < big["labels"].numel() * VOCABULARY


def test_a_loss_outside_of_the_model_stays_lazy_in_pieces():
    net = model()
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), measure=False)
    for number in range(4):
        given = batch(number)
        with step.autocast():
            logits = net(input_ids=given["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].reshape(-1, VOCABULARY), given["labels"][:, 1:].reshape(-1)
            )
        del logits
        step.backward(loss)
        assert step.update()
    assert step.report["loss"].status == "kept", step.report["loss"].reason


@pytest.mark.parametrize("counts", [(1.0, 0.2), (0.1, 0.0, 0.9)])
def test_accumulation_is_the_joined_batch(counts):
    plain, fast = model(), model()
    batches = [batch(number, kept) for number, kept in enumerate(counts)]
    joined = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    plain(**joined).loss.backward()
    optimizer = torch.optim.SGD(fast.parameters(), lr=1.0)
    weights = [p.detach().clone() for p in fast.parameters()]
    step = optimize(fast, optimizer, accumulate=len(batches), measure=False)
    for each in batches:
        step(each)
    difference = norm = 0.0
    for a, before, after in zip(plain.parameters(), weights, fast.parameters(), strict=True):
        difference += (a.grad - (before - after.detach())).square().sum().item()
        norm += a.grad.square().sum().item()
    assert (difference / norm) ** 0.5 < 1e-3  # the update itself rounds


def test_evaluation_and_generation_are_as_before():
    net = model()
    ids = batch()["input_ids"]
    net.eval()
    with torch.no_grad():
        expected = net(ids).logits
    generated = net.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    net.train()
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.0), measure=False)
    step(batch())
    net.eval()
    with torch.no_grad():
        logits = net(ids).logits
    assert type(logits) is torch.Tensor and torch.equal(logits, expected)
    assert torch.equal(net.generate(ids[:, :4], max_new_tokens=4, do_sample=False), generated)


def test_undo_gives_the_layer_back():
    net = model()
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), measure=False)
    step(batch())
    assert type(net.lm_head) is not torch.nn.Linear
    step.undo()
    assert type(net.lm_head) is torch.nn.Linear
    assert type(net(**batch()).logits) is torch.Tensor


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_lower_precision(precision):
    net = model()
    step = optimize(net, torch.optim.AdamW(net.parameters(), lr=1e-3), precision=precision, measure=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: None)
        losses = [step(batch()).item() for _ in range(8)]
    assert step.report["loss"].status == "kept", step.report["loss"].reason
    assert losses[-1] < losses[0]
