"""The one line: hardware -> patchers -> plan -> training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.arguments import check_choices, check_model, loop_of, names_of, optimizers_of, plan_of
from autofuse.hardware import Hardware
from autofuse.patch import Context, Settings, Transaction, given_up
from autofuse.plan import Plan, make_plan
from autofuse.step import TrainingStep

__all__ = ["optimize", "plan", "undo"]


@dataclass
class _Done:
    """What was done to a model, by one call or several that ask for the same precision."""

    precision: str
    settings: Settings
    journals: list[list[Transaction]] = field(default_factory=list)
    steps: weakref.WeakSet[TrainingStep] = field(default_factory=weakref.WeakSet)


# So that undo(model) works without the step, and a second call finds what the first has done. The
# transactions hold the changed modules weakly: an entry never keeps its model alive.
_done: weakref.WeakKeyDictionary[nn.Module, list[_Done]] = weakref.WeakKeyDictionary()


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
        measure: time the patches on real steps, together and each against steps without it, and keep
            what helps; they start with the first call of the step. False: the whole plan as it is.
            Each change is proved on a batch either way.
        steps: optimizer steps still to come, if known.
        on_nonfinite: what a NaN or inf loss does beyond skipping its optimizer step: "report" it,
            or "raise" a FloatingPointError.
        only, skip: names of patches.
        plan: a saved `Plan` or its path: exactly its patches.

    Raises:
        TypeError: ``model`` or ``optimizer`` is something else.
        ValueError: an unknown name, or an optimizer that holds none of the model's parameters.
            Nothing is changed then.

    >>> import torch
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
    check_model(model)
    optimizers = optimizers_of(model, optimizer)
    check_choices(precision, compile, steps)
    loop = loop_of(loss_fn, forward, scheduler, accumulate, clip_grad_norm, on_nonfinite, optimizers)
    saved = plan_of(plan)
    if saved is not None and precision == "auto":
        precision = saved.precision
    done = _done_with(model, precision)
    for earlier in [step for each in _done[model] for step in each.steps]:
        earlier.stop_tuning("a later call of optimize took over")
    for module in model.modules():
        given_up.discard(module)  # it is looked at anew
    context = Context(model, optimizers, _hardware(model), precision, compile, steps, done.settings)
    made = make_plan(context, only=names_of(only, "only"), skip=names_of(skip, "skip") or (), saved=saved)
    tune = measure and saved is None
    if not tune:
        for patch in made.patches.values():
            patch.timed = False
    journal: list[Transaction] = []
    done.journals.append(journal)
    reference = weakref.ref(model)
    loop = replace(loop, steps=steps)
    step = TrainingStep(
        model, optimizers, made, done.settings, loop, journal, lambda: _undo(reference()), tune=tune
    )
    done.steps.add(step)
    return step


def plan(
    model: Any,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    hardware: Hardware | str | None = None,
    precision: str = "auto",
    compile: bool | str = "auto",
    steps: int | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    **loop: Any,
) -> Plan:
    """What `optimize` would do with the same arguments, here or on other hardware. Changes nothing.

    Args:
        hardware: a `Hardware`, or the name of one ("H100"); None: this machine's.

    Raises:
        TypeError, ValueError: as `optimize`, or ``hardware`` is something else or of an unknown name.

    >>> print(plan(nn.LayerNorm(8), hardware="A100")["norms"].status)
    planned
    """
    if isinstance(hardware, str):
        hardware = Hardware.named(hardware)
    elif hardware is not None and not isinstance(hardware, Hardware):
        raise TypeError(
            f"hardware must be an autofuse.Hardware or the name of one, not {type(hardware).__name__}"
        )
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
    if _is_trainer(model):
        from autofuse.integrations.transformers import plan_trainer

        default = {"accumulate": 1, "on_nonfinite": "report", "measure": loop.get("measure")}
        given = {name: None if value == default.get(name) else value for name, value in loop.items()}
        given["optimizer"] = optimizer
        chosen = {"compile": compile, "steps": steps, "only": only, "skip": skip}
        return plan_trainer(model, plan, given, hardware=hardware, precision=precision, **chosen)
    check_model(model)
    check_choices(precision, compile, steps)
    optimizers = optimizers_of(model, optimizer)
    context = Context(model, optimizers, hardware or _hardware(model), precision, compile, steps)
    return make_plan(context, only=names_of(only, "only"), skip=names_of(skip, "skip") or ())


def undo(model: nn.Module) -> None:
    """Restore every class, attribute, flag and backend setting that was changed for ``model``.

    Nothing happens to a model that was never optimized.
    """
    _undo(model)


def _undo(model: nn.Module | None) -> None:
    everything = [] if model is None else _done.pop(model, [])
    steps = [step for done in everything for step in done.steps]
    for step in steps:
        step.stop_tuning("undone")
    for journal in reversed([journal for done in everything for journal in done.journals]):
        for transaction in reversed(journal):
            if transaction.open:
                transaction.rollback()
    for step in steps:
        step.undone()


def _done_with(model: nn.Module, precision: str) -> _Done:
    """What earlier calls have done; steps of another precision have settings of their own."""
    earlier = _done.setdefault(model, [])
    for done in earlier:
        if done.precision == precision:
            return done
    earlier.append(_Done(precision, Settings()))
    return earlier[-1]


def _hardware(model: nn.Module) -> Hardware:
    first = next(model.parameters(), None)
    return Hardware.detect("cpu" if first is None else first.device)


def _is_trainer(obj: Any) -> bool:
    return not isinstance(obj, nn.Module) and all(
        hasattr(obj, name) for name in ("model", "create_optimizer", "training_step", "add_callback")
    )
