"""`autofuse.FusedAdam`, the drop-in for Apex's: constructor, state, numbers, and Apex's own kernel."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from autofuse.functional import adam
from autofuse.functional.adam import Hyper, Rule, adam_update, reference_update
from autofuse.optim import FusedAdam


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (), (0, 2)]
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).bfloat16().to(dtype))
        for s in shapes
    ]


def train(optimizer: Any, owned: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in owned:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = noise.bfloat16().to(p.dtype)
        optimizer.step()


def distance(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    return max(float((p.double() - q.double()).detach().norm()) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("adam_w_mode", "cls"), [(True, AdamW), (False, Adam)])
def test_parity_with_torch(adam_w_mode: bool, cls: type[Adam], dtype: torch.dtype) -> None:
    ours, theirs = params(dtype), params(dtype)
    train(FusedAdam(ours, lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode), ours, range(12))
    train(cls(theirs, lr=0.01, weight_decay=0.1), theirs, range(12))
    assert distance(ours, theirs) < (1e-5 if dtype is torch.float32 else 1e-13)


def test_without_bias_correction() -> None:
    ours, theirs = params(torch.float64), params(torch.float64)
    optimizer = FusedAdam(ours, lr=0.01, bias_correction=False, weight_decay=0.1)
    moments = [(torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in theirs]
    for step in range(5):
        train(optimizer, ours, range(step, step + 1))
        for p, q, (m, v) in zip(theirs, ours, moments, strict=True):
            assert q.grad is not None
            with torch.no_grad():
                m.mul_(0.9).add_(q.grad, alpha=0.1)
                v.mul_(0.999).add_(q.grad**2, alpha=0.001)
                p.sub_(0.01 * (m / (v.sqrt() + 1e-8) + 0.1 * p))
    assert distance(ours, theirs) < 1e-13


def test_the_constructor_is_apexs() -> None:
    names = "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable"
    assert [*inspect.signature(FusedAdam).parameters][:11] == [*names.split(), "master_weights"]
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(params(), amsgrad=True)
    with pytest.raises(ValueError, match=r"max_grad_norm.*clip_grad_norm_\(parameters, 1.0\)"):
        FusedAdam(params(), max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="closure"):
        FusedAdam(params()).step(grads=[])


def test_zero_grad_follows_set_grad_none() -> None:
    for none in (True, False):
        owned = params()
        optimizer = FusedAdam(owned, set_grad_none=none)
        train(optimizer, owned, range(1))
        optimizer.zero_grad()
        assert all((p.grad is None) if none else not p.grad.any() for p in owned)  # type: ignore[union-attr]


def test_sparse_gradients_are_an_error() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam([p]).step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_follow_the_exact_training(dtype: torch.dtype) -> None:
    exact, plain, master = params(torch.float64), params(dtype), params(dtype)
    with_master = FusedAdam(master, lr=1e-4, master_weights=True)
    train(FusedAdam(exact, lr=1e-4), exact, range(30))
    train(FusedAdam(plain, lr=1e-4), plain, range(30))
    train(with_master, master, range(30))
    masters = [with_master.state[p]["master_param"] for p in master]
    assert distance(exact, masters) < 2e-6 < distance(exact, plain) / 50
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(master, masters, strict=True))


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"capturable": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_training_goes_on_from_a_copy(how: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    owned = params(dtype)
    optimizer = FusedAdam(owned, lr=0.01, weight_decay=0.1, adam_w_mode=False, **options)
    train(optimizer, owned, range(5))
    if how == "state_dict":
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        others = [nn.Parameter(p.detach().clone()) for p in owned]
        other = FusedAdam(others, adam_w_mode=False, **options)
        other.load_state_dict(torch.load(buffer))
    else:
        copied = (owned, optimizer)
        others, other = copy.deepcopy(copied) if how == "deepcopy" else pickle.loads(pickle.dumps(copied))
    for p, q in zip(owned, others, strict=True):
        for name, value in optimizer.state[p].items():
            assert value.dtype is other.state[q][name].dtype is torch.float32
            assert torch.equal(value, other.state[q][name])
    train(optimizer, owned, range(5, 10))
    train(other, others, range(5, 10))
    assert distance(owned, others) == 0.0


def test_the_state_dict_has_apexs_names() -> None:
    owned = params()
    optimizer = FusedAdam(owned)
    train(optimizer, owned, range(3))
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq"} and saved["param_groups"][0]["step"] == 3
    expected = {"lr", "bias_correction", "betas", "eps", "weight_decay", "step", "params"}
    assert set(saved["param_groups"][0]) == expected


def test_capturable_keeps_its_counts_in_tensors_and_a_scheduler_moves_the_rate() -> None:
    ours, theirs = params(), params()
    optimizer, reference = FusedAdam(ours, lr=0.01, capturable=True), AdamW(theirs, lr=0.01, weight_decay=0)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference)]
    rate, counts = optimizer.param_groups[0]["lr"], set()
    for step in range(4):
        train(optimizer, ours, range(step, step + 1))
        train(reference, theirs, range(step, step + 1))
        counts.add(id(optimizer.param_groups[0]["step"]))
        for scheduler in schedulers:
            scheduler.step()
    assert isinstance(rate, Tensor) and optimizer.param_groups[0]["lr"] is rate and len(counts) == 1
    assert distance(ours, theirs) < 1e-5


def test_a_scaler_and_a_closure() -> None:
    owned, plain = params(), params()
    optimizer, scaler = FusedAdam(owned, lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p in owned:
        p.grad = torch.full_like(p, 4.0)
    scaler.step(optimizer)
    for p in plain:
        p.grad = torch.ones_like(p)
    assert FusedAdam(plain, lr=0.01).step(lambda: 7.0) == 7.0
    assert distance(owned, plain) < 1e-7


# --- the kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["l2", "before", "after"])
@pytest.mark.parametrize(("correction", "raw"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2, 10.0])
def test_every_rule_fused_is_the_rule(decay: Any, correction: bool, raw: bool, weight_decay: float) -> None:
    rule, hyper = Rule(decay, correction, raw), Hyper(0.1, 0.8, 0.95, 1e-2, weight_decay)
    tensors = [
        [torch.rand(3, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)] for i in range(4)
    ]
    expected = copy.deepcopy(tensors)
    for step in (1, 2, 50):
        adam_update(rule, hyper, step, *tensors)
        reference_update(rule, hyper, step, *(t[0] for t in expected))
    for (actual,), (wanted,) in zip(tensors, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("which", range(4))
def test_tensors_that_no_kernel_can_walk_over(which: int) -> None:
    tensors = [
        [torch.rand(4, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)] for i in range(4)
    ]
    expected = copy.deepcopy(tensors)
    tensors[which] = [tensors[which][0].t().contiguous().t()]
    adam_update(Rule(), Hyper(0.1, 0.9, 0.99, 1e-8, 0.1), 1, *tensors)
    reference_update(Rule(), Hyper(0.1, 0.9, 0.99, 1e-8, 0.1), 1, *(t[0] for t in expected))
    torch.testing.assert_close(tensors, expected)


@pytest.fixture
def amp_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A double with the signature of Apex's extension, let loose on the CPU."""
    calls: list[str] = []

    def multi_tensor_adam(
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: list[list[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        assert type(lr) is float and type(step) is int and noop_flag.dtype == torch.int
        gradients, owned, exp_avgs, exp_avg_sqs = tensor_lists
        assert all(m.dtype == torch.float32 for m in (*exp_avgs, *exp_avg_sqs))
        calls.append(str(owned[0].dtype))
        rule = Rule("before" if mode else "l2", bool(bias_correction))
        for tensors in zip(owned, gradients, exp_avgs, exp_avg_sqs, strict=True):
            reference_update(rule, Hyper(lr, beta1, beta2, epsilon, weight_decay), step, *tensors)

    monkeypatch.setitem(sys.modules, "amp_C", SimpleNamespace(multi_tensor_adam=multi_tensor_adam))
    apex = adam.PROVIDERS["apex"]
    on_cpu = adam.Provider("apex", lambda _, dtype: apex.why_not("cuda", dtype), apex.call)
    monkeypatch.setitem(adam.PROVIDERS, "apex", on_cpu)
    adam._why_not.cache_clear()
    yield calls
    adam._why_not.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"adam_w_mode": False}, {"bias_correction": False}, {"master_weights": True}]
)
def test_apexs_kernel_where_it_works(amp_c: list[str], dtype: torch.dtype, options: dict[str, Any]) -> None:
    through_apex, through_torch = params(dtype), params(dtype)
    train(FusedAdam(through_apex, lr=0.01, weight_decay=0.1, **options), through_apex, range(5))
    used = len(amp_c)
    optimizer = FusedAdam(through_torch, lr=0.01, weight_decay=0.1, **options)
    optimizer.providers = ("torch",)  # type: ignore[misc]
    train(optimizer, through_torch, range(5))
    # it takes float32 moments alone, and gradients of the parameters' dtype
    master = "master_weights" in options and dtype is torch.bfloat16
    assert used == len(amp_c) == (0 if dtype is torch.float64 or master else 5)
    assert distance(through_apex, through_torch) < 1e-5


def test_apex_says_why_not() -> None:
    why_not = adam.PROVIDERS["apex"].why_not
    assert "CUDA" in str(why_not("cpu", torch.float32)) and "float64" in str(why_not("cuda", torch.float64))
    assert "extensions" in str(why_not("cuda", torch.float32))
