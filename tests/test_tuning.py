"""The tuner on real steps, with a clock that the tests move: what is kept, undone, and in which order."""

import pytest
import torch
from doubles import Entry, forward_patcher, register
from torch import nn
from tuned import Slow, batch, net, plain, takes, tune

import autofuse
from autofuse.patch import Patch, Rejected, Site

# --- kept and undone -----------------------------------------------------------------------------


def test_what_helps_is_kept_and_what_does_not_is_undone(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), planted_slow=takes("1", 1.5))
    model = net(time)
    step, losses = tune(model, names=["good", "planted_slow"])
    assert not step.tuning and step.report.tuning.state == "done"
    good, slow = step.report["good"], step.report["planted_slow"]
    assert good.status == "kept" and slow.status == "rejected" and "slower" in slow.reason
    assert model[0].seconds == 0.4 and model[1].seconds == 1.0  # the one in place, the other gone
    assert good.before_ms == pytest.approx(2000) and good.after_ms == pytest.approx(1400)
    assert good.gain == pytest.approx(0.3) and good.interval[0] < 0.3 < good.interval[1]
    assert slow.gain < 0 and slow.after_ms > slow.before_ms  # what was measured is told
    assert step.report.tuning.baseline_ms == pytest.approx(2000)
    assert step.report.tuning.final_ms == pytest.approx(1400)
    assert step.report.tuning.speedup == pytest.approx(2 / 1.4)
    assert losses == plain(net(time), len(losses))  # every step of it was a step of the training


def test_a_wrong_patch_is_undone_by_the_proof_and_never_timed(monkeypatch, time):
    wrong = forward_patcher("1", lambda forward: lambda x: forward(x) * 1.01)
    register(monkeypatch, good=takes("0", 0.4), planted_wrong=wrong)
    model = net(time)
    step, losses = tune(model, names=["good", "planted_wrong"])
    row = step.report["planted_wrong"]
    assert row.status == "rejected" and "changes the result" in row.reason and row.gain is None
    assert "forward" not in vars(model[1]) and step.report["good"].status == "kept"
    assert losses == plain(net(time), len(losses))


def test_nothing_helps(monkeypatch, time):
    register(monkeypatch, useless=takes("0", 1.0), slow=takes("1", 2.0))
    model = net(time)
    step, losses = tune(model, names=["useless", "slow"])
    assert not [row for row in step.report.rows if row.status == "kept"]
    assert "Nothing helped: the loop is as it was." in str(step.report)
    assert [layer.seconds for layer in model[:2]] == [1.0, 1.0]
    assert losses == plain(net(time), len(losses))


def test_nothing_to_try_is_decided_at_once(time):
    step, losses = tune(net(time), names=["loss"])
    assert len(losses) == 1 and not step.tuning


def test_it_starts_from_the_loop_as_it_was(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good"])
    assert model[0].seconds == 1.0 and step.report["good"].status == "planned"
    assert step.report.tuning.state == "waiting"
    step(*batch())
    assert model[0].seconds == 1.0 and step.report.tuning.state == "measuring"


def test_the_order_pays_early(monkeypatch, time):
    """All at once from the first step on, then the loop as it was, then each once without."""
    register(monkeypatch, little=takes("0", 0.9), much=takes("1", 0.1))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["little", "much"])
    seen = []
    for number in range(40):
        seen.append(tuple(layer.seconds for layer in model[:2]))
        step(*batch(number))
    assert seen[1:4] == [(0.9, 0.1)] * 3 and seen[4:7] == [(1.0, 1.0)] * 3
    assert (1.0, 0.1) in seen and (0.9, 1.0) in seen
    assert sum(sum(pair) > 1.2 for pair in seen[7:]) <= 3  # what does most is left out for few steps
    assert step.report.tuning.order == ["much", "little"]


def test_one_at_a_time_where_all_at_once_does_not_help(monkeypatch, time):
    register(monkeypatch, much=takes("1", 0.7), slow=takes("0", 3.0))
    model = net(time)
    step, _ = tune(model, names=["much", "slow"])
    assert [step.report[name].status for name in ("much", "slow")] == ["kept", "rejected"]
    assert [layer.seconds for layer in model[:2]] == [1.0, 0.7]
    assert step.report["much"].before_ms == pytest.approx(2000)


