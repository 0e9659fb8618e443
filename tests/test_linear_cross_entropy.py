"""The chunked loss against ``F.cross_entropy`` in float64, over shapes, options, labels and dtypes."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofuse.functional import linear_cross_entropy as file
from autofuse.functional.linear_cross_entropy import PROVIDERS, choose, linear_cross_entropy
from autofuse.hardware import Hardware

IGNORE = 3


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: dict[str, Any]
    cap: float | None = None
    chunk: int | None = None

    def inputs(self, dtype: torch.dtype) -> list[Tensor | None]:
        found = (self.hidden, self.weight, self.bias)
        return [None if x is None else x.to(dtype).detach().requires_grad_() for x in found]


@st.composite
def cases(draw: Any) -> Case:
    n, width, classes = draw(st.integers(0, 9)), draw(st.integers(1, 6)), draw(st.integers(IGNORE + 1, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1.0, 6.0]))
    dense = draw(st.booleans())
    if dense:
        target = torch.rand(n, classes, generator=g, dtype=torch.float64)
    else:
        target = torch.randint(classes, (n,), generator=g)
        ignored = draw(st.sampled_from([0.0, 0.5, 1.0]))
        target[torch.rand(n, generator=g) < ignored] = IGNORE
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "ignore_index": IGNORE if not dense and draw(st.booleans()) else -100,
    }
    weighted = draw(st.booleans())
    options["weight"] = torch.rand(classes, generator=g, dtype=torch.float64) if weighted else None
    return Case(
        torch.randn(n, width, generator=g, dtype=torch.float64) * scale,
        torch.randn(classes, width, generator=g, dtype=torch.float64),
        torch.randn(classes, generator=g, dtype=torch.float64) if draw(st.booleans()) else None,
        target,
        options,
        draw(st.sampled_from([None, 2.0])),
        draw(st.sampled_from([None, 1, 4])),
    )


def unfused(case: Case, inputs: list[Any], dtype: torch.dtype) -> Tensor:
    logits = F.linear(*inputs).to(torch.promote_types(dtype, torch.float32))
    logits = logits if case.cap is None else torch.tanh(logits / case.cap) * case.cap
    target = case.target.to(logits.dtype) if case.target.is_floating_point() else case.target
    weight = case.options["weight"]
    options = case.options | {"weight": None if weight is None else weight.to(logits.dtype)}
    return F.cross_entropy(logits, target, **options)


def fused(case: Case, inputs: list[Any], dtype: torch.dtype, provider: str = "torch") -> Tensor:
    options = dict(case.options)
    return linear_cross_entropy(
        inputs[0],
        inputs[1],
        case.target if not case.target.is_floating_point() else case.target.to(dtype),
        inputs[2],
        class_weight=options.pop("weight"),
        epilogue=None if case.cap is None else lambda x: torch.tanh(x / case.cap) * case.cap,
        chunk=case.chunk,
        provider=provider,
        **options,
    )


def results(loss: Tensor, inputs: list[Any]) -> list[Tensor]:
    """The loss and the gradients for unequal weights of the rows' losses."""
    g = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    gradients = torch.autograd.grad(loss, [x for x in inputs if x is not None], g)
    return [loss.detach().double(), *(x.double() for x in gradients)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference over norm of the original (or one: a gradient may be zero in exact arithmetic),
    where both are finite; else they must agree."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        finite = b.isfinite()
        assert torch.equal(a.isnan(), b.isnan())
        difference = (a - b)[finite].norm() / b[finite].norm().clamp(min=1.0)
        worst = max(worst, float(difference))
    return worst


@given(cases())
@settings(max_examples=300, deadline=None)
def test_float64_agrees(case: Case) -> None:
    a, b = case.inputs(torch.float64), case.inputs(torch.float64)
    loss = fused(case, a, torch.float64)
    assert loss.dtype == torch.float64
    assert error(results(loss, a), results(unfused(case, b, torch.float64), b)) < 1e-10


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=300, deadline=None)
def test_no_further_from_float64_than_the_unfused_loss(case: Case, dtype: torch.dtype) -> None:
    rounded = [None if x is None else x.double() for x in case.inputs(dtype)]
    exact = Case(*rounded, case.target, case.options, case.cap)
    e, a, b = exact.inputs(torch.float64), case.inputs(dtype), case.inputs(dtype)
    truth = results(unfused(exact, e, torch.float64), e)
    theirs = error(results(unfused(case, b, dtype), b), truth)
    units = 4.0  # of rounding, which a few terms may have by chance where theirs have none
    if dtype == torch.float32:  # a logit's own rounding is a relative error of its probability
        units += float((exact.hidden @ exact.weight.T).abs().max()) if exact.hidden.numel() else 0.0
    assert error(results(fused(case, a, dtype), a), truth) <= max(
        1.5 * theirs, units * torch.finfo(dtype).eps
    )


