"""Tuning that is stopped, interrupted, undone, or fed with batches that show nothing."""

import pytest
import torch
from doubles import register
from torch import nn
from tuned import batch, net, plain, takes, tune

import autofuse


def kept_is_in_place(step, model):
    return (step.report["good"].status == "kept") == (model[0].seconds == 0.4)


@pytest.mark.parametrize("after", range(0, 26, 2))
@pytest.mark.parametrize("how", ["stop", "again", "undo"])
def test_whenever_it_is_stopped_what_is_said_is_what_is_there(monkeypatch, time, after, how):
    register(monkeypatch, good=takes("0", 0.4), other=takes("1", 0.5))
    model = net(time)
    options = {"loss_fn": nn.functional.mse_loss, "only": ["good", "other"], "precision": "fp32"}
    step = autofuse.optimize(model, **options)
    for number in range(after):
        step(*batch(number))
    if how == "stop":
        step.stop_tuning()
        assert kept_is_in_place(step, model)
        assert (step.report["other"].status == "kept") == (model[1].seconds == 0.5)
    elif how == "again":
        again, _ = tune(model, names=["good", "other"])
        assert not step.tuning and [layer.seconds for layer in model[:2]] == [0.4, 0.5]
        assert "good" in {r.name for s in (step, again) for r in s.report.rows if r.status == "kept"}
    else:
        autofuse.undo(model)
        for number in range(5):
            step(*batch(number))
        assert [layer.seconds for layer in model[:2]] == [1.0, 1.0]
        assert not any(row.status == "kept" for row in step.report.rows) and not step.tuning


def test_what_helped_together_stays_when_it_is_stopped_before_each_was_left_out(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), other=takes("1", 0.5))
    model = net(time)
    options = {"loss_fn": nn.functional.mse_loss, "only": ["good", "other"], "precision": "fp32"}
    step = autofuse.optimize(model, **options)
    for number in range(40):
        step(*batch(number))
        if (model[0].seconds, model[1].seconds) == (0.4, 1.0):  # "other" is left out
            break
    step.stop_tuning()
    assert [layer.seconds for layer in model[:2]] == [0.4, 0.5]
    assert [step.report[name].status for name in ("good", "other")] == ["kept", "kept"]


@pytest.mark.parametrize("at", range(0, 24, 3))
@pytest.mark.parametrize("pieces", [False, True])
def test_an_interrupt_in_the_backward_and_then_the_loop_goes_on(monkeypatch, time, at, pieces):
    register(monkeypatch, good=takes("0", 0.4))
    model, stop = net(time), [False]

    def interrupt(gradient):
        if stop[0]:
            stop[0] = False
            raise KeyboardInterrupt
        return gradient

    model[1].register_forward_hook(lambda m, a, out: out.register_hook(interrupt) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = None if pieces else nn.functional.mse_loss
    step = autofuse.optimize(model, optimizer, loss_fn=loss_fn, only=["good"], precision="fp32")
    losses = []

    def go(x, y):
        if not pieces:
            return step(x, y)
        with step.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        step.backward(loss)
        step.update()
        return loss.detach()

    for number in range(24):
        if number == at:
            stop[0] = True
            with pytest.raises(KeyboardInterrupt):
                go(*batch(number))
        losses.append(go(*batch(number)).item())
    assert losses == plain(net(time), 24)
    assert not step.tuning and kept_is_in_place(step, model) and step.report["good"].status == "kept"
    assert step.report.counters.steps == step.report.counters.micro_batches == 24


def test_batches_that_are_never_finite_end_the_final_comparison_without_harm(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), other=takes("1", 0.5))
    model = net(time)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = autofuse.optimize(
        model, optimizer, loss_fn=nn.functional.mse_loss, only=["good", "other"], precision="fp32"
    )
    for number in range(60):
        x, y = batch(number)
        both = {step.report[name].status for name in ("good", "other")} == {"kept"}
        step(x * float("nan") if both else x, y)
    assert not step.tuning and [layer.seconds for layer in model[:2]] == [0.4, 0.5]
    assert {step.report[name].status for name in ("good", "other")} == {"kept"}


def test_gradients_that_are_zero_for_long_cost_little(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    model, calls = net(time), [0]
    model.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    step = autofuse.optimize(model, forward=lambda m, b: 0 * m(b).sum(), only=["good"], precision="fp32")
    for number in range(100):
        step(batch(number)[0])
    assert calls[0] < 115


def test_batches_that_grow_are_not_taken_for_what_tuning_costs(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), other=takes("1", 0.5), third=takes("1", 1.2))
    model = net(time)
    model.register_forward_pre_hook(lambda m, args: time.__setattr__("speed", len(args[0]) / 4))
    step = autofuse.optimize(
        model, loss_fn=nn.functional.mse_loss, only=["good", "other", "third"], precision="fp32"
    )
    for number in range(150):
        rows = 4 + 2 * number
        step(torch.randn(rows, 8), torch.randn(rows, 1))
    assert not step.tuning and not any("budget" in row.reason for row in step.report.rows)
    assert step.report["good"].status == step.report["other"].status == "kept", str(step.report)


def test_a_module_that_was_set_to_something_else_is_left_alone():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.offset = nn.Parameter(torch.rand(8)), 0.0

        def forward(self, x):
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            return x * scale * (self.offset + self.weight)

    def train(use, at):
        torch.manual_seed(0)
        model, losses = nn.Sequential(nn.Linear(8, 8), Norm(), nn.Linear(8, 1)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"loss_fn": nn.functional.mse_loss, "precision": "fp32"}
        step = autofuse.optimize(model, optimizer, only=["norms"] if use else ["tf32"], **options)
        for number in range(20):
            if number == at:
                model[1].offset = 0.5
            losses.append(step(*batch(number)).item())
        return losses

    for at in range(12):
        assert train(True, at) == pytest.approx(train(False, at), rel=1e-5), at


def test_a_model_in_eval_mode_is_trained_in_pieces_too(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    model = net(time).eval()
    step = autofuse.optimize(model, only=["good"], precision="fp32")
    for number in range(20):
        x, y = batch(number)
        with step.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        step.backward(loss)
        step.update()
    assert step.report["good"].status == "kept"


def test_a_batch_that_shows_nothing_leaves_what_is_kept_in_place(monkeypatch, time):
    """At the second proof (of the exact patches) the first patch is in place already."""
    register(monkeypatch, good=takes("0", 0.4, exact=False), other=takes("1", 0.5))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good", "other"], precision="fp32")
    for number in range(80):
        x, y = batch(number)
        waiting = step.report["good"].status == "kept" and step.report["other"].error is None
        step(x * float("nan") if waiting and number < 20 else x, y)
        if step.report["good"].status == "kept" and waiting:
            assert model[0].seconds == 0.4, number
    assert [layer.seconds for layer in model[:2]] == [0.4, 0.5] and not step.tuning
