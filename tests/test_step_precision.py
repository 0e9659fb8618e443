"""Lower precision: bf16 and fp16 asked for on a CPU, scalers, models that are narrow already."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, adamw, arguments, close, plain_loop
from test_step import net, pair
from torch import nn

import autofuse

fp16_warning = pytest.mark.filterwarnings('ignore:precision="fp16"')
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def optimize(model, optimizer=None, **options):
    return autofuse.optimize(
        model, optimizer, **{"loss_fn": F.mse_loss, "compile": False, "measure": False, **options}
    )


def start_scale(step, scale=256.0):
    """A scaler starts at 65536 and comes down by overflows, as any does: this one starts low."""
    state = step.state_dict()
    if state["scaler"] is not None:
        step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": scale}})
    return step


@fp16_warning
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", ["gpt2", "bert-cls", "llama", "gemma2", "rms", "encoder", "conv"])
def test_low_precision_asked_for_on_a_cpu_is_honoured(name, precision):
    case = CASES[name]
    plain, model = case.model(), case.model()
    extra = {"loss_fn": getattr(case, "loss_fn", None)}
    step = start_scale(optimize(model, adamw(model), precision=precision, **{"measure": False, **extra}))
    losses = [step(*arguments(case, number)).item() for number in range(3)]
    expected = plain_loop(case, plain, adamw(plain), 3)
    assert close(losses, expected, 2e-2) and not close(losses, expected, 1e-7)
    assert step.report["precision"].status == "kept"
    assert step.report["norms"].status == "kept", step.report["norms"].reason
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert step.report.counters.steps == 3


def seen_dtypes(model, path):
    seen = []
    model.get_submodule(path).register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    return seen


@pytest.mark.parametrize("name, path", [("gpt2", "transformer.h.0.ln_1"), ("llama", "model.norm")])
def test_a_norm_gives_the_autocast_dtype_inside_the_step_alone(name, path):
    """No fp32 copy is written only to be cast down; a direct call keeps the dtypes that it had."""
    case = CASES[name]
    model, plain = case.model(), case.model()
    step = optimize(model, loss_fn=None, precision="bf16", measure=False)
    step(*arguments(case))
    seen, expected = seen_dtypes(model, path), seen_dtypes(plain, path)
    step(*arguments(case))
    assert seen.pop() == torch.bfloat16
    for context in (torch.enable_grad, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            out, wanted = model(**case.batch()), plain(**case.batch())
        assert seen.pop() == expected.pop() and out.logits.dtype == wanted.logits.dtype


@pytest.mark.parametrize("outputs", ["tensor", "mapping", "tuple"])
def test_the_loss_function_runs_in_fp32_on_fp32_outputs(outputs):
    seen = []

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            y = self.body(x)
            return {"tensor": y, "mapping": {"y": y, "mask": x > 0}, "tuple": (y, 3)}[outputs]

    def loss_fn(out, target):
        y = {"tensor": lambda: out, "mapping": lambda: out["y"], "tuple": lambda: out[0]}[outputs]()
        product = y @ y.T  # under autocast it would be narrow
        seen.append((y.dtype, product.dtype, torch.is_autocast_enabled("cpu")))
        return F.mse_loss(y, target)

    step = optimize(Wrapped(), loss_fn=loss_fn, precision="bf16", measure=False)
    step(*pair())
    assert set(seen) == {(torch.float32, torch.float32, False)}


def test_autocast_is_off_outside_the_step():
    model = net()
    step = optimize(model, precision="bf16", measure=False)
    step(*pair())
    assert not torch.is_autocast_enabled("cpu") and model(pair()[0]).dtype == torch.float32
    with step.autocast():
        assert model(pair()[0]).dtype == torch.bfloat16
    step.undo()
    with step.autocast():
        assert model(pair()[0]).dtype == torch.float32


def test_fp16_where_bf16_is_as_fast_gets_a_warning_that_names_it(monkeypatch):
    monkeypatch.setattr(autofuse.Hardware, "autocast_dtype", lambda self: (torch.bfloat16, "fast here"))
    with pytest.warns(UserWarning, match="bf16"):
        optimize(net(), precision="fp16", measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(net(), precision="bf16", measure=False)


# --- fp16: the scaler ------------------------------------------------------------------------------


@fp16_warning
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("clip", [0.01, None])
def test_clipping_is_after_unscaling(pieces, clip):
    model = net()
    plain = copy.deepcopy(model)
    step = optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        precision="fp16",
        clip_grad_norm=clip,
        measure=False,
    )
    start_scale(step)
    inputs, targets = pair()
    if pieces:
        with step.autocast():
            outputs = model(inputs)
        step.backward(F.mse_loss(outputs.float(), targets))
        assert step.update() is True
    else:
        step(inputs, targets)
    F.mse_loss(plain(inputs), targets).backward()
    if clip:
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    before = copy.deepcopy(net().state_dict())
    moved = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters()])
    expected = torch.cat([(p - before[n]).flatten() for n, p in plain.named_parameters()])
    assert (moved - expected).norm() < 0.02 * expected.norm()
    assert clip is None or abs(moved.norm().item() / clip - 1) < 0.01


@fp16_warning
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_skips_the_step_halves_the_scale_and_keeps_the_scheduler(accumulate):
    model = net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message='precision="fp16"')
        step = optimize(
            model, optimizer, scheduler=scheduler, precision="fp16", accumulate=accumulate, measure=False
        )
        start_scale(step)
        for _ in range(accumulate):
            step(*pair())
        scale = step.state_dict()["scaler"]["scale"]
        weights, state = copy.deepcopy(model.state_dict()), str(optimizer.state_dict())
        for _ in range(accumulate):
            step(pair()[0], pair()[1] * 1e4)  # a finite loss, a gradient over 65504 / scale
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        assert str(optimizer.state_dict()) == state
        assert step.state_dict()["scaler"]["scale"] == scale / 2
        for _ in range(accumulate):
            step(*pair())
    counters = step.report.counters
    assert (counters.steps, counters.skipped, counters.nonfinite) == (2, 1, 0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)


@fp16_warning
def test_a_nan_loss_under_a_scaler_is_skipped_and_counted():
    model = net()
    optimizer = adamw(model)
    step = start_scale(optimize(model, optimizer, precision="fp16", measure=False))
    step(*pair())
    weights, state = copy.deepcopy(model.state_dict()), str(optimizer.state_dict())
    assert step(pair()[0] * float("nan"), pair()[1]).isnan()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == state
    counters = step.report.counters
    assert (counters.nonfinite, counters.first_nonfinite, counters.skipped, counters.steps) == (1, 2, 1, 1)
    step(*pair())
    assert step.report.counters.steps == 2


@fp16_warning
def test_the_window_is_the_joined_batch_under_a_scaler():
    case = CASES["rms"]
    model, plain = case.model(), case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = optimize(model, optimizer, loss_fn=case.loss_fn, precision="fp16", accumulate=2, measure=False)
    start_scale(step)
    big, small = case.batch(1), tuple(part[:1] for part in case.batch(2))
    for batch in (big, small):
        step(*batch)
    inputs, targets = (torch.cat(parts) for parts in zip(big, small, strict=True))
    F.cross_entropy(plain(inputs), targets).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    start = dict(case.model().named_parameters())
    for name, parameter in plain.named_parameters():
        moved, expected = model.get_parameter(name) - start[name], parameter - start[name]
        assert (moved - expected).norm() < 0.05 * expected.norm() + 1e-3


@fp16_warning
def test_a_gan_with_one_scaler_for_two_optimizers():
    models = nn.ModuleDict({"a": net(), "b": net(1)})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]

    def forward(model, batch):
        return F.mse_loss(model["a"](batch[0]), batch[1]) + F.mse_loss(model["b"](batch[0]), batch[1])

    step = autofuse.optimize(
        models, optimizers, forward=forward, precision="fp16", compile=False, measure=False
    )
    start_scale(step)
    before = copy.deepcopy(models.state_dict())
    losses = [step(pair()).item() for _ in range(5)]
    assert losses[-1] < losses[0] and step.report.counters.steps == 5
    assert not any(torch.equal(value, before[key]) for key, value in models.state_dict().items())


# --- models that are narrow already -------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert-cls"])
def test_a_model_in_bf16_trains_as_it_would(name, asked):
    case = CASES[name]
    plain, model = case.model().bfloat16(), case.model().bfloat16()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    step = optimize(model, optimizers[1], loss_fn=None, precision=asked, measure=False)
    losses = [step(*arguments(case, number)).item() for number in range(3)]
    assert close(losses, plain_loop(case, plain, optimizers[0], 3), 1e-2)
    assert step.report["precision"].status == "rejected" and "already" in step.report["precision"].reason
    assert step.report["norms"].status == "kept", step.report["norms"].reason
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with torch.no_grad():
        found, expected = model.eval()(**case.batch()).logits, case.model().bfloat16().eval()
        expected.load_state_dict(model.state_dict())
        assert torch.equal(found, expected(**case.batch()).logits)


def test_a_bf16_model_with_norms_in_fp32():
    """Native layer norm takes such a mix on a CPU."""
    model = net().bfloat16()
    model[1].float()
    plain, (inputs, targets) = copy.deepcopy(model), pair()
    step = optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), measure=False)
    loss = step(inputs.bfloat16(), targets)
    assert close(loss.item(), F.mse_loss(plain(inputs.bfloat16()).float(), targets).item(), 1e-2)
    assert model[1].weight.dtype == torch.float32 and model[0].weight.dtype == torch.bfloat16
    assert step.report["norms"].status == "kept", step.report["norms"].reason


def test_a_model_in_fp64():
    model = net().double()
    plain = copy.deepcopy(model)
    inputs, targets = (t.double() for t in pair())
    step = optimize(model, adamw(model), precision="fp32", measure=False)
    loss = step(inputs, targets)
    assert loss.dtype == torch.float64
    assert close(loss.item(), F.mse_loss(plain(inputs), targets).item(), 1e-12)
