"""The training step: what a batch may be, the pieces, clipping, schedulers, several optimizers, state."""

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
from legacy import LEGACY, gan
from torch import nn

import autofuse

MSE = {"loss_fn": F.mse_loss, **PLAIN}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def pair(seed=1, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


# --- what a batch may be -------------------------------------------------------------------------


def test_a_mapping_with_labels():
    case = CASES["gpt2"]
    model = case.model()
    loss = optimize(case, model, measure=False)(case.batch())
    assert loss.dim() == 0 and not loss.requires_grad and loss.dtype == torch.float32
    assert close(loss.item(), loss_of(case, case.model()).item())


def test_a_batch_encoding_is_a_mapping():
    transformers = pytest.importorskip("transformers")
    case = CASES["bert-cls"]
    encoding = transformers.BatchEncoding(case.batch())
    loss = optimize(case, case.model(), measure=False)(encoding)
    assert close(loss.item(), loss_of(case, case.model()).item())


@pytest.mark.parametrize("form", ["two arguments", "a pair", "a list", "a mapping"])
def test_inputs_and_targets(form):
    inputs, targets = pair()
    batch = {
        "two arguments": (inputs, targets),
        "a pair": ((inputs, targets),),
        "a list": ([inputs, targets],),
        "a mapping": ({"input": inputs, "labels": targets},),
    }[form]
    model = net()
    expected = F.mse_loss(model(inputs), targets).item()
    assert close(autofuse.optimize(model, **{"measure": False, **MSE})(*batch).item(), expected)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.norm, self.right = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, a, b):
        return self.right(self.norm(self.left(a) + self.left(b)))


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_several_inputs(kind):
    model, (inputs, targets) = TwoInputs(), pair()
    several = {"a": inputs, "b": inputs.flip(0)} if kind is dict else kind([inputs, inputs.flip(0)])
    expected = F.mse_loss(model(inputs, inputs.flip(0)), targets).item()
    assert close(autofuse.optimize(model, **{"measure": False, **MSE})(several, targets).item(), expected)


def test_forward_takes_any_batch():
    class Strange:
        x, y = pair()

    def forward(model, batch):
        return F.mse_loss(model(batch.x), batch.y) * 3

    model = net()
    expected = forward(model, Strange).item()
    loss = autofuse.optimize(model, forward=forward, **{"measure": False, **PLAIN})(Strange())
    assert close(loss.item(), expected)


@pytest.mark.parametrize("kind", ["mapping", "loss_fn", "forward"])
def test_return_outputs(kind):
    case = CASES["bert-cls"]
    model, plain = case.model(), case.model()
    extra = {
        "mapping": {},
        "loss_fn": {"loss_fn": lambda outputs, labels: F.cross_entropy(outputs.logits, labels)},
        "forward": {"forward": lambda m, b: (lambda out: (out.loss, out))(m(**b))},
    }[kind]
    step = autofuse.optimize(model, adamw(model), **extra, **{"measure": False, **PLAIN})
    loss, outputs = step(case.batch(), return_outputs=True)
    expected = plain(**case.batch())
    assert close(loss.item(), expected.loss.item())
    torch.testing.assert_close(outputs.logits, expected.logits)
    step(case.batch(2))  # the outputs stay right after the weights have moved
    torch.testing.assert_close(outputs.logits, expected.logits)


def test_a_tuple_whose_first_is_the_loss():
    case = CASES["bert-cls"]
    model = case.model(return_dict=False)
    assert close(
        optimize(case, model, measure=False)(case.batch()).item(), loss_of(case, case.model()).item()
    )


