"""The operations on lazy logits that need no logits: each is carried out on what they are made of.

Everything here happens below autograd, one ATen operation at a time. What is not in `LAZY`, or what
a handler there cannot do, is done on the real logits by `autofuse.lazy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAZY", "Form", "as_indices", "derive"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """How lazy logits follow from the output layer's call: ``maps(linear(rows(hidden)))``.

    Args:
        head: that call.
        rows: what was done to the leading dimensions, for (..., H) as for (..., V).
        maps: elementwise operations, on logits whose classes are last.
        tensors: the tensors that the maps take, in order, with their versions.
        classes: the dimension of the classes; None: the last.
        normalized: log_softmax was the last map.
    """

    head: Any
    rows: tuple[Callable[[Tensor], Tensor], ...] = ()
    maps: tuple[Callable[[Tensor, list[Tensor]], Tensor], ...] = ()
    tensors: tuple[tuple[Tensor, int], ...] = ()
    classes: int | None = None
    normalized: bool = False

    def hidden(self) -> Tensor:
        """The hidden states, with their history, arranged as the logits' rows."""
        return functools.reduce(lambda x, function: function(x), self.rows, self.head.hidden)

    def epilogue(self) -> Callable[..., Tensor] | None:
        """``epilogue(logits, *tensors)``, or None if nothing was done to the logits."""
        if not self.maps:
            return None

        def run(logits: Tensor, *tensors: Tensor) -> Tensor:
            left = [*tensors]
            return functools.reduce(lambda x, function: function(x, left), self.maps, logits)

        return run

    def unchanged(self) -> bool:
        """Whether nothing that the logits are made of was changed in place since."""
        return self.head.unchanged() and all(x._version == version for x, version in self.tensors)

    def class_dim(self, dims: int) -> int:
        return dims - 1 if self.classes is None else self.classes

    def with_rows(self, function: Callable[[Tensor], Tensor]) -> Form | None:
        return replace(self, rows=(*self.rows, function)) if self.classes is None else None


# handler(form, logits, out, *other arguments, **kwargs) -> the result's form, or None if it cannot;
# ``out`` is the result on the meta device, and for several results the handler gives a list.
Handler = Callable[..., Any]
LAZY: dict[Any, Handler] = {}


