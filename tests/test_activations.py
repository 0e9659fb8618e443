"""The patcher `activations`: what it recognises, what it leaves alone, and the numbers of what it changes."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from activation_zoo import REFUSED, SPELLINGS, Act, Beta, OtherInBF16
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2CLS, ACT2FN

import autofuse
from autofuse.functional.activation import ACTIVATIONS, REFERENCES
from patchers import activations
from patchers.activations import recognise

PLAIN = {"compile": False, "precision": "fp32", "measure": False, "only": ["activations"]}
BF16 = torch.bfloat16


def mlp(act):
    return nn.Sequential(nn.Linear(8, 32), act, nn.Linear(32, 8))


def data():
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(5))


def optimized(act, **options):
    model = mlp(act)
    return model, autofuse.optimize(model, loss_fn=F.mse_loss, **{**PLAIN, **options})


# --- what is recognised ---------------------------------------------------------------------------

OF_TRANSFORMERS = {
    "gelu_fast": "gelu (tanh)",
    "gelu_new": "gelu (tanh)",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu (tanh)",
    "gelu_accurate": "gelu (tanh)",
    "quick_gelu": "quick_gelu",
    "relu2": "relu_squared",
}
ONE_OPERATION = {"gelu", "gelu_pytorch_tanh", "mish", "silu"}


def test_every_activation_of_transformers():
    names = [name for name in ACT2CLS if name != "xielu"]  # which warns of a package, and has parameters
    model = nn.ModuleDict({name: ACT2FN[name] for name in names})
    sites = {site.path: site for site in autofuse.plan(model, **PLAIN)["activations"].sites}
    assert {name: site.operation for name, site in sites.items() if site.accepted} == OF_TRANSFORMERS
    reasons = {name: site.reason for name, site in sites.items() if not site.accepted}
    assert {name for name, reason in reasons.items() if "one operation" in reason} == ONE_OPERATION
    assert reasons.keys() - ONE_OPERATION == {"gelu_10", "sqrtsoftplus"}
    assert not [site for site in sites.values() if site.cls.startswith("torch.nn.")]
    grid = torch.linspace(-30, 30, 20001, dtype=torch.float64, requires_grad=True)
    for name, operation in OF_TRANSFORMERS.items():
        pair = [f(grid) for f in (ACT2FN[name], ACTIVATIONS[operation])]
        torch.testing.assert_close(*pair, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), grid)[0] for y in pair), rtol=1e-8, atol=1e-8
        )


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_hand_written_one_is_recognised_and_trains_as_before(name):
    make, operation = SPELLINGS[name]
    model, step = optimized(make())
    assert [site.operation for site in step.report["activations"].accepted] == [operation]
    assert type(model[1]).__name__.startswith("Fused") and isinstance(model[1], type(make()))
    plain = mlp(make())
    plain.load_state_dict(model.state_dict())
    loss = F.mse_loss(plain(data()), data())
    loss.backward()
    assert step(data(), data()).item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", REFUSED)
def test_a_near_miss_is_left_alone_and_says_why(name):
    make, reason = REFUSED[name]
    act = make()
    kind = type("Activation", (type(act),), {})  # the name is what is listed
    act.__class__ = kind
    model, step = optimized(act)
    assert type(model[1]) is kind
    (site,) = step.plan["activations"].sites
    assert reason in site.reason


def test_what_is_set_afterwards_gives_the_class_back():
    model, _ = optimized(Beta(1.702))
    assert type(model[1]) is not Beta
    model[1].beta = 3.0
    assert type(model[1]) is Beta
    model = nn.Sequential(Beta(1.702), Beta(1.0), Beta(1.7))
    operations = [site.operation for site in autofuse.plan(model, **PLAIN)["activations"].sites]
    assert operations == ["quick_gelu", "silu"]  # one class, three functions; the third is listed nowhere
    changed = autofuse.plan(model, **PLAIN).patches["activations"]
    model[0].beta = 1.7
    changed.apply()
    assert type(model[0]) is Beta and type(model[1]) is not Beta


def test_a_dtype_in_which_it_is_another_function_is_the_originals():
    model = nn.Sequential(OtherInBF16())
    autofuse.optimize(model, None, **PLAIN)
    x = torch.randn(9, requires_grad=True)
    torch.testing.assert_close(model(x), F.silu(x))
    assert type(model[0]) is not OtherInBF16 and torch.equal(model(x.to(BF16)), F.relu(x.to(BF16)))


def test_mish_is_changed_where_that_is_faster():
    model = nn.Sequential(Act(lambda x: x * torch.tanh(F.softplus(x))))
    for machine, accepted in (("A100", True), ("cpu-amx", False)):
        plan = autofuse.plan(model, hardware=autofuse.Hardware.named(machine), **PLAIN)
        (site,) = plan["activations"].sites
        assert site.accepted is accepted and (site.operation == "mish" or "longer on a CPU" in site.reason)


def test_recognition_is_made_once_and_touches_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(activations, "recognise", lambda module: calls.append(1) or recognise(module))
    model = nn.Sequential(*(ACT2FN[name] for name in ["gelu_python", "gelu_new"] * 9))
    before, rng = [dict(vars(module)) for module in model], torch.get_rng_state()
    plan = autofuse.plan(model, **PLAIN)
    assert len(plan["activations"].accepted) == 18 and len(calls) == 2
    assert [dict(vars(module)) for module in model] == before and torch.equal(rng, torch.get_rng_state())


# --- the operations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_operation_is_its_formula(name):
    x = torch.linspace(-9, 9, 301, dtype=torch.float64, requires_grad=True)
    pair = [f(x) for f in (ACTIVATIONS[name], REFERENCES[name])]
    torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12)
    firsts = [torch.autograd.grad(y.square().sum(), x, create_graph=True)[0] for y in pair]
    torch.testing.assert_close(*firsts, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(g.sum(), x)[0] for g in firsts), rtol=1e-7, atol=1e-9)
    _, tangent = torch.func.jvp(ACTIVATIONS[name], (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.vmap(torch.func.grad(ACTIVATIONS[name]))(x.detach()))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_dtypes_are_the_originals_under_autocast_too(name):
    act = ACT2FN[name]
    model = nn.Sequential(copy.deepcopy(act))
    autofuse.optimize(model, None, **PLAIN)
    for dtype in (torch.float32, BF16, torch.float16, torch.float64):
        for enabled in (False, True):
            with torch.autocast("cpu", BF16, enabled=enabled):
                x = torch.randn(4, 8, dtype=dtype).requires_grad_()
                assert model(x).dtype == act(x).dtype
                (gradient,) = torch.autograd.grad(model(x).sum(), x)
                assert gradient.dtype == dtype
    assert model(torch.ones(2, device="meta")).is_meta


@pytest.mark.parametrize("name", ["gelu_new", "quick_gelu", "relu2"])
def test_compile_double_backward_and_checkpointing(name):
    model, _ = optimized(ACT2FN[name])
    plain = mlp(ACT2FN[name])
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    runs = [plain, model, compiled, lambda x: checkpoint(model, x, use_reentrant=False)]
    runs.append(lambda x: checkpoint(model, x, use_reentrant=True))
    slopes = []
    for run in runs:
        x = data().requires_grad_()
        run(x).square().sum().backward()
        slopes.append(x.grad)
        torch.testing.assert_close(x.grad, slopes[0], rtol=1e-5, atol=1e-6)
    penalties = []
    for run in (plain, model):
        x = data().requires_grad_()
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        run.zero_grad()
        gradient.norm().backward()
        penalties.append(run[0].weight.grad)
    torch.testing.assert_close(*penalties, rtol=1e-5, atol=1e-6)


# --- in a model -----------------------------------------------------------------------------------


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def tokens():
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_gpt2_gives_its_loss_and_gradients_and_takes_everything_back():
    model, plain = gpt2(), gpt2()
    step = autofuse.optimize(model, **PLAIN)
    assert [site.operation for site in step.report["activations"].accepted] == ["gelu (tanh)"] * 2
    loss = plain(**tokens()).loss
    loss.backward()
    assert step(tokens()).item() == pytest.approx(loss.item(), rel=1e-5)
    assert step.report["activations"].status == "kept" and step.report["activations"].error < 1e-4
    expected = gradients(plain)
    assert (gradients(model) - expected).norm() <= 1e-4 * expected.norm()
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(**tokens()).logits, plain.eval()(**tokens()).logits)
    file = io.BytesIO(pickle.dumps(model.transformer.h[0].mlp.act))
    assert b"Fused" not in file.getvalue() and type(pickle.load(file)) is ACT2CLS["gelu_new"]
    assert type(copy.deepcopy(model).transformer.h[0].mlp.act) is type(model.transformer.h[0].mlp.act)
    again = autofuse.optimize(model, **PLAIN)
    assert "2 are fused already" in again.plan["activations"].reason
    step.undo()
    assert {type(block.mlp.act) for block in model.transformer.h} == {ACT2CLS["gelu_new"]}


def test_gpt2_in_bf16_keeps_its_promise():
    exact, plain, model = gpt2(), gpt2(), gpt2()
    exact(**tokens()).loss.backward()
    with torch.autocast("cpu", BF16):
        plain(**tokens()).loss.backward()
    step = autofuse.optimize(model, **{**PLAIN, "precision": "bf16", "only": ["activations", "precision"]})
    step(tokens())
    assert step.report["activations"].status == "kept", step.report["activations"].reason
    errors = [(gradients(m) - gradients(exact)).norm() for m in (model, plain)]
    assert errors[0] <= 1.5 * errors[1]
