"""The fused norms' numbers: gradients, dtypes, autocast, drop-in classes, Apex and Liger doubles."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from norm_zoo import ACCEPTED, SIZE
from test_norms import data, optimized
from torch import nn

import autofuse
from autofuse import providers
from autofuse.functional import layer_norm as layer_norm_file
from autofuse.functional import rms_norm as rms_norm_file
from autofuse.functional.layer_norm import layer_norm
from autofuse.functional.rms_norm import rms_norm

EVERY = pytest.mark.parametrize("name", ACCEPTED)


def reference(x, weight, eps, offset=0.0, dims=1):
    axes = tuple(range(-dims, 0))
    y = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


# --- the functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_gradcheck_of_rms_norm(affine, offset, shape):
    x = torch.randn(2, 4, *shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True) if affine else None
    inputs = (x, weight) if affine else (x,)

    def function(x, weight=None):
        return rms_norm(x, shape, weight, 1e-3, offset=offset)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    torch.testing.assert_close(function(*inputs), reference(x, weight, 1e-3, offset, len(shape)))


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_of_layer_norm(bias):
    x, weight, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,)))
    inputs = (x, weight, b) if bias else (x, weight)

    def function(x, weight, b=None):
        return layer_norm(x, (5,), weight, b, 1e-3)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("needs", ["x", "weight", "both"])
def test_rms_norm_with_some_gradients_only(needs):
    x, weight = torch.randn(3, 5), torch.randn(5)
    grads = []
    for function in (lambda: rms_norm(x, (5,), weight, 1e-6), lambda: reference(x, weight, 1e-6)):
        x.requires_grad_(needs != "weight"), weight.requires_grad_(needs != "x")
        wanted = [t for t in (x, weight) if t.requires_grad]
        grads.append(torch.autograd.grad(function().sin().sum(), wanted))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "case", ["zeros", "tiny", "huge", "one row", "no rows", "not contiguous", "0-d grad"]
)
def test_rms_norm_at_the_edges(case):
    x = {
        "zeros": torch.zeros(2, 6),
        "tiny": torch.full((2, 6), 1e-20),
        "huge": torch.full((2, 6), 1e15),
        "one row": torch.randn(6),
        "no rows": torch.randn(0, 6),
        "not contiguous": torch.randn(6, 4).T,
        "0-d grad": torch.randn(2, 6),
    }[case]
    grads = []
    for function in (rms_norm, lambda x, shape, w, eps: reference(x, w, eps)):
        leaf, weight = x.clone().requires_grad_(), torch.linspace(0.5, 2, 6).requires_grad_()
        y = function(leaf, (6,), weight, 1e-6)
        loss = y.sum() if case == "0-d grad" else (y * y.detach().cos()).sum()  # sum: an expanded gradient
        grads.append((y, *torch.autograd.grad(loss, (leaf, weight))))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rms_norm_under_the_function_transforms():
    x, weight = torch.randn(4, 5), torch.randn(5)

    def loss(x, weight):
        return rms_norm(x, (5,), weight, 1e-6).sin().sum()

    def plain(x, weight):
        return reference(x, weight, 1e-6).sin().sum()

    for transform in (
        torch.func.grad,
        lambda f: torch.func.vmap(torch.func.grad(f), (0, None)),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.hessian(f),
    ):
        torch.testing.assert_close(
            transform(loss)(x, weight), transform(plain)(x, weight), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm"])
def test_mixed_dtypes_are_as_exact_as_their_narrowest(x_dtype, w_dtype, operation):
    x = torch.randn(8, 32).to(x_dtype).requires_grad_()
    weight, bias = (torch.randn(32).to(w_dtype).requires_grad_() for _ in range(2))
    if operation == "layer_norm":
        y = layer_norm(x, (32,), weight, bias, 1e-5)
        exact = F.layer_norm(x.double(), (32,), weight.double(), bias.double(), 1e-5)
    else:
        y = rms_norm(x, (32,), weight, 1e-5)
        exact = reference(x.double(), weight.double(), 1e-5)
    assert y.dtype == x_dtype
    unit = max(torch.finfo(x_dtype).eps, torch.finfo(w_dtype).eps, 1e-6)
    assert (y.double() - exact).norm() <= unit * exact.norm()
    found = torch.autograd.grad((y.double() ** 3).sum(), (x, weight))
    expected = torch.autograd.grad((exact**3).sum(), (x, weight))
    for a, b, leaf in zip(found, expected, (x, weight), strict=True):
        assert a.dtype == leaf.dtype
        assert (a.double() - b.double()).norm() <= 4 * unit * b.double().norm()


@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm"])
def test_statistics_are_in_float32(operation):
    """The squares of fp16 inputs of 300 overflow fp16, and a sum of many bf16 stops growing."""
    for dtype, value in ((torch.float16, 300.0), (torch.bfloat16, 1.0)):
        x = (torch.randn(2, 4096) * value).to(dtype)
        if operation == "layer_norm":
            y, exact = layer_norm(x, (4096,)), F.layer_norm(x.double(), (4096,))
        else:
            y, exact = rms_norm(x, (4096,), None, 1e-6), reference(x.double(), None, 1e-6)
        assert (y.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


# --- the swapped modules --------------------------------------------------------------------------


@EVERY
def test_double_backward_of_a_swapped_norm(name):
    plain, model, _ = optimized(ACCEPTED[name][0]())
    results = []
    for each in (plain, model):
        x = data()[0].requires_grad_()
        (first,) = torch.autograd.grad(each.norm(x).sin().sum(), x, create_graph=True)
        first.square().sum().backward()
        results.append(
            (first.detach(), x.grad, *[p.grad for p in each.norm.parameters() if p.grad is not None])
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("whole", [True, False])
def test_other_dtypes_give_the_dtypes_they_gave(name, dtype, whole):
    """Inputs, or inputs and parameters, in another dtype; also what raised goes on raising."""
    plain, model, _ = optimized(ACCEPTED[name][0]())
    if whole:
        plain.norm.to(dtype), model.norm.to(dtype)
    x = data()[0].to(dtype)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            try:
                expected = plain.norm(x)
            except Exception as error:
                with pytest.raises(type(error)):
                    model.norm(x)
                continue
            found = model.norm(x)
        assert found.dtype == expected.dtype
        unit = 1e-12 if dtype == torch.float64 and whole else max(torch.finfo(dtype).eps, 1e-6)
        assert (found - expected).double().norm() <= 2 * unit * expected.double().norm()


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_callers_own_autocast_gives_what_it_gave(name, dtype):
    plain, model, _ = optimized(ACCEPTED[name][0]())
    for x in (data()[0], data()[0].to(dtype)):
        with torch.autocast("cpu", dtype=dtype):
            expected, found = plain.norm(x), model.norm(x)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@EVERY
def test_under_bf16_in_the_step_the_statistics_stay_exact(name):
    plain, model, step = optimized(ACCEPTED[name][0](), only=None, precision="bf16")
    step(*data())
    seen = []
    model.norm.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(), out.detach())))
    step(*data())
    (x, out) = seen[-1]
    assert out.dtype == torch.bfloat16
    exact = plain.norm(x.float())
    assert (out.float() - exact).norm() <= 0.004 * exact.norm()


# --- the drop-in classes ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SIZE, (SIZE,), [3, SIZE], torch.Size([3, SIZE])])
@pytest.mark.parametrize("affine", [True, False])
def test_drop_in_layer_norm(shape, affine):
    norm = autofuse.FusedLayerNorm(shape, eps=1e-4, elementwise_affine=affine, memory_efficient=True)
    plain = nn.LayerNorm(shape, 1e-4, affine)
    assert isinstance(norm, nn.LayerNorm) and list(norm.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm(data()[0]), plain(data()[0]))
    assert norm(data()[0].bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [SIZE, (SIZE,), [3, SIZE]])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, None])
def test_drop_in_rms_norm(shape, affine, eps):
    norm = autofuse.FusedRMSNorm(shape, eps, affine)
    plain = nn.RMSNorm(shape, eps, affine)
    assert isinstance(norm, nn.RMSNorm) and list(norm.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(norm(data()[0]), plain(data()[0]))


@pytest.mark.parametrize("cls", [autofuse.FusedLayerNorm, autofuse.FusedRMSNorm])
def test_drop_ins_under_autocast_are_like_apexs(cls):
    norm = cls(SIZE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(data()[0])
    assert out.dtype == torch.bfloat16
    exact = norm(data()[0])
    assert (out - exact).norm() <= 0.004 * exact.norm()
    out.sum().backward()
    assert norm.weight.grad is not None


def test_drop_ins_are_not_swapped_again():
    model = nn.Sequential(autofuse.FusedLayerNorm(SIZE), autofuse.FusedRMSNorm(SIZE))
    step = autofuse.optimize(model, precision="fp32", compile=False, measure=False)
    assert [type(m) for m in model] == [autofuse.FusedLayerNorm, autofuse.FusedRMSNorm]
    assert not step.plan["norms"].accepted


# --- Apex and Liger, by doubles of their signatures ----------------------------------------------------


def module(name, **content):
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def apex(monkeypatch):
    """Apex's functions: the kernel writes its output in the parameters' dtype."""
    calls = []

    def mixed_dtype_fused_layer_norm_affine(
        input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False
    ):
        calls.append(("layer_norm", input.dtype, weight.dtype))
        shape = torch.Size(normalized_shape)
        assert weight.shape == bias.shape == shape and weight.dtype == bias.dtype
        y = F.layer_norm(input.float(), shape, weight.float(), bias.float(), eps)
        return y.to(weight.dtype)

    def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        calls.append(("rms_norm", input.dtype, weight.dtype))
        assert weight.shape == torch.Size(normalized_shape)
        return F.rms_norm(input.float(), list(normalized_shape), weight.float(), eps).to(weight.dtype)

    inner = module(
        "apex.normalization.fused_layer_norm",
        mixed_dtype_fused_layer_norm_affine=mixed_dtype_fused_layer_norm_affine,
        mixed_dtype_fused_rms_norm_affine=mixed_dtype_fused_rms_norm_affine,
    )
    monkeypatch.setitem(sys.modules, "apex", module("apex"))
    monkeypatch.setitem(sys.modules, "apex.normalization", module("apex.normalization"))
    monkeypatch.setitem(sys.modules, "apex.normalization.fused_layer_norm", inner)
    yield calls
    providers.forget()


@pytest.fixture
def liger(monkeypatch):
    """Liger's autograd functions: apply(X, W, eps, offset, casting_mode, in_place, row_mode)."""
    calls = []

    class LigerRMSNormFunction:
        @staticmethod
        def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            assert casting_mode in ("llama", "gemma", "none") and W.dim() == 1 and W.shape[0] == X.shape[-1]
            calls.append(("rms_norm", offset, casting_mode, in_place))
            return reference(X.float(), W.float(), eps, offset).to(X.dtype)

    class LigerLayerNormFunction:
        @staticmethod
        def apply(X, W, B, eps):
            calls.append(("layer_norm",))
            return F.layer_norm(X.float(), (X.shape[-1],), W.float(), B.float(), eps).to(X.dtype)

    for name, content in {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": LigerRMSNormFunction},
        "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": LigerLayerNormFunction},
    }.items():
        monkeypatch.setitem(sys.modules, name, module(name, **content))
    yield calls
    providers.forget()


