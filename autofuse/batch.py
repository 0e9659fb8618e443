"""What a batch is: a mapping with labels, or inputs and targets; and how many labels count in it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = [
    "LabelRule",
    "LossWatch",
    "check_not_empty",
    "fresh",
    "loss_from",
    "loss_of_batch",
    "stand_in_loss",
    "tensors",
]

Batch = tuple[Any, ...]  # the arguments of step(...)


def tensors(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nest of mappings, sequences and dataclass-like outputs, with its path.

    >>> [name for name, _ in tensors({"input_ids": torch.ones(2), "extra": [torch.ones(1)]})]
    ['input_ids', 'extra[0]']
    """
    if isinstance(batch, Tensor):
        yield path or "batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from tensors(value, f"{path or 'batch'}[{index}]")


def fresh(batch: Any, *, detached: bool = False) -> Any:
    """A copy of a batch's mappings and sequences, which a forward may change; the same tensors, or
    for a proof copies of them, cut off from the graph that they may hang on.

    >>> batch = {"labels": torch.ones(1)}
    >>> _ = fresh(batch).pop("labels")
    >>> list(batch)
    ['labels']
    """
    if isinstance(batch, Tensor):
        return _cut_off(batch) if detached else batch
    if isinstance(batch, MutableMapping):
        new = copy.copy(batch)
        for key, value in batch.items():
            new[key] = fresh(value, detached=detached)
        return new
    if type(batch) in (list, tuple):
        return type(batch)(fresh(value, detached=detached) for value in batch)
    return copy.copy(batch) if hasattr(batch, "__dict__") and not callable(batch) else batch