def test_one_that_fails_while_all_are_tried_leaves_the_others(monkeypatch, time):
    calls = [0]

    def make(forward):
        def new(x):
            calls[0] += 1
            if calls[0] > 2:  # in the proofs it works
                raise RuntimeError("the double fails")
            return forward(x)

        return new

    register(monkeypatch, good=takes("0", 0.4), double=forward_patcher("1", make))
    model = net(time)
    step, losses = tune(model, names=["good", "double"])
    assert step.report["double"].status == "rejected" and "the double fails" in step.report["double"].reason
    assert step.report["good"].status == "kept" and step.report["good"].gain == pytest.approx(0.3)
    assert losses == plain(net(time), len(losses))


def test_a_clear_answer_takes_few_steps(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    step, losses = tune(net(time), names=["good"])
    assert step.report["good"].status == "kept" and len(losses) <= 8


def test_what_the_user_asked_for_stays_though_it_is_slower(monkeypatch, time):
    register(monkeypatch, asked=takes("0", 1.5, forced=True))
    model = net(time)
    step, _ = tune(model, names=["asked"])
    assert step.report["asked"].status == "kept" and step.report["asked"].gain < 0 and model[0].seconds == 1.5


def test_a_price_that_does_not_pay_is_not_paid(monkeypatch, time):
    asked = []

    def pays(seconds):
        asked.append(seconds)
        return Rejected("too dear")

    register(monkeypatch, good=takes("0", 0.4), dear=Entry(takes("1", 0.1, pays=pays), order=90))
    model = net(time)
    step, _ = tune(model, names=["good", "dear"])
    assert step.report["dear"].reason == "too dear" and model[1].seconds == 1.0
    assert asked == [pytest.approx(1.4)]  # the time of a step as it is by then


# --- company -------------------------------------------------------------------------------------


def test_what_wins_alone_and_loses_in_company_is_found_out(monkeypatch, time):
    class Enclosed(Slow):
        pass

    model = net(time)

    def find(context):
        def change(transaction, sites):
            # once it is there, the other patch's 0.6 s costs 1.2 s instead
            transaction.set_attribute(model[1], "forward", lambda x: enclosed(x))

        def enclosed(x):
            time.passes(0.2 if model[0].seconds == 1.0 else 0.9)
            return model[1].linear(x)

        pays = lambda seconds: None  # noqa: E731
        return Patch([Site("1", "Slow", "double", "tests")], change, pays=pays, encloses=True)

    register(
        monkeypatch,
        inner=takes("0", 0.8, in_modules=True),
        outer=Entry(find, order=90),
    )
    step, _ = tune(model, names=["inner", "outer"])
    inner, outer = step.report["inner"], step.report["outer"]
    assert outer.status == "kept" and inner.status == "rejected", step.report
    assert "it helps alone, but not in outer" in inner.reason and inner.gain > 0
    assert model[0].seconds == 1.0
    assert step.report.tuning.final_ms == pytest.approx(1200)


@pytest.mark.parametrize("better, expected", [(0.2, 1.2), (0.9, 1.5)])
def test_a_dearer_form_is_kept_only_if_it_is_faster(monkeypatch, time, better, expected):
    asked = []

    def find(context):
        def upgrade(seconds):
            asked.append(seconds)
            return takes("0", better)(context)

        return takes("0", 0.5, upgrade=upgrade, encloses=True)(context)

    register(monkeypatch, dear=Entry(find, order=90))
    model = net(time)
    step, _ = tune(model, names=["dear"])
    assert asked == [pytest.approx(1.5)] and step.report["dear"].status == "kept"
    assert 1.0 + model[0].seconds == pytest.approx(expected)
    assert step.report["dear"].after_ms == pytest.approx(1e3 * expected)
    assert step.report["dear"].before_ms == pytest.approx(2000)
    assert step.report.tuning.final_ms == pytest.approx(1e3 * expected)


def test_all_together_slower_than_the_loop_is_undone(monkeypatch, time):
    """Each helps in the state in which it was tried; later something else happens."""
    model = net(time, layers=4)

    register(monkeypatch, one=takes("0", 0.5), two=takes("1", 0.5), useless=takes("3", 1.0))
    step, _ = tune(model, names=["one", "two", "useless"], steps=1)
    for number in range(1, 200):
        one, two = step.report["one"].status, step.report["two"].status
        both = {one, two} == {"kept"} and model[0].seconds == model[1].seconds == 0.5
        model[2].seconds = 4.0 if both else 1.0  # from now on the pair of them is slow
        step(*batch(number))
        if not step.tuning:
            break
    assert not step.tuning
    assert [step.report[name].status for name in ("one", "two")] == ["rejected", "rejected"]
    assert "slower together" in step.report["one"].reason
    assert [layer.seconds for layer in model[:2]] == [1.0, 1.0]


def test_two_that_help_alone_and_not_together(monkeypatch, time):
    model = net(time, layers=3)
    register(monkeypatch, one=takes("0", 0.5), two=takes("1", 0.5))
    step, _ = tune(model, names=["one", "two"], steps=1)
    for number in range(1, 200):
        model[2].seconds = 4.0 if model[0].seconds == model[1].seconds == 0.5 else 1.0
        step(*batch(number))
        if not step.tuning:
            break
    assert sorted(step.report[name].status for name in ("one", "two")) == ["kept", "rejected"]
    assert sorted(layer.seconds for layer in model[:2]) == [0.5, 1.0]
    assert step.report.tuning.final_ms == pytest.approx(2500)


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("the double fails"), torch.OutOfMemoryError("no memory")])
def test_a_patch_that_raises_in_step_7_is_rolled_back_and_step_7_done_again(monkeypatch, time, failure):
    calls, raised = [0], []

    def make(forward):
        def new(x):
            calls[0] += 1
            if step_number[0] == 7:
                raised.append(failure)
                raise failure
            return forward(x)

        return new

    step_number = [0]
    register(monkeypatch, double=forward_patcher("1", make), good=takes("0", 0.4))
    model = net(time)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = autofuse.optimize(
        model, optimizer, loss_fn=nn.functional.mse_loss, only=["double", "good"], precision="fp32"
    )
    losses = []
    for number in range(60):
        step_number[0] = number + 1
        # it is tried, and kept on, in the very step that fails
        if number == 6 and "forward" not in vars(model[1]):
            step._patches.get("double").apply()
        losses.append(step(*batch(number)).item())
    assert raised and not step.tuning
    row = step.report["double"]
    assert row.status == "rejected" and str(failure) in row.reason and "batch 7" in row.reason
    assert "forward" not in vars(model[1])
    assert step.report["good"].status == "kept" and step.report.counters.steps == 60
    assert losses == plain(net(time), 60)