DTYPES = [(a, b) for a in (torch.float32, torch.bfloat16) for b in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("x_dtype, out_dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("provider", ["apex", "liger"])
def test_rms_norm_by_a_provider(request, provider, x_dtype, out_dtype, offset):
    calls = request.getfixturevalue(provider)
    x, weight = data()[0].to(x_dtype).requires_grad_(), torch.randn(SIZE, requires_grad=True)
    y = rms_norm(x, (SIZE,), weight, 1e-6, offset=offset, out_dtype=out_dtype, provider=provider)
    assert y.dtype == out_dtype and len(calls) == 1
    exact = reference(x.double(), weight.double(), 1e-6, offset)
    assert (y.double() - exact).norm() <= 0.01 * exact.norm()
    assert provider == "apex" or calls[0] == ("rms_norm", offset, "gemma", False)
    found = torch.autograd.grad(y.double().sin().sum(), (x, weight))
    expected = torch.autograd.grad(exact.sin().sum(), (x, weight))
    assert all(
        (a.double() - b.double()).norm() <= 0.02 * b.double().norm()
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("x_dtype, out_dtype", DTYPES)
@pytest.mark.parametrize("provider", ["apex", "liger"])
def test_layer_norm_by_a_provider(request, provider, x_dtype, out_dtype):
    calls = request.getfixturevalue(provider)
    x = data()[0].to(x_dtype)
    weight, bias = torch.randn(SIZE), torch.randn(SIZE)
    y = layer_norm(x, (SIZE,), weight, bias, 1e-5, out_dtype=out_dtype, provider=provider)
    exact = F.layer_norm(x.double(), (SIZE,), weight.double(), bias.double(), 1e-5)
    assert y.dtype == out_dtype and len(calls) == 1
    assert (y.double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("provider", ["apex", "liger"])
def test_a_provider_is_not_asked_for_what_it_does_not_have(request, provider):
    calls = request.getfixturevalue(provider)
    x, weight = data()[0], torch.ones(3, SIZE)
    torch.testing.assert_close(rms_norm(x, (SIZE,), None, 1e-6, provider=provider), reference(x, None, 1e-6))
    torch.testing.assert_close(
        layer_norm(x, (SIZE,), weight[0], None, provider=provider), F.layer_norm(x, (SIZE,))
    )
    assert not calls
    if provider == "liger":  # one dimension alone
        rms_norm(x, (3, SIZE), weight, 1e-6, provider=provider)
        layer_norm(x, (3, SIZE), weight, weight, provider=provider)
        assert not calls


@pytest.mark.parametrize(
    "usable, layer, rms",
    [
        ((), "torch", "torch"),
        (("apex",), "apex", "apex"),
        (("liger",), "torch", "liger"),
        (("apex", "liger"), "apex", "liger"),
    ],
)
def test_which_provider_is_chosen(usable, layer, rms):
    made = {name: None if name in usable else "absent" for name in ("apex", "liger")}
    gpu = types.SimpleNamespace(kind="cuda", providers=made)
    assert layer_norm_file.choose(gpu) == layer and rms_norm_file.choose(gpu) == rms
    cpu = types.SimpleNamespace(kind="cpu", providers=made)
    assert layer_norm_file.choose(cpu) == rms_norm_file.choose(cpu) == "torch"
