"""Layer norms and RMS norms, recognised by what they compute, whatever their class is called.

A copy of a candidate, with random parameters, is run on random inputs of several ranks, scales and
dtypes, and compared with each known form; its eps is read off from an input far below sqrt(eps).
One match in the forward and in the backward is a recognition. It is made once per (class, shapes,
attributes), not once per module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autofuse import nn as fused_nn
from autofuse.functional import layer_norm as layer_norm_file
from autofuse.functional import rms_norm as rms_norm_file
from autofuse.functional.layer_norm import layer_norm
from autofuse.functional.rms_norm import rms_norm
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name, fused_class
from autofuse.precision import step_dtype
from autofuse.probe import (
    CannotProbe,
    generator,
    isolated_copy,
    keeps_something,
    outside_dependence,
    quiet,
    signature,
    single_input,
)

order = 20

Dtypes = tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]


@dataclass(frozen=True)
class Form:
    """What a norm module computes, in terms of its own attributes' names."""

    operation: str  # "layer_norm" or "rms_norm"
    dims: int  # the number of trailing dimensions that are normalised over
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0  # 1.0 where the scale is 1 + weight
    eps: float | None = 0.0
    eps_attribute: str | None = None  # where eps is read at every call, if anywhere
    dtypes: Dtypes = ()  # (input's, weight's, output's) combinations that were seen
    narrow: bool = True  # under autocast the output is in autocast's dtype, not in the original's own

    def __call__(self, module: Any, input: Tensor, out_dtype: torch.dtype, provider: str) -> Tensor:
        eps: Any = self.eps if self.eps_attribute is None else getattr(module, self.eps_attribute)
        weight = None if self.weight is None else getattr(module, self.weight)
        shape = input.shape[-self.dims :]
        if self.operation == "rms_norm":
            return rms_norm(
                input, shape, weight, eps, offset=self.offset, out_dtype=out_dtype, provider=provider
            )
        bias = None if self.bias is None else getattr(module, self.bias)
        scale = weight + self.offset if weight is not None and self.offset else weight
        return layer_norm(input, shape, scale, bias, eps, out_dtype=out_dtype, provider=provider)

    def __str__(self) -> str:
        extras = [f"{self.offset:g} + weight"] if self.offset else []
        extras += [f"over {self.dims} dimensions"] if self.dims > 1 else []
        extras += [] if self.narrow else ["output as wide as before"]
        return self.operation + (f" ({', '.join(extras)})" if extras else "")


def find(context: Context) -> Patch | Rejected:
    known: dict[Any, Form | Rejected | None] = {}
    forms: dict[str, Form] = {}
    sites, done = [], 0
    for path, module in context.modules:
        done += hasattr(module, "_autofuse_original")
        if not _is_candidate(module):
            continue
        key = signature(module)
        if key not in known:
            known[key] = recognise(module)
        form = known[key]
        if isinstance(form, Rejected):
            sites.append(Site(path, class_name(module), reason=form.reason))
        elif form is not None:
            forms[path] = form
            sites.append(Site(path, class_name(module), str(form), _provider(form, context)))
    if not forms:
        reason = f"nothing more to do: {done} norms are fused already" if done else "no norm was recognised"
        return Patch(sites, reason=reason)
    modules = {path: module for path, module in context.modules if path in forms}
    return _patch(modules, forms, sites)


def _patch(modules: dict[str, nn.Module], forms: dict[str, Form], sites: Sequence[Site]) -> Patch:
    seen = {path: _constants(module, forms[path]) for path, module in modules.items()}

    def change(transaction: Transaction, accepted: Sequence[Site]) -> None:
        for site in accepted:
            module = modules[site.path]
            if _constants(module, forms[site.path]) != seen[site.path]:
                continue  # it was set to compute something else since it was recognised
            transaction.set_class(module, _swapped(type(module), forms[site.path], str(site.provider)))

    def wider() -> Patch:
        """For a norm whose output is the residual stream itself (BERT's), which must not be rounded."""
        wide = {path: replace(form, narrow=False) for path, form in forms.items()}
        again = [replace(site, operation=str(wide[site.path])) if site.accepted else site for site in sites]
        return _patch(modules, wide, again)

    narrow = all(form.narrow for form in forms.values())
    return Patch(
        sites,
        change,
        reason="one fused operation, statistics in float32",
        in_modules=True,
        fallback=wider if narrow else None,
    )


