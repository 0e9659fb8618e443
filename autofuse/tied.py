"""Output layers that are no module: the product with an embedding's own weight, in a model's forward.

``F.linear(h, embedding.weight)`` calls nothing that could be swapped. But the tokens are looked up in the
embedding first: from then on until that product its weight is of a subclass of `nn.Parameter` that sees
what is done with it. It is the same object throughout, and an ordinary parameter again before the
backward; nothing else in the forward is slowed down by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["arm", "disarm", "is_armed"]

# What is done for ``F.linear(x, weight, bias)``; None: the product itself.
Product = Callable[[Tensor, Tensor | None], Tensor | None]

_products: dict[int, Product] = {}
_TRANSPOSING: set[Any] = {
    *(getattr(getattr(Tensor, name), "__get__") for name in ("T", "mT")),  # noqa: B009
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
}  # fmt: skip
_MULTIPLYING = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}


def arm(weight: nn.Parameter, product: Product) -> None:
    """``product`` is asked at the next product with the weight, once.

    >>> embedding = nn.Embedding(5, 2)
    >>> arm(embedding.weight, lambda x, bias: x.sum())
    >>> F.linear(torch.ones(1, 2), embedding.weight), type(embedding.weight).__name__
    (tensor(2.), 'Parameter')
    """
    _products[id(weight)] = product
    weight.__class__ = _Armed


def disarm(weight: Tensor) -> None:
    """Make the weight an ordinary parameter; nothing to do if it is."""
    if is_armed(weight):
        _products.pop(id(weight), None)
        weight.__class__ = nn.Parameter


def is_armed(weight: Tensor) -> bool:
    return type(weight) is _Armed


class _Armed(nn.Parameter):
    """A parameter that waits for its product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            out = _linear(*args, **kwargs)
            if out is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if func in _TRANSPOSING and _is_transposed(out, args[0]):
                out = out.as_subclass(_Transposed)
                out.weight = args[0]
        return out


class _Transposed(Tensor):
    """The transposed weight, for ``h @ weight.T``."""

    weight: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MULTIPLYING and len(args) == 2 and type(args[1]) is cls and type(args[0]) is Tensor:
            out = _take(args[1].weight, args[0], None)
            if out is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return _take(weight, input, bias)


def _take(weight: Any, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The armed weight's product, if it is made in another way; the weight is armed no more."""
    product = _products.get(id(weight)) if type(weight) is _Armed else None
    if product is None:
        return None
    disarm(weight)
    return product(x, bias)


def _is_transposed(out: Any, weight: Tensor) -> bool:
    same = isinstance(out, Tensor) and out.dim() == 2 and out.data_ptr() == weight.data_ptr()
    return same and type(weight) is _Armed and out.stride() == weight.stride()[::-1]
