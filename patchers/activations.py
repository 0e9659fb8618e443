"""The `activations` patch: written-out activations in one operation each, recognised by what they compute.

A candidate is a leaf module without state. A copy of it is run on random inputs of several ranks, scales
and dtypes, and compared with each known activation, forward and backward, once per (class, attributes). One
that is a single operation already has nothing to gain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofuse.functional import activation
from autofuse.functional.activation import ACTIVATIONS
from autofuse.functional.rms_norm import transformed
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name, fused_class
from autofuse.probe import (
    CannotProbe,
    attributes_read,
    generator,
    isolated_copy,
    keeps_something,
    outside_dependence,
    quiet,
    signature,
    single_input,
)

__all__ = ["Form", "find", "order", "recognise"]

order = 22


@dataclass(frozen=True)
class Form:
    """What an activation module computes: a key of ``ACTIVATIONS``, and the input dtypes in which it does."""

    operation: str
    dtypes: frozenset[torch.dtype]


def find(context: Context) -> Patch | Rejected:
    """Every module that computes an activation in several operations."""
    known: dict[Any, Form | Rejected | None] = {}
    forms: dict[str, Form] = {}
    seen: dict[str, Any] = {}
    sites, done = [], 0
    for path, module in context.modules:
        done += type(module) in _ours
        if not _is_candidate(module):
            continue
        key = signature(module)
        if key not in known:
            known[key] = recognise(module)
        form = known[key]
        obstacle = activation.obstacle(form.operation, context.hardware) if isinstance(form, Form) else None
        if obstacle is not None:
            form = Rejected(obstacle)
        if isinstance(form, Rejected):
            sites.append(Site(path, class_name(module), reason=form.reason))
        elif form is not None:
            forms[path], seen[path] = form, key
            sites.append(Site(path, class_name(module), form.operation, "torch"))
    if not forms:
        nothing = "no activation was found that is written out in several operations"
        return Patch(sites, reason=f"nothing more to do: {done} are fused already" if done else nothing)
    modules = {path: module for path, module in context.modules if path in forms}

    def change(transaction: Transaction, accepted: Sequence[Site]) -> None:
        for site in accepted:
            module = modules[site.path]
            if signature(module) == seen[site.path]:  # else it was set to compute something else since
                transaction.set_class(module, _swapped(type(module), forms[site.path]))

    return Patch(
        sites, change, reason="one operation, which keeps only its input for the backward", in_modules=True
    )


# --- the changed module ------------------------------------------------------------------------

_ours: weakref.WeakSet[type] = weakref.WeakSet()


def _swapped(cls: type[nn.Module], form: Form) -> type[nn.Module]:
    original = cls.forward
    operation = ACTIVATIONS[form.operation]
    dtypes: dict[Any, torch.dtype] = {}  # the original's, where it has been asked
    parameter = single_input(cls) or "input"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if transformed() or not torch.is_grad_enabled():  # a compiler fuses the original itself
            return original(self, *args, **kwargs)
        if len(args) + len(kwargs) != 1 or not (args or parameter in kwargs):
            return original(self, *args, **kwargs)  # which says what is wrong with the call
        input = args[0] if args else kwargs[parameter]
        if type(input) not in (Tensor, nn.Parameter) or input.dtype not in form.dtypes:
            return original(self, *args, **kwargs)
        key = input.dtype, input.device.type, _autocast_dtype(input.device.type)
        if key not in dtypes:  # autocast's lists differ between devices
            dtypes[key] = _output_dtype(original, self, input)
        dtype = dtypes[key]
        if dtype != input.dtype and dtype.itemsize <= input.dtype.itemsize:
            return original(self, *args, **kwargs)
        return operation(input.to(dtype))

    fused = fused_class(cls, form, forward)
    _ours.add(fused)
    return fused


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    available = torch.amp.is_autocast_available(device_type)
    enabled = available and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def _output_dtype(forward: Callable[..., Any], module: nn.Module, input: Tensor) -> torch.dtype:
    with torch.no_grad():
        dtype: torch.dtype = forward(module, input.new_zeros(1)).dtype
    return dtype


# --- candidates --------------------------------------------------------------------------------


def _is_candidate(module: nn.Module) -> bool:
    """A leaf without parameters and buffers that takes one input, and is not PyTorch's own."""
    return not (
        module._modules
        or module._parameters
        or module._buffers
        or hasattr(module, "_autofuse_original")
        or isinstance(module, torch.jit.ScriptModule)
        or type(module).__module__.startswith("torch.nn.")
        or single_input(type(module)) is None
    )


_NAMES = ("activation", "elu", "silu", "swish", "mish")  # of what is listed where it is left alone

# --- recognition -------------------------------------------------------------------------------


