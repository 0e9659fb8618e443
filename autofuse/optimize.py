"""The one line: hardware -> patchers -> plan -> training step."""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.hardware import Hardware
from autofuse.patch import Context, Settings, Transaction
from autofuse.plan import Plan, make_plan
from autofuse.registry import check_names
from autofuse.step import Loop, TrainingStep

__all__ = ["optimize", "plan", "undo"]

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")

# What was done to each model, so that undo(model) works without the step. The transactions hold the
# changed modules weakly: an entry never keeps its model alive.
_journals: weakref.WeakKeyDictionary[nn.Module, list[list[Transaction]]] = weakref.WeakKeyDictionary()


def optimize(
    model: Any,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    forward: Callable[..., Tensor] | None = None,
    scheduler: Any = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    precision: str = "auto",
    compile: bool | str = "auto",
    measure: bool = True,
    steps: int | None = None,
    on_nonfinite: str = "report",
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    plan: Plan | str | Path | None = None,
) -> TrainingStep:
    """Make training faster: change model and optimizer in place, prove it, return the step.

    Args:
        model: an ``nn.Module`` (plain, PEFT, DDP), or a transformers ``Trainer``.
        optimizer: the optimizer, several of them, or None (then a step computes gradients alone).
        loss_fn: ``loss_fn(outputs, targets) -> scalar``, for ``step(inputs, targets)``; it runs in
            float32 on float32 outputs.
        forward: ``forward(model, batch) -> scalar loss``, for a batch of any other kind.
        scheduler: one or several, stepped once per optimizer step that was really taken.
        accumulate: micro-batches per optimizer step. Where the loss is a mean over tokens they
            weigh by the labels that it used, so that a window equals the joined batch.
        clip_grad_norm: the largest norm of all gradients together, applied after unscaling.
        precision: "auto", "fp32", "tf32", "bf16" or "fp16".
        compile: True, False, or "auto": only if its price pays within ``steps``.
        measure: keep a change of speed only where a real batch shows it. The proof of each change
            on the first batch is made either way.
        steps: optimizer steps still to come, if known.
        on_nonfinite: what a NaN or inf loss does beyond skipping its optimizer step: "report" it,
            or "raise" a FloatingPointError.
        only, skip: names of patches.
        plan: a saved `Plan` or its path: exactly its patches.

    Raises:
        TypeError: ``model`` or ``optimizer`` is something else.
        ValueError: an unknown name, or an optimizer that holds none of the model's parameters.
            Nothing is changed then.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = optimize(model, optimizer, loss_fn=nn.functional.mse_loss)
    >>> loss = step(torch.ones(2, 4), torch.zeros(2, 4))
    >>> step.undo()
    >>> type(model[1]) is nn.LayerNorm
    True
    """
    if _is_trainer(model):
        from autofuse.integrations.transformers import optimize_trainer

        given = {"optimizer": optimizer, "loss_fn": loss_fn, "forward": forward, "scheduler": scheduler}
        given |= {"clip_grad_norm": clip_grad_norm, "accumulate": None if accumulate == 1 else accumulate}
        given |= {"on_nonfinite": None if on_nonfinite == "report" else on_nonfinite}
        return optimize_trainer(
            model,
            optimize,
            given,
            precision=precision,
            compile=compile,
            measure=measure,
            steps=steps,
            only=only,
            skip=skip,
            plan=plan,
        )
    _check_model(model)
    optimizers = _optimizers(model, optimizer)
    _check_choice("precision", precision, PRECISIONS)
    _check_choice("compile", compile, (True, False, "auto"))
    _check_choice("on_nonfinite", on_nonfinite, ("report", "raise"))
    for argument, function in (("loss_fn", loss_fn), ("forward", forward)):
        if function is not None and not callable(function):
            raise TypeError(f"{argument} must be a function, not {type(function).__name__}")
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ValueError(f"clip_grad_norm must be a positive number, not {clip_grad_norm!r}")
    loop = Loop(loss_fn, forward, _schedulers(scheduler), _window(accumulate), clip_grad_norm, on_nonfinite)
    saved = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    settings = Settings()
    context = Context(model, optimizers, _hardware(model), precision, compile, steps, settings)
    made = make_plan(context, only=_names(only, "only"), skip=_names(skip, "skip") or (), saved=saved)
    if not measure:
        for patch in made.patches.values():
            patch.timed = False
    journal: list[Transaction] = []
    _journals.setdefault(model, []).append(journal)
    reference = weakref.ref(model)
    return TrainingStep(model, optimizers, made, settings, loop, journal, lambda: _undo(reference()))


