"""Logits that are not built: what stays lazy, what builds them, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autofuse.lazy import Fate, is_built, lazy_linear, materialize

V, H = 37, 8
Y = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(0))
Y[0, 2] = Y[1, 0] = -100
Made = tuple[Tensor, Tensor, Tensor]


def made() -> Made:
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 6, H), (V, H), (V,))
    return tuple(torch.randn(s, generator=g).requires_grad_() for s in shapes)  # type: ignore[return-value]


def flat(z: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), Y.reshape(-1), **options)


def flat_pair(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1), reduction="sum")


def probabilities(*shape: int, dim: int = -1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).softmax(dim)


def mapped(logits: Tensor, function: Callable[[Tensor], Any], *also: Tensor) -> Tensor:
    function(logits)
    return flat(logits)


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda z: F.cross_entropy(z.float().view(-1, V), Y.view(-1)),
    "module": lambda z: nn.CrossEntropyLoss()(z.flatten(0, 1), Y.flatten()),
    "shifted": lambda z: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, V), Y[..., 1:].contiguous().view(-1)
    ),
    "a range": lambda z: F.cross_entropy(z[:, 1:4].reshape(-1, V), Y[:, 1:4].reshape(-1)),
    "the last position": lambda z: F.cross_entropy(z[:, -1], Y[:, -1]),
    "positions": lambda z: F.cross_entropy(z[:, [1, 3]].reshape(-1, V), Y[:, [1, 3]].reshape(-1)),
    "a mask": lambda z: F.cross_entropy(z[Y != -100], Y[Y != -100]),
    "index_select": lambda z: F.cross_entropy(z[0].index_select(0, torch.tensor([4, 1])), Y[0, [4, 1]]),
    "chunks": lambda z: sum(flat_pair(*pair) for pair in zip(z.chunk(2, 1), Y.chunk(2, 1), strict=True)),
    "parts": lambda z: sum(
        flat_pair(*pair) for pair in zip(z.split([1, 5], 1), Y.split([1, 5], 1), strict=True)
    ),
    "each row": lambda z: sum(flat_pair(*pair) for pair in zip(z, Y, strict=True)),
    "unsqueeze": lambda z: flat(z.unsqueeze(1)),
    "squeeze": lambda z: F.cross_entropy(z[:1].squeeze(0), Y[0]),
    "unflatten": lambda z: flat(z.unflatten(1, (2, 3))),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), Y),
    "permuted and back": lambda z: flat(z.permute(2, 0, 1).permute(1, 2, 0)),
    "time first": lambda z: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), Y.t().reshape(-1)),
    "double": lambda z: flat(z.double()),
    "scaled": lambda z: flat(z * 0.3 / 2),
    "scaled by a tensor": lambda z: flat(torch.tensor(0.3) * z),
    "soft-capped": lambda z: flat(torch.tanh(z / 3.0) * 3.0),
    "with a bias": lambda z: flat(z + torch.linspace(0, 1, V)),
    "weights": lambda z: flat(z, weight=torch.linspace(0.1, 1, V), label_smoothing=0.1),
    "sum": lambda z: flat(z, reduction="sum") / 7,
    "none": lambda z: (flat(z, reduction="none") * torch.linspace(0, 1, 12)).sum(),
    "none, classes second": lambda z: (
        F.cross_entropy(z.mT, Y, reduction="none") * torch.ones(2, 6).cumsum(1)
    ).sum(),
    "all ignored": lambda z: F.cross_entropy(z.view(-1, V), torch.full((12,), -100)),
    "all ignored, sum": lambda z: F.cross_entropy(z.view(-1, V), torch.full((12,), -100), reduction="sum"),
    "another ignore_index": lambda z: F.cross_entropy(z.view(-1, V), Y.view(-1).clamp(min=0), ignore_index=0),
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), probabilities(12, V)),
    "probabilities, classes second": lambda z: F.cross_entropy(z.mT, probabilities(2, V, 6, dim=1)),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, -1).view(-1, V), Y.view(-1)),
    "nll, classes second": lambda z: nn.NLLLoss()(torch.log_softmax(z, -1).transpose(1, 2), Y),
    "nll, dtype": lambda z: F.nll_loss(z.view(-1, V).log_softmax(1, dtype=torch.float32), Y.view(-1)),
    "two losses": lambda z: flat(z) + 0.1 * flat(z[:, :] * 0.5, label_smoothing=0.2),
}

BUILT: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy after": lambda z: flat(z) + 0 * (z.argmax(-1) == Y).sum(),
    "accuracy before": lambda z: 0 * (z.argmax(-1) == Y).sum() + flat(z),
    "z-loss": lambda z: flat(z) + 1e-2 * z.logsumexp(-1).square().mean(),
    "z-loss before": lambda z: 1e-2 * z.logsumexp(-1).square().mean() + flat(z),
    "entropy": lambda z: flat(z) - 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "kl": lambda z: flat(z) + F.kl_div(z.log_softmax(-1), probabilities(2, 6, V), reduction="batchmean"),
    "gathered": lambda z: -z.log_softmax(-1).gather(-1, Y.clamp(min=0)[..., None]).mean(),
    "in place": lambda z: flat(z.mul_(2)),
    "in place through a view": lambda z: mapped(z, lambda z: z.view(-1, V)[:, 2].mul_(3)),
    "in place after a view": lambda z: (
        [z.view(-1, V), z.add_(torch.arange(V))][0].logsumexp(1).sum() + flat(z)
    ),
    "an item": lambda z: mapped(z, lambda z: z.__setitem__((..., 3), -5.0)),
    "masked items": lambda z: mapped(z, lambda z: z.__setitem__(Y == -100, 0.0)),
    "some classes": lambda z: F.cross_entropy(z[..., :30].reshape(-1, 30), Y.view(-1).clamp(max=29)),
    "stacked": lambda z: F.cross_entropy(torch.stack([z, z]).view(-1, V), torch.cat([Y, Y]).view(-1)),
    "concatenated": lambda z: flat(torch.cat([z[:, :2], z[:, 2:]], 1)),
    "where": lambda z: flat(torch.where(torch.arange(V) > 3, z, z * 2)),
    "masked classes": lambda z: F.cross_entropy(
        z.view(-1, V).masked_fill(torch.arange(V) == 36, -1e4), Y.view(-1).clamp(max=35)
    ),
    "other classes": lambda z: F.cross_entropy(z, probabilities(2, 6, V, dim=1)),
    "a hook": lambda z: mapped(z, lambda z: z.register_hook(lambda g: 2 * g)),
    "somebody's function": lambda z: flat(Twice.apply(z)),
}


class Twice(torch.autograd.Function):
    """Passes its input on, and twice the gradient back, as a hook on a module's output might."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def outcome(loss: Tensor, inputs: Made) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, inputs, retain_graph=True)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", LAZY)