def recognise(module: nn.Module) -> Form | Rejected | None:
    """The form of a candidate; `Rejected` for what looks like one and has nothing to gain; else None.

    >>> class Swish(nn.Module):
    ...     def forward(self, x):
    ...         return x * x.sigmoid()
    >>> recognise(Swish()).operation
    'silu'
    >>> class Native(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.silu(x)
    >>> recognise(Native())
    Rejected(reason='its forward is one operation already')
    """
    with quiet():
        try:
            return _recognise(module)
        except CannotProbe as error:
            reason = str(error)
        except Exception as error:  # a module of the user's, run on inputs of ours: anything may come
            reason = f"it does not run on a probe ({type(error).__name__}: {str(error)[:80]})"
    return Rejected(reason) if any(name in type(module).__name__.lower() for name in _NAMES) else None


def _recognise(module: nn.Module) -> Form | Rejected | None:
    """Raises CannotProbe for what is no activation that is known."""
    if "forward" in vars(module):
        raise CannotProbe("its forward was replaced on the instance")
    outside = outside_dependence(module)
    if outside is not None:
        raise CannotProbe(outside)
    for name in sorted(attributes_read(module)):
        if name.startswith("_"):
            raise CannotProbe(f"its forward depends on its private attribute {name!r}")
    probe = isolated_copy(module)
    operations = _operations(probe)
    if keeps_something(probe, _inputs(torch.float32, 1.0, 2)):
        raise CannotProbe("its forward changes its own state")
    matches = [name for name in ACTIVATIONS if _matches(probe, ACTIVATIONS[name])]
    if operations < 2:
        return Rejected("its forward is one operation already") if matches else None
    if len(matches) != 1:
        raise CannotProbe("it computes none of the activations that are known")
    narrow = (torch.bfloat16, torch.float16)
    same = {dtype for dtype in narrow if _as_good_in(probe, ACTIVATIONS[matches[0]], dtype)}
    return Form(matches[0], frozenset({torch.float32, torch.float64, *same}))


class _Watch(TorchDispatchMode):
    """Counts the operations that compute, and notes those that no activation has."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotProbe("its forward draws random numbers")
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotProbe("its forward decides by the values of its input")
        self.count += not (func.is_view or func is torch.ops.aten.detach.default)
        return func(*args, **(kwargs or {}))


def _operations(probe: nn.Module) -> int:
    """How many operations the forward makes, in training; the same checks in evaluation."""
    counts = []
    for training in (False, True):
        x = _inputs(torch.float32, 1.0, 2)
        with _Watch() as watch:
            y = probe.train(training)(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise CannotProbe("its output is not a tensor of its input's shape")
        if x._version:
            raise CannotProbe("it changes its input in place")
        counts.append(watch.count)
    return counts[-1]


def _inputs(dtype: torch.dtype, scale: float, rank: int) -> Tensor:
    shape = ((64,), (8, 16), (2, 3, 32), (2, 3, 4, 8))[rank - 1]
    return (torch.randn(shape, generator=generator(rank), dtype=torch.float64) * scale).to(dtype)


def _cases() -> Iterator[Tensor]:
    """Inputs from where an activation is linear to where a bound, a clip or an overflow would show."""
    for dtype in (torch.float32, torch.float64):
        yield torch.linspace(-12.0, 12.0, 1001, dtype=dtype)
        for scale, rank in ((1e-3, 1), (1.0, 2), (4.0, 3), (30.0, 4), (1e3, 2), (1e6, 1)):
            yield _inputs(dtype, scale, rank)


def _matches(probe: nn.Module, operation: Callable[[Tensor], Tensor]) -> bool:
    """The same output and gradient everywhere, up to float32's rounding, in training and evaluation."""
    for x in _cases():
        y, dx = _with_gradient(probe.train(), x)
        expected, slope = _with_gradient(operation, x.double())
        if y is None or dx is None or expected is None or slope is None:
            return False
        if not _within(y, expected, 1e-6 * torch.maximum(x.double().abs(), expected.abs())):
            return False
        if not _within(dx, slope, 1e-5 * slope.abs().clamp(min=1.0)):
            return False
        with torch.no_grad():
            if not torch.equal(probe.eval()(x), y) or not torch.equal(probe.train()(x), y):
                return False
    return True


def _within(a: Tensor, b: Tensor, tolerance: Tensor) -> bool:
    return a.shape == b.shape and bool(((a.double() - b).abs() <= tolerance + 1e-30).all())


def _with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The output and its derivative; None where it has none."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    if not y.requires_grad:
        return y, None
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)[0]


def _as_good_in(probe: nn.Module, operation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether a narrow dtype's rounding does no more to the operation than to the original."""
    x = _inputs(dtype, 1.0, 2)
    try:
        original = _with_gradient(probe.train(), x)
    except Exception:
        return False  # a dtype that the module does not take: the original will say so itself
    if original[0] is None or original[0].dtype not in (dtype, torch.float32):
        return False
    wide = original[0].dtype
    fused = _with_gradient(lambda x: operation(x.to(wide)), x)
    exact = _with_gradient(operation, x.double())
    for y, ours, expected in zip(original, fused, exact, strict=True):
        if y is None or ours is None or expected is None:
            return False
        error, size = (y.double() - expected).norm(), expected.norm()
        if error > 2e-2 * size or (ours.double() - expected).norm() > 1.5 * error + 1e-6 * size:
            return False
    return True
