"""Rows packed together inside a model: for its repeated blocks alone.

A batch with one label for each row cannot be packed as a whole, since something in the model takes
one token of each row, or their mean. But what costs time, the repeated blocks, only needs to know which
tokens see each other. So the part that holds the blocks is called with several sequences in one row
and what it returns is put back in its place, with zeros at padding; everything around it sees the
rows that it knows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autofuse.packing import Change, Packing, Tokens, allowed, block_mask, packing_of
from autofuse.patch import Transaction
from autofuse.proof import Unprovable
from autofuse.regions import find_kinds

__all__ = ["body_path", "pack_body"]

Batch = Mapping[str, Any]


def body_path(model: nn.Module) -> str | None:
    """The one part of ``model`` that holds its repeated blocks; None if there is none, or several.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2)
    >>> body_path(nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 2)})), body_path(encoder)
    ('encoder', None)
    """
    paths = [path for kind in find_kinds(model, "body") for path in kind.paths]
    return paths[0] if len(paths) == 1 and paths[0] else None


def pack_body(batch: Batch, found: Tokens, path: str, offsets: Iterable[int], lengths: int) -> list[Change]:
    """The batch as it is, in a context in which the part at ``path`` computes packed rows.

    Where that part takes a mask for each pair of tokens, the packed one is made from it. Where it takes
    the batch's, it is told in one of the two ways of `autofuse.packing.pack`.

    Args:
        offsets: what the first position may be, where the part counts them.
    """
    places = packing_of(batch, found, lengths)
    if places is None:
        return []
    given = "position_ids" in batch
    told = [
        _Told(offset, mask) for offset in ([0] if given else sorted(set(offsets))) for mask in (False, True)
    ]
    kind, n = (found.kind, places.left, given), places.longest

    def change(how: _Told) -> Change:
        inside = functools.partial(_packed, path=path, places=places, real=found.real, how=how)
        return Change(
            str(how), kind, n, found.length, n, batch, batch, found.real, places.layout, places.widen, inside
        )

    return [change(how) for how in told]


@dataclass(frozen=True)
class _Told:
    """How a part is told that its rows are packed, where it takes a mask for single tokens."""

    offset: int
    mask: bool

    def __str__(self) -> str:
        return f"{'block mask and ' if self.mask else ''}positions from {self.offset}"


@contextmanager
def _packed(model: nn.Module, *, path: str, places: Packing, real: Tensor, how: _Told) -> Iterator[None]:
    """Inside it the part at ``path`` computes packed rows.

    Raises:
        Unprovable: the part was never told which tokens are padding.
    """
    body, transaction = model.get_submodule(path), Transaction()
    call = _Call(body.forward, places, real, how)
    transaction.set_attribute(body, "forward", functools.update_wrapper(call, body.forward))
    try:
        yield
    finally:
        transaction.rollback()
    if not call.packed:
        raise Unprovable(f"{path} is not called with a mask of the batch's tokens")


class _Call:
    """What the part's ``forward`` is while rows are packed in it."""

    def __init__(self, forward: Callable[..., Any], places: Packing, real: Tensor, how: _Told) -> None:
        self._forward, self._places, self._real, self._how = forward, places, real, how
        self.packed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        pairs = [x for x in args if isinstance(x, Tensor) and x.dim() == 4]
        if not any(map(self._is_mask, (mask, *pairs))):
            return self._forward(*args, **kwargs)
        self.packed = True
        told = self._tell(kwargs) if isinstance(mask, Tensor) and mask.dim() == 2 else {}
        args, kwargs = tree_map_only(Tensor, self._pack, (args, kwargs))
        return tree_map_only(Tensor, self._put_back, self._forward(*args, **{**kwargs, **told}))

    def _is_mask(self, x: Any) -> bool:
        """Whether it says of each token whether it is padding, and says what the batch says."""
        if not isinstance(x, Tensor):
            return False
        if self._of_pairs(x) and x.shape[0] == len(self._real):
            return torch.equal(allowed(x).flatten(1, 2).any(1), self._real)
        return x.shape == self._real.shape and torch.equal(x != 0, self._real)

    def _of_pairs(self, x: Tensor) -> bool:
        rows, length = self._real.shape
        return x.dim() == 4 and x.shape[0] in (1, rows) and x.shape[2] in (1, length) and x.shape[3] == length

    def _tell(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A mask for single tokens says nothing about packed rows: what is said instead."""
        told: dict[str, Any] = {"attention_mask": None}
        if self._how.mask:
            told["attention_mask"] = block_mask(self._places.segments)
        takes_positions = "position_ids" in inspect.signature(self._forward).parameters
        if takes_positions and kwargs.get("position_ids") is None:
            told["position_ids"] = self._places.positions + self._how.offset
        return told

    def _pack(self, x: Tensor) -> Tensor:
        rows, length = self._real.shape
        if self._of_pairs(x):
            return self._pack_pairs(x)
        if x.dim() < 2 or x.shape[0] not in (1, rows) or x.shape[1] != length:
            return x
        return self._places.take(x.expand(rows, *x.shape[1:]))

    def _pack_pairs(self, x: Tensor) -> Tensor:
        """(rows, heads, length, length) -> (new rows, heads, width, width): nothing between sequences."""
        rows, length = self._real.shape
        x = x.expand(rows, x.shape[1], length, length)
        source = self._places.source
        row, column = source // length, source % length
        pairs = x[row[:, :, None], :, column[:, :, None], column[:, None, :]].movedim(-1, 1)
        filler = ~self._real.flatten()[source]  # sees itself: a token that sees nothing becomes NaN
        segments = self._places.segments
        others = segments[:, None, :, None] != segments[:, None, None, :]
        yes, no = (0.0, torch.finfo(x.dtype).min) if x.is_floating_point() else (1, 0)
        return pairs.masked_fill(filler[:, None, :, None], yes).masked_fill(others, no)

    def _put_back(self, x: Tensor) -> Tensor:
        return self._places.put_back(x) if x.shape[:2] == self._places.source.shape else x
