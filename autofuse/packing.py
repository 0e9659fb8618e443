"""Batches without their padding: columns trimmed away, and rows packed together.

Nothing here is proved: a `Change` is a batch with less work in it that *should* give what the batch
before it gives, together with everything that a proof must have seen for that to hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autofuse.proof import Unprovable

__all__ = [
    "Change",
    "Packing",
    "Tokens",
    "allowed",
    "block_mask",
    "decoder_tokens",
    "kept_length",
    "pack",
    "packing_of",
    "tokens",
    "trim_left",
    "trim_right",
]

Batch = Mapping[str, Any]

IGNORED = -100
ALIGNED = 8  # a length that tensor cores and vector units like
LENGTHS = 32  # of one padded length: a dynamic compilation serves all, what is set up for each is cheap
FEW_LENGTHS = 8  # no more than the compilations that dynamo allows for one function
WORTH_PACKING = 0.8  # of the tokens computed without it


@dataclass(frozen=True)
class Change:
    """A batch and the smaller one that should give the same loss, gradients and real tokens.

    Attributes:
        variant: which of several ways to tell the model about it.
        kind: what else must have been the same in the batch of the proof.
        short, long: the shortest and the longest length that the comparison is about.
        reach: the longest sequence that is in one row with others; 0 where no attention mask is remade.
        real: (rows, length), the tokens whose outputs must agree.
        layout: ``layout(before, after)``: the dimensions of an output that the change made smaller.
        widen: ``widen(output, dimensions)``: the output with the size it would have had.
        inside: ``inside(model)``: the context in which the model is called with the smaller batch.
    """

    variant: str
    kind: tuple[Hashable, ...]
    short: int
    long: int
    reach: int
    before: Batch
    after: Batch
    real: Tensor
    layout: Callable[[Tensor, Tensor], tuple[int, ...]]
    widen: Callable[[Tensor, tuple[int, ...]], Tensor]
    inside: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()


@dataclass(frozen=True)
class Tokens:
    """The tensors of a batch that share one sequence length.

    Attributes:
        real: (rows, length), True for a token that is no padding.
        used: (rows, length), real or with a label that is not ignored.
        labels: one per token, if the batch has such.
        padding: the one value that ``input_ids`` has at all padding; None without ``input_ids``.
        dims: for each tensor the dimensions of that length.
    """

    real: Tensor
    used: Tensor
    labels: Tensor | None
    padding: int | None
    dims: dict[str, tuple[int, ...]]

    @property
    def length(self) -> int:
        return self.real.shape[1]

    @property
    def kind(self) -> Hashable:
        """What the batches of a proof and of its use must have in common."""
        return self.padding, tuple(sorted(self.dims.items()))

    @functools.cached_property
    def after_padding(self) -> bool:
        """Whether a label is used right after padding: a causal model predicts it from the padding."""
        if self.labels is None:
            return False
        return bool(((self.labels[:, 1:] != IGNORED) & ~self.real[:, :-1]).any())


# --- what belongs together ---------------------------------------------------------------------


def tokens(batch: Batch, *, encoder_decoder: bool = False) -> Tokens | None:
    """The tokens that ``attention_mask`` is about; None without one, without any padding, or where
    the padding is not of one kind.

    >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    >>> found = tokens({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.zeros(2)})
    >>> sorted(found.dims), found.padding
    (['attention_mask', 'input_ids'], 0)
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.layout != torch.strided:
        return None
    real = allowed(mask) if mask.dim() == 2 else allowed(mask).flatten(1, 2).any(1)
    encoder_decoder = encoder_decoder or any(name.startswith("decoder_") for name in batch)
    names = [n for n in batch if not n.startswith("decoder_") and not (encoder_decoder and n == "labels")]
    return _tokens(batch, names, real, "input_ids")


def decoder_tokens(batch: Batch, *, encoder_decoder: bool = False) -> Tokens | None:
    """The tokens of an encoder-decoder's decoder: what its mask says, or the labels that count."""
    names = [n for n in batch if n.startswith("decoder_")]
    labels, mask = batch.get("labels"), batch.get("decoder_attention_mask")
    if not (encoder_decoder or names) or not _integers(labels, 2):
        return None
    if isinstance(mask, Tensor) and mask.shape != labels.shape:
        return None
    real = allowed(mask) if isinstance(mask, Tensor) else labels.ne(IGNORED)
    return _tokens(batch, [*names, "labels"], real, "decoder_input_ids")


