"""What goes wrong: patches that fail or change the result, losses that are not finite, bad input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import (
    CASES,
    PLAIN,
    adamw,
    arguments,
    close,
    fast_loop,
    gradient_error,
    loss_of,
    optimize,
    plain_loop,
)
from doubles import Entry, ScaledGradient, Switch, forward_patcher, register
from test_promises import shape_of
from test_step import MSE, net, pair
from torch import nn

import autofuse
from autofuse.patch import Patch, Rejected, Site

CASE = CASES["rms"]
PATH = "layers.1"


def run(switch=None, on_from=99, steps=4, **extra):
    """Losses of a plain and of an optimized model, with the double misbehaving from a step on."""
    plain, model = CASE.model(0.1), CASE.model(0.1)
    torch.manual_seed(3)
    expected = plain_loop(CASE, plain, adamw(plain), steps)
    torch.manual_seed(3)
    step, losses = optimize(CASE, model, adamw(model), **{"measure": False, **extra}), []
    for number in range(steps):
        if switch is not None:
            switch.on = number >= on_from
        losses.append(step(*arguments(CASE, number)).item())
    assert close(losses, expected), (losses, expected)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert step.report.counters.steps == step.report.counters.micro_batches == steps
    return step, model


# --- patches that fail ---------------------------------------------------------------------------


def failing_forward(switch):
    def make(forward):
        def new(x):
            if switch.on:
                raise RuntimeError("the double's forward fails")
            return forward(x)

        return new

    return forward_patcher(PATH, make)


def failing_backward(switch):
    return forward_patcher(PATH, lambda forward: lambda x: ScaledGradient.apply(forward(x), 1.0, switch))


@pytest.mark.parametrize("where", [failing_forward, failing_backward])
@pytest.mark.parametrize("on_from", [0, 2])
def test_a_patch_that_raises_is_taken_back_and_the_step_done_again(monkeypatch, where, on_from):
    switch = Switch()
    register(monkeypatch, double=where(switch))
    step, model = run(switch, on_from)
    row = step.report["double"]
    assert row.status == "rejected" and "the double's" in row.reason
    assert ("first batch" if on_from == 0 else "batch 3") in row.reason
    assert "forward" not in vars(model.get_submodule(PATH))
    assert step.report["norms"].status == "kept"  # the innocent stay
    assert any("Fused" in type(m).__name__ for m in model.modules())


@pytest.mark.parametrize("where", [failing_forward, failing_backward])
def test_a_patch_that_raises_in_the_middle_of_a_window(monkeypatch, where):
    switch = Switch()
    register(monkeypatch, double=where(switch))
    plain, model = CASE.model(), CASE.model()
    step = optimize(CASE, model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3, measure=False)
    for number in range(3):
        switch.on = number == 1
        step(*arguments(CASE, number))
        (loss_of(CASE, plain, number) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert step.report["double"].status == "rejected" and step.report.counters.micro_batches == 3


def test_a_patch_that_fails_half_way_while_it_is_applied(monkeypatch):
    def find(context):
        def change(transaction, sites):
            transaction.set_attribute(context.model, "marker", 1)
            raise RuntimeError("half-way")

        return Patch([Site("", "a class", "double", "tests")], change)

    register(monkeypatch, double=find)
    step, model = run()
    assert not hasattr(model, "marker")
    assert step.report["double"].status == "rejected" and "half-way" in step.report["double"].reason


@pytest.mark.parametrize("broken", [ImportError("no such thing"), lambda context: 1 / 0])
def test_a_patcher_that_cannot_look_is_a_rejection(monkeypatch, broken):
    register(monkeypatch, double=Entry(broken))
    step, _ = run()
    row = step.report["double"]
    assert row.status == "rejected" and "its patcher failed" in row.reason
    assert "no such thing" in row.reason or "ZeroDivisionError" in row.reason


def test_a_patcher_that_rejects_says_why(monkeypatch):
    register(monkeypatch, double=lambda context: Rejected("there is nothing for it here"))
    step, _ = run()
    assert step.report["double"].reason == "there is nothing for it here"


def test_an_optimizer_patch_that_fails_in_the_step(monkeypatch):
    switch = Switch()

    def find(context):
        optimizer = context.optimizers[0]

        def failing():
            if switch.on:
                raise RuntimeError("the fused step fails")
            return type(optimizer).step(optimizer)

        def change(transaction, sites):
            transaction.set_attribute(optimizer, "step", failing)

        site = Site("optimizer.param_groups[0]", "AdamW", "double", "tests")
        return Patch([site], change, in_forward=False)

    register(monkeypatch, optimizer=Entry(find, 15.0))
    step, _ = run(switch, 2)
    row = step.report["optimizer"]
    assert row.status == "rejected" and "the fused step fails" in row.reason
    assert "step" not in vars(step.optimizer)


# --- patches that are wrong ------------------------------------------------------------------------

WRONG = {
    "a little": lambda forward: lambda x: forward(x) * 1.001,
    "the gradient alone": lambda forward: lambda x: ScaledGradient.apply(forward(x), 1.01, None),
    "no gradient": lambda forward: lambda x: forward(x).detach(),
    "nan": lambda forward: lambda x: forward(x) * float("nan"),
    "random": lambda forward: lambda x: forward(x) + torch.rand_like(x) * 0.01,
    "shape": lambda forward: lambda x: forward(x)[:, :3],
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_patch_is_undone_by_the_proof(monkeypatch, kind):
    register(monkeypatch, double=forward_patcher(PATH, WRONG[kind]))
    step, model = run()
    row = step.report["double"]
    assert row.status == "rejected"
    assert ("failed on the first batch" if kind == "shape" else "changes the result") in row.reason
    assert "forward" not in vars(model.get_submodule(PATH))
    assert step.report["norms"].status == "kept"
    assert not row.accepted and row.sites


def test_a_wrong_patch_is_found_in_the_pieces_too(monkeypatch):
    register(monkeypatch, double=forward_patcher(PATH, WRONG["a little"]))
    plain, model = CASE.model(), CASE.model()
    step = optimize(CASE, model, adamw(model), measure=False)
    with step.autocast():
        loss = loss_of(CASE, model)
    assert close(loss.item(), loss_of(CASE, plain).item())
    assert step.report["double"].status == "rejected"


@pytest.mark.parametrize("first", ["nan", "no labels"])
def test_a_first_batch_that_shows_nothing_proves_nothing(monkeypatch, first):
    """A wrong patch must not be kept because the first loss was NaN for everybody."""
    case = CASES["gpt2"]
    register(monkeypatch, double=forward_patcher("transformer.h.0.mlp.c_proj", WRONG["a little"]))
    plain, model = case.model(), case.model()
    step = optimize(case, model, adamw(model), measure=False)
    batch = case.batch()
    if first == "nan":
        with torch.no_grad():
            weight = model.transformer.wpe.weight
            kept = weight.clone()
            weight.fill_(float("nan"))
        step(batch)
        with torch.no_grad():
            weight.copy_(kept)
    else:
        step({**batch, "labels": torch.full_like(batch["labels"], -100)})
    losses = [step(case.batch(number)).item() for number in range(3)]
    assert close(losses, plain_loop(case, plain, adamw(plain), 3))
    assert step.report["double"].status == "rejected" and step.report["norms"].status == "kept"


def test_a_step_that_is_not_reproducible_keeps_nothing_and_says_so():
    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.source = net(), torch.Generator()

        def forward(self, x):
            return self.body(x) + torch.rand(x.shape[0], 2, generator=self.source)

    model = Restless()
    step = autofuse.optimize(model, adamw(model), **{"measure": False, **MSE})
    step(*pair())
    assert "not reproducible" in step.report["norms"].reason
    assert type(model.body[1]) is nn.LayerNorm


# --- losses that are not finite -----------------------------------------------------------------------


def poisoned(number, bad=(1,)):
    inputs, targets = CASE.batch(number)
    return (inputs * float("nan") if number in bad else inputs), targets


@pytest.mark.parametrize("first_bad", [0, 2])
@pytest.mark.parametrize("mode", ["report", "raise"])
def test_a_loss_that_is_nan(mode, first_bad):
    model, plain = CASE.model(), CASE.model()
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, gamma=0.9)
    step = optimize(CASE, model, optimizer, scheduler=scheduler, on_nonfinite=mode, measure=False)
    for number in range(5):
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        batch = poisoned(number, bad=(first_bad,))
        if number == first_bad and mode == "raise":
            with pytest.raises(FloatingPointError, match=f"batch {number + 1}"):
                step(*batch)
        else:
            loss = step(*batch)
        if number == first_bad:
            assert mode == "raise" or loss.isnan()
            after = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
            assert str(after) == str(before)
            assert all(torch.equal(v, before[0][k]) for k, v in after[0].items())
            assert all(p.grad is None for p in model.parameters())
        else:
            assert close(loss.item(), plain_loop_once(plain, plain_optimizer, batch))
            plain_scheduler.step()
    counters = step.report.counters
    assert (counters.nonfinite, counters.skipped, counters.steps) == (1, 1, 4)
    assert counters.first_nonfinite == first_bad + 1
    assert f"batch {first_bad + 1}" in str(step.report)
    assert step.report["norms"].status == "kept"


def plain_loop_once(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("position", [0, 1])
def test_one_nan_in_a_window_skips_the_windows_step(position):
    model = CASE.model()
    step = optimize(CASE, model, adamw(model), accumulate=2, measure=False)
    weights = copy.deepcopy(model.state_dict())
    for number in range(2):
        step(*poisoned(number, bad=(position,)))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert step.report.counters.first_nonfinite == position + 1 and step.report.counters.skipped == 1
    for number in range(2):
        step(*CASE.batch(number))
    assert step.report.counters.steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_nan_in_the_pieces():
    model = CASE.model()
    step = optimize(CASE, model, adamw(model), measure=False)
    weights = copy.deepcopy(model.state_dict())
    with step.autocast():
        loss = F.cross_entropy(model(poisoned(1)[0]), poisoned(1)[1])
    step.backward(loss)
    assert step.update() is False
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert step.report.counters.nonfinite == 1


# --- bad input --------------------------------------------------------------------------------------


def bad_calls():
    model, other = net(), net()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adamw(model))
    return {
        "model": (("gpt2",), {}, TypeError, "torch.nn.Module.*not str"),
        "class": ((nn.Linear,), {}, TypeError, "torch.nn.Module"),
        "foreign": ((model, adamw(other)), {}, ValueError, "none of the parameters"),
        "parameters": ((model, model.parameters()), {}, TypeError, "torch.optim.Optimizer"),
        "number": ((model, 3), {}, TypeError, "optimizer must be"),
        "precision": ((model,), {"precision": "bf61"}, ValueError, "precision.*bf16"),
        "dtype": ((model,), {"precision": torch.bfloat16}, ValueError, "precision.*bf16"),
        "compile": ((model,), {"compile": "yes"}, ValueError, "compile"),
        "only": ((model,), {"only": ["norm"]}, ValueError, "norm.*Did you mean.*norms"),
        "skip": ((model,), {"skip": ["optimiser"]}, ValueError, "Did you mean.*optimizer"),
        "nonfinite": ((model,), {"on_nonfinite": "rais"}, ValueError, "Did you mean.*raise"),
        "zero": ((model,), {"accumulate": 0}, ValueError, "accumulate"),
        "half": ((model,), {"accumulate": 1.5}, ValueError, "accumulate"),
        "clip": ((model,), {"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm"),
        "scheduler": ((model,), {"scheduler": 0.1}, TypeError, "scheduler.*step"),
        "plateau": ((model,), {"scheduler": plateau}, ValueError, "ReduceLROnPlateau"),
        "loss_fn": ((model,), {"loss_fn": "mse"}, TypeError, "loss_fn"),
        "forward": ((model,), {"forward": "mse"}, TypeError, "forward"),
        "plan": ((model,), {"plan": __file__}, ValueError, "not a saved plan"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_a_bad_call_says_what_is_wrong_and_changes_nothing(name):
    args, kwargs, error, message = bad_calls()[name]
    model = args[0] if isinstance(args[0], nn.Module) else net()
    optimizer = args[1] if len(args) > 1 and isinstance(args[1], torch.optim.Optimizer) else adamw(model)
    before, random = shape_of(model, optimizer), torch.get_rng_state()
    with pytest.raises(error, match=message):
        autofuse.optimize(*args, **{"measure": False, **kwargs})
    assert shape_of(model, optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)


EMPTY = {
    "nothing": (),
    "none": (None,),
    "an empty mapping": ({},),
    "an empty list": ([],),
    "no rows": (torch.empty(0, 4), torch.empty(0, 2)),
    "no rows in a mapping": ({"input": torch.empty(0, 4), "labels": torch.empty(0, 2)},),
}
BAD_BATCHES = {
    **{name: (batch, MSE, ValueError, "empty") for name, batch in EMPTY.items()},
    "no loss": (({"input": pair()[0]},), PLAIN, ValueError, "no loss.*loss_fn"),
    "no loss_fn": (pair(), PLAIN, ValueError, "loss_fn"),
    "no targets": ((pair()[0],), MSE, ValueError, "targets"),
    "not a scalar": (pair(), {**PLAIN, "loss_fn": lambda a, b: (a - b) ** 2}, ValueError, "scalar"),
    "not a tensor": (pair(), {**PLAIN, "loss_fn": lambda a, b: 1.0}, ValueError, "scalar tensor"),
    "the user's own": ((pair()[0][:, :3], pair()[1]), MSE, RuntimeError, "shapes cannot be multiplied"),
    "no gradient": (pair(), {**PLAIN, "loss_fn": lambda a, b: a.mean().detach()}, RuntimeError, "grad"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("proved", [False, True])
def test_a_bad_batch_says_what_is_wrong_and_changes_nothing(name, proved):
    batch, options, error, message = BAD_BATCHES[name]
    model = net()
    optimizer = adamw(model)
    sane = "loss_fn" not in options or options is MSE
    step = autofuse.optimize(model, optimizer, **{"measure": False, **options})
    if proved and options is MSE:
        step(*pair())
    weights, state = copy.deepcopy(model.state_dict()), str(optimizer.state_dict())
    before, random, counters = (
        shape_of(model, optimizer),
        torch.get_rng_state(),
        vars(step.report.counters).copy(),
    )
    with pytest.raises(error, match=message):
        step(*batch)
    assert shape_of(model, optimizer) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == state and torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert vars(step.report.counters) == counters
    if sane and options is MSE:
        expected = F.mse_loss(model(pair()[0]), pair()[1]).item()
        assert close(step(*pair()).item(), expected) and step.report["norms"].status == "kept"


@pytest.mark.parametrize("patched", [True, False])
def test_an_error_in_the_middle_of_a_window_leaves_the_window_as_it_was(patched):
    model = CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimize(CASE, model, optimizer, accumulate=2, only=None if patched else [], measure=False)
    step(*CASE.batch(0))
    with pytest.raises(RuntimeError, match="must match the size"):
        step(CASE.batch(1)[0][:, :5], CASE.batch(1)[1])
    step(*CASE.batch(1))
    plain = CASE.model()
    for number in (0, 1):
        (loss_of(CASE, plain, number) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert step.report.counters.steps == 1
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fast_loop_and_gradient_error_see_a_difference():
    """The suite's own measures are able to fail."""
    plain, other = CASE.model(), CASE.model(seed=1)
    loss_of(CASE, plain).backward()
    loss_of(CASE, other).backward()
    assert gradient_error(plain, other) > 0.1
    assert not close(
        fast_loop(CASE, optimize(CASE, plain, measure=False), 1),
        fast_loop(CASE, optimize(CASE, other, measure=False), 1),
    )