def test_running_out_of_memory_in_the_proof_is_tried_again_with_more_room(monkeypatch, time):
    failing = [True]

    def make(forward):
        def new(x):
            if failing and failing.pop():
                raise torch.OutOfMemoryError("no room for two sets of gradients")
            time.passes(-0.5)
            return forward(x)

        return new

    register(monkeypatch, double=forward_patcher("1", make))
    step, _ = tune(net(time), names=["double"])
    assert not failing and step.report["double"].status == "kept"


def test_steps_with_something_that_happens_once_are_not_counted(monkeypatch, time):
    """A step in which something was compiled takes ten times as long, and says nothing."""
    from autofuse.proof import runs

    seen = [0]

    def make(forward):
        def new(x):
            seen[0] += 1
            if seen[0] in (4, 6, 8):
                runs.evaluations += 1
                time.passes(10.0)
            time.passes(-0.6)
            return forward(x)

        return new

    register(monkeypatch, double=forward_patcher("1", make))
    step, _ = tune(net(time), names=["double"])
    row = step.report["double"]
    assert row.status == "kept" and row.gain == pytest.approx(0.3)


def test_steps_before_a_compilation_are_not_compared_with_those_after_it(monkeypatch, time):
    """Meanwhile the machine has become half as fast."""
    from autofuse.proof import runs

    seen = [0]

    def make(forward):
        def new(x):
            seen[0] += 1
            if seen[0] == 2:  # the first step after the proof
                runs.evaluations += 1
                time.speed = 2.0
            time.passes(-0.6)
            return forward(x)

        return new

    register(monkeypatch, double=forward_patcher("1", make))
    step, _ = tune(net(time), names=["double"])
    row = step.report["double"]
    assert row.status == "kept" and row.gain == pytest.approx(0.3)
    assert row.before_ms == pytest.approx(4000) and row.after_ms == pytest.approx(2800)