def _tokens(batch: Batch, names: Sequence[str], real: Tensor, ids_name: str) -> Tokens | None:
    dims = {name: found for name in names if (found := _dims(name, batch[name], real.shape))}
    labels, used = batch.get("labels"), real
    if "labels" in dims:
        if not _integers(labels, 2) or labels.shape[0] != real.shape[0]:
            return None  # a float for each token: none can be ignored
        used = real | (labels != IGNORED)
    ids, padding = batch.get(ids_name), None
    if isinstance(ids, Tensor) and ids.shape == real.shape:
        values = ids[~real]
        if values.numel() == 0:
            return None
        low, high = torch.stack(values.aminmax()).tolist()
        if low != high:
            return None
        padding = int(low)
    elif bool(real.all()):
        return None
    return Tokens(real, used, labels if "labels" in dims else None, padding, dims)


def allowed(mask: Tensor) -> Tensor:
    """Where a mask lets a token be seen: true, not 0, or (four dimensions, floating) not minus infinity."""
    if mask.is_floating_point() and mask.dim() == 4:
        return mask > torch.finfo(mask.dtype).min / 2
    return mask != 0


def _integers(value: Any, dim: int) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.dim() == dim
        and not value.is_floating_point()
        and value.dtype != torch.bool
    )


def _dims(name: str, value: Any, shape: torch.Size) -> tuple[int, ...]:
    """The dimensions of a tensor that count the tokens; none where it has nothing to do with them.

    >>> shape = torch.Size([2, 7])
    >>> _dims("position_ids", torch.ones(1, 7, dtype=torch.long), shape)
    (1,)
    >>> _dims("attention_mask", torch.ones(2, 1, 7, 7), shape), _dims("labels", torch.ones(2), shape)
    ((2, 3), ())
    """
    if not isinstance(value, Tensor) or value.dim() < 2:
        return ()
    if name.endswith("mask"):
        return tuple(d for d in range(1, value.dim()) if value.shape[d] == shape[1])
    if not value.is_floating_point() and value.shape[-1] == shape[1]:
        return (value.dim() - 1,)
    return (1,) if value.shape[:2] == shape else ()


# --- trimming ----------------------------------------------------------------------------------