# --- the pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert-cls", "rms", "conv", "nanogpt"])
def test_the_pieces_equal_the_call_and_the_plain_loop(name):
    case = CASES[name]
    plain, called, pieced = (case.model(0.1) for _ in range(3))
    torch.manual_seed(4)
    expected = plain_loop(case, plain, adamw(plain), 3)
    torch.manual_seed(4)
    assert close(fast_loop(case, optimize(case, called, adamw(called), measure=False), 3), expected)
    torch.manual_seed(4)
    step, losses = optimize(case, pieced, adamw(pieced), measure=False), []
    for number in range(3):
        with step.autocast():
            loss = loss_of(case, pieced, number)
        step.backward(loss)
        assert step.update() is True
        losses.append(loss.item())
    assert close(losses, expected)
    assert step.report.proved and step.report["norms"].status == "kept"
    assert all(p.grad is None for p in pieced.parameters())
    for a, b in zip(plain.parameters(), pieced.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("together", [True, False])
def test_a_gan_in_pieces(together):
    def losses(net, noise, real, context):
        with context():
            loss = F.softplus(-net.discriminator(real)).mean()
            loss = loss + F.softplus(net.discriminator(net.generator(noise).detach())).mean()
        return loss, lambda: F.softplus(-net(noise)).mean()

    plain, *plain_optimizers = gan()
    fast, *optimizers = gan()
    if together:
        both = autofuse.optimize(fast, optimizers, **{"measure": False, **PLAIN})
        steps = (both, both)
    else:
        steps = (
            autofuse.optimize(fast.generator, optimizers[0], **{"measure": False, **PLAIN}),
            autofuse.optimize(fast.discriminator, optimizers[1], **{"measure": False, **PLAIN}),
        )
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        noise, real = torch.randn(5, 4, generator=generator), torch.randn(5, 6, generator=generator)
        found, expected = [], []
        loss, second = losses(plain, noise, real, torch.enable_grad)
        expected.append(loss.item())
        for optimizer, value in ((plain_optimizers[1], loss), (plain_optimizers[0], None)):
            value = second() if value is None else value
            plain.zero_grad()
            value.backward()
            optimizer.step()
            expected.append(value.item())
        loss, second = losses(fast, noise, real, steps[1].autocast)
        found.append(loss.item())
        steps[1].backward(loss)
        assert steps[1].update(optimizers[1]) is True
        found.append(loss.item())
        fast.zero_grad()
        with steps[0].autocast():
            loss = second()
        steps[0].backward(loss)
        assert steps[0].update(optimizers[0]) is True
        found.append(loss.item())
        fast.zero_grad()
        assert close(found, expected, 1e-4), number
    swapped = [type(m).__name__ for m in fast.modules() if "Norm" in type(m).__name__]
    assert swapped == ["FusedGammaBetaNorm", "FusedLayerNorm"]


def test_several_optimizers_in_one_step():
    case = CASES["bert-cls"]
    models = case.model(), case.model()
    several = []
    for model in models:
        body = [p for n, p in model.named_parameters() if "classifier" not in n]
        head = [p for n, p in model.named_parameters() if "classifier" in n]
        several.append((torch.optim.AdamW(body, lr=1e-3), torch.optim.SGD(head, lr=0.1, momentum=0.9)))
    expected = []
    for number in range(3):
        expected.append(loss := loss_of(case, models[0], number))
        loss.backward()
        for optimizer in several[0]:
            optimizer.step()
            optimizer.zero_grad()
    step = optimize(case, models[1], several[1], measure=False)
    assert close(fast_loop(case, step, 3), [loss.item() for loss in expected])
    assert step.optimizer == several[1] and step.report.counters.steps == 3
    assert len(step.report["optimizer"].sites) == 2


def test_without_an_optimizer_a_step_computes_gradients_alone():
    case = CASES["llama"]
    model, plain = case.model(), case.model()
    step = optimize(case, model, measure=False)
    weights = copy.deepcopy(model.state_dict())
    step(*arguments(case))
    loss_of(case, plain).backward()
    assert gradient_error(plain, model) < 1e-4
    assert step.optimizer is None and step.report.counters.steps == 0
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_an_optimizer_with_extra_parameters():
    """A learnable temperature beside the model, as in CLIP."""
    models, temperatures = (net(), net()), [nn.Parameter(torch.ones(())) for _ in range(2)]
    losses = [[], []]
    optimizers = [
        torch.optim.AdamW([*model.parameters(), temperature], lr=0.01)
        for model, temperature in zip(models, temperatures, strict=True)
    ]
    step = autofuse.optimize(
        models[1],
        optimizers[1],
        loss_fn=lambda out, y: F.mse_loss(out * temperatures[1], y),
        **PLAIN,
        measure=False,
    )
    for number in range(4):
        inputs, targets = pair(number)
        loss = F.mse_loss(models[0](inputs) * temperatures[0], targets)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        losses[0].append(loss.item())
        losses[1].append(step(inputs, targets).item())
    assert close(losses[1], losses[0])
    torch.testing.assert_close(temperatures[1], temperatures[0])
    assert temperatures[0].item() != 1


# --- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.01, 1e6])
@pytest.mark.parametrize("name", ["gpt2", "rms"])
def test_clipping(name, clip):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=1.0), []
    for number in range(3):
        loss = loss_of(case, plain, number)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    step = optimize(
        case, fast, torch.optim.SGD(fast.parameters(), lr=1.0), clip_grad_norm=clip, measure=False
    )
    assert close(fast_loop(case, step, 3), expected)