def _constants(module: nn.Module, form: Form) -> dict[str, Any]:
    """The attributes that the recognition took for constant, as far as they can be compared."""
    simple = (bool, int, float, str, type(None))
    live = (form.weight, form.bias, form.eps_attribute, "training")
    return {k: v for k, v in vars(module).items() if isinstance(v, simple) and k[0] != "_" and k not in live}


def _provider(form: Form, context: Context) -> str:
    file = layer_norm_file if form.operation == "layer_norm" else rms_norm_file
    return file.choose(context.hardware)


def _swapped(cls: type[nn.Module], form: Form, provider: str) -> type[nn.Module]:
    original = cls.forward
    dtypes = {(x, w): y for x, w, y in form.dtypes}
    under_autocast: dict[Any, torch.dtype] = {}
    parameter = single_input(cls) or "input"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1 or not (args or parameter in kwargs):
            return original(self, *args, **kwargs)  # which says what is wrong with the call
        input = args[0] if args else kwargs[parameter]
        weight = input if form.weight is None else getattr(self, form.weight)
        dtype = step_dtype(input.device.type)
        if dtype is not None and not form.narrow:
            key = (dtype, input.dtype, weight.dtype, input.device.type)
            if key not in under_autocast:  # autocast's lists differ between devices: ask the original
                under_autocast[key] = _output_dtype(original, self, input, form.dims)
            dtype = under_autocast[key]
        if dtype is None and torch.is_grad_enabled() and not torch.is_autocast_enabled(input.device.type):
            dtype = dtypes.get((input.dtype, weight.dtype))  # outside autocast: what the original gives
        if dtype is None:
            return original(self, *args, **kwargs)
        return form(self, input, dtype, provider)

    bases = {nn.LayerNorm: fused_nn.FusedLayerNorm, nn.RMSNorm: fused_nn.FusedRMSNorm}
    live = {name for name in (form.weight, form.bias, form.eps_attribute) if name}
    return fused_class(cls, (form, provider), forward, base=bases.get(cls), live=live)


def _output_dtype(forward: Callable[..., Any], module: nn.Module, input: Tensor, dims: int) -> torch.dtype:
    """The dtype that the module's original ``forward`` gives here, found out on a single row."""
    row = input.new_zeros((*(1,) * (input.dim() - dims), *input.shape[-dims:]))
    with torch.no_grad():
        dtype: torch.dtype = forward(module, row).dtype
    return dtype


# --- candidates --------------------------------------------------------------------------------


def _is_candidate(module: nn.Module) -> bool:
    """A leaf with no parameter, or one or two of equal shape, small enough to be a norm's."""
    if (
        module._modules
        or module._buffers
        or isinstance(module, (fused_nn.FusedLayerNorm, fused_nn.FusedRMSNorm))
    ):
        return False
    if hasattr(module, "_autofuse_original"):
        return False
    builtin = type(module).__module__.startswith("torch.nn.")
    if builtin and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return False
    shapes = {p.shape for p in module._parameters.values() if p is not None}
    count = sum(p is not None for p in module._parameters.values())
    if count == 0:
        return single_input(type(module)) is not None
    shape = next(iter(shapes))
    return count <= 2 and len(shapes) == 1 and 1 <= len(shape) <= 4 and 1 < shape.numel() <= 2**17


# --- recognition -------------------------------------------------------------------------------


