"""The tuner in a run that goes on from another, and in loops in pieces, in windows, with two optimizers."""

import pytest
import torch
from doubles import Entry, register
from torch import nn
from tuned import batch, net, plain, takes, tune

import autofuse
from autofuse.patch import Patch, Site

# --- again ---------------------------------------------------------------------------------------


def test_a_state_dict_spares_the_tuning(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), slow=takes("1", 1.5))
    step, _ = tune(net(time), names=["good", "slow"])
    state = step.state_dict()
    model = net(time)
    again = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good", "slow"], precision="fp32")
    again.load_state_dict(state)
    assert not again.tuning and [layer.seconds for layer in model[:2]] == [0.4, 1.0]
    assert [again.report[n].status for n in ("good", "slow")] == ["kept", "rejected"]
    again(*batch())
    assert model[0].seconds == 0.4


def test_a_saved_plan_is_repeated_without_measuring(monkeypatch, time, tmp_path):
    register(monkeypatch, good=takes("0", 0.4), slow=takes("1", 1.5))
    step, _ = tune(net(time), names=["good", "slow"])
    step.plan.save(tmp_path / "plan.json")
    model = net(time)
    again = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, plan=tmp_path / "plan.json")
    assert not again.tuning and [layer.seconds for layer in model[:2]] == [0.4, 1.0]
    again(*batch())
    assert again.report["good"].status == "kept" and again.report["slow"].status != "kept"
    row = autofuse.Plan.load(tmp_path / "plan.json")["good"]
    assert row.gain == pytest.approx(0.3) and isinstance(row.interval, tuple)


# --- other loops ---------------------------------------------------------------------------------


def test_in_pieces(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), slow=takes("1", 1.5))
    model = net(time)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = autofuse.optimize(model, optimizer, only=["good", "slow"], precision="fp32")
    losses = []
    for number in range(100):
        x, y = batch(number)
        with step.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        step.backward(loss)
        time.passes(5.0)  # what the loop does for itself is not the step's
        step.update()
        losses.append(loss.item())
    assert not step.tuning
    assert step.report["good"].gain == pytest.approx(0.3) and step.report["slow"].status == "rejected"
    assert losses == plain(net(time), 100)


@pytest.mark.parametrize("pieces", [False, True])
def test_an_accumulation_window_is_one_step(monkeypatch, time, pieces):
    register(monkeypatch, good=takes("0", 0.4))
    model = net(time)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = None if pieces else nn.functional.mse_loss
    step = autofuse.optimize(model, optimizer, loss_fn=loss_fn, only=["good"], precision="fp32", accumulate=3)
    states = []
    for number in range(60):
        x, y = batch(number)
        if pieces:
            with step.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            time.passes(7.0)  # loading the next micro-batch
            step.update()
        else:
            step(x, y)
        states.append(model[0].seconds)
    assert step.report["good"].before_ms == pytest.approx(6000) and step.report["good"].status == "kept"
    windows = [states[i : i + 2] for i in range(0, 60, 3)]
    assert all(a == b for a, b in windows)  # nothing changes inside a window


def test_two_optimizers_that_take_turns_are_never_compared(monkeypatch, time):
    """The one's step takes three times as long as the other's."""
    register(monkeypatch, good=takes("0", 0.5))
    one, two = net(time), net(time)
    both = nn.ModuleList([one, two])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in both]

    def find(context):
        def change(transaction, sites):
            for m in both:
                transaction.set_attribute(m[0], "seconds", 0.5)

        return Patch([Site("0", "Slow", "double", "tests")], change)

    register(monkeypatch, good=find)
    both.forward = lambda x, which: both[which](x)
    step = autofuse.optimize(both, optimizers, only=["good"], precision="fp32")
    for number in range(80):
        which = number % 2
        x, y = batch(number)
        with step.autocast():
            loss = nn.functional.mse_loss(both(x, which), y)
        step.backward(loss)
        time.passes(0)
        with step.clock.running():
            time.passes(4.0 * which)
        step.update(optimizers[which])
    assert not step.tuning and step.report["good"].status == "kept"


def test_evaluation_in_between_changes_nothing(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good"], precision="fp32")
    for number in range(40):
        step(*batch(number))
        model.eval()
        with torch.no_grad():
            time.passes(100.0)
            model(batch(0)[0])
        model.train()
    assert step.report["good"].before_ms == pytest.approx(2000)


def test_a_backward_through_the_backward_is_noticed_before_it_could_fail(monkeypatch, time):
    """A gradient penalty: what could not take it is given up before it is ever introduced."""

    def first_order(context):
        return takes("0", 0.4, blames=lambda error: True, pays=lambda seconds: None, encloses=True)(context)

    register(monkeypatch, first_order=Entry(first_order, order=90))
    model = net(time)
    step = autofuse.optimize(model, only=["first_order"], precision="fp32")
    for number in range(20):
        x, y = batch(number)
        x.requires_grad_()
        with step.autocast():
            loss = nn.functional.mse_loss(model(x), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        step.backward(loss + gradient.square().sum())
        step.update()
        assert model[0].seconds == 1.0
    assert "create_graph" in step.report["first_order"].reason and not step.tuning