def _stays_lazy(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        LAZY.update(dict.fromkeys(functions, handler))
        return handler

    return register


def derive(
    form: Form, logits: Tensor, func: Any, at: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """(form, shape on the meta device) of ``func(*args)``, a list of them for several results, or None.

    Args:
        at: where in ``args`` the logits are.
    """
    out = func(*map(_meta, args), **{k: v for k, v in kwargs.items() if k != "device"})
    others = [x for i, x in enumerate(args) if i != at]
    if LAZY[func] is _elementwise:
        others = [func, at, *others]
    found = LAZY[func](form, logits, out, *others, **kwargs)
    return (
        [*zip(found, out, strict=True)]
        if isinstance(found, list)
        else None
        if found is None
        else (found, out)
    )


def _meta(x: Any) -> Any:
    """The shape of it."""
    if isinstance(x, (list, tuple)):
        return [_meta(item) for item in x]
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def as_indices(x: Any) -> Any:
    """A list of index tensors with masks written out, so that shapes follow from shapes.

    >>> as_indices([torch.tensor([False, True, True])])
    [tensor([1, 2])]
    """
    if not isinstance(x, (list, tuple)) or not any(isinstance(i, Tensor) for i in x):
        return x
    out: list[Tensor | None] = []
    for i in x:
        mask = isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
        out += i.nonzero().unbind(1) if mask else [i]
    return out


@_stays_lazy(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh.default)
def _same(form: Form, logits: Tensor, out: Tensor, **kwargs: Any) -> Form:
    return form


@_stays_lazy(aten._to_copy.default)
def _to_copy(form: Form, logits: Tensor, out: Tensor, **kwargs: Any) -> Form | None:
    same_device = kwargs.get("device") in (None, logits.device)
    return form if same_device and out.is_floating_point() else None


# --- rows ----------------------------------------------------------------------------------------


@_stays_lazy(aten.view.default, aten._unsafe_view.default)
def _view(form: Form, logits: Tensor, out: Tensor, size: Sequence[int]) -> Form | None:
    leading = out.shape[:-1]
    same_classes = out.shape[-1:] == logits.shape[-1:]
    return form.with_rows(lambda h: h.reshape(*leading, h.shape[-1])) if same_classes else None


def _leading(logits: Tensor, dim: int, more: int = 0) -> int | None:
    """``dim`` counted from the front, if it lies before the classes. ``more`` dimensions are made."""
    dim = dim % (logits.dim() + more)
    return dim if dim < logits.dim() - 1 + more else None


@_stays_lazy(aten.slice.Tensor, aten.select.int, aten.index_select.default)
def _along(form: Form, logits: Tensor, out: Tensor, dim: int = 0, *args: Any) -> Form | None:
    at = _leading(logits, dim)
    if at is None:
        return None
    if out.dim() < logits.dim():
        return form.with_rows(lambda h: h.select(at, *args))
    if args and isinstance(args[0], Tensor):
        return form.with_rows(lambda h: h.index_select(at, *args))
    return form.with_rows(lambda h: aten.slice.Tensor(h, at, *args))


@_stays_lazy(aten.unsqueeze.default)
def _unsqueeze(form: Form, logits: Tensor, out: Tensor, dim: int) -> Form | None:
    at = _leading(logits, dim, 1)
    return None if at is None else form.with_rows(lambda h: h.unsqueeze(at))


@_stays_lazy(aten.squeeze.dim)
def _squeeze(form: Form, logits: Tensor, out: Tensor, dim: int) -> Form | None:
    at = _leading(logits, dim)
    return None if at is None else form.with_rows(lambda h: h.squeeze(at))


@_stays_lazy(aten.unbind.int)
def _unbind(form: Form, logits: Tensor, out: Sequence[Tensor], dim: int = 0) -> list[Form] | None:
    at = _leading(logits, dim)
    if at is None or form.classes is not None:
        return None
    return [_sure(form.with_rows(functools.partial(torch.select, dim=at, index=i))) for i in range(len(out))]


@_stays_lazy(aten.split.Tensor, aten.split_with_sizes.default)
def _split(form: Form, logits: Tensor, out: Sequence[Tensor], size: Any, dim: int = 0) -> list[Form] | None:
    at = _leading(logits, dim)
    if at is None or form.classes is not None:
        return None
    sizes = [x.shape[at] for x in out]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        _sure(form.with_rows(functools.partial(torch.narrow, dim=at, start=start, length=length)))
        for start, length in zip(starts, sizes, strict=True)
    ]


def _sure(form: Form | None) -> Form:
    assert form is not None
    return form


@_stays_lazy(aten.index.Tensor)
def _index(form: Form, logits: Tensor, out: Tensor, indices: Sequence[Tensor | None]) -> Form | None:
    if len(indices) >= logits.dim() or out.shape[-1] != logits.shape[-1]:
        return None
    return form.with_rows(lambda h: aten.index.Tensor(h, [*indices]))


@_stays_lazy(aten.transpose.int, aten.permute.default, aten.t.default)
def _permute(form: Form, logits: Tensor, out: Tensor, *args: Any) -> Form:
    n = logits.dim()
    order = [*range(n)]
    if len(args) == 1:
        order = [d % n for d in args[0]]
    else:
        a, b = (d % n for d in (args or (0, 1)))
        order[a], order[b] = order[b], order[a]
    classes = form.class_dim(n)
    rows, place = [d - (d > classes) for d in order if d != classes], order.index(classes)
    moved = (*form.rows, lambda h: h.permute(*rows, h.dim() - 1))
    return replace(form, rows=moved, classes=None if place == n - 1 else place)


# --- numbers -------------------------------------------------------------------------------------


@_stays_lazy(
    *(getattr(getattr(aten, op), of) for op in ("mul", "div", "add", "sub") for of in ("Tensor", "Scalar")),
    aten.tanh.default,
    aten.neg.default,
)
def _elementwise(
    form: Form, logits: Tensor, out: Tensor, func: Any, at: int, *others: Any, **kwargs: Any
) -> Form | None:
    """Arithmetic with numbers, and with tensors that are the same for every row."""
    tensors = [x for x in others if isinstance(x, Tensor)]
    plain = all(_for_every_row(x, form, logits) for x in tensors) and out.is_floating_point()
    if form.normalized or not plain or out.shape != logits.shape:
        return None

    def run(x: Tensor, left: list[Tensor]) -> Tensor:
        args = [left.pop(0).to(x.device) if isinstance(other, Tensor) else other for other in others]
        return func(*args[:at], x, *args[at:], **kwargs)

    kept = tuple((x, x._version) for x in tensors)
    return replace(form, maps=(*form.maps, run), tensors=form.tensors + kept)


def _for_every_row(x: Tensor, form: Form, logits: Tensor) -> bool:
    along = x.dim() == 1 and form.classes is None and x.shape[0] in (1, logits.shape[-1])
    return type(x) in (Tensor, torch.nn.Parameter) and (x.dim() == 0 or along)


@_stays_lazy(aten._log_softmax.default)
def _log_softmax(form: Form, logits: Tensor, out: Tensor, dim: int, half_to_float: bool) -> Form | None:
    same = dim % logits.dim() == form.class_dim(logits.dim()) and not form.normalized
    return replace(form, normalized=True) if same else None