def test_stays_lazy(name: str) -> None:
    a, b, fate = made(), made(), Fate()
    logits = lazy_linear(*a, fate)
    assert_same(outcome(LAZY[name](logits), a), outcome(LAZY[name](F.linear(*b)), b))
    assert not is_built(logits) and fate.fused and fate.materialized_by is None


@pytest.mark.parametrize("name", BUILT)
def test_builds_the_real_logits(name: str) -> None:
    a, b, fate = made(), made(), Fate()
    logits = lazy_linear(*a, fate)
    assert_same(outcome(BUILT[name](logits), a), outcome(BUILT[name](F.linear(*b)), b))
    assert is_built(logits) and fate.materialized_by is not None


def test_says_what_the_logits_say() -> None:
    a = made()
    real, lazy = F.linear(*a), lazy_linear(*a)
    for x, y in ((real, lazy), (real[:, 1:], lazy[:, 1:]), (real.half().mT, lazy.half().mT)):
        assert isinstance(y, torch.Tensor)
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "nbytes"):
            assert getattr(x, what) == getattr(y, what), what
        assert x.stride() == y.stride() and x.is_contiguous() == y.is_contiguous() and len(x) == len(y)
    assert not is_built(lazy)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda z: z.detach().numpy().sum(),
    "tolist": lambda z: sum(z[0, 0].tolist()),
    "item": lambda z: z[0, 0, 0].item(),
    "iteration": lambda z: sum(float(row.detach().sum()) for row in z),
    "deepcopy": lambda z: copy.deepcopy(z.detach()).sum(),
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())).sum(),
    "max": lambda z: z.max(-1).values.sum(),
    "einsum": lambda z: torch.einsum("btv->b", z).sum(),
    "data": lambda z: z.data.sum(),
    "comparison": lambda z: float((z == z).sum()),
    "integers": lambda z: z.long().sum(),
    "copy_": lambda z: torch.zeros(z.shape).copy_(z).sum(),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_get_plain_numbers(name: str) -> None:
    a = made()
    real, lazy = READERS[name](F.linear(*a)), READERS[name](lazy_linear(*a))
    assert float(real) == pytest.approx(float(lazy), rel=1e-5)
    assert type(lazy) is type(real)