def kept_length(needed: int, length: int, lengths: int = LENGTHS) -> int:
    """How many of ``length`` columns are kept where ``needed`` are used.

    A multiple of 8, and at most so many different ones for one padded length; a compilation by the
    model's owner, which may be made for each length anew, wants few (`FEW_LENGTHS`).

    >>> [kept_length(n, 256) for n in (1, 32, 33, 115, 250)], kept_length(9, 20), kept_length(17, 20)
    ([8, 32, 40, 120, 256], 16, 20)
    >>> [kept_length(n, 256, FEW_LENGTHS) for n in (1, 32, 33, 115, 250)]
    [32, 32, 64, 128, 256]
    """
    multiple = _multiple(length, lengths)
    return min(length, -(-needed // multiple) * multiple)


def _multiple(length: int, lengths: int) -> int:
    return max(1, -(-length // (lengths * ALIGNED))) * ALIGNED


def trim_right(batch: Batch, found: Tokens, lengths: int = LENGTHS) -> list[Change]:
    """Without the columns at the right in which nothing is used.

    >>> ids = torch.ones(2, 64, dtype=torch.long)
    >>> batch = {"input_ids": ids, "attention_mask": torch.arange(64).expand(2, 64) < 20}
    >>> trim_right(batch, tokens(batch))[0].after["input_ids"].shape
    torch.Size([2, 24])
    """
    _, last = _bounds(found.used)
    kept = kept_length(last + 1, found.length, lengths)
    return [] if kept == found.length else [_trimmed(batch, found, 0, kept)]


def trim_left(batch: Batch, found: Tokens, of: int, lengths: int = LENGTHS) -> list[Change]:
    """Without the columns at the left in which nothing is used; then the same with explicit positions,
    for a model that counts its positions from the first column.

    Where a label is used right after padding, one column of padding stays.

    Args:
        of: the padded length that decides which lengths are kept.
    """
    first, _ = _bounds(found.used)
    multiple = _multiple(of, lengths)
    kept = -(-(found.length - first + int(found.after_padding)) // multiple) * multiple
    if kept >= found.length:
        return []
    start = found.length - kept
    plain = _trimmed(batch, found, start, found.length)
    if "position_ids" in batch:
        return [plain]
    positions = torch.arange(start, found.length, device=found.real.device).expand(len(found.real), -1)
    with_positions = {**plain.after, "position_ids": positions}
    return [plain, replace(plain, variant="positions", after=with_positions)]


def _bounds(used: Tensor) -> tuple[int, int]:
    """The first and the last column in which anything is used."""
    columns = used.any(0).nonzero()
    if not len(columns):
        return 0, used.shape[1] - 1
    first, last = columns[[0, -1], 0].tolist()
    return first, last


def _trimmed(batch: Batch, found: Tokens, start: int, stop: int) -> Change:
    length, kept = found.length, stop - start
    after = dict(batch)
    for name, dims in found.dims.items():
        for dim in dims:
            after[name] = after[name].narrow(dim, start, kept).contiguous()

    def layout(a: Tensor, b: Tensor) -> tuple[int, ...]:
        dims = tuple(d for d in range(a.dim()) if b.dim() == a.dim() and a.shape[d] != b.shape[d])
        if a.dim() != b.dim() or any((a.shape[d], b.shape[d]) != (length, kept) for d in dims):
            raise Unprovable(f"an output of the shape {tuple(a.shape)} becomes {tuple(b.shape)}")
        return dims

    def widen(output: Tensor, dims: tuple[int, ...]) -> Tensor:
        for dim in dims:
            output = F.pad(output, [0, 0] * (output.dim() - 1 - dim) + [start, length - stop])
        return output

    kind = (found.kind, found.after_padding)
    return Change("", kind, kept, length, 0, batch, after, found.real, layout, widen)


# --- packing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Where each token goes.

    Attributes:
        source: (new rows, width), the flat place that a token comes from, or a place of padding.
        positions, segments: its number within its sequence, and its sequence's number in the row.
        target: (rows, length), the flat place where a token lies now; -1 for padding.
        longest: the number of tokens of the longest sequence.
        left: a sequence has padding at its left.
    """

    source: Tensor
    positions: Tensor
    segments: Tensor
    target: Tensor
    longest: int
    left: bool

    def take(self, x: Tensor) -> Tensor:
        """(rows, length, ...) -> (new rows, width, ...)."""
        return x.flatten(0, 1).index_select(0, self.source.flatten()).unflatten(0, self.source.shape)

    def put_back(self, x: Tensor) -> Tensor:
        """(new rows, width, ...) -> (rows, length, ...), with zeros at padding."""
        rows = self.target.clamp(min=0).flatten()
        wide = x.flatten(0, 1).index_select(0, rows).unflatten(0, self.target.shape)
        return wide.masked_fill((self.target < 0).view(*self.target.shape, *[1] * (x.dim() - 2)), 0)

    def layout(self, a: Tensor, b: Tensor) -> tuple[int, ...]:
        """Which dimensions of an output are packed in ``b``; raises `Unprovable` where it cannot tell."""
        if a.shape == b.shape:
            return ()
        shapes = a.shape[:2] == self.target.shape, b.shape[:2] == self.source.shape
        if all(shapes) and a.shape[2:] == b.shape[2:]:
            return (0, 1)
        raise Unprovable(f"an output of the shape {tuple(a.shape)} becomes {tuple(b.shape)}")

    def widen(self, output: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The output with the size that it would have had."""
        return self.put_back(output) if dims else output


def pack(batch: Batch, found: Tokens, offsets: Iterable[int] = (0,), lengths: int = LENGTHS) -> list[Change]:
    """The real tokens in fewer rows, several sequences in each; empty where it does not pay, or not
    for this batch.

    The model is told in one of two ways, of which the proof chooses: by positions that start again
    in each sequence, without a mask (causal models of transformers then build block-diagonal masks),
    or by a block-diagonal mask of four dimensions. What fills a row up is a sequence of its own.

    Args:
        offsets: what the model's first position may be.

    Raises:
        Unprovable: the batch has something that does not belong to single tokens.

    >>> ids = torch.arange(1, 17).repeat(4, 1)
    >>> mask = torch.arange(16) < torch.tensor([[16], [8], [5], [3]])
    >>> batch = {"input_ids": ids.where(mask, 0), "attention_mask": mask, "labels": ids.where(mask, -100)}
    >>> packed = pack(batch, tokens(batch))[0].after
    >>> packed["input_ids"].shape, packed["position_ids"][1].tolist()
    (torch.Size([2, 16]), [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2])
    """
    places = packing_of(batch, found, lengths)
    if places is None:
        return []
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[:2] != found.real.shape:
            raise Unprovable(f"{name!r} of the shape {tuple(value.shape)} is not about single tokens")
    return list(_packed(batch, found, places, sorted(set(offsets))))


def packing_of(batch: Batch, found: Tokens, lengths: int = LENGTHS) -> Packing | None:
    """Where the tokens of a batch would go; None where it does not pay, or not for this batch."""
    mask, real = batch["attention_mask"], found.real
    if mask.dim() != 2 or batch.get("use_cache"):
        return None
    counts, firsts, lasts = _extents(real)
    width = kept_length(max(counts), found.length, lengths)
    bins = _first_fit(counts, width)
    if not bins or len(bins) * width > WORTH_PACKING * real.numel():
        return None
    contiguous = all(
        n == 0 or last - first + 1 == n for n, first, last in zip(counts, firsts, lasts, strict=True)
    )
    if not contiguous or bool((mask.float() > 1).any()) or bool((found.used & ~real).any()):
        return None
    return None if found.after_padding else _places(real, bins, counts, firsts, width)


def _extents(real: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Of each row: how many real tokens, and the columns of the first and the last."""
    numbers = real.int()
    last = real.shape[1] - 1 - numbers.flip(1).argmax(1)
    lengths, firsts, lasts = torch.stack([numbers.sum(1), numbers.argmax(1), last]).tolist()
    return lengths, firsts, lasts


def _first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Rows put together so that each group fits into ``width``: the longest first, where it fits first.

    >>> _first_fit([3, 8, 5, 16], 16)
    [[3], [1, 2, 0]]
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        place = next((i for i, room in enumerate(free) if room >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(width)
        bins[place].append(row)
        free[place] -= lengths[row]
    return bins


def _places(
    real: Tensor, bins: list[list[int]], lengths: list[int], firsts: list[int], width: int
) -> Packing:
    rows, length = real.shape
    padding = int((~real).flatten().int().argmax())  # what fills up is a copy of some padding
    source = torch.full((len(bins), width), padding)
    positions, segments = torch.zeros_like(source), torch.zeros_like(source)
    target = torch.full((rows * length,), -1)
    for index, members in enumerate(bins):
        at = 0
        for number, row in enumerate(members):
            n, begin = lengths[row], row * length + firsts[row]
            source[index, at : at + n] = torch.arange(begin, begin + n)
            positions[index, at : at + n] = torch.arange(n)
            segments[index, at : at + n] = number
            target[begin : begin + n] = torch.arange(index * width + at, index * width + at + n)
            at += n
        positions[index, at:] = torch.arange(width - at)
        segments[index, at:] = len(members)
    moved = [t.to(real.device) for t in (source, positions, segments, target.view(rows, length))]
    source, positions, segments, target = moved
    return Packing(source, positions, segments, target, max(lengths), any(firsts))


def _packed(batch: Batch, found: Tokens, places: Packing, offsets: list[int]) -> Iterable[Change]:
    after: dict[str, Any] = {
        name: places.take(value) if isinstance(value, Tensor) and value.dim() else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    given = after.get("position_ids")
    positions = places.positions if given is None else given
    starts = places.positions == 0
    if given is not None and not _tells_apart(given, starts, found.real.flatten()[places.source]):
        return
    first_label = found.labels is not None and bool(((after["labels"] != IGNORED) & starts).any())

    def change(variant: str, told: Batch) -> Change:
        kind, real, n = (found.kind, first_label, places.left), found.real, places.longest
        return Change(variant, kind, n, found.length, n, batch, told, real, places.layout, places.widen)

    for offset in offsets if given is None else [0]:
        told = {**after, "position_ids": positions + offset}
        masked = {**told, "attention_mask": block_mask(places.segments)}
        if first_label:  # a causal model would predict it from the sequence before
            told["labels"] = after["labels"].masked_fill(starts, IGNORED)
        yield change(f"positions from {offset}", told)
        yield change(f"block mask and positions from {offset}", masked)


def _tells_apart(positions: Tensor, starts: Tensor, real: Tensor) -> bool:
    """Whether a new sequence is where the position is not the next one, and nowhere else."""
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    return bool((~real[:, 1:] | (jumps == starts[:, 1:])).all())


def block_mask(segments: Tensor) -> Tensor:
    """(rows, 1, width, width), to be added to attention scores."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return torch.zeros(same.shape, device=same.device).masked_fill(~same, torch.finfo(torch.float32).min)