def recognise(module: nn.Module) -> Form | Rejected | None:
    """The form of a candidate; `Rejected` for what looks like a norm and is none; None otherwise.

    >>> norm = nn.LayerNorm(8, eps=1e-6)
    >>> form = recognise(norm)
    >>> form.operation, form.weight, form.bias, form.eps_attribute
    ('layer_norm', 'weight', 'bias', 'eps')
    >>> recognise(nn.ReLU()) is None
    True
    """
    with quiet():
        try:
            form = _recognise(module)
        except CannotProbe as error:
            form = Rejected(str(error))
        except Exception as error:  # a module of the user's, run on inputs of ours: anything may come
            form = Rejected(f"it does not run on a probe ({type(error).__name__}: {str(error)[:80]})")
    looks_like_a_norm = "norm" in type(module).__name__.lower() or bool(list(module.parameters()))
    return form if isinstance(form, Form) or looks_like_a_norm else None


def _recognise(module: nn.Module) -> Form | Rejected:
    if "forward" in vars(module):
        return Rejected("its forward was replaced on the instance")
    if single_input(type(module)) is None:
        return Rejected("its forward takes more than one input")
    outside = outside_dependence(module)
    if outside is not None:
        return Rejected(outside)
    probe = isolated_copy(module)
    _fill(probe)
    if keeps_something(probe, _inputs(probe)):
        return Rejected("its forward changes its own state")
    matches = [form for form in _hypotheses(probe) if _matches(probe, form)]
    if not matches:
        return Rejected("it computes neither a layer norm nor an RMS norm")
    if len(matches) > 1:
        return Rejected(f"it cannot be told apart: {' or '.join(map(str, matches))}")
    return _with_dtypes(probe, matches[0])


def _shape(probe: nn.Module) -> tuple[int, ...]:
    """The normalised shape: the parameters', or what an attribute says, or any."""
    for parameter in probe._parameters.values():
        if parameter is not None:
            return tuple(parameter.shape)
    shape = getattr(probe, "normalized_shape", 16)
    return tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)


def _hypotheses(probe: nn.Module) -> Iterator[Form]:
    """Every form that the parameters' names allow, each with the eps that the module shows."""
    names = [name for name, p in probe._parameters.items() if p is not None]
    affine: list[tuple[str | None, str | None]] = (
        [(None, None)] if not names else [(names[0], None), (None, names[0])]
    )
    if len(names) == 2:
        affine = [(names[0], names[1]), (names[1], names[0])]
    dims = len(_shape(probe))
    for operation, (weight, bias), offset in itertools.product(
        ("layer_norm", "rms_norm"), affine, (0.0, 1.0)
    ):
        if (offset and weight is None) or (operation == "rms_norm" and bias is not None):
            continue
        form = Form(operation, dims, weight, bias, offset)
        eps = _measured_eps(probe, form)
        if eps is not None:
            value, attribute = _named_eps(probe, eps, operation)
            yield Form(operation, dims, weight, bias, offset, value, attribute)


def _fill(probe: nn.Module, zero: str | None = None) -> None:
    draw = generator(1)
    for name, parameter in probe._parameters.items():
        if parameter is not None:
            value = torch.randn(parameter.shape, generator=draw)
            parameter.data = (torch.zeros_like(value) if name == zero else value).to(parameter.dtype)
            parameter.grad = None


def _inputs(probe: nn.Module, scale: float = 1.0, rank: int = 1) -> Tensor:
    """Random numbers with a mean that is not zero: (rank leading dimensions, *normalised shape)."""
    lead = ((5,), (2, 3), (2, 1, 2), (1, 1))[rank - 1]
    return (torch.randn(*lead, *_shape(probe), generator=generator(rank + 1)) + 0.3) * scale


