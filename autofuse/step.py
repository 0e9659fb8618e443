"""TrainingStep: forward, autocast, backward, accumulation, unscaling, clipping, optimizer, scheduler."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.batch import check_not_empty, fresh, loss_of_batch, stand_in_loss, tensors
from autofuse.clock import StepClock
from autofuse.distributed import Agreement
from autofuse.integrations.logging import LogHandle, log_to
from autofuse.lazy import materialize, settle
from autofuse.patch import Patch, Settings, Transaction
from autofuse.patches import Patches
from autofuse.plan import Plan
from autofuse.precision import step_autocast
from autofuse.probe import modules_behind
from autofuse.profile import Profile, profile
from autofuse.redoing import Redoing
from autofuse.report import Counters, Report, Tuning
from autofuse.stepping import Stepping
from autofuse.tuning import Tuner
from autofuse.window import Loop, Moment, Window, is_finite

__all__ = ["Loop", "TrainingStep"]


class TrainingStep(Redoing):
    """One training step, as a call or in pieces. Made by `autofuse.optimize`.

    >>> import autofuse
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = autofuse.optimize(model, optimizer, loss_fn=nn.functional.mse_loss)
    >>> step(torch.ones(2, 4), torch.zeros(2, 1)).shape
    torch.Size([])
    >>> step.report.counters.steps
    1
    >>> for _ in range(2):  # the same in pieces
    ...     with step.autocast():
    ...         loss = model(torch.ones(2, 4)).square().mean()
    ...     step.backward(loss)
    ...     _ = step.update()
    >>> step.report.counters.steps
    3
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        settings: Settings,
        loop: Loop,
        journal: list[Transaction],
        undo: Callable[[], None],
        *,
        tune: bool = False,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self._settings, self._loop, self._undo = settings, loop, undo
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self.clock = StepClock(self._device)
        others = modules_behind([loop.loss_fn, loop.forward])
        self.agreement = agreement = Agreement.between(model)
        self._patches = Patches(
            plan, model, self.optimizers, settings, journal, others, agreement=agreement, at_once=not tune
        )
        self.counters, self._window = Counters(), Window()
        self._stepping = Stepping(model, loop, settings, self._patches, self.counters)
        self._seen: Any = None  # what the model was called with inside autocast()
        self._busy = self._wants_outputs = self._redone = False
        if loop.loss_fn is not None or loop.forward is not None:
            idle = [patch for patch in self._patches if patch.step_only and patch.accepted]
            self._patches.give_up(idle, "it acts on batches that the model itself takes the loss of")
        self._loaded = Tuning()
        self._tuner = Tuner(self._patches, agreement, self.clock, loop.steps) if tune else None

    @property
    def optimizer(self) -> Any:
        """The very object that was passed in: an optimizer, a tuple of several, or None."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers or None

    # --- the step as a call ----------------------------------------------------------------------

    def __call__(self, *batch: Any, return_outputs: bool = False) -> Any:
        """Forward, backward and, when the accumulation window is full, the optimizer step.

        Args:
            batch: a mapping with labels, or inputs and targets (with ``loss_fn``), or one object
                of any kind (with ``forward``).
            return_outputs: return ``(loss, outputs)``.

        Returns:
            The micro-batch's own loss, detached, unscaled, whatever ``accumulate`` is.

        Raises:
            ValueError: the batch is empty or no loss follows from it.
            FloatingPointError: the loss is not finite and ``on_nonfinite="raise"``; the weights and
                the optimizer's state are as before.
        """
        check_not_empty(batch)
        self._wants_outputs = return_outputs
        with self._tuner.shown() if self._tuner is not None else nullcontext():
            if self._wants_proof:
                self._prove(batch)
            return self._step(batch)

    def _step(self, batch: tuple[Any, ...]) -> Any:
        with self.clock.running(batch[0] if len(batch) == 1 else batch):
            self._window.replay.append(Moment.now(batch, self._patches))
            try:
                loss, outputs = self._forward_backward(batch)
            except Exception as error:
                loss, outputs = self._without_failing_patch(error)
            except BaseException:
                self._begin_anew()
                raise
            given = materialize(outputs()) if self._wants_outputs else None  # before the weights change
            self.update()
        return (loss, given) if self._wants_outputs else loss

    @property
    def _wants_proof(self) -> bool:
        """Whether this batch is one to prove patches on."""
        if self.tuning:
            waits = self._tuner is not None and self._tuner.due is not None and not self._window.weights
        else:
            waits = not self._patches.proved
        return waits and not self._patches.rests()

    def _prove(self, batch: tuple[Any, ...]) -> None:
        own = fresh(batch, detached=True)
        inputs = [tensor for _, tensor in tensors(own) if tensor.requires_grad]
        labels = own[0] if len(own) == 1 else own
        self._prove_on(
            lambda: self._forward(fresh(own, detached=not inputs))[0], labels, inputs=inputs, without=()
        )

    def _prove_on(self, loss_of: Callable[[], Tensor], batch: Any, **options: Any) -> None:
        if self.tuning:
            assert self._tuner is not None
            self._tuner.prove(loss_of, batch, **{**options, "without": ()})
        else:
            self._patches.prove(loss_of, batch, **options)

    def _forward(self, batch: tuple[Any, ...]) -> tuple[Tensor, Callable[[], Any]]:
        """(loss, what gives the outputs): those of a batch that was shrunk are restored if asked for."""
        shrink, inside, restore = self._settings.shrink, None, None
        own_loss = self._loop.forward is None and self._loop.loss_fn is None
        if shrink is not None and own_loss and isinstance(batch[0], Mapping):
            smaller, inside, restore = shrink(batch[0])
            batch = (smaller, *batch[1:])
        with ExitStack() as stack:
            self._enter_autocast(stack)
            stack.enter_context(inside or nullcontext())
            loss, outputs = loss_of_batch(
                self.model, batch, self._loop.loss_fn, self._loop.forward, self._outside_autocast
            )
        return loss, (lambda: outputs) if restore is None else functools.partial(restore, outputs)

    def _forward_backward(self, batch: tuple[Any, ...]) -> tuple[Tensor, Callable[[], Any]]:
        self._seen = fresh(batch[0] if len(batch) == 1 else batch)
        loss, outputs = self._forward(batch)
        if not self._wants_outputs:
            outputs = _nothing  # their memory is for the backward
        self.backward(loss)
        return loss.detach(), outputs

    # --- the step in pieces ----------------------------------------------------------------------

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context of the forward. The first model call inside it is where the patches are proved."""
        if torch.is_grad_enabled():
            self.clock.start()
        with ExitStack() as hooks, ExitStack() as precision:
            self._enter_autocast(precision)
            if not self._patches.proved or self._loop.accumulate > 1 or self.clock.listened:
                before = self.model.register_forward_pre_hook(  # before FSDP's, which gathers parameters
                    self._before_forward(precision), prepend=True, with_kwargs=True
                )
                hooks.callback(before.remove)
            if not self._patches.proved or self.tuning:
                hooks.callback(self.model.register_forward_hook(self._after_forward).remove)
            try:
                yield
            except BaseException as error:
                self.clock.stop()
                self._patches.blame(error)
                raise

    def _before_forward(self, precision: ExitStack) -> Callable[..., None]:
        def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._busy:
                return
            self._seen = kwargs
            if torch.is_grad_enabled():
                if self._wants_proof:
                    self.clock.stop()
                    prove(args, kwargs)
                    self.clock.start()
                self.clock.note(kwargs or args)

        def prove(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            idle = [patch for patch in self._patches if patch.step_only and patch.accepted]
            self._patches.give_up(idle, "it acts in step(batch) alone, and this loop calls the model itself")
            precision.close()  # the proof sets the precision itself, and may change it
            self._busy = True
            try:
                own = fresh((args, dict(kwargs)), detached=True)
                inputs = [tensor for _, tensor in tensors(own) if tensor.requires_grad]
                loss_of = functools.partial(self._stand_in_loss, *own)
                self._prove_on(loss_of, kwargs, inputs=inputs, without=self._too_early())
            finally:
                self._busy = False
                self._enter_autocast(precision)

        return hook

    def _too_early(self) -> list[Patch]:
        """The patches that wait for the first update: a backward of the caller's through a backward,
        which they could not take, cannot be done again here, but it shows itself in `_after_forward`."""
        begun = self.counters.steps + self.counters.skipped
        return [] if begun else self._patches.first_order

    def _after_forward(self, model: nn.Module, args: Any, outputs: Any) -> None:
        for _, output in () if self._busy else tensors(outputs):
            if output.requires_grad:
                output.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            reason = "the loop takes a backward through the backward (create_graph=True)"
            self._patches.give_up(self._patches.first_order, reason)

    def _stand_in_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The loss is computed by the caller: a smooth function of all outputs stands in for it."""
        with ExitStack() as stack:
            self._enter_autocast(stack)
            outputs = self.model(*fresh(args), **fresh(kwargs))
        return stand_in_loss(outputs, self.model)

    def backward(self, loss: Tensor) -> None:
        """The backward of one micro-batch's loss, scaled where fp16 needs it.

        The loss is the micro-batch's own: neither scaled nor divided by ``accumulate``.

        Raises:
            TypeError: ``loss`` is no tensor (a ``loss.item()``).
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward(loss) needs the loss as a tensor, not a {type(loss).__name__}")
        self.clock.start()
        self.counters.micro_batches += 1
        weight = self._weight(loss)
        finite = is_finite(loss)
        self._window.weights.append(weight)
        if weight != 0:  # else all labels are ignored: exactly nothing is added to the gradient
            share = weight / (self._window.reference * self._loop.accumulate)
            scaled = loss if share == 1 else loss * share
            scaler = self._settings.active_scaler
            try:
                with step_autocast(self._settings.autocast_dtype):
                    (scaled if scaler is None else scaler.scale(scaled)).backward()
            except Exception as error:
                if not self._window.replay:  # in pieces: the caller's forward cannot be done again here
                    self.counters.micro_batches -= 1
                    self._patches.blame(error)
                    self._window.weights.pop()
                    if not self._window.weights:
                        self._stepping.zero_grad(self.optimizers)
                raise
            except BaseException:
                self._begin_anew()
                raise
        self._window.finite.append(finite)
        self.clock.stop()

    def _weight(self, loss: Tensor) -> int:
        """How much a micro-batch counts: its labels where the loss is a mean over them, else 1."""
        if self._patches.rule is None:
            return 1
        if self._loop.accumulate == 1 and bool(torch.isfinite(loss.detach())):
            return 1
        count = self._patches.rule.count(self._seen)
        if count is None:
            return 1
        return min(count, 1) if self._loop.accumulate == 1 else count

    def update(self, optimizer: Optimizer | None = None) -> bool:
        """Unscale, clip, step the optimizer and the scheduler, update the scaler, zero the gradients.

        Args:
            optimizer: one of several optimizers, to step it alone (a GAN's two); all by default.

        Returns:
            True if an optimizer step was taken. Before the accumulation window is full nothing is
            changed.
        """
        if optimizer is not None and self._loop.accumulate > 1 and len(self.optimizers) > 1:
            raise ValueError("update(optimizer) steps one of several optimizers: it needs accumulate=1")
        if optimizer is not None and not any(optimizer is own for own in self.optimizers):
            raise ValueError(f"update() got a {type(optimizer).__name__} that optimize() was not given")
        if not self._window.weights:
            self._count_backward_of_the_callers()
        if len(self._window.weights) < self._loop.accumulate:
            return False
        with self.clock.running():
            return self._take_step(self.optimizers if optimizer is None else (optimizer,))

    def _count_backward_of_the_callers(self) -> None:
        """``loss.backward()`` instead of ``step.backward(loss)``: gradients that nobody has counted."""
        if all(p.grad is None for o in self.optimizers for g in o.param_groups for p in g["params"]):
            return
        if self._settings.active_scaler is not None or self._loop.accumulate > 1:
            raise RuntimeError(
                "update() finds gradients that step.backward(loss) has not made: call it instead of "
                "loss.backward(), since fp16 needs a scaled loss and accumulation a count"
            )
        self.counters.micro_batches += 1
        self._window.weights, self._window.finite = [1], [lambda: True]

    def flush(self) -> bool:
        """Take the optimizer step of an accumulation window that is not full (the epoch's last)."""
        with self.clock.running():
            return self._take_step(self.optimizers) if self._window.weights else False

    def _take_step(self, optimizers: Sequence[Optimizer]) -> bool:
        asked = self._patches.asked or self._patches.proved
        if not asked and self.counters.steps >= 2:  # a GAN's other optimizer may come first
            reason = "it cannot be proved: the loop never calls the model itself inside step.autocast()"
            self._patches.give_up([p for p in self._patches if p.in_forward and p.accepted], reason)
            if self._tuner is not None:
                self._tuner.cannot_prove()
        settle()
        window, self._window = self._window, Window()
        counts = [f() or w == 0 for f, w in zip(window.finite, window.weights, strict=True)]
        bad = counts.count(False)
        if bad:
            first = self.counters.micro_batches - len(counts) + counts.index(False) + 1
            self.counters.nonfinite += bad
            self.counters.first_nonfinite = self.counters.first_nonfinite or first
        stepped = False
        if any(window.weights):
            # Of one micro-batch a step, several backwards before an update add up, as in PyTorch.
            whole = window.reference * self._loop.accumulate
            factor = whole / sum(window.weights) if self._loop.accumulate > 1 else 1.0
            finite = self.agreement.all_finite(not bad, self._device)  # gradients are added up over ranks
            stepped = self._stepping.step(optimizers, factor, finite=finite)
        self._stepping.zero_grad(optimizers)
        key = [i for i, o in enumerate(self.optimizers) if any(o is own for own in optimizers)]
        self.clock.step_done(
            (len(window.weights), *key), one_off=self._redone or bool(optimizers and not stepped)
        )
        self._redone = False
        if bad and self._loop.on_nonfinite == "raise":
            raise FloatingPointError(
                f"the loss was NaN or inf in batch {first}; the optimizer step was not taken, weights and "
                'state are as before. on_nonfinite="report" goes on and counts it'
            )
        return stepped

    # --- precision -------------------------------------------------------------------------------

    def _enter_autocast(self, stack: ExitStack) -> None:
        dtype = self._settings.autocast_dtype
        if dtype is not None:
            stack.enter_context(torch.autocast(self._device.type, dtype=dtype))
            stack.enter_context(step_autocast(dtype))

    @contextmanager
    def _outside_autocast(self) -> Iterator[None]:
        if self._settings.autocast_dtype is None:
            yield
            return
        with torch.autocast(self._device.type, enabled=False), step_autocast(None):
            yield

    # --- what is said of it ----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is planned or done: it can be saved, and given to ``optimize(..., plan=...)``."""
        return self._patches.plan

    @property
    def report(self) -> Report:
        """What was done to the step, and what happened in it."""
        plan = self.plan
        notes = [plan.note] if plan.note else []
        if self._loop.accumulate > 1 and self._patches.proved:
            rule = self._patches.rule
            how = "counts the same" if rule is None else f"weighs by its labels in {rule.path!r}"
            notes.append(f"Each of the {self._loop.accumulate} micro-batches of a step {how}.")
        tuning = self._loaded if self._tuner is None else self._tuner.tuning
        proved = self._patches.proved and not self.tuning
        rows = [copy.copy(row) for row in plan.rows]
        return Report(
            rows, plan.hardware, plan.model, copy.copy(self.counters), notes, proved, copy.deepcopy(tuning)
        )

    def stop_tuning(self, reason: str = "tuning was stopped") -> None:
        """Keep what is decided for, leave the rest as it was, and measure no more."""
        if self._tuner is not None:
            self._tuner.stop(reason)

    @property
    def tuning(self) -> bool:
        """Whether patches are still being introduced one at a time."""
        return self._tuner is not None and self._tuner.active

    def undo(self) -> None:
        """Restore every class, attribute, flag and backend setting; the step goes on as a plain one."""
        self._undo()

    def undone(self) -> None:
        """Everything is taken back: go on as a plain step."""
        self._patches.give_up(list(self._patches), "undone")
        self._patches.proved = True

    def profile(self, **options: Any) -> AbstractContextManager[Profile]:
        """Watch the steps that run inside: see `autofuse.profile.profile`."""
        return profile(self, **options)

    def log_to(self, target: Any, *, every: int = 10) -> LogHandle:
        """Log to TensorBoard or Weights & Biases: see `autofuse.integrations.logging.log_to`."""
        return log_to(self, target, every=every)

    def attach(self, change: Callable[[Transaction], None]) -> None:
        """Make a change around the step (an integration's), which `undo` takes back too."""
        self._patches.change(change)

    def state_dict(self) -> dict[str, Any]:
        """The scaler, the counters and the decisions; plain types and tensors."""
        scaler = self._settings.scaler
        return {
            "scaler": None if scaler is None else scaler.state_dict(),
            "counters": dict(vars(self.counters)),
            "decisions": self._patches.decisions(),
            "proved": self._patches.proved and not self.tuning,
            "hardware": self.plan.hardware,
            "tuning": self.report.tuning.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped; on the same hardware its decisions are taken over."""
        if self._settings.scaler is not None and state["scaler"] is not None:
            self._settings.scaler.load_state_dict(state["scaler"])
        vars(self.counters).update(state["counters"])
        if state["hardware"] == self.plan.hardware and state["proved"]:
            self._patches.take_over(state["decisions"])
            self.stop_tuning("a state that was loaded has the decisions")
            self._tuner, self._loaded = None, Tuning.from_dict(state.get("tuning", {}))


def _nothing() -> None:
    return None