def plan(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    hardware: Hardware | None = None,
    precision: str = "auto",
    compile: bool | str = "auto",
    steps: int | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    **loop: Any,
) -> Plan:
    """What `optimize` would do with the same arguments, here or on other hardware. Changes nothing.

    >>> print(plan(nn.LayerNorm(8), hardware=Hardware.named("A100"))["norms"].status)
    planned
    """
    _check_model(model)
    _check_choice("precision", precision, PRECISIONS)
    _check_choice("compile", compile, (True, False, "auto"))
    unknown = set(loop) - {
        "loss_fn",
        "forward",
        "scheduler",
        "accumulate",
        "clip_grad_norm",
        "measure",
        "on_nonfinite",
    }
    if unknown:
        raise TypeError(f"plan() takes optimize()'s arguments and hardware, not {', '.join(sorted(unknown))}")
    optimizers = _optimizers(model, optimizer)
    context = Context(model, optimizers, hardware or _hardware(model), precision, compile, steps)
    return make_plan(context, only=_names(only, "only"), skip=_names(skip, "skip") or ())


def undo(model: nn.Module) -> None:
    """Restore every class, attribute, flag and backend setting that was changed for ``model``.

    Nothing happens to a model that was never optimized.
    """
    _undo(model)


def _undo(model: nn.Module | None) -> None:
    if model is None:
        return
    for journal in reversed(_journals.pop(model, [])):
        for transaction in reversed(journal):
            if transaction.open:
                transaction.rollback()


def _hardware(model: nn.Module) -> Hardware:
    first = next(model.parameters(), None)
    return Hardware.detect("cpu" if first is None else first.device)


def _is_trainer(obj: Any) -> bool:
    return not isinstance(obj, nn.Module) and all(
        hasattr(obj, name) for name in ("model", "create_optimizer", "training_step", "add_callback")
    )


# --- what is asked, checked before anything is changed -----------------------------------------


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module or a transformers Trainer, not {type(model).__name__}"
        )


def _optimizers(model: nn.Module, optimizer: Any) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    several = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    parameters = {id(p) for p in model.parameters()}
    for index, each in enumerate(several):
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or several, not {type(each).__name__}"
            )
        _check_closure(each)
        if not any(id(p) in parameters for group in each.param_groups for p in group["params"]):
            raise ValueError(
                f"optimizer {index} ({type(each).__name__}) holds none of the parameters of "
                f"{type(model).__name__}: was it made for another model, or before the model was rebuilt? "
                "Make it from model.parameters()"
            )
    return several


def _check_closure(optimizer: Optimizer) -> None:
    needed = inspect.signature(type(optimizer).step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step() needs a closure that computes the loss again, which a "
            "training step does not give it: keep your own loop, and optimize(model) alone for its patches"
        )


def _schedulers(scheduler: Any) -> tuple[Any, ...]:
    if scheduler is None:
        return ()
    several = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for each in several:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric: call its step(metric) yourself after validation"
            )
        if not callable(getattr(each, "step", None)):
            raise TypeError(f"scheduler must have a step() method; {type(each).__name__} has none")
    return several


def _window(accumulate: int) -> int:
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of at least 1, not {accumulate!r}")
    return accumulate


def _names(names: Iterable[str] | None, argument: str) -> list[str] | None:
    if names is None:
        return None
    listed = [names] if isinstance(names, str) else list(names)
    check_names(listed, argument)
    return listed


def _check_choice(argument: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=2, cutoff=0.3)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}, not {value!r}.{meant}")
