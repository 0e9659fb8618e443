"""Hand-written Adams are told by what they do, and given a fused step; look-alikes are not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_written_adams import (
    BertAdam,
    ClippedGradient,
    ClippedUpdate,
    Counting,
    DecaysMatricesOnly,
    EpsInside,
    GroupStepAdam,
    Hostile,
    L2Adam,
    Lamb,
    Lion,
    Lookahead,
    NanoAdamW,
    Noisy,
    OldHFAdamW,
    PlainAdam,
    RateElsewhere,
    ReachesForTheModel,
    TwiceTheClosure,
    WarmUp,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from autofuse.patch import Context, Patch
from patchers import optimizer as patcher

HAND_WRITTEN = [NanoAdamW, OldHFAdamW, L2Adam, GroupStepAdam, BertAdam, PlainAdam]


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (), (0, 2)]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def train(optimizer: Optimizer, steps: range) -> None:
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(owned):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if i == 1 and step in (0, 1, 4) else grad
        optimizer.step()


def find(optimizer: Optimizer) -> Patch:
    patch = patcher.find(Context(nn.Identity(), (optimizer,), hardware=None))  # type: ignore[arg-type]
    assert isinstance(patch, Patch)
    return patch


def upgrade(optimizer: Optimizer) -> Patch:
    patch = find(optimizer)
    assert len(patch.accepted) == len(optimizer.param_groups), patch.reason
    patch.apply()
    return patch


def flat(optimizer: Optimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def shape_of_state(optimizer: Optimizer) -> list[Any]:
    """Keys in order, types, dtypes, counts."""

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape, value.item() if value.ndim == 0 and value.numel() == 1 else None
        return type(value), value

    packed = optimizer.state_dict()["state"]
    tensors = [[(k, describe(v)[:2]) for k, v in state.items()] for state in packed.values()]
    counts = [v for state in packed.values() for v in state.values() if isinstance(v, int)]
    return [list(packed), tensors, counts, [g.get("step") for g in optimizer.param_groups]]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counting(kernel: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            calls.append(len(args[0]))
            kernel(*args, **kwargs)

        return counted

    for name in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_parity_over_a_training(cls: type[Optimizer], dtype: torch.dtype, kernel_calls: list[int]) -> None:
    plain, fused = cls(params(dtype)), cls(params(dtype))
    upgrade(fused)
    kernel_calls.clear()
    train(plain, range(12))
    train(fused, range(12))
    assert kernel_calls
    assert isinstance(fused, cls) and cls.__name__ in type(fused).__name__
    assert shape_of_state(plain) == shape_of_state(fused)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(flat(fused), flat(plain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_mid_training_upgrade_undo_and_state_dicts_both_ways(cls: type[Optimizer]) -> None:
    plain, fused = cls(params()), cls(params())
    train(plain, range(4))
    train(fused, range(4))
    before = [dict(group) for group in fused.param_groups], {k: dict(v) for k, v in fused.state.items()}
    attributes = dict(vars(fused))
    patch = upgrade(fused)
    patch.undo()
    assert type(fused) is cls and dict(vars(fused)) == attributes
    assert [dict(group) for group in fused.param_groups] == before[0]
    assert all(fused.state[p][k] is v for p, s in before[1].items() for k, v in s.items())
    patch.apply()
    train(plain, range(4, 8))
    train(fused, range(4, 8))
    plain_saved, fused_saved = copy.deepcopy((plain.state_dict(), fused.state_dict()))
    plain.load_state_dict(fused_saved)
    fused.load_state_dict(plain_saved)
    train(plain, range(8, 12))
    train(fused, range(8, 12))
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)
    patch.undo()
    train(plain, range(12, 14))
    train(fused, range(12, 14))
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_the_search_leaves_no_trace(cls: type[Optimizer]) -> None:
    optimizer = cls(params())
    train(optimizer, range(3))
    before = [dict(group) for group in optimizer.param_groups], copy.deepcopy(list(optimizer.state.values()))
    values, random_state, attributes = flat(optimizer), torch.get_rng_state(), dict(vars(optimizer))
    find(optimizer)
    assert [dict(group) for group in optimizer.param_groups] == before[0]
    torch.testing.assert_close(list(optimizer.state.values()), before[1], rtol=0, atol=0)
    torch.testing.assert_close(flat(optimizer), values, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state) and dict(vars(optimizer)) == attributes


def test_bf16_is_no_further_from_the_truth_or_left_alone() -> None:
    exact, plain, fused = (NanoAdamW(params(d)) for d in (torch.float64, torch.bfloat16, torch.bfloat16))
    for p, q in zip(exact.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        p.data.copy_(q)
    upgrade(fused)
    for optimizer in (exact, plain, fused):
        train(optimizer, range(12))

    def error(optimizer: Optimizer) -> float:
        pairs = zip(flat(exact), flat(optimizer), strict=True)
        return float(torch.stack([(p - q).norm() for p, q in pairs]).norm())

    assert error(fused) <= 1.5 * error(plain)


@pytest.mark.parametrize("when", ["before", "after", "undone"])
def test_schedulers(when: str, kernel_calls: list[int]) -> None:
    plain, fused = OldHFAdamW(params()), OldHFAdamW(params())
    hooks: list[int] = []

    def schedule(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [schedule(plain)]
        schedulers += [schedule(fused)] if when == "before" else []
        patch = upgrade(fused)
        kernel_calls.clear()
        schedulers += [schedule(fused)] if when != "before" else []
        fused.register_step_post_hook(lambda *_: hooks.append(1))
        if when == "undone":
            patch.undo()
        for step in range(6):
            for optimizer, scheduler in zip((plain, fused), schedulers, strict=True):
                train(optimizer, range(step, step + 1))
                scheduler.step()
    assert len(hooks) == 6 and bool(kernel_calls) == (when != "undone")
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_alike_and_a_pickle_needs_no_autofuse(how: str) -> None:
    optimizer = NanoAdamW(params())
    upgrade(optimizer)
    train(optimizer, range(4))
    if how == "pickle":
        stored = pickle.dumps(optimizer)
        assert b"autofuse" not in stored
        other = pickle.loads(stored)
        assert type(other) is NanoAdamW
    else:
        other = copy.deepcopy(optimizer)
        assert type(other) is type(optimizer)
    train(optimizer, range(4, 8))
    train(other, range(4, 8))
    torch.testing.assert_close(flat(other), flat(optimizer), rtol=1e-5, atol=1e-5)


def test_hooks_closures_groups_and_a_scaler(kernel_calls: list[int]) -> None:
    plain, fused = PlainAdam(params()), PlainAdam(params())
    upgrade(fused)
    kernel_calls.clear()
    calls: list[str] = []
    fused.register_step_pre_hook(lambda *_: calls.append("pre"))
    fused.register_step_post_hook(lambda *_: calls.append("post"))
    for optimizer in (plain, fused):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        train(optimizer, range(3))
        for p in (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            p.grad = torch.full_like(p, torch.inf)
        scaler.step(optimizer)  # skipped
        scaler.update()
        assert optimizer.step(lambda: 3.5) == 3.5 if (optimizer.zero_grad() is None) else False
        train(optimizer, range(3, 6))
    assert calls == ["pre", "post"] * 7 and kernel_calls
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)


def test_a_closure_goes_to_a_step_that_treats_it_in_its_own_way(kernel_calls: list[int]) -> None:
    optimizer = TwiceTheClosure(params())
    upgrade(optimizer)
    kernel_calls.clear()
    calls: list[int] = []
    optimizer.step(lambda: calls.append(1) or 2.0)  # type: ignore[func-returns-value]
    assert len(calls) == 2 and not kernel_calls
    train(optimizer, range(1))
    assert kernel_calls


def test_what_the_recognition_took_for_constant_changes(kernel_calls: list[int]) -> None:
    plain, fused = OldHFAdamW(params()), OldHFAdamW(params())
    upgrade(fused)
    for number, correct_bias in enumerate((True, False, True)):
        kernel_calls.clear()
        for optimizer in (plain, fused):
            optimizer.param_groups[0]["correct_bias"] = correct_bias
            train(optimizer, range(3 * number, 3 * number + 3))
        assert bool(kernel_calls) == correct_bias  # else its own step runs
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)


def test_groups_that_differ_in_names_and_rates_only_are_recognised_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    recognise = patcher.recognise
    monkeypatch.setattr(patcher, "recognise", lambda *args: (seen.append(1), recognise(*args))[1])
    groups = [
        {"params": [p], "name": f"layer{i}", "lr": 0.1**i, "weight_decay": i / 10}
        for i, p in enumerate(params())
    ]
    upgrade(OldHFAdamW(groups))
    assert len(seen) == 1
    assert find(OldHFAdamW(params())).sites[0].cls.endswith("hand_written_adams.OldHFAdamW")


# --- look-alikes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Lamb, "differ"),
        (Lion, "no eps is read"),
        (ClippedUpdate, "differ"),
        (ClippedGradient, "differ"),
        (WarmUp, "differ at step 1000001"),
        (RateElsewhere, "differ"),
        (DecaysMatricesOnly, "differ"),
        (EpsInside, "differ"),
        (Noisy, "random"),
        (Counting, "own attributes"),
        (Lookahead, "'slow'"),
        (Hostile, "SystemError"),
        (ReachesForTheModel, "AttributeError"),
        (lambda p: BertAdam(p, t_total=500_000), "differ"),
        (lambda p: BertAdam(p, max_grad_norm=1.0), "differ"),
        (torch.optim.RAdam, "differ"),
        (torch.optim.NAdam, "differ"),
        (torch.optim.Adamax, "differ"),
        (torch.optim.Adafactor, "betas"),
        (torch.optim.RMSprop, "betas"),
        (torch.optim.Rprop, "betas"),
        (torch.optim.LBFGS, "fails on a probe"),
        (lambda p: PlainAdam(p, lr=torch.tensor(0.1)), "tensor"),  # type: ignore[arg-type]
    ],
)
def test_look_alikes_are_left_alone(make: Any, reason: str) -> None:
    optimizer = make(params())
    random_state = torch.get_rng_state()
    model = (
        [p.clone() for p in optimizer.model.parameters()] if isinstance(optimizer, ReachesForTheModel) else []
    )
    patch = find(optimizer)
    assert not patch.accepted
    assert reason in patch.reason
    assert torch.equal(torch.get_rng_state(), random_state)
    if model:
        assert all(torch.equal(p, q) for p, q in zip(optimizer.model.parameters(), model, strict=True))


def test_a_step_replaced_on_the_object_is_left_alone() -> None:
    optimizer = NanoAdamW(params())
    optimizer.step = lambda: None  # type: ignore[method-assign]
    assert "replaced" in find(optimizer).reason


def test_a_gradient_or_state_that_no_kernel_takes_is_stepped_as_before() -> None:
    plain, fused = (OldHFAdamW([nn.Parameter(torch.ones(4, 6))]) for _ in "12")
    upgrade(fused)
    for step in range(6):
        for optimizer in (plain, fused):
            (p,) = optimizer.param_groups[0]["params"]
            grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).t()
            p.grad = grad if optimizer is fused else grad.contiguous()
            optimizer.step()
    torch.testing.assert_close(flat(fused), flat(plain), rtol=1e-5, atol=1e-5)
