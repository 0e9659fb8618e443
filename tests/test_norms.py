"""Recognition of norms by behaviour: what is accepted, what is refused and why, what un-fuses."""

import copy
import warnings

import norm_zoo
import pytest
import torch
import torch.nn.functional as F
from cases import PLAIN
from norm_zoo import ACCEPTED, LOOK_ALIKES, OTHERS, SIZE
from torch import nn

import autofuse
from patchers.norms import recognise


class Holder(nn.Module):
    """A norm between two layers."""

    def __init__(self, norm):
        super().__init__()
        self.before, self.norm = nn.Linear(SIZE, SIZE), norm
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)

    def forward(self, x):
        y = self.norm(torch.sin(self.before(x)))
        return y[0] if isinstance(y, tuple) else y


def optimized(norm, **options):
    torch.manual_seed(0)
    model = Holder(norm)
    plain = copy.deepcopy(model)
    settings = {"loss_fn": F.mse_loss, "only": ["norms"], **PLAIN, **options}
    return plain, model, autofuse.optimize(model, **{"measure": False, **settings})


def data(scale=1.0):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4, 3, SIZE, generator=generator) * scale
    return inputs, torch.randn(4, 3, SIZE, generator=generator)


def same_step(plain, model, step, scale=1.0):
    inputs, targets = data(scale)
    loss = F.mse_loss(plain(inputs), targets)
    loss.backward()
    assert step(inputs, targets).item() == pytest.approx(loss.item(), rel=1e-5)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


# --- accepted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_a_norm_is_recognised_and_trains_as_before(name, scale):
    make, operation = ACCEPTED[name]
    norm = make()
    kind, keys = type(norm), list(norm.state_dict())
    plain, model, step = optimized(norm)
    (site,) = step.plan["norms"].sites
    assert site.path == "norm" and (site.operation or "").startswith(operation), site
    assert type(model.norm) is not kind and isinstance(model.norm, kind)
    assert kind.__name__ in type(model.norm).__name__ and list(model.norm.state_dict()) == keys
    same_step(plain, model, step, scale)
    assert step.report["norms"].status == "kept", step.report["norms"].reason
    step.undo()
    assert type(model.norm) is kind


@pytest.mark.parametrize(
    "name, eps, attribute",
    [
        ("nn.LayerNorm", 1e-5, "eps"),
        ("nn.LayerNorm large eps", 0.1, "eps"),
        ("a and b", 1e-12, "variance_epsilon"),
        ("eps in the code", 3e-5, None),
        ("no eps", 0.0, None),
        ("llama", 1e-6, "variance_epsilon"),
        ("nn.RMSNorm eps None", None, "eps"),
        ("gemma", 1e-6, None),
    ],
)
def test_eps_is_found(name, eps, attribute):
    form = recognise(ACCEPTED[name][0]())
    assert form.eps_attribute == attribute
    if eps == 1e-12:  # read from the attribute
        assert attribute is not None
    assert form.eps == (eps if eps is None else pytest.approx(eps, rel=1e-2, abs=1e-13))


def test_weight_and_bias_are_told_apart_by_what_they_do():
    form = recognise(norm_zoo.AB())
    assert (form.weight, form.bias) == ("a", "b")
    assert recognise(norm_zoo.OnePlus()).offset == recognise(norm_zoo.Gemma()).offset == 1.0


def test_one_recognition_serves_many_modules(monkeypatch):
    from patchers import norms

    calls = []
    original = norms.recognise
    monkeypatch.setattr(norms, "recognise", lambda module: calls.append(1) or original(module))
    model = nn.Sequential(*(nn.LayerNorm(SIZE) for _ in range(50)), nn.LayerNorm(SIZE, eps=1e-3))
    plan = autofuse.plan(model, **PLAIN)
    assert len(plan["norms"].accepted) == 51 and len(calls) == 2


