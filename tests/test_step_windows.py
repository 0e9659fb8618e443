"""Accumulation: a window's gradient is that of the joined batch; clipping and schedulers with it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, PLAIN, adamw, close, gradient_error, optimize
from legacy import LEGACY
from test_step import MSE, net, pair
from torch import nn

import autofuse


def joined(batches):
    """The micro-batches as one, padded with token 0 and ignored labels on the right."""

    def join(key):
        parts, value = [batch[key] for batch in batches], -100 if key == "labels" else 0
        length = max(part.shape[-1] for part in parts)
        if parts[0].dim() > 1:
            parts = [F.pad(part, (0, length - part.shape[-1]), value=value) for part in parts]
        return torch.cat(parts)

    return {key: join(key) for key in batches[0]}


def window_gradients(case, model, batches, call=lambda step, batch: step(batch)):
    """Runs the batches as one window; leaves in ``.grad`` what the optimizer's step was given."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    )
    step = optimize(case, model, optimizer, accumulate=len(batches), measure=False)
    for batch in batches:
        call(step, batch)
    assert len(seen) == step.report.counters.steps == 1
    for parameter, gradient in zip(model.parameters(), seen[0], strict=True):
        parameter.grad = gradient
    return step


def gpt_batches(counts, seed=0, length=10):
    """Causal batches with so many labels that count in each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in counts:
        tokens = torch.randint(3, 90, (2, length), generator=generator)
        labels = torch.full_like(tokens, -100)
        flat = labels[:, 1:].reshape(-1)  # a copy: the first label of a row is never used
        flat[:count] = tokens[:, 1:].reshape(-1)[:count]
        labels[:, 1:] = flat.view(2, length - 1)
        labels[:, 0] = 5  # not ignored, and yet not used after the causal shift
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def gradients_of_the_joined_batch(case, batches):
    plain = case.model()
    plain(**joined(batches)).loss.backward()
    return plain


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("counts", [(18, 18, 18), (18, 2, 9), (1, 18), (7, 0, 11), (0, 5)])
def test_a_window_is_the_joined_batch_for_a_causal_loss(name, counts):
    case = CASES[name]
    batches, model = gpt_batches(counts), case.model()
    window_gradients(case, model, batches)
    assert gradient_error(gradients_of_the_joined_batch(case, batches), model) < 1e-4


@pytest.mark.parametrize("name", ["bert-mlm", "roberta", "t5", "bart", "bert-cls", "vit"])
def test_a_window_is_the_joined_batch_for_other_losses(name):
    case = CASES[name]
    batches, model = [case.batch(seed) for seed in (1, 2, 3)], case.model()
    if name in ("bert-mlm", "roberta"):
        batches[1]["labels"][0] = -100
        batches[2]["labels"][:, 7] = 5
    window_gradients(case, model, batches)
    assert gradient_error(gradients_of_the_joined_batch(case, batches), model) < 1e-4


def test_micro_batches_of_unequal_lengths():
    case = CASES["gpt2"]
    batches = gpt_batches((10,), 1, 6) + gpt_batches((20,), 2, 12) + gpt_batches((3,), 3, 4)
    model, plain = case.model(), case.model()
    window_gradients(case, model, batches)
    plain(**joined(batches)).loss.backward()
    assert gradient_error(plain, model) < 1e-4


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1, 3)])
def test_rows_weigh_with_loss_fn_as_the_joined_batch(sizes):
    """Cross entropy is a mean over targets: unequal micro-batches weigh by their targets."""
    case = LEGACY["rms"]
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 16, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]
    model, plain = case.model(), case.model()
    window_gradients(case, model, batches, lambda step, batch: step(*batch))
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    F.cross_entropy(plain(inputs), targets).backward()
    assert gradient_error(plain, model) < 1e-4


@pytest.mark.parametrize("counts", [(18, 18), (18, 2), (2, 18)])
def test_without_an_optimizer_the_window_is_the_joined_batch_too(counts):
    case = CASES["gpt2"]
    batches, model = gpt_batches(counts), case.model()
    step = optimize(case, model, accumulate=2, measure=False)
    for batch in batches:
        step(batch)
    assert gradient_error(gradients_of_the_joined_batch(case, batches), model) < 1e-4


def test_a_loss_that_is_no_mean_over_labels_counts_each_the_same():
    model = net()
    plain, batches = copy.deepcopy(model), [pair(1), pair(2)]
    step = autofuse.optimize(model, accumulate=2, **{"measure": False, **MSE})
    for batch in batches:
        step(*batch)
    for inputs, targets in batches:
        (F.mse_loss(plain(inputs), targets) / 2).backward()
    assert gradient_error(plain, model) < 1e-5


def test_the_loss_returned_is_the_micro_batches_own():
    case = CASES["gpt2"]
    model, batches = case.model(), gpt_batches((18, 2, 9))
    expected = [case.model()(**batch).loss.item() for batch in batches]
    step = optimize(case, model, adamw(model), accumulate=3, measure=False)
    assert close([step(batch).item() for batch in batches], expected)


def steps_of(case, model, batches, habit, **extra):
    """Runs the batches in one of the habits; returns the losses and what update() gave."""
    step = optimize(case, model, adamw(model), accumulate=2, **{"measure": False, **extra})
    losses, updates = [], []
    for number, batch in enumerate(batches):
        if habit == "call":
            losses.append(step(batch).item())
            continue
        with step.autocast():
            loss = model(**batch).loss
        step.backward(loss)
        losses.append(loss.item())
        if habit == "always" or number % 2:
            updates.append(step.update())
    return losses, updates, step


def test_either_habit_with_the_pieces_equals_the_call():
    case = CASES["gpt2"]
    batches = gpt_batches((18, 2, 9, 9, 4, 17))
    plain = case.model()
    optimizer, expected = adamw(plain), []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        expected += [plain(**first).loss.item(), plain(**second).loss.item()]
        plain(**joined([first, second])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {"call": [], "always": [False, True] * 3, "once": [True] * 3}
    for habit, updates in wanted.items():
        model = case.model()
        losses, found, step = steps_of(case, model, batches, habit)
        assert close(losses, expected), habit
        assert found == updates
        assert step.report.counters.steps == 3 and step.report.counters.micro_batches == 6


def test_flush_takes_a_partial_window_and_only_that():
    case = CASES["gpt2"]
    batches = gpt_batches((18, 2, 9))
    model, plain = case.model(), case.model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimize(case, model, sgd, accumulate=2, measure=False)
    weights = copy.deepcopy(model.state_dict())
    assert step.flush() is False
    step(batches[0])
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    step(batches[1])
    step(batches[2])
    assert step.report.counters.steps == 1
    assert step.flush() is True and step.flush() is False
    assert step.report.counters.steps == 2
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in (batches[:2], batches[2:]):
        plain(**joined(window)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_window_starts_again_after_flush():
    case = CASES["gpt2"]
    model = case.model()
    step = optimize(case, model, adamw(model), accumulate=2, measure=False)
    batches = gpt_batches((9, 9, 9, 9, 9))
    step(batches[0])
    step.flush()
    taken = [(step(batch), step.report.counters.steps)[1] for batch in batches[1:]]
    assert taken == [1, 2, 2, 3]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scheduler_moves_once_per_optimizer_step(accumulate):
    case = CASES["rms"]
    model = case.model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = optimize(case, model, optimizer, scheduler=scheduler, accumulate=accumulate, measure=False)
    rates = []
    for number in range(4):
        step(*case.batch(number))
        rates.append(optimizer.param_groups[0]["lr"] / 1e-3)
    assert rates == ([0.5, 0.25, 0.125, 0.0625] if accumulate == 1 else [1, 0.5, 0.5, 0.25])


def test_clipping_applies_to_the_whole_window():
    case = CASES["gpt2"]
    batches = gpt_batches((18, 2))
    model, plain = case.model(), case.model()
    step = optimize(
        case,
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        accumulate=2,
        clip_grad_norm=0.1,
        measure=False,
    )
    for batch in batches:
        step(batch)
    plain(**joined(batches)).loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_micro_batch_without_labels_adds_exactly_nothing(position):
    case = CASES["gpt2"]
    counts = [9, 9]
    counts.insert(position, 0)
    batches = gpt_batches(counts)
    others = [batch for batch, count in zip(batches, counts, strict=True) if count]
    model = case.model()
    step = window_gradients(case, model, batches)
    assert gradient_error(gradients_of_the_joined_batch(case, others), model) < 1e-4
    assert step.report.counters.nonfinite == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_batches_without_any_label_take_no_step_and_count_as_no_nan(accumulate, first):
    case = CASES["gpt2"]
    model = case.model()
    optimizer = adamw(model)
    step = optimize(case, model, optimizer, accumulate=accumulate, on_nonfinite="raise", measure=False)
    if not first:
        for batch in gpt_batches([9] * accumulate):
            step(batch)
    weights = copy.deepcopy(model.state_dict())
    for batch in gpt_batches([0] * accumulate):
        step(batch)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert step.report.counters.nonfinite == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_update_before_the_window_is_full_changes_nothing():
    model = net()
    optimizer = adamw(model)
    step = autofuse.optimize(model, optimizer, accumulate=3, **{"measure": False, **MSE})
    assert step.update() is False
    with step.autocast():
        loss = F.mse_loss(model(pair()[0]), pair()[1])
    step.backward(loss)
    gradient = model[0].weight.grad.clone()
    assert step.update() is False
    assert torch.equal(model[0].weight.grad, gradient)
    assert PLAIN["precision"] == "fp32" and not optimizer.state
