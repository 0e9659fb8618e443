"""The proof of a change: the same step, without and with it, on the user's own batch.

In float32 the loss must agree to 1e-5 relative and all gradients together to 1e-4 (norm of the
difference over norm of the original). In a lower precision, the patched step's error against
float32 may be at most 1.5 times the unpatched step's own at that precision.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autofuse.probe import random_state

__all__ = ["Error", "Outcome", "Unprovable", "compare", "evaluate", "no_trace", "runs", "widened"]

LOSS_TOLERANCE = 1e-5
LOSS_ROUNDING = 1e-7  # a loss that cancels to nearly nothing (a WGAN's) has the rounding of its terms
GRADIENT_TOLERANCE = 1e-4
LOW_PRECISION_FACTOR = 1.5
_NARROW = (torch.bfloat16, torch.float16)
_INTERNAL = frozenset(vars(nn.Module()))  # what nn.Module keeps itself: parameters, hooks and so on
_OURS = {"_compiled_call_impl"}  # a compiled module may give itself up while it is proved


@dataclass
class _Runs:
    """How many steps were run for comparison in this process: they are no part of a step's time."""

    evaluations: int = 0


runs = _Runs()


class Unprovable(Exception):
    """The step cannot be run for a comparison; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """A step's loss and gradients, and the seconds that its forward and backward took."""

    loss: float
    gradients: list[Tensor | None]
    seconds: float
    moved: tuple[Tensor, ...] = ()  # the buffers that the step changed

    @property
    def says_something(self) -> bool:
        """False for a loss that is not finite and for gradients that are all zero: anything equals it."""
        return _kind(self.loss) == "finite" and any(g is not None and bool(g.any()) for g in self.gradients)


@dataclass(frozen=True)
class Error:
    """The relative difference of two outcomes."""

    loss: float
    gradients: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients)

    def __str__(self) -> str:
        return f"loss differs by {self.loss:.1e}, gradients by {self.gradients:.1e} relative"

    def within(self, own: Error | None = None, dtype: torch.dtype = torch.float32) -> bool:
        """Whether it keeps the promise: exact, or against the unpatched step's ``own`` error."""
        if own is None:
            return self.loss <= LOSS_TOLERANCE and self.gradients <= GRADIENT_TOLERANCE
        # A single loss can be right by luck; the rounding unit of the dtype is always allowed.
        unit = torch.finfo(dtype).eps / 2
        return self.loss <= max(LOW_PRECISION_FACTOR * own.loss, unit) and self.gradients <= max(
            LOW_PRECISION_FACTOR * own.gradients, GRADIENT_TOLERANCE
        )


def compare(reference: Outcome, other: Outcome) -> Error:
    """How far ``other`` is from ``reference``. A loss or gradient that is not finite in both alike
    counts as equal; in one alone as infinitely far.

    >>> a = Outcome(2.0, [torch.tensor([3.0, 4.0])], 0.0)
    >>> b = Outcome(2.0, [torch.tensor([3.0, 4.5])], 0.0)
    >>> compare(a, b).gradients
    0.1
    """
    same_class = _kind(reference.loss) == _kind(other.loss)
    if not torch.tensor([reference.loss, other.loss]).isfinite().all():
        loss = 0.0 if same_class else float("inf")
        return Error(loss, 0.0 if same_class else float("inf"))
    difference, norm = 0.0, 0.0
    for a, b in zip(reference.gradients, other.gradients, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
        if a.device != b.device:  # one of them was moved where there is more memory
            a, b = a.cpu(), b.cpu()
        difference += _square(a.float() - b.float())
        norm += _square(a.float())
    gradients = (difference / norm) ** 0.5 if norm else (0.0 if difference == 0.0 else float("inf"))
    if gradients != gradients:
        gradients = float("inf")
    difference = max(abs(reference.loss - other.loss) - LOSS_ROUNDING, 0.0)
    return Error(difference / max(abs(reference.loss), LOSS_ROUNDING), round(gradients, 15))


def _square(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float32)) ** 2