def _measured_eps(probe: nn.Module, form: Form) -> float | None:
    """eps by the output on an input far below sqrt(eps); None if the output is no norm's at all.

    There the output is the centred input times r = 1 / sqrt(variance + eps), times the scale.
    """
    _fill(probe, zero=form.bias)
    x = _inputs(probe, scale=1e-6)
    with torch.no_grad():
        y = probe(x)
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
        raise CannotProbe("its output is not a tensor of its input's shape")
    flat = tuple(range(-form.dims, 0))
    x = x.double()
    centred = x - x.mean(flat, keepdim=True) if form.operation == "layer_norm" else x
    scale = (
        torch.ones(()) if form.weight is None else getattr(probe, form.weight).detach().double() + form.offset
    )
    r = (y.double() * centred * scale).sum(flat) / (centred * scale).square().sum(flat)
    variance = centred.square().mean(flat)
    eps = (1 / r.square() - variance).median().item()
    noise = 1e-5 * variance.median().item()
    if not eps > -noise or not bool((r > 0).all()):
        return None
    return 0.0 if eps < noise else eps


def _named_eps(probe: nn.Module, eps: float, operation: str) -> tuple[float | None, str | None]:
    """eps as the attribute that holds it, else as the round number that it is, else as measured."""
    for name, value in vars(probe).items():
        if isinstance(value, float) and abs(value - eps) <= 1e-3 * eps:
            return value, name
        if (
            operation == "rms_norm"
            and name == "eps"
            and value is None
            and abs(eps / torch.finfo(torch.float32).eps - 1) < 1e-3
        ):
            return None, name
    for exponent, mantissa in itertools.product(range(-15, 0), (1.0, 2.0, 5.0)):
        if abs(mantissa * 10.0**exponent - eps) <= 1e-3 * eps:
            return float(f"{mantissa:g}e{exponent}"), None
    return eps, None


def _matches(probe: nn.Module, form: Form) -> bool:
    """Same output and gradients for every rank and scale, in training and in evaluation."""
    _fill(probe)
    near_eps = (form.eps or 1e-7) ** 0.5
    cases = [(1.0, 2), (near_eps, 2), (1e-6, 1), (30.0, 1), (3e3, 3), (1.0, 4)]
    for scale, rank in cases:
        x = _inputs(probe, scale, rank)
        try:
            original = probe.train()(x)
        except Exception:
            if rank == 2:
                raise
            continue  # a rank that the module does not take
        if not _close(original, form(probe, x, torch.float32, "torch")):
            return False
        if not torch.equal(original, probe.eval()(x)) or not torch.equal(original, probe.train()(x)):
            return False
    return all(_same_gradients(probe, form, scale) for scale in (1.0, near_eps))


def _close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= tolerance * b.norm() + 1e-30)


def _same_gradients(probe: nn.Module, form: Form, scale: float) -> bool:
    gradients = []
    parameters = [p for p in probe._parameters.values() if p is not None]
    for parameter in parameters:
        parameter.requires_grad_(True)
    x = _inputs(probe, scale, 2).requires_grad_(True)
    direction = torch.randn(x.shape, generator=generator(7))
    for output in (probe(x), form(probe, x, torch.float32, "torch")):
        if not output.requires_grad:
            return False
        gradients.append(torch.autograd.grad(output, [x, *parameters], direction, allow_unused=True))
    return all(
        a is not None and b is not None and _close(a, b, 1e-4)
        for a, b in zip(gradients[0], gradients[1], strict=True)
    )


def _with_dtypes(probe: nn.Module, form: Form) -> Form:
    """The same form with the output dtype of every mix of dtypes in which it holds too."""
    dtypes: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for x_dtype, w_dtype in itertools.product(floats, floats):
        if form.weight is None and form.bias is None and x_dtype != w_dtype:
            continue
        _fill(probe)
        for parameter in probe._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(w_dtype)
        x = _inputs(probe, 1.0, 2).to(x_dtype)
        try:
            y = probe(x)
            same = _close(y, form(probe, x, y.dtype, "torch"), 1e-5 if y.dtype == torch.float32 else 2e-2)
        except Exception:
            continue  # a mix that the module does not take: the original will say so itself
        if same:
            dtypes.append((x_dtype, w_dtype, y.dtype))
    return replace(form, dtypes=tuple(dtypes))
