"""A head that is no module: the product with the embedding's own weight, written in the model's forward."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofuse
from autofuse.lazy import LazyLogits, is_built
from autofuse.tied import is_armed
from patchers import loss as patcher

CLASSES = 1200
IDS = torch.randint(CLASSES, (2, 10), generator=torch.Generator().manual_seed(3))
WAYS = {
    "linear": lambda h, w: F.linear(h, w),
    "linear by name": lambda h, w: F.linear(input=h, weight=w),
    "matmul": lambda h, w: torch.matmul(h, w.t()),
    "@": lambda h, w: h @ w.T,
    "transpose": lambda h, w: h @ w.transpose(0, 1),
}


class GPT(nn.Module):
    """A small language model, written as many write it. ``head`` is how the logits are computed."""

    def __init__(self, head="linear", positions=1024):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(CLASSES, 16), nn.Embedding(positions, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), head

    def forward(self, ids, labels=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = WAYS[self.head](self.norm(x), self.tokens.weight)
        if labels is None:
            return logits
        shifted = logits[:, :-1].reshape(-1, CLASSES)
        return {"loss": F.cross_entropy(shifted, labels[:, 1:].reshape(-1)), "logits": logits}

    @torch.no_grad()
    def generate(self, ids, steps=4):
        for _ in range(steps):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def optimized(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"precision": "fp32", "compile": False, "only": ["loss"], "measure": False, **options}
    return autofuse.optimize(model, optimizer, **{"measure": False, **options})


BATCH = {"ids": IDS, "labels": IDS}


@pytest.mark.parametrize("head", WAYS)
def test_training_goes_the_same_way(head):
    plain, fast = GPT(head), GPT(head)
    step, optimizer = optimized(fast), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        loss = plain(**BATCH)["loss"]
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        torch.testing.assert_close(step(BATCH), loss.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert patcher._uses[fast.tokens].fused


def test_tied_gradients_are_those_of_both_uses():
    plain, fast = GPT().double(), GPT().double()
    optimized(fast)
    for model in (plain, fast):
        logits = model(IDS)
        assert isinstance(logits, LazyLogits) == (model is fast)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    assert not is_built(logits)
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_the_report_names_it_and_what_is_no_head_is_left_alone():
    model = GPT()
    step = optimized(model)
    for _ in range(4):
        step(BATCH)
    sites = {site.path: site for site in step.report["loss"].sites}
    assert sites["tokens"].operation == "linear_cross_entropy"
    assert "no product with its weight follows" in sites["positions"].reason
    assert type(model.positions) is nn.Embedding
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_model_without_such_a_product():
    class Classifier(GPT):
        def forward(self, ids, labels):
            pooled = self.norm(self.tokens(ids) + self.positions(ids[:1] % 10)).mean(1)
            return {"loss": (pooled.sum(1) - labels.float().mean(1)).square().mean()}

    model = Classifier()
    step = optimized(model)
    for _ in range(5):
        step(BATCH)
    assert step.report["loss"].status == "rejected"
    assert type(model.tokens) is nn.Embedding and not is_armed(model.tokens.weight)


def test_evaluation_and_generation_are_untouched():
    plain, fast = GPT(), GPT()
    optimized(fast)
    for training in (True, False):
        plain.train(training), fast.train(training)
        with torch.no_grad():
            assert torch.equal(plain(IDS), fast(IDS))
        assert torch.equal(plain.generate(IDS), fast.generate(IDS))
    logits = fast(IDS)  # with gradients, in evaluation
    assert type(logits) is torch.Tensor and torch.equal(logits, plain(IDS))


def test_logits_are_real_for_whoever_reads_them():
    plain, fast = GPT(), GPT()
    optimized(fast)
    assert torch.equal(fast(IDS).argmax(-1), plain(IDS).argmax(-1))
    step = optimized(GPT())
    _, outputs = step(BATCH, return_outputs=True)
    assert type(outputs["logits"]) is torch.Tensor


def test_only_the_next_product_is_another_one():
    model = GPT()
    optimized(model)
    first, second = model(IDS), F.linear(torch.ones(1, 16), model.tokens.weight)
    assert isinstance(first, LazyLogits) and type(second) is torch.Tensor
    assert type(model.tokens.weight) is nn.Parameter
    model.tokens(IDS)  # and no product: something else is done with the weight
    weight = model.tokens.weight
    assert is_armed(weight) and isinstance(weight, nn.Parameter)
    for value in (
        weight * 2,
        weight.T * 2,
        weight.detach(),
        weight.sum(),
        weight[0],
        torch.ones(3, 1200) @ weight,
    ):
        assert type(value) is torch.Tensor
    assert type(torch.ones(1, 16) @ weight[:5].T) is torch.Tensor


def test_undo():
    model = GPT()
    weight = model.tokens.weight
    step = optimized(model)
    step(BATCH)
    model.tokens(IDS)
    step.undo()
    assert type(model.tokens) is nn.Embedding and type(weight) is nn.Parameter
    assert model.tokens.weight is weight and type(model(IDS)) is torch.Tensor


@pytest.mark.parametrize("armed", [False, True])
def test_copies_and_files(armed):
    model = GPT()
    optimized(model)
    model(IDS)
    if armed:
        model.tokens(IDS)
    assert is_armed(model.tokens.weight) == armed
    again = pickle.loads(pickle.dumps(model))
    assert type(again.tokens) is nn.Embedding and type(again.tokens.weight) is nn.Parameter
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in torch.load(file).items())
    copied = copy.deepcopy(model)
    logits = copied(IDS)
    assert isinstance(logits, LazyLogits) and type(copied.tokens.weight) is nn.Parameter
    with torch.no_grad():
        copied.tokens.weight.zero_()
    assert not model(IDS).argmax(-1).eq(0).all()


def test_recomputation_in_the_backward_leaves_it_alone():
    class Checkpointed(GPT):
        def forward(self, ids, labels=None):
            x = torch.utils.checkpoint.checkpoint(self.tokens, ids, use_reentrant=False)
            logits = F.linear(self.norm(x), self.tokens.weight)
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    model = Checkpointed()
    step = optimized(model)
    step(BATCH)
    assert step.report["loss"].status == "kept" and not is_armed(model.tokens.weight)


def test_autocast():
    plain, fast = GPT(), GPT()
    optimized(fast)
    losses = []
    for model in (plain, fast):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(**BATCH)["loss"])
    assert losses[0].dtype == losses[1].dtype and not is_built(fast(**BATCH)["logits"])
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


def test_the_model_is_not_kept_alive():
    model = GPT()
    step = optimized(model)
    step(BATCH)
    model.tokens(IDS)
    reference = weakref.ref(model)
    del model, step
    gc.collect()
    assert reference() is None
