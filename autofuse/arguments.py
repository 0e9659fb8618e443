"""What `autofuse.optimize` is asked for, checked before anything is changed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.plan import Plan
from autofuse.registry import check_names
from autofuse.window import Loop

__all__ = ["check_choices", "check_model", "loop_of", "names_of", "optimizers_of", "plan_of"]

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a transformers Trainer, not {_what(model)}")


def check_choices(precision: Any, compile: Any, steps: Any) -> None:
    _check_choice("precision", precision, PRECISIONS)
    _check_choice("compile", compile, (True, False, "auto"))
    if steps is not None and not (_is_whole(steps) and steps > 0):
        raise ValueError(f"steps must be the number of optimizer steps still to come, or None, not {steps!r}")


def loop_of(
    loss_fn: Callable[..., Tensor] | None,
    forward: Callable[..., Tensor] | None,
    scheduler: Any,
    accumulate: Any,
    clip_grad_norm: Any,
    on_nonfinite: Any,
    optimizers: tuple[Optimizer, ...],
) -> Loop:
    """The options of the loop around the model, checked."""
    _check_choice("on_nonfinite", on_nonfinite, ("report", "raise"))
    for argument, function in (("loss_fn", loss_fn), ("forward", forward)):
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise TypeError(
                f"{argument} must be a function or an object that can be called, not {_what(function)}"
            )
    if loss_fn is not None and forward is not None:
        raise ValueError(
            "loss_fn and forward exclude each other: forward(model, batch) returns the loss itself"
        )
    if not (_is_whole(accumulate) and accumulate > 0):
        raise ValueError(f"accumulate must be a whole number of at least 1, not {accumulate!r}")
    number = isinstance(clip_grad_norm, (int, float)) and not isinstance(clip_grad_norm, bool)
    if clip_grad_norm is not None and not (number and clip_grad_norm > 0):
        raise ValueError(f"clip_grad_norm must be a positive number, not {clip_grad_norm!r}")
    schedulers = _schedulers(scheduler, optimizers)
    return Loop(loss_fn, forward, schedulers, accumulate, clip_grad_norm, on_nonfinite)


def optimizers_of(model: nn.Module, optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers given, each once, each with some of the model's parameters."""
    if optimizer is None:
        return ()
    several = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    if not several:
        raise ValueError("optimizer is empty: pass an optimizer, several, or None")
    if len({id(each) for each in several}) < len(several):
        raise ValueError("the same optimizer was given twice: it would step twice")
    parameters = {id(p) for p in model.parameters()}
    for index, each in enumerate(several):
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, not {_what(each)}")
        _check_closure(each)
        if not any(id(p) in parameters for group in each.param_groups for p in group["params"]):
            raise ValueError(
                f"optimizer {index} ({type(each).__name__}) holds none of the parameters of "
                f"{type(model).__name__}: was it made for another model, or before the model was rebuilt? "
                "Make it from model.parameters()"
            )
    return several


def names_of(names: Any, argument: str) -> list[str] | None:
    """The names of patches in ``only`` or ``skip``, checked."""
    if names is None:
        return None
    if not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be names of patches, not {type(names).__name__}")
    listed = [names] if isinstance(names, str) else list(names)
    check_names(listed, argument)
    return listed


def plan_of(plan: Any) -> Plan | None:
    """A saved plan, or the one at a path."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, Path)):
        return Plan.load(plan)
    raise TypeError(f"plan must be an autofuse.Plan or the path of a saved one, not {type(plan).__name__}")


def _what(value: Any) -> str:
    """What was given instead, in words.

    >>> _what(3), _what(nn.CrossEntropyLoss)
    ('int', 'the class CrossEntropyLoss: make an instance, CrossEntropyLoss(...)')
    """
    if not isinstance(value, type):
        return type(value).__name__
    return f"the class {value.__name__}: make an instance, {value.__name__}(...)"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_closure(optimizer: Optimizer) -> None:
    needed = inspect.signature(type(optimizer).step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step() needs a closure that computes the loss again, which a "
            "training step does not give it: keep your own loop, and optimize(model) alone for its patches"
        )


def _schedulers(scheduler: Any, optimizers: tuple[Optimizer, ...]) -> tuple[Any, ...]:
    if scheduler is None:
        return ()
    several = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for each in several:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric: call its step(metric) yourself after validation"
            )
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            raise TypeError(f"scheduler must be an object with a step() method, not {_what(each)}")
        groups = {id(g) for o in optimizers for g in o.param_groups}
        own = getattr(getattr(each, "optimizer", None), "param_groups", None)
        if own is not None and not any(id(group) in groups for group in own):
            raise ValueError(
                f"{type(each).__name__} belongs to another optimizer: its rates would never change"
            )
    return several


def _check_choice(argument: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=2, cutoff=0.3)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}, not {value!r}.{meant}")
