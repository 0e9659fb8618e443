"""The class that a recognised hand-written Adam is given: its own, with a fused ``step``."""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autofuse.functional.adam import Hyper, adam_update
from autofuse.functional.adam_like import Layout, counted
from autofuse.functional.optimizer_probe import unhooked_step

__all__ = ["FusedAdamLike", "follow_scheduler", "fused_optimizer_class", "suits"]

_classes: weakref.WeakValueDictionary[tuple[type, tuple[Layout, ...]], type] = weakref.WeakValueDictionary()


class FusedAdamLike(Optimizer):
    """What every swapped class has besides its original: it pickles as the original, so that the
    file loads without autofuse, and copies as itself."""

    _autofuse_original: type[Optimizer]
    _autofuse_layouts: tuple[Layout, ...]
    _autofuse_closure: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        fused, original = type(self), self._autofuse_original
        if function is copyreg.__newobj__ and arguments == (fused,):  # type: ignore[attr-defined]
            # pickle insists that __newobj__ is given the object's own class; its older form does not
            function, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return (function, arguments, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        function, arguments, state, *_ = self.__reduce_ex__(4)
        new = function(*arguments)
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(state, memo))
        if type(new) is self._autofuse_original:
            new.__class__ = type(self)
        return new

    def __setattr__(self, name: str, value: Any) -> None:
        # the recognition took the optimizer's own numbers and flags for constant
        old = vars(self).get(name)
        super().__setattr__(name, value)
        if isinstance(old, (bool, int, float, str)) and not name.startswith("_") and old != value:
            self.__class__ = self._autofuse_original  # type: ignore[assignment]


def fused_optimizer_class(original: type[Optimizer], layouts: tuple[Layout, ...]) -> type[Optimizer]:
    """The subclass of ``original`` whose ``step`` is fused for groups of these layouts."""
    cached = _classes.get((original, layouts))
    if cached is not None:
        return cached
    name = f"Fused{original.__name__}"
    fused = type(
        name,
        (FusedAdamLike, original),
        {
            "__module__": original.__module__,
            "__qualname__": name,
            "__doc__": original.__doc__,
            "_autofuse_original": original,
            "_autofuse_layouts": layouts,
            "_autofuse_closure": all(layout.closure for layout in layouts),
        },
    )
    fused.step = Optimizer.profile_hook_step(_fused_step(fused, original))  # type: ignore[attr-defined]
    fused.step.hooked = True  # type: ignore[attr-defined]  # torch's mark: its hooks are run already
    _classes[original, layouts] = fused
    return fused


def _fused_step(fused: Any, original: type[Optimizer]) -> Callable[..., Any]:
    original_step = unhooked_step(original)

    @functools.wraps(original_step)
    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        # a scheduler that was made after the swap goes on calling this after an undo
        own = type(self) is not fused or args or kwargs
        if own or (closure is not None and not fused._autofuse_closure):
            arguments = args if closure is None and not args else (closure, *args)
            return original_step(self, *arguments, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(suits(self, group, fused) for group in self.param_groups):
            _advance(self)
        else:
            original_step(self)
        return loss

    return step


def _layout_of(fused: Any, group: dict[str, Any]) -> Layout | None:
    return next((layout for layout in fused._autofuse_layouts if layout.holds_for(group)), None)


def suits(optimizer: Optimizer, group: dict[str, Any], fused: type) -> bool:
    """Whether this group can take ``fused``'s step now: else the original step is run."""
    layout = _layout_of(fused, group)
    if layout is None or any(isinstance(value, Tensor) for value in layout.keys.read(group)):
        return False
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        state = optimizer.state.get(param)
        if grad.layout is not torch.strided or grad.dtype != param.dtype or not param.is_floating_point():
            return False
        if state and (
            len(state) != len(layout.order)
            or layout.first not in state
            or state[layout.first].dtype != param.dtype
            or state[layout.first].device != param.device
        ):
            return False
    return True


@torch.no_grad()
def _advance(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        layout = _layout_of(type(optimizer), group)
        assert layout is not None
        hyper = layout.keys.read(group)
        for step, rows in _by_step(optimizer, group, layout).items():
            first, second = ([row[2][key] for row in rows] for key in (layout.first, layout.second))
            params, grads = [row[0] for row in rows], [row[1] for row in rows]
            adam_update(layout.rule, Hyper(*hyper), step, params, grads, first, second)


def _by_step(
    optimizer: Any, group: dict[str, Any], layout: Layout
) -> dict[int, list[tuple[Tensor, Tensor, dict[str, Any]]]]:
    """Parameters with a gradient, their counts moved on, gathered by count: a kernel takes one
    correction for all its tensors."""
    rows: defaultdict[int, list[tuple[Tensor, Tensor, dict[str, Any]]]] = defaultdict(list)
    if layout.step is not None and layout.step_in_group:
        group[layout.step] = group.get(layout.step, 0) + 1
    for param in group["params"]:
        if param.grad is None:
            continue
        state = optimizer.state[param]
        if not state:
            state.update(_fresh(layout, param))
        if layout.step is None:
            count = 1
        elif layout.step_in_group:
            count = group[layout.step]
        else:
            state[layout.step] += 1
            count = int(state[layout.step])
        rows[count].append((param, param.grad, state))
    return rows


def _fresh(layout: Layout, param: Tensor) -> Iterator[tuple[str, Any]]:
    for key in layout.order:
        if key in (layout.first, layout.second):
            yield key, torch.zeros_like(param)
        else:
            yield key, counted(layout.step_type, 0)


def follow_scheduler(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The ``step`` that replaces the one by which a scheduler has wrapped the old class's.

    torch's schedulers store a wrapper on the optimizer that calls the class's step as it was when
    the scheduler was made, and that notes that a step was taken.
    """
    old = vars(optimizer).get("step")
    if not getattr(old, "_wrapped_by_lr_sched", False):
        return None
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        current: Any = reference()
        current._opt_called = True
        return type(current).step(current, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