def _cut_off(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is not None:
        return tensor.detach().clone().requires_grad_()
    return tensor if tensor.requires_grad else tensor.clone()


def check_not_empty(batch: Batch) -> None:
    """Raise a ValueError for a batch in which there is nothing to train on."""
    first = batch[0] if batch else None
    if not batch or first is None or (isinstance(first, (Mapping, list, tuple)) and not first):
        raise ValueError(f"the batch is empty ({first!r}): give step(batch) a mapping or inputs and targets")
    for name, tensor in tensors(batch if len(batch) > 1 else first):
        if tensor.dim() and tensor.shape[0] == 0:
            raise ValueError(f"the batch is empty: {name!r} has the shape {tuple(tensor.shape)}")


def loss_of_batch(
    model: nn.Module,
    batch: Batch,
    loss_fn: Callable[..., Tensor] | None,
    forward: Callable[..., Tensor] | None,
    outside_autocast: Callable[[], Any],
) -> tuple[Tensor, Any]:
    """(loss, outputs) of one forward; called under the step's autocast.

    ``loss_fn`` runs outside of autocast, in float32 on float32 outputs.
    """
    if forward is not None:
        result = forward(model, batch[0] if len(batch) == 1 else batch)
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        return _scalar(loss, "forward(model, batch)"), outputs
    inputs, targets = _split(batch, loss_fn)
    outputs = _call(model, inputs)
    if loss_fn is None:
        return loss_from(outputs, model), outputs
    with outside_autocast():
        loss = loss_fn(tree_map(_widen, outputs), targets)
    return _scalar(loss, "loss_fn(outputs, targets)"), outputs


def _split(batch: Batch, loss_fn: Callable[..., Tensor] | None) -> tuple[Any, Any]:
    """(inputs, targets) of step(batch) or step(inputs, targets)."""
    if loss_fn is None:
        if len(batch) > 1 or not isinstance(batch[0], Mapping):
            raise ValueError(
                f"step got {' and '.join(type(b).__name__ for b in batch)}, from which no loss follows: pass "
                "loss_fn= to optimize() for step(inputs, targets), or forward= for any other batch"
            )
        return batch[0], None
    if len(batch) == 2:
        return batch
    only = batch[0]
    if isinstance(only, (list, tuple)) and len(only) == 2:
        return only[0], only[1]
    if isinstance(only, Mapping) and "labels" in only:
        return {k: v for k, v in only.items() if k != "labels"}, only["labels"]
    raise ValueError(
        f"loss_fn needs targets: call step(inputs, targets), not step({type(only).__name__}), "
        'or give a mapping with "labels"'
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def _widen(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def loss_from(outputs: Any, model: nn.Module) -> Tensor:
    """The loss in a model's outputs: their ``loss``, or the first of a tuple if it is a scalar."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        loss = outputs[0] if outputs[0].numel() == 1 else None
    if loss is None and isinstance(outputs, Tensor) and outputs.numel() == 1:
        loss = outputs
    if loss is None:
        raise ValueError(
            f"the outputs of {type(model).__name__} ({type(outputs).__name__}) have no loss: give the batch "
            '"labels", or pass loss_fn= or forward= to optimize()'
        )
    return _scalar(loss, f"{type(model).__name__}'s loss")


def _scalar(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{what} must be a scalar tensor, not {shape}: reduce it with .mean() or .sum()")
    return loss if loss.dim() == 0 else loss.reshape(())


# --- how many labels count ---------------------------------------------------------------------


@dataclass(frozen=True)
class LabelRule:
    """Which labels of a batch the loss is a mean over: all of one tensor's, or after a causal shift.

    >>> rule = LabelRule("labels", shifted=True, ignore_index=-100)
    >>> rule.count({"labels": torch.tensor([[5, 6, -100, 7]])})
    2
    """

    path: str
    shifted: bool
    ignore_index: int

    def count(self, batch: Any) -> int | None:
        """The number of labels that count; None if the batch has no such tensor."""
        labels = dict(tensors(batch)).get(self.path)
        if labels is None or (self.shifted and labels.dim() < 2):
            return None
        labels = labels[..., 1:] if self.shifted else labels
        return int((labels != self.ignore_index).sum())


class LossWatch(TorchFunctionMode):
    """Sees which cross entropy a forward computes, to learn what its loss is a mean over, and whether
    it runs under an autocast of the caller's own (Accelerate's, say)."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._kind = device_type
        self.seen: list[tuple[Tensor, Tensor, int]] = []
        self.autocast: torch.dtype | None = None  # of an autocast of the caller's own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.autocast is None and torch.is_autocast_enabled(self._kind):
            self.autocast = torch.get_autocast_dtype(self._kind)
        result = func(*args, **(kwargs or {}))
        if func in (F.cross_entropy, F.nll_loss):
            self._note(result, args, kwargs or {})
        return result

    def _note(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        ignore_index = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
        reduction = args[6] if len(args) > 6 else kwargs.get("reduction", "mean")
        if not isinstance(target, Tensor) or target.is_floating_point() or weight is not None:
            return
        if reduction == "mean":
            self.seen.append((result.detach(), target.detach(), ignore_index))

    def rule(self, loss: float, batch: Any) -> LabelRule | None:
        """The rule by which a batch's labels can be counted; None if the loss is no mean over them."""
        # Several tensors may hold the labels' values (``input_ids`` of a language model): what is
        # called labels, or comes second in (inputs, targets), is asked first.
        candidates = sorted(tensors(batch), key=lambda item: not _named_as_labels(item[0]))
        for value, target, ignore_index in self.seen:
            if not _same(float(value), loss):
                continue
            for are_labels in (_are_exactly, _are_among):
                for (path, tensor), shifted in itertools.product(candidates, (False, True)):
                    if _can_be_labels(tensor, shifted) and are_labels(tensor, target, ignore_index, shifted):
                        return LabelRule(path, shifted, ignore_index)
        return None


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b) or (a != a and b != b)


def _named_as_labels(path: str) -> bool:
    return path == "batch[1]" or any(word in path.lower() for word in ("label", "target"))


def _can_be_labels(tensor: Tensor, shifted: bool) -> bool:
    return not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.dim() >= 1 + shifted


def _are_exactly(labels: Tensor, target: Tensor, ignore_index: int, shifted: bool) -> bool:
    """The very targets, the ignored ones in their places: a shift cuts the first column off, or fills
    the last one with ignored labels."""
    forms = [labels[..., 1:], F.pad(labels, (0, 1), value=ignore_index)[..., 1:]] if shifted else [labels]
    return any(
        f.numel() == target.numel() and torch.equal(f.flatten(), target.flatten().to(f)) for f in forms
    )


def _are_among(labels: Tensor, target: Tensor, ignore_index: int, shifted: bool) -> bool:
    """The same labels without the ignored ones, for a model that selects them itself."""
    labels = labels[..., 1:] if shifted else labels
    kept, used = labels[labels != ignore_index], target[target != ignore_index]
    return kept.shape == used.shape and torch.equal(kept, used.to(kept))


def stand_in_loss(outputs: Any, model: nn.Module) -> Tensor:
    """The loss in the outputs, or where the caller computes it a smooth function of all outputs."""
    try:
        return loss_from(outputs, model)
    except ValueError:
        found = [_stand_in(t) for _, t in tensors(outputs) if t.is_floating_point()]
        return torch.stack([loss.float() for loss in found]).sum() if found else torch.zeros(())


def _stand_in(output: Tensor) -> Tensor:
    """A loss that is positive and sensitive everywhere: the cross entropy of what may be logits, else
    the mean square distance from a fixed pattern."""
    if output.dim() > 1 and output.shape[-1] >= 1024:
        rows = output.reshape(-1, output.shape[-1])
        labels = torch.arange(rows.shape[0], device=rows.device) * 7919 % rows.shape[1]
        return nn.functional.cross_entropy(rows, labels)
    pattern = torch.arange(float(output.numel()), device=output.device).cos_().view(output.shape)
    return (output.float() - pattern).square().mean()