def test_batch_norm_statistics_are_the_plain_loops():
    case = LEGACY["conv"]
    plain, fast = case.model(), case.model()
    step = optimize(case, fast, adamw(fast), measure=False)
    optimizer = adamw(plain)
    for number in range(4):
        plain_loop(case, plain, optimizer, 1)
        step(*arguments(case, 0))
        torch.testing.assert_close(fast.bn.running_mean, plain.bn.running_mean, msg=f"step {number}")
        torch.testing.assert_close(fast.bn.running_var, plain.bn.running_var)
        assert fast.bn.num_batches_tracked == plain.bn.num_batches_tracked == number + 1


class Counting(nn.Module):
    """A user's own buffers and attributes, changed in the forward."""

    def __init__(self):
        super().__init__()
        self.body, self.calls, self.last = net(), 0, None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.history.append(x.shape[0])
        self.last = self.body(x)
        return self.last


def test_the_proof_leaves_no_trace_in_the_models_own_state():
    model = Counting()
    step = autofuse.optimize(model, adamw(model), **{"measure": False, **MSE})
    step(*pair())
    assert model.seen.item() == 1 and model.calls == 1
    assert model.history == [6]
    step(*pair())
    assert model.seen.item() == model.calls == 2 and model.history == [6, 6]


def test_gradients_that_were_there_before_are_added_to():
    case = CASES["rms"]
    plain, fast = case.model(), case.model()
    for model in (plain, fast):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    step = optimize(case, fast, measure=False)
    step(*arguments(case))
    loss_of(case, plain).backward()
    assert gradient_error(plain, fast) < 1e-5


# --- what a loop may get wrong ---------------------------------------------------------------------


def test_a_backward_of_the_callers_own_is_counted_or_refused():
    case = CASES["rms"]
    plain, fast = case.model(), case.model()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    step = optimize(case, fast, optimizer, measure=False)
    with step.autocast():
        loss = loss_of(case, fast)
    loss.backward()
    assert step.update() is True and step.report.counters.steps == 1
    loss_of(case, plain).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    step = optimize(case, fast, optimizer, accumulate=2, measure=False)
    loss_of(case, fast).backward()
    with pytest.raises(RuntimeError, match=r"step\.backward"):
        step.update()


def test_several_backwards_before_an_update_add_up():
    case = CASES["rms"]
    plain, fast = case.model(), case.model()
    step = optimize(case, fast, torch.optim.SGD(fast.parameters(), lr=0.1), measure=False)
    for number in range(2):
        with step.autocast():
            loss = loss_of(case, fast, number)
        step.backward(loss)
        loss_of(case, plain, number).backward()
    assert step.update() is True
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_forward_may_take_the_batch_apart():
    def forward(model, batch):
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    case = CASES["gpt2"]
    plain, fast = case.model(), case.model()
    step = autofuse.optimize(
        fast, adamw(fast), forward=forward, precision="fp32", compile=False, measure=False
    )
    (batch,) = arguments(case)
    expected = forward(plain, dict(batch)).item()
    given = dict(batch)
    assert step(given).item() == pytest.approx(expected, rel=1e-5)
    assert "labels" not in given  # as by one run