def test_steps_before_a_long_proof_are_not_compared_with_those_after_it(monkeypatch, time):
    """While something was compiled for the proof, the machine has become half as fast."""
    seen = [0]

    def make(forward):
        def new(x):
            seen[0] += 1
            if seen[0] == 1:  # in the proof
                time.speed = 2.0
            time.passes(-0.6)
            return forward(x)

        return new

    double = forward_patcher("1", make)

    def dear(context):
        patch = double(context)
        patch.pays, patch.encloses = (lambda seconds: None), True
        return patch

    register(monkeypatch, dear=Entry(dear, order=90))
    step, _ = tune(net(time), names=["dear"])
    row = step.report["dear"]
    assert row.status == "kept" and row.gain == pytest.approx(0.3)
    assert row.before_ms == pytest.approx(4000) and row.after_ms == pytest.approx(2800)


def test_a_patch_whose_steps_never_settle_is_given_up(monkeypatch, time):
    from autofuse.proof import runs

    def make(forward):
        def new(x):
            runs.evaluations += 1
            return forward(x)

        return new

    register(monkeypatch, double=forward_patcher("1", make))
    step, losses = tune(net(time), names=["double"])
    assert not step.tuning and len(losses) < 30
    assert step.report["double"].status == "rejected" and "never settled" in step.report["double"].reason


def test_the_budget_is_kept(monkeypatch, time):
    """A patch that makes its steps a hundred times as slow costs a few steps, not dozens."""
    register(monkeypatch, **{f"slow{n}": takes("0", 30.0) for n in range(8)})
    step, _ = tune(net(time), names=[f"slow{n}" for n in range(8)])
    tuning = step.report.tuning
    assert tuning.extra_seconds < 75 * tuning.baseline_ms / 1e3, tuning
    assert any("budget" in row.reason for row in step.report.rows)


def test_undo_in_the_middle_of_a_trial(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.99))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good"])
    for number in range(100):
        step(*batch(number))
        if model[0].seconds == 0.99:
            break
    step.undo()
    assert model[0].seconds == 1.0 and not step.tuning
    step(*batch())
    assert model[0].seconds == 1.0 and step.report["good"].status == "rejected"


def test_a_second_call_takes_over(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4))
    model = net(time)
    first = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good"])
    for number in range(3):
        first(*batch(number))
    second, _ = tune(model, names=["good"])
    assert not first.tuning and second.report["good"].status == "kept"
    third = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["optimizer"])
    assert second.report["good"].status == "kept" and model[0].seconds == 0.4 and third is not second


def test_a_fault_of_the_tuner_is_not_the_users(monkeypatch, time):
    register(monkeypatch, good=takes("0", 0.4), other=takes("1", 0.4))
    model = net(time)
    step = autofuse.optimize(model, loss_fn=nn.functional.mse_loss, only=["good", "other"], precision="fp32")
    monkeypatch.setattr("autofuse.trial.Trial.estimate", lambda self, **_: 1 / 0)
    for number in range(20):
        step(*batch(number))
    assert not step.tuning and "tuning ended early (ZeroDivisionError" in " ".join(step.report.tuning.notes)
    assert [layer.seconds for layer in model[:2]] == [1.0, 1.0]


def test_what_had_nothing_to_do_is_not_timed(monkeypatch, time):
    register(monkeypatch, idle=takes("0", 1.5, idle=lambda: True))
    model = net(time)
    step, losses = tune(model, names=["idle"])
    row = step.report["idle"]
    assert row.status == "kept" and "not timed" in row.reason and row.gain is None and len(losses) <= 4
    assert step.report.tuning.final_ms == step.report.tuning.baseline_ms