def test_two_norms_of_one_class_with_another_eps_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(SIZE, eps=1e-5), nn.LayerNorm(SIZE, eps=1.0))
    plain, inputs = copy.deepcopy(model), data()[0]
    step = autofuse.optimize(model, loss_fn=F.mse_loss, **{"measure": False, **PLAIN})
    expected = F.mse_loss(plain(inputs), data()[1]).item()
    assert step(*data()).item() == pytest.approx(expected, rel=1e-6)
    assert len(step.report["norms"].accepted) == 2


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_left_alone_and_trains_as_before(name):
    norm = LOOK_ALIKES[name]()
    kind = type(norm)
    torch.manual_seed(0)
    model = Holder(norm)
    plain = Holder(norm) if name == "replaced on the instance" else copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    step = autofuse.optimize(model, loss_fn=F.mse_loss, only=["norms"], **{"measure": False, **PLAIN})
    assert type(model.norm) is kind and not step.plan["norms"].accepted
    if name != "parametrized":  # its class is PyTorch's own invention
        (site,) = step.plan["norms"].sites
        assert site.operation is None and len(site.reason) > 10
    torch.manual_seed(1)
    expected = F.mse_loss(plain(data()[0]), data()[1]).item()
    torch.manual_seed(1)
    assert step(*data()).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("gated", "more than one input"),
        ("a global flag", "FLAG"),
        ("a global mapping", "FLAGS"),
        ("a global tensor", "TEMPERATURE"),
        ("a closure", "state"),
        ("a mutable attribute", "options"),
        ("a counter", "changes its own"),
        ("replaced on the instance", "replaced"),
        ("L2 norm", "neither a layer norm nor an RMS norm"),
        ("named LayerNorm", "neither a layer norm nor an RMS norm"),
    ],
)
def test_the_reason_names_what_is_in_the_way(name, reason):
    assert reason in recognise(LOOK_ALIKES[name]()).reason


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_left_alone(name):
    model = nn.Sequential(OTHERS[name](), nn.LayerNorm(SIZE))
    kind = type(model[0])
    step = autofuse.optimize(model, **{"measure": False, **PLAIN})
    assert type(model[0]) is kind
    assert [site.path for site in step.plan["norms"].sites] == ["1"]


def test_recognition_leaves_the_module_untouched():
    for make, _ in ACCEPTED.values():
        norm = make()
        before, state = dict(vars(norm)), {k: v.clone() for k, v in norm.state_dict().items()}
        for parameter in norm.parameters():
            parameter.requires_grad_(False)
        recognise(norm)
        assert dict(vars(norm)) == before
        assert all(torch.equal(value, state[key]) for key, value in norm.state_dict().items())
        assert not any(p.requires_grad or p.grad is not None for p in norm.parameters())
    counter = norm_zoo.CounterNorm()
    recognise(counter)
    assert counter.calls == 0


@pytest.mark.parametrize("name", [*ACCEPTED, *LOOK_ALIKES])
def test_recognition_warns_of_nothing(name):
    norm = ACCEPTED[name][0]() if name in ACCEPTED else LOOK_ALIKES[name]()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recognise(norm)
            autofuse.optimize(Holder(norm), **{"measure": False, **PLAIN})
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in caught]


def test_a_hook_is_not_called_by_the_recognition():
    norm, calls = nn.LayerNorm(SIZE), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    autofuse.optimize(nn.Sequential(norm, nn.Linear(SIZE, 1)), **{"measure": False, **PLAIN})
    assert not calls


# --- what changes later ---------------------------------------------------------------------------


def test_a_new_eps_is_followed():
    plain, model, step = optimized(nn.LayerNorm(SIZE))
    same_step(plain, model, step)
    plain.zero_grad(), model.zero_grad()
    plain.norm.eps = model.norm.eps = 0.5
    same_step(plain, model, step)
    assert "Fused" in type(model.norm).__name__