def test_saved_and_printed_as_a_plain_tensor() -> None:
    file, lazy = io.BytesIO(), lazy_linear(*made())
    torch.save({"logits": lazy}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["logits"]
    assert type(loaded) is Tensor and torch.equal(loaded, materialize(lazy))
    assert repr(lazy).startswith("tensor([[[")
    assert type(lazy.detach()) is type(lazy.cpu()) is type(materialize([lazy])[0]) is Tensor


def test_built_once() -> None:
    lazy = lazy_linear(*made())
    one, two = lazy[:, 1:].float().sum(-1), lazy.view(-1, V).sum(-1)
    assert torch.equal(two.view(2, 6)[:, 1:], one)
    assert lazy._value() is lazy._value() and lazy[:, 1:].data_ptr() == lazy._value()[:, 1:].data_ptr()


def test_nothing_stays_alive() -> None:
    gc.disable()
    try:
        h, w, b = made()
        h = h * 2
        logits = lazy_linear(h, w, b)
        loss = flat(logits.float() * 2)
        alive = [weakref.ref(h), weakref.ref(logits)]
        del h, logits, loss
        assert [x() for x in alive] == [None, None]
    finally:
        gc.enable()


# --- gradients, by every road --------------------------------------------------------------------


def test_gradients_of_the_logits_themselves() -> None:
    for late in (False, True):
        grads = []
        for linear in (F.linear, lazy_linear):
            a = made()
            z = linear(*a)
            if not late:
                z.retain_grad()
            loss = flat(z)
            if late:
                z.retain_grad()
            loss.backward()
            grads.append([z.grad, *(x.grad for x in a)])
        assert_same(grads[1], grads[0])
    a = made()
    z, real = lazy_linear(*a), F.linear(*a)
    both = torch.autograd.grad(flat(z), (z, a[0]))
    assert_same([*both], [*torch.autograd.grad(flat(real), (real, a[0]))])


def test_double_backward() -> None:
    results = []
    for linear in (F.linear, lazy_linear):
        a = made()
        first = torch.autograd.grad(flat(linear(*a)), a, create_graph=True)
        results.append([*torch.autograd.grad(sum(x.square().sum() for x in first), a)])
    assert_same(results[1], results[0])


def test_hooks_on_what_comes_before() -> None:
    seen = []
    for linear in (F.linear, lazy_linear):
        h, w, b = made()
        h2 = h * 2
        h2.register_hook(seen.append)
        flat(linear(h2, w, b)).backward()
    torch.testing.assert_close(seen[1], seen[0])


def test_scale_weight_and_bias_that_learn() -> None:
    results = []
    for linear in (F.linear, lazy_linear):
        a = made()
        scale, shift = torch.tensor(1.3, requires_grad=True), torch.zeros(V, requires_grad=True)
        z = linear(*a)
        loss = flat(z * scale + shift)
        results.append([loss, *torch.autograd.grad(loss, (*a, scale, shift))])
        assert linear is F.linear or not is_built(z)
    assert_same(results[1], results[0])


def test_frozen_weight_and_frozen_trunk() -> None:
    for frozen in (0, 1, 2):
        results = []
        for linear in (F.linear, lazy_linear):
            a = made()
            a[frozen].requires_grad_(False)
            flat(linear(*a)).backward()
            assert a[frozen].grad is None
            results.append([x.grad for x in a if x.grad is not None])
        assert_same(results[1], results[0])


def test_autocast_and_loss_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for cast in (False, True):
            a = [x.detach().to(dtype).requires_grad_() for x in made()]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                real, lazy = F.linear(*a), lazy_linear(*a)
                assert real.dtype == lazy.dtype
                assert flat(real).dtype == flat(lazy).dtype
            assert torch.equal(real, lazy)


# --- later ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_data", [False, True])
def test_never_the_new_weights_values(through_data: bool) -> None:
    h, w, b = made()
    early, late = lazy_linear(h, w, b), lazy_linear(h, w, b)
    before = F.linear(h, w, b)
    (flat(early) + flat(late)).backward()
    early.detach()
    with torch.no_grad():
        (w.data if through_data else w).sub_(w.grad)
    assert torch.equal(early, before)
    with pytest.raises(RuntimeError, match="weights have changed"):
        late.sum()
