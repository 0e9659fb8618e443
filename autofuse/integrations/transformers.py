"""``autofuse.optimize(trainer)``: the patches inside transformers' own loop.

The Trainer keeps its loop, its accumulation, its clipping and its scheduler. Its ``compute_loss``
runs inside the step's autocast, where the patches are proved on the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from autofuse.patch import Transaction
from autofuse.plan import Plan
from autofuse.step import TrainingStep

__all__ = ["optimize_trainer", "plan_trainer"]


class _Counting(TrainerCallback):
    """Counts the Trainer's optimizer steps into the report, and times them."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.clock.stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.counters.steps += 1
        self._step.clock.step_done()


# What the Trainer's own loop does, and where it is told so.
THE_TRAINERS = {
    "optimizer": "Trainer(optimizers=(optimizer, scheduler))",
    "scheduler": "Trainer(optimizers=(optimizer, scheduler))",
    "loss_fn": "Trainer(compute_loss_func=...)",
    "forward": "a compute_loss method",
    "accumulate": "TrainingArguments(gradient_accumulation_steps=...)",
    "clip_grad_norm": "TrainingArguments(max_grad_norm=...)",
    "on_nonfinite": "a TrainerCallback that looks at the logged loss",
}


def optimize_trainer(
    trainer: Any,
    optimize: Callable[..., TrainingStep],
    given: Mapping[str, Any],
    *,
    precision: str,
    **options: Any,
) -> TrainingStep:
    """Optimize a Trainer's model and optimizer in place; ``trainer.train()`` as before.

    Mixed precision that the Trainer's arguments ask for stays the Trainer's.

    Args:
        given: arguments of `autofuse.optimize` that are the Trainer's own business; None where not given.

    Raises:
        ValueError: an argument was given that the Trainer's own loop decides, or ``precision="fp16"``,
            whose loss scaling is the Trainer's; or the Trainer makes its model in ``train()``.
    """
    options = _checked(trainer, given, precision, options)
    step = optimize(trainer.model, _optimizer(trainer), **options)
    _say_whose(trainer, step.plan)
    step.agreement.several = trainer.args.world_size > 1  # it wraps the model itself, later
    step.attach(lambda transaction: _wrap(trainer, step, transaction))
    return step


def plan_trainer(
    trainer: Any, plan: Callable[..., Plan], given: Mapping[str, Any], *, precision: str, **options: Any
) -> Plan:
    """The plan of what `optimize_trainer` would do; the Trainer is left as it is."""
    options = _checked(trainer, given, precision, options)
    before = trainer.optimizer
    try:
        made = plan(trainer.model, _optimizer(trainer), **options)
        _say_whose(trainer, made)
        return made
    finally:
        trainer.optimizer = before


def _say_whose(trainer: Any, plan: Plan) -> None:
    """Its own mixed precision is the reason, not an argument that nobody gave."""
    asked = "bf16=True" if trainer.args.bf16 else "fp16=True" if trainer.args.fp16 else None
    for row in plan.rows if asked else ():
        if row.name in ("tf32", "precision") and row.status == "rejected":
            row.reason = f"the Trainer's own: {asked} is among its arguments"


def _checked(
    trainer: Any, given: Mapping[str, Any], precision: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The options for the Trainer's model, if nothing was given that the Trainer decides."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"with a Trainer {name} is the Trainer's own: use {THE_TRAINERS[name]}")
    if trainer.model_init is not None:
        raise ValueError("Trainer(model_init=...) makes another model in train(): pass it model= instead")
    if precision == "fp16":
        raise ValueError('for a Trainer ask for fp16 with TrainingArguments(fp16=True), not precision="fp16"')
    own = trainer.args.bf16 or trainer.args.fp16
    steps = options.get("steps")
    steps = _steps(trainer) if steps is None else steps
    return {**options, "precision": "fp32" if own else precision, "steps": steps}


def _optimizer(trainer: Any) -> Any:
    """The Trainer's optimizer, made if it is not there yet."""
    if trainer.optimizer is None and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        trainer.create_optimizer()
    return trainer.optimizer


def _steps(trainer: Any) -> int | None:
    """The optimizer steps that it will take; None where its data set does not say how long it is."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    try:
        rows = len(trainer.train_dataset)
    except TypeError:
        return None
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return max(1, math.ceil(rows / batch * arguments.num_train_epochs))


def _wrap(trainer: Any, step: TrainingStep, transaction: Transaction) -> None:
    compute_loss = trainer.compute_loss

    def in_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return compute_loss(model, inputs, *args, **kwargs)
        step.counters.micro_batches += 1
        with step.autocast():
            return compute_loss(model, inputs, *args, **kwargs)

    transaction.set_attribute(trainer, "compute_loss", in_step)
    callback = _Counting(step)
    trainer.add_callback(callback)
    transaction.on_undo(lambda: trainer.remove_callback(callback))