@pytest.mark.parametrize("name", ["scale norm", "nn.LayerNorm", "no affine"])
def test_setting_an_attribute_that_was_taken_for_constant_un_fuses(name):
    plain, model, step = optimized(ACCEPTED[name][0]())
    same_step(plain, model, step)
    plain.zero_grad(), model.zero_grad()
    attribute = {"scale norm": "root", "nn.LayerNorm": "mark", "no affine": "normalized_shape"}[name]
    value = {"scale norm": 5.0, "nn.LayerNorm": 3, "no affine": (3, SIZE)}[name]
    setattr(plain.norm, attribute, value)
    setattr(model.norm, attribute, value)
    assert type(model.norm) is type(plain.norm)
    same_step(plain, model, step)
    step.undo()
    assert getattr(model.norm, attribute) == value


def test_a_forward_set_on_the_instance_later_is_used():
    plain, model, step = optimized(nn.LayerNorm(SIZE))
    same_step(plain, model, step)
    for each in (plain, model):
        each.zero_grad()
        each.norm.forward = lambda x, norm=each.norm: F.layer_norm(x, (SIZE,), norm.weight, norm.bias) * 3
    same_step(plain, model, step)
    step.undo()
    assert type(model.norm) is nn.LayerNorm and "forward" in vars(model.norm)


def test_a_weight_replaced_later_is_used():
    plain, model, step = optimized(nn.LayerNorm(SIZE))
    for each in (plain, model):
        torch.manual_seed(5)
        each.norm.weight = nn.Parameter(torch.randn(SIZE))
        each.norm.bias = None
    same_step(plain, model, step)


def test_a_parametrization_added_later():
    plain, model, step = optimized(nn.LayerNorm(SIZE))
    for each in (plain, model):
        nn.utils.parametrizations.weight_norm(each.norm, "weight", dim=None)
    inputs, targets = data()
    expected = F.mse_loss(plain(inputs), targets).item()
    assert step(inputs, targets).item() == pytest.approx(expected, rel=1e-5)


def test_the_class_is_made_once_per_original_and_form():
    models = [optimized(nn.LayerNorm(SIZE))[1] for _ in range(2)]
    assert type(models[0].norm) is type(models[1].norm)
    assert isinstance(models[0].norm, autofuse.FusedLayerNorm)
    assert isinstance(optimized(nn.RMSNorm(SIZE))[1].norm, autofuse.FusedRMSNorm)


@pytest.mark.parametrize(
    "name, keyword", [("llama", "hidden_states"), ("eps in the code", "x"), ("nn.LayerNorm", "input")]
)
@pytest.mark.parametrize("training", [True, False])
def test_arguments_by_keyword(name, keyword, training):
    plain, model, _ = optimized(ACCEPTED[name][0]())
    inputs = data()[0]
    model.train(training)
    torch.testing.assert_close(model.norm(**{keyword: inputs}), plain.norm(inputs))
    with pytest.raises(TypeError):
        model.norm(inputs, inputs)
    with pytest.raises(TypeError):
        model.norm(nonsense=inputs)
    with pytest.raises(TypeError):
        model.norm()


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_the_transformer_encoder_still_works(norm_first, monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, 2, 24, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plain, inputs = copy.deepcopy(model), data()[0]
    step = autofuse.optimize(model, loss_fn=F.mse_loss, **{"measure": False, **PLAIN})
    assert len(step.plan["norms"].accepted) == 4
    calls, native = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or native(*a))
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[0, 2] = True
    with torch.no_grad():
        expected, found = plain.eval()(inputs), model.eval()(inputs)
        assert torch.equal(expected, found) and len(calls) == 4
        expected = plain(inputs, src_key_padding_mask=mask)
        assert torch.equal(expected, model(inputs, src_key_padding_mask=mask))
    model.train()
    assert step(inputs, data()[1]).item() == pytest.approx(
        F.mse_loss(plain.train()(inputs), data()[1]).item(), rel=1e-5
    )