def _kind(value: float) -> str:
    return "nan" if value != value else "inf" if abs(value) == float("inf") else "finite"


def evaluate(
    loss_of: Callable[[], Tensor],
    model: nn.Module,
    parameters: Sequence[Tensor],
    others: Sequence[nn.Module] = (),
) -> Outcome:
    """The loss and the gradients of one step, leaving no trace.

    Gradients are taken with ``torch.autograd.grad``, which fills no ``.grad`` and calls no hook of
    an optimizer that steps inside the backward, nor of DDP.
    """
    runs.evaluations += 1
    local = getattr(model, "no_sync", nullcontext)  # DDP must not wait for gradients that never come
    with no_trace(model, *others) as moved, local():
        start = time.perf_counter()
        loss = loss_of()
        try:
            gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            # Reentrant checkpointing works with backward() alone.
            with no_trace(model, *others):
                gradients = _by_backward(loss_of(), parameters)
        _synchronize(loss)
        outcome = Outcome(float(loss.detach()), list(gradients), time.perf_counter() - start)
    return replace(outcome, moved=tuple(moved))


def _by_backward(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        raise Unprovable("reentrant checkpointing together with hooks that act in the backward")
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        loss.backward()
        return [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _synchronize(loss: Tensor) -> None:
    if loss.device.type == "cuda":
        torch.cuda.synchronize(loss.device)


class _NoAutocast(TorchFunctionMode):
    """Inside it every function computes without autocast, whoever enters one."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._kind = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.autocast(self._kind, enabled=False):
            return func(*args, **(kwargs or {}))


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """A model in bf16 or fp16, or under an autocast of the caller's own, computes in float32 inside:
    the same parameters, exactly the same values.

    >>> model = nn.Linear(2, 2).bfloat16()
    >>> with widened(model):
    ...     print(model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype)
    torch.float32
    >>> model.weight.dtype
    torch.bfloat16
    """
    narrow = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in _NARROW]
    saved = [(t, t.data) for t in narrow]
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map(_widen, (args, kwargs)), with_kwargs=True
    )
    try:
        for tensor in narrow:
            tensor.data = tensor.data.float()
        first = next(model.parameters(), None)
        with _NoAutocast("cpu" if first is None else first.device.type):
            yield
    finally:
        hook.remove()
        for tensor, data in saved:
            tensor.data = data


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


@contextmanager
def no_trace(*roots: nn.Module) -> Iterator[list[Tensor]]:
    """What runs inside leaves the generators, buffers and module attributes as they were.

    Gives a list, which holds afterwards the buffers that had to be put back.
    """
    modules = list({id(m): m for root in roots for m in root.modules()}.values())
    moved: list[Tensor] = []
    saved = [(m, dict(vars(m)), dict(m._buffers), _contents(m)) for m in modules]
    buffers = {id(b): (b, b.detach().clone()) for m in modules for b in m._buffers.values() if b is not None}
    with random_state():
        try:
            yield moved
        finally:
            for module, attributes, own, contents in saved:
                _restore(module, attributes)
                module._buffers.update(own)
                for container, content in contents:
                    _refill(container, content)
            with torch.no_grad():
                for buffer, value in buffers.values():  # batch norm writes without a new version
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
                        moved.append(buffer)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets among a module's own attributes, and its hooks, each with a copy."""
    kinds = (list, dict, set, OrderedDict)
    own = [v for k, v in vars(module).items() if type(v) in kinds and (k not in _INTERNAL or "hooks" in k)]
    return [(value, value.copy()) for value in own]


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) == 0:
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Attributes that a forward sets: counters, caches, what it keeps for others to read."""
    now = vars(module)
    for name in now.keys() - attributes.keys() - _OURS:
        del now[name]
    for name in attributes.keys() - _OURS:
        if now.get(name) is not attributes[name]:
            now[name] = attributes[name]
