"""`LazyLogits`: the logits of an output layer that are not there until somebody looks.

A loss does not need them (`autofuse.functional.linear_cross_entropy`), so while training the output
layer returns this stand-in of the same shape, dtype, device and autograd history. It works at two
levels:

* *Below* autograd (``__torch_dispatch__``) an operation on it either stays lazy (`autofuse.lazy_ops`),
  or is run on the real logits, built then, once. Autograd sees ordinary operations with ordinary
  nodes, so whatever happens to a stand-in, its gradients are right.
* *Above* autograd (``__torch_function__``) `F.cross_entropy` and `F.nll_loss` of a stand-in become
  the fused loss of what the logits are made of. This is done only where nobody looks at or changes
  the logits in between; else the real logits go through the original loss.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autofuse.functional.linear_cross_entropy import linear_cross_entropy, product_dtype
from autofuse.lazy_ops import LAZY, Form, as_indices, derive

__all__ = ["Fate", "LazyLogits", "is_built", "lazy_linear", "materialize", "settle"]

aten = torch.ops.aten


@dataclass
class Fate:
    """What became of one call's logits, and how that call's loss may be computed."""

    provider: str = "torch"
    fused: bool = False  # a loss was computed without them
    materialized_by: str | None = None  # the first operation that needed the real ones
    watched: bool = False  # a hook waits for their gradient


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, fate: Fate | None = None) -> Tensor:
    """`F.linear` whose result is not computed until it is needed.

    >>> h, w = torch.randn(2, 5, 4), torch.randn(9, 4, requires_grad=True)
    >>> logits = lazy_linear(h, w, None)
    >>> logits.shape, logits.requires_grad, is_built(logits)
    (torch.Size([2, 5, 9]), True, False)
    >>> F.cross_entropy(logits.flatten(0, 1), torch.arange(9).repeat(2)[:10]).backward()
    >>> is_built(logits), torch.equal(logits.argmax(-1), (h @ w.T).argmax(-1)), is_built(logits)
    (False, True, True)
    """
    if "torch._dynamo" in sys.modules:  # else nothing is compiled yet; importing it takes seconds
        _shield_from_compiler()
    head = _Head(hidden, weight, bias, product_dtype(hidden, weight), fate or Fate())
    with torch._C.DisableTorchFunctionSubclass():
        return _LazyLinear.apply(head, hidden, weight, bias)


def materialize(tree: Any) -> Any:
    """``tree`` (of tensors, in lists, dicts and the like) with every stand-in replaced by its real logits.

    >>> logits = lazy_linear(torch.ones(1, 2), torch.ones(3, 2, requires_grad=True), None)
    >>> type(materialize({"logits": logits})["logits"]).__name__
    'Tensor'
    """
    return tree_map_only(LazyLogits, lambda x: x.real_logits("materialize"), tree)


_alive: dict[int, weakref.ref[LazyLogits]] = {}


def settle() -> None:
    """Build the logits that somebody still holds, before an optimizer changes what they are made of."""
    for reference in list(_alive.values()):
        logits = reference()
        if logits is not None:
            logits._value()


def is_built(logits: Tensor) -> bool:
    """Whether these logits hold numbers: real ones, or a stand-in's that have been asked for."""
    return not isinstance(logits, LazyLogits) or logits._form.head.numbers is not None


# --- what the logits are made of ---------------------------------------------------------------


class _Value:
    """Numbers that are computed when they are asked for, once."""

    def __init__(self, build: Callable[[], Tensor] | None = None) -> None:
        self._function = build
        self.numbers: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.numbers is None:
            with torch.no_grad():
                self.numbers = self._build()
            self._function = None  # with what it holds
        return self.numbers

    def _build(self) -> Tensor:
        assert self._function is not None
        return self._function()