@given(cases())
@settings(max_examples=60, deadline=None)
def test_autocast(case: Case) -> None:
    case = Case(*case.inputs(torch.float32), case.target, case.options, case.cap, case.chunk)
    e, a, b = case.inputs(torch.float64), case.inputs(torch.float32), case.inputs(torch.float32)
    truth = results(unfused(case, e, torch.float64), e)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused(case, a, torch.float32), unfused(case, b, torch.bfloat16)
    assert ours.dtype == torch.float32
    assert error(results(ours, a), truth) <= max(1.5 * error(results(theirs, b), truth), 2 * 2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_problem_is_as_exact_as_the_unfused_one(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    case = Case(
        torch.randn(256, 32, generator=g),
        torch.randn(2000, 32, generator=g) * 0.3,
        torch.randn(2000, generator=g),
        torch.randint(20, (256,), generator=g),
        {"weight": None},
        chunk=32,
    )
    e, a, b = (case.inputs(d) for d in (torch.float64, torch.float32, torch.float32))
    truth = results(unfused(case, e, torch.float64), e)
    with torch.autocast("cpu", dtype):
        ours, theirs = fused(case, a, torch.float32), unfused(case, b, dtype)
    assert error(results(ours, a), truth) <= 1.5 * error(results(theirs, b), truth)


def make(n: int = 6, width: int = 4, classes: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    target = torch.randint(classes, (n,), generator=g)
    target[1] = -100
    return torch.randn(n, width, generator=g), torch.randn(classes, width, generator=g), target


def test_only_needed_products_and_nothing_without_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w, y = make()
    seen: list[list[bool]] = []
    sums = file._Sums.__init__
    monkeypatch.setattr(
        file._Sums, "__init__", lambda self, *a: (seen.append(list(a[-1])), sums(self, *a))[1]
    )
    linear_cross_entropy(h.requires_grad_(), w, y).backward()
    assert h.grad is not None and seen == [[True, False, False]]
    with torch.no_grad():
        linear_cross_entropy(h, w, y)
    linear_cross_entropy(h.detach(), w, y)
    assert len(seen) == 1


def test_second_backward_accumulation_and_scale() -> None:
    h, w, y = make()
    h.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(h, w, y, chunk=2)
    first = torch.autograd.grad(loss * 3, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, 3 * b)


def test_the_weight_gradient_is_given_away_not_copied() -> None:
    h, w, y = make()
    w.requires_grad_()
    made: list[int] = []
    finish = file._Sums.finish

    def spy(self: Any, *args: Any) -> Any:
        made.append(self.weight.data_ptr())
        return finish(self, *args)

    file._Sums.finish = spy
    try:
        linear_cross_entropy(h, w, y).backward()
    finally:
        file._Sums.finish = finish
    assert w.grad is not None and w.grad.data_ptr() == made[0]


class Fresh(TorchDispatchMode):
    """The places of the tensors of at least ``numel`` elements that operations make."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.places, self.kept = numel, set[int](), list[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel() >= self.numel]
        self.kept += [x.untyped_storage() for x in found]  # so that no place is used again
        self.places |= {x.untyped_storage().data_ptr() for x in found}
        return out


def test_the_weights_copy_lies_in_its_gradients_memory() -> None:
    h, w, y = make(classes=9000, width=16)
    w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), Fresh(w.numel()) as fresh:
        linear_cross_entropy(h, w, y).backward()
    assert w.grad is not None and w.grad.dtype == torch.float32
    assert fresh.places - {w.data_ptr()} == {w.grad.data_ptr()}
    exact = w.detach().double().requires_grad_()
    F.cross_entropy(h.double() @ exact.T, y).backward()
    assert error([w.grad], [exact.grad]) < 2 * 2**-7  # type: ignore[list-item]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_double_backward(reduction: str) -> None:
    h, w, y = make()
    h, w, t = h.double().requires_grad_(), w.double().requires_grad_(), torch.tensor(1.3).double()
    t.requires_grad_()

    def run(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(
            h, w, y, reduction=reduction, epilogue=lambda x, t: x * t, tensors=(t,), chunk=2
        )

    assert torch.autograd.gradcheck(run, (h, w, t))
    assert torch.autograd.gradgradcheck(run, (h, w, t))


def test_wrong_labels_are_the_error_that_they_were() -> None:
    h, w, y = make()
    for wrong in (9, -1):
        y[0] = wrong
        with pytest.raises(IndexError) as theirs:
            F.cross_entropy(h @ w.T, y)
        with pytest.raises(IndexError, match=str(theirs.value)):
            linear_cross_entropy(h, w, y)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type != "meta"]
        self.numel = max([self.numel, *sizes])
        return out


def test_a_large_vocabulary_is_never_whole() -> None:
    rows, classes = 700, 128_256
    h, w = torch.randn(rows, 2, requires_grad=True), torch.randn(classes, 2, requires_grad=True)
    y = torch.randint(classes, (rows,))
    with Largest() as largest:
        linear_cross_entropy(h, w, y).backward()
    assert largest.numel <= rows * classes / 2


@pytest.mark.parametrize("provider", sorted(PROVIDERS))
def test_every_provider_gives_the_reference(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    liger_double(monkeypatch)
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        for target in (torch.tensor([1, IGNORE, 0, 2]), torch.full((4,), IGNORE)):
            g = torch.Generator().manual_seed(0)
            h, w = torch.randn(4, 3, generator=g), torch.randn(5, 3, generator=g)
            case = Case(h, w, torch.ones(5), target, {"weight": None, "ignore_index": IGNORE, **options})
            a, b = case.inputs(torch.float32), case.inputs(torch.float32)
            found = results(fused(case, a, torch.float32, provider), a)
            assert error(found, results(unfused(case, b, torch.float32), b)) < 1e-5


def liger_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of Liger's function, with the arguments and results that its 0.5 to 0.7 have."""

    class LigerFusedLinearCrossEntropyFunction:
        @staticmethod
        def apply(
            _input: Tensor,
            weight: Tensor,
            target: Tensor,
            bias: Tensor | None = None,
            ce_weight: Tensor | None = None,
            ignore_index: int = -100,
            lse_square_scale: float = 0.0,
            label_smoothing: float = 0.0,
            reduction: str = "mean",
            softcap: float | None = None,
            return_z_loss: bool = False,
            accum_dtype: torch.dtype | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            assert lse_square_scale == 0 and softcap is None and not return_z_loss
            loss = F.cross_entropy(
                F.linear(_input, weight, bias),
                target,
                ce_weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
            return loss, None

    name = "liger_kernel.ops.fused_linear_cross_entropy"
    module = types.ModuleType(name)
    module.LigerFusedLinearCrossEntropyFunction = LigerFusedLinearCrossEntropyFunction
    for part in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)


def test_liger_is_chosen_only_where_it_works() -> None:
    assert choose(Hardware.named("A100", providers={"liger": None})) == "liger"
    assert choose(Hardware.named("A100")) == "torch"
    assert choose(Hardware.named("cpu")) == "torch"
