"""Attention by products: its numbers against float64 and against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import ADDED, BF16, LOWER, outcome, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofuse.functional.attention import by_products, is_faster, reference


def exactly(given: list[Tensor], mask: Tensor | None, **options: Any) -> list[Tensor]:
    wide = [t.detach().double().requires_grad_() for t in given]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return outcome(reference, wide, mask, **options)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"heads": 2, "enable_gqa": True},
        {"keys": 9},
        {"keys": 9, "is_causal": True},
        {"mask": LOWER},
        {"mask": ADDED},
        {"mask": ADDED.to(BF16)},
        {"tokens": 300, "keys": 300, "is_causal": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_errors_against_float64_are_no_larger_than_pytorchs(
    options: dict[str, Any], scale: float, autocast: bool
) -> None:
    """Scores of all sizes: in bf16 large ones would be off. (With few tokens PyTorch, which rounds exp(S)
    before it divides by the sum, is up to 1.2 times as exact, with many less exact.)"""
    options = dict(options)
    mask = options.pop("mask", None)
    shape = {name: options.pop(name) for name in ("tokens", "keys", "heads") if name in options}
    given = [(t.detach() * scale).requires_grad_() for t in qkv(**shape)]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(BF16).to(mask.dtype)  # what autocast makes of it
    exact = exactly(given, mask, **options)
    if mask is ADDED and not autocast:
        mask = mask.float()
    with torch.autocast("cpu", BF16, enabled=autocast):
        assert is_faster(*given, mask, **options)
        ours = outcome(by_products, given, mask, **options)
        theirs = outcome(reference, given, mask, **options)
    assert {t.dtype for t in ours} == {BF16} and [t.shape for t in ours] == [t.shape for t in theirs]
    a, b = errors(ours, exact), errors(theirs, exact)
    assert max(a) < 8e-3 and sum(a) <= 1.3 * sum(b), (a, b)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 40),
    keys=st.integers(1, 40),
    channels=st.sampled_from([1, 8, 24]),
    masked=st.sampled_from(["no", "causal", "bool", "added"]),
    dropout=st.sampled_from([0.0, 0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_any_shape_is_as_pytorchs(
    tokens: int, keys: int, channels: int, masked: str, dropout: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    shapes = tokens, keys, keys
    made = (torch.randn(2, n, 3, channels, generator=g).to(BF16) for n in shapes)
    given = [x.transpose(1, 2).requires_grad_() for x in made]
    mask = None
    if masked in ("bool", "added"):
        mask = torch.rand(2, 1, tokens, keys, generator=g) < 0.6
        mask = mask if masked == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).to(BF16)
    options = {"dropout_p": dropout, "is_causal": masked == "causal"}
    found = []
    for attend in (by_products, reference):
        torch.manual_seed(seed)
        found.append([*outcome(attend, given, mask, **options), torch.get_rng_state()])
    for a, b in zip(*found, strict=True):
        assert (a.float() - b.float()).norm() <= 0.03 * b.float().norm() + 1e-3


@pytest.mark.parametrize("tokens", [12, 100, 450])
def test_with_dropout_the_error_is_twice_float32s_at_the_most(tokens: int) -> None:
    given, found = qkv(tokens, tokens), []
    for attend in (by_products, reference):
        torch.manual_seed(1)
        found.append(outcome(attend, given, None, dropout_p=0.25))
    torch.manual_seed(1)
    kept = torch.empty(2, 4, tokens, tokens).bernoulli_(0.75).double() / 0.75

    def exact(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return (torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) * kept) @ v

    expected = outcome(exact, [t.detach().double().requires_grad_() for t in given], None)
    ours, theirs = (errors(each, expected) for each in found)
    assert max(ours) < 6e-3 and sum(ours) <= 2.2 * sum(theirs), (ours, theirs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_output_is_laid_out_as_by_pytorch(dropout_p: float) -> None:
    """Whoever calls ``view`` on it relies on that."""
    flat = torch.randn(2, 16, 3 * 4 * 8).to(BF16).requires_grad_()
    by_heads = flat.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    for three in (list(by_heads), [t.detach().contiguous().requires_grad_() for t in by_heads]):
        ours, theirs = (f(*three, dropout_p=dropout_p) for f in (by_products, reference))
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": ADDED}, {"attn_mask": LOWER}])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_backward_through_the_backward(options: dict[str, Any], dropout_p: float) -> None:
    found = []
    for attend in (by_products, reference):
        given = qkv()
        torch.manual_seed(2)
        with sdpa_kernel(SDPBackend.MATH):
            out = attend(*given, dropout_p=dropout_p, **options)
        gradients = torch.autograd.grad(out.float().square().sum(), given, create_graph=True)
        sum(g.float().square().sum() for g in gradients).backward()
        found.append([t.grad.float() for t in given])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


def test_a_backward_through_the_backward_where_only_the_query_is_trained() -> None:
    q, k, v = qkv()
    (gradient,) = torch.autograd.grad(
        by_products(q, k.detach(), v.detach()).square().sum(), q, create_graph=True
    )
    gradient.float().square().sum().backward()
    assert q.grad is not None and q.grad.any() and k.grad is None


def test_gradients_of_several_directions_at_once() -> None:
    given = qkv()
    out = by_products(*given)
    directions = torch.randn(3, *out.shape).to(BF16)
    batched = torch.autograd.grad(out, given, directions, is_grads_batched=True, retain_graph=True)
    for n, direction in enumerate(directions):
        for a, b in zip(batched, torch.autograd.grad(out, given, direction, retain_graph=True), strict=True):
            torch.testing.assert_close(a[n], b, rtol=2e-2, atol=2e-2)


def test_where_the_kernel_is_switched_off_and_under_forward_derivatives_nothing_is_replaced() -> None:
    given = qkv()
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_faster(*given) and is_faster(*given, dropout_p=0.1)
    with torch.autograd.forward_ad.dual_level():
        assert not is_faster(*given) and not is_faster(*given, dropout_p=0.1)
    assert is_faster(*given) and not is_faster(*given, torch.zeros(12))


def test_a_query_that_sees_nothing_gives_what_it_gave() -> None:
    lowest = torch.zeros(12, 12)
    lowest[3] = torch.finfo(torch.float32).min
    for mask in (lowest, lowest == 0):
        with torch.autocast("cpu", BF16):
            ours, theirs = (outcome(f, qkv(), mask) for f in (by_products, reference))
        assert not ours[0][:, :, 3].any() and not ours[1][:, :, 3].any()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_what_is_not_finite_stays_so() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        q[0, 1, 2, 3] = torch.nan
    for mask in (None, LOWER):
        out = by_products(q, k, v, mask)
        assert out[0, 1, 2].isnan().all() and int(out.isnan().sum()) == out.shape[-1]


@pytest.mark.parametrize(
    "change, faster",
    [
        ({}, True),
        ({"dropout_p": 0.1}, True),
        ({"dropout_p": 1.0}, False),
        ({"attn_mask": LOWER}, True),
        ({"attn_mask": LOWER, "is_causal": True}, False),
        ({"attn_mask": ADDED.clone().requires_grad_()}, False),
        ({"enable_gqa": True}, True),
        ({"tokens": 385}, False),
        ({"tokens": 385, "dropout_p": 0.1}, True),
        ({"keys": 385}, False),
        ({"heads": 2}, False),
        ({"heads": 2, "enable_gqa": True}, True),
        ({"heads": 3, "enable_gqa": True}, False),
    ],
    ids=str,
)
def test_what_is_computed_by_products(change: dict[str, Any], faster: bool) -> None:
    shape = {name: change[name] for name in ("tokens", "keys", "heads") if name in change}
    options = {name: value for name, value in change.items() if name not in shape}
    assert is_faster(*qkv(**shape), **options) == faster
    assert not is_faster(*(t.detach() for t in qkv(**shape)), **options)


def test_dropout_is_the_same_when_it_is_compiled() -> None:
    from torch._inductor import config

    attend = torch.compile(by_products, fullgraph=True)
    with config.patch(fallback_random=True):
        found = []
        for f in (attend, by_products):
            torch.manual_seed(0)
            found.append(outcome(f, qkv(), None, dropout_p=0.3))
    for a, b in zip(*found, strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