def _sample(weight: Tensor) -> Tensor:
    """A few of the numbers. Optimizers that write through ``.data`` or a kernel of their own leave
    the version counter as it was, but they leave no row of an output layer as it was."""
    rows, columns = weight.shape
    return weight.detach()[:: max(1, rows // 16), :: max(1, columns // 4)].clone()


class _Head(_Value):
    """One call of the output layer: its inputs, with their history, as they were.

    It is the value of its logits itself: a cycle of references here would keep the whole graph of the
    forward alive until the garbage collector comes by.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, fate: Fate
    ) -> None:
        super().__init__()
        self.hidden, self.weight, self.bias, self.dtype, self.fate = hidden, weight, bias, dtype, fate
        self._versions = self._current_versions()
        self._sample = _sample(weight)

    def _current_versions(self) -> list[int]:
        return [x._version for x in (self.hidden, self.weight, self.bias) if x is not None]

    def unchanged(self) -> bool:
        return self._versions == self._current_versions()

    def _build(self) -> Tensor:
        hidden, weight, bias = (
            None if x is None else x.detach().to(self.dtype) for x in (self.hidden, self.weight, self.bias)
        )
        if not self.unchanged() or not torch.equal(_sample(self.weight), self._sample):
            raise RuntimeError(
                "these logits were not computed in their forward, and since then the weights have changed "
                "(by an optimizer step?). Read them before, or take step(batch, return_outputs=True), "
                "autofuse.lazy.materialize(outputs), or optimize(..., skip=('loss',))."
            )
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(hidden, weight, bias)  # type: ignore[arg-type]


class _LazyLinear(torch.autograd.Function):
    """The stand-in's place in autograd's graph: the derivative of `F.linear`, for real gradients."""

    @staticmethod
    def forward(ctx: Any, head: _Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)  # a fused loss sends nothing this way
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = head.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        like = torch.empty((*hidden.shape[:-1], weight.shape[0]), dtype=head.dtype, device="meta")
        return LazyLogits(head, Form(head), like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        hidden, weight = ctx.saved_tensors
        _, need_hidden, need_weight, need_bias = ctx.needs_input_grad
        grad = grad.to(ctx.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            to_hidden = (grad @ weight.to(ctx.dtype)).to(hidden.dtype) if need_hidden else None
            inputs = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)
            to_weight = (rows.t() @ inputs).to(weight.dtype) if need_weight else None
        return None, to_hidden, to_weight, rows.sum(0).to(ctx.bias_dtype) if need_bias else None


class LazyLogits(Tensor):
    """See the module's documentation. Made by `lazy_linear` only."""

    _value: _Value
    _form: Form

    @staticmethod
    def __new__(cls, value: _Value, form: Form, like: Tensor) -> LazyLogits:
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=form.head.hidden.device
        )
        self._value, self._form = value, form
        key = id(self)
        _alive[key] = weakref.ref(self, lambda _: _alive.pop(key, None))
        return self

    def __init__(self, value: _Value, form: Form, like: Tensor) -> None:
        super().__init__()

    def real_logits(self, reader: str) -> Tensor:
        """The numbers as a plain tensor, with this tensor's history."""
        _read_by(self, reader)
        self._value()  # now that the numbers are there, an operation on this is one on them
        with torch._C.DisableTorchFunctionSubclass():
            return aten.alias(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fused = _FUSED.get(func)
        if fused is not None:
            out = fused(*args, **kwargs)
            if out is not None:
                return out
        name = getattr(func, "__name__", str(func))
        if name in _WATCHING or func is torch.autograd.grad:
            for lazy in tree_leaves((args, kwargs)):
                if isinstance(lazy, LazyLogits):
                    lazy._form.head.fate.watched = True
        if name in _READING:
            args, kwargs = tree_map_only(LazyLogits, lambda x: x.real_logits(name), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = _derive(func, args, kwargs)
        if lazy is not None:
            return lazy
        name = func._schema.name.removeprefix("aten::")
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, LazyLogits):
                _read_by(x, name)
        real_args, real_kwargs = tree_map_only(LazyLogits, lambda x: x._value(), (args, kwargs))
        out = func(*real_args, **real_kwargs)
        return _returned(func, args, real_args, out) if func._schema.is_mutable else out


@functools.cache
def _shield_from_compiler() -> None:
    """Makes a compiled loss break its graph at each operation on a stand-in and go on behind it."""
    disabled = torch.compiler.disable(LazyLogits.__torch_function__.__func__)  # type: ignore[attr-defined]
    LazyLogits.__torch_function__ = classmethod(disabled)  # type: ignore[assignment]


def _derive(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The lazy result (or list of results) of ``func``, or None if it needs the numbers."""
    at = [i for i, x in enumerate(args) if isinstance(x, LazyLogits)]
    if func not in LAZY or len(at) != 1:
        return None
    lazy = args[at[0]]
    # Numbers that are there already, or were changed in place, are the ones to go on with.
    if lazy._form.head.numbers is not None or lazy._version:
        return None
    args = [as_indices(x) for x in args]
    derived = derive(lazy._form, lazy, func, at[0], args, kwargs)
    if derived is None:
        return None
    source = lazy._value

    def build() -> Any:
        return func(*(source() if i == at[0] else x for i, x in enumerate(args)), **kwargs)

    if isinstance(derived, tuple):
        return LazyLogits(_Value(build), *derived)
    pieces = functools.cache(build)
    return [LazyLogits(_Value(lambda i=i: pieces()[i]), *one) for i, one in enumerate(derived)]  # type: ignore[misc]


def _read_by(lazy: LazyLogits, reader: str) -> None:
    fate = lazy._form.head.fate
    fate.materialized_by = fate.materialized_by or reader


def _returned(func: Any, args: Sequence[Any], real_args: Sequence[Any], out: Any) -> Any:
    """An in-place operation returns the tensor that it was given, not the numbers behind it."""
    return next((a for a, real in zip(args, real_args, strict=True) if real is out), out)


# --- the losses --------------------------------------------------------------------------------

# What asks for the numbers themselves, or for the tensor as an object that holds them.
_READING = {
    "__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "cpu",
    "data_ptr", "detach", "numpy", "share_memory_", "storage", "tolist", "untyped_storage",
}  # fmt: skip
_WATCHING = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor | None:
    return _loss(False, _bind(F.cross_entropy, args, kwargs))


def _nll_loss(*args: Any, **kwargs: Any) -> Tensor | None:
    return _loss(True, _bind(F.nll_loss, args, kwargs))


_FUSED: dict[Any, Callable[..., Tensor | None]] = {F.cross_entropy: _cross_entropy, F.nll_loss: _nll_loss}


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _bind(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _loss(normalized: bool, call: dict[str, Any]) -> Tensor | None:
    """The loss without the logits; None where the original must compute it."""
    lazy, target, weight = call["input"], call["target"], call["weight"]
    legacy = call["size_average"] is not None or call["reduce"] is not None
    if legacy or not (_fusable(lazy, normalized) and _plain(target) and (weight is None or _plain(weight))):
        return None
    dense = target.shape == lazy.shape and target.is_floating_point() and not normalized
    labels = target.shape == lazy.shape[:1] + lazy.shape[2:] and target.dtype in (torch.int64, torch.uint8)
    dense = dense and call["ignore_index"] < 0
    if not (labels or dense) or call["reduction"] not in ("mean", "sum", "none"):
        return None  # the original says what is wrong
    form = lazy._form
    wanted = _loss_dtype(lazy.dtype, lazy.device, torch.is_autocast_enabled(lazy.device.type))
    with torch._C.DisableTorchFunctionSubclass():
        loss = linear_cross_entropy(
            form.hidden(),
            form.head.weight,
            target.movedim(1, -1) if dense else target,
            form.head.bias,
            class_weight=weight,
            reduction=call["reduction"],
            ignore_index=call["ignore_index"],
            label_smoothing=call.get("label_smoothing", 0.0),
            epilogue=form.epilogue(),
            tensors=[x for x, _ in form.tensors],
            dtype=form.head.dtype,
            provider=form.head.fate.provider,
        ).to(wanted)
        form.head.fate.fused = True
        if not loss.requires_grad:
            return loss
        call = call | {"input": None}
        return _Watched.apply(loss, lazy, F.nll_loss if normalized else F.cross_entropy, call)


def _plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and not x.requires_grad


def _fusable(lazy: Any, normalized: bool) -> bool:
    """Whether the logits are still nothing but what they are made of, and laid out as the loss wants."""
    if not isinstance(lazy, LazyLogits) or lazy.dim() < 2:
        return False
    form = lazy._form
    fate = form.head.fate
    built = form.head.numbers is not None
    return (
        form.normalized == normalized
        and form.class_dim(lazy.dim()) == 1
        and not (built or fate.watched or lazy._version)
        and form.unchanged()
        and _lineage_is_plain(lazy.grad_fn)
    )


def _lineage_is_plain(node: Any) -> bool:
    """Whether only PyTorch's own operations lie between the output layer and here.

    Others' autograd functions may do something to the gradient that passes (a module's backward
    hooks are such a function), and a fused loss would send the gradient around them.
    """
    while node is not None and not isinstance(node, _LazyLinear._backward_cls):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return True


@functools.cache
def _loss_dtype(dtype: torch.dtype, device: torch.device, autocast: bool) -> torch.dtype:
    """The dtype that the unfused loss would have here and now."""
    label = torch.zeros(1, dtype=torch.int64, device=device)
    return F.cross_entropy(torch.zeros(1, 2, dtype=dtype, device=device), label).dtype


class _Watched(torch.autograd.Function):
    """Passes the loss on. If a hook has come to wait for the logits' gradient since, it gets it: then
    the gradient goes the ordinary way, through real logits, instead of the fused one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, lazy: LazyLogits, function: Any, call: dict[str, Any]) -> Tensor:
        ctx.lazy, ctx.function, ctx.call = lazy, function, call
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not ctx.lazy._form.head.fate.watched:
            return grad, None, None, None
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            logits = ctx.lazy.real_logits("hook")
            loss = ctx.function(**ctx.call | {"input": logits})
            (gradient,) = torch.autograd.grad(loss, logits, grad.to(loss.dtype), create_graph=again)
        return None, gradient, None, None
