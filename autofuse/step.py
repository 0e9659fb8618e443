"""TrainingStep: forward, autocast, backward, accumulation, unscaling, clipping, optimizer, scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.batch import check_not_empty, fresh, loss_from, loss_of_batch, tensors
from autofuse.lazy import materialize, settle
from autofuse.patch import Patch, Settings, Transaction
from autofuse.patches import Patches, first_line
from autofuse.plan import Plan
from autofuse.precision import step_autocast
from autofuse.probe import modules_behind
from autofuse.report import Counters, Report
from autofuse.window import Loop, Moment, Window, is_finite

__all__ = ["Loop", "TrainingStep"]


class TrainingStep:
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
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self._settings, self._loop, self._undo = settings, loop, undo
        others = modules_behind([loop.loss_fn, loop.forward])
        self._patches = Patches(plan, model, self.optimizers, settings, journal, others)
        self._counters, self._window = Counters(), Window()
        self._seen: Any = None  # what the model was called with inside autocast()
        self._busy = self._wants_outputs = False
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device

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
        if not self._patches.proved:
            self._prove(batch)
        self._wants_outputs = return_outputs
        self._window.replay.append(Moment.now(batch, self._patches))
        try:
            loss, outputs = self._forward_backward(batch)
        except Exception as error:
            loss, outputs = self._without_failing_patch(error)
        given = materialize(outputs()) if return_outputs else None  # before the weights change
        self.update()
        return (loss, given) if return_outputs else loss

    def _prove(self, batch: tuple[Any, ...]) -> None:
        own = fresh(batch, detached=True)
        inputs = [tensor for _, tensor in tensors(own) if tensor.requires_grad]
        labels = own[0] if len(own) == 1 else own
        self._patches.prove(lambda: self._forward(fresh(own, detached=not inputs))[0], labels, inputs=inputs)

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

    def _without_failing_patch(self, error: Exception) -> tuple[Tensor, Callable[[], Any]]:
        """Do the window again with one patch less at a time; the user's own error comes out."""
        active = self._patches.active
        if not active:
            self._forget_last()
            raise error
        undone: list[Patch] = []
        for patch in reversed(active):
            patch.undo()
            undone.append(patch)
            try:
                result = self._replay()
            except Exception:
                continue
            for innocent in reversed(undone[:-1]):
                self._patches.apply_or_reject(innocent)
            patch.reject(f"it failed in batch {self._counters.micro_batches}: {first_line(error)}")
            return result
        for patch in reversed(undone):  # it fails without any patch: the error is the user's own
            self._patches.apply_or_reject(patch)
        self._forget_last()
        raise error

    def _forget_last(self) -> None:
        """Take the micro-batch that failed out of the window."""
        window = self._window
        window.replay.pop()
        if not window.torn and len(window.weights) == len(window.replay):
            return
        if window.replay:
            self._replay_all()
        else:
            self._counters.micro_batches -= len(window.weights)
            self._zero_grad(self.optimizers)
            self._window = Window()

    def _replay(self) -> tuple[Tensor, Callable[[], Any]]:
        """The last micro-batch again with its random numbers; if gradients of it may be there already,
        the whole window again, from no gradient."""
        if self._window.torn or len(self._window.weights) != len(self._window.replay) - 1:
            return self._replay_all()
        return self._forward_backward(self._window.replay[-1].restore())

    def _replay_all(self) -> tuple[Tensor, Callable[[], Any]]:
        window = self._window
        self._counters.micro_batches -= len(window.weights)
        window.weights, window.finite = [], []
        self._zero_grad(self.optimizers)
        for moment in window.replay:
            result = self._forward_backward(moment.restore())
        return result

    # --- the step in pieces ----------------------------------------------------------------------

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context of the forward. The first model call inside it is where the patches are proved."""
        with ExitStack() as hooks, ExitStack() as precision:
            self._enter_autocast(precision)
            if not self._patches.proved or self._loop.accumulate > 1:
                before = self.model.register_forward_pre_hook(
                    self._before_forward(precision), with_kwargs=True
                )
                hooks.callback(before.remove)
            if not self._patches.proved:
                hooks.callback(self.model.register_forward_hook(self._after_forward).remove)
            try:
                yield
            except Exception as error:
                self._patches.blame(error)
                raise

    def _before_forward(self, precision: ExitStack) -> Callable[..., None]:
        def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._busy:
                return
            self._seen = kwargs
            if self._patches.proved or not torch.is_grad_enabled():
                return
            idle = [patch for patch in self._patches if patch.step_only and patch.accepted]
            self._patches.give_up(idle, "it acts in step(batch) alone, and this loop calls the model itself")
            precision.close()  # the proof sets the precision itself, and may change it
            self._busy = True
            try:
                own = fresh((args, dict(kwargs)), detached=True)
                inputs = [tensor for _, tensor in tensors(own) if tensor.requires_grad]
                loss_of = functools.partial(self._stand_in_loss, *own)
                self._patches.prove(loss_of, kwargs, inputs=inputs, without=self._too_early())
            finally:
                self._busy = False
                self._enter_autocast(precision)

        return hook

    def _too_early(self) -> list[Patch]:
        """The patches that wait for the first update: a backward of the caller's through a backward,
        which they could not take, cannot be done again here, but it shows itself in `_after_forward`."""
        begun = self._counters.steps + self._counters.skipped
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
        try:
            return loss_from(outputs, self.model)
        except ValueError:
            return sum(
                (_stand_in(t) for _, t in tensors(outputs) if t.is_floating_point()),
                torch.zeros((), device=self._device),
            )

    def backward(self, loss: Tensor) -> None:
        """The backward of one micro-batch's loss, scaled where fp16 needs it.

        The loss is the micro-batch's own: neither scaled nor divided by ``accumulate``.
        """
        self._counters.micro_batches += 1
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
                    self._patches.blame(error)
                    self._window.weights.pop()
                    if not self._window.weights:
                        self._zero_grad(self.optimizers)
                raise
        self._window.finite.append(finite)

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
        if not self._window.weights:
            self._count_backward_of_the_callers()
        if len(self._window.weights) < self._loop.accumulate:
            return False
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
        self._counters.micro_batches += 1
        self._window.weights, self._window.finite = [1], [lambda: True]

    def flush(self) -> bool:
        """Take the optimizer step of an accumulation window that is not full (the epoch's last)."""
        return self._take_step(self.optimizers) if self._window.weights else False

    def _take_step(self, optimizers: Sequence[Optimizer]) -> bool:
        asked = self._patches.asked or self._patches.proved
        if not asked and self._counters.steps >= 2:  # a GAN's other optimizer may come first
            reason = "it cannot be proved: the loop never calls the model itself inside step.autocast()"
            self._patches.give_up([p for p in self._patches if p.in_forward and p.accepted], reason)
        settle()
        window, self._window = self._window, Window()
        counts = [f() or w == 0 for f, w in zip(window.finite, window.weights, strict=True)]
        bad = counts.count(False)
        if bad:
            first = self._counters.micro_batches - len(counts) + counts.index(False) + 1
            self._counters.nonfinite += bad
            self._counters.first_nonfinite = self._counters.first_nonfinite or first
        stepped = False
        if any(window.weights):
            # Of one micro-batch a step, several backwards before an update add up, as in PyTorch.
            whole = window.reference * self._loop.accumulate
            factor = whole / sum(window.weights) if self._loop.accumulate > 1 else 1.0
            stepped = self._optimizer_step(optimizers, factor, finite=not bad)
        self._zero_grad(optimizers)
        if bad and self._loop.on_nonfinite == "raise":
            raise FloatingPointError(
                f"the loss was NaN or inf in batch {first}; the optimizer step was not taken, weights and "
                'state are as before. on_nonfinite="report" goes on and counts it'
            )
        return stepped

    def _optimizer_step(self, optimizers: Sequence[Optimizer], factor: float, finite: bool) -> bool:
        scaler, clip = self._settings.active_scaler, self._loop.clip_grad_norm
        held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        parameters: list[Any] = [p for p in (held or self.model.parameters()) if p.grad is not None]
        if not parameters:
            return False
        if scaler is not None and (clip is not None or factor != 1 or not finite):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if factor != 1:
            for gradient in (p.grad for p in parameters):
                gradient.mul_(factor)
        if clip is not None and finite:
            norm = nn.utils.clip_grad_norm_(parameters, clip)
            finite = bool(torch.isfinite(norm))
        if not optimizers:  # the gradients are the caller's
            return False
        before = 0.0 if scaler is None else scaler.get_scale()
        if finite or scaler is not None:  # a scaler sees for itself what is not finite, and learns of it
            for optimizer in optimizers:
                self._step_one(optimizer)
        if scaler is not None:
            scaler.update()
            finite = scaler.get_scale() >= before
        if not finite:
            self._counters.skipped += 1
            return False
        self._counters.steps += 1
        for scheduler in self._loop.schedulers:
            scheduler.step()
        return True

    def _step_one(self, optimizer: Optimizer) -> None:
        scaler = self._settings.active_scaler
        step = (lambda: optimizer.step()) if scaler is None else (lambda: scaler.step(optimizer))
        patch = self._patches.get("optimizer")
        if patch is None or not patch.applied:
            step()
            return
        try:
            step()
        except Exception as error:
            patch.undo()
            step()  # an error of the user's own comes out here
            patch.reject(f"it failed in step {self._counters.steps + 1}: {first_line(error)}")

    def _zero_grad(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

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
        return Report(plan.rows, plan.hardware, plan.model, self._counters, notes, self._patches.proved)

    def undo(self) -> None:
        """Restore every class, attribute, flag and backend setting; the step goes on as a plain one."""
        self._undo()
        self._patches.give_up(list(self._patches), "undone")
        self._patches.proved = True

    def attach(self, change: Callable[[Transaction], None]) -> None:
        """Make a change around the step (an integration's), which `undo` takes back too."""
        self._patches.change(change)

    def state_dict(self) -> dict[str, Any]:
        """The scaler, the counters and the decisions; plain types and tensors."""
        scaler = self._settings.scaler
        return {
            "scaler": None if scaler is None else scaler.state_dict(),
            "counters": dict(vars(self._counters)),
            "decisions": self._patches.decisions(),
            "proved": self._patches.proved,
            "hardware": self.plan.hardware,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped; on the same hardware its decisions are taken over."""
        if self._settings.scaler is not None and state["scaler"] is not None:
            self._settings.scaler.load_state_dict(state["scaler"])
        self._counters = Counters(**state["counters"])
        if state["hardware"] == self.plan.hardware and state["proved"]:
            self._patches.take_over(state["decisions"])


def _nothing() -> None:
    return None


def _stand_in(output: Tensor) -> Tensor:
    """A loss that is positive and sensitive everywhere: the cross entropy of what may be logits, else
    the mean square distance from a fixed pattern."""
    if output.dim() > 1 and output.shape[-1] >= 1024:
        rows = output.reshape(-1, output.shape[-1])
        labels = torch.arange(rows.shape[0], device=rows.device) * 7919 % rows.shape[1]
        return nn.functional.cross_entropy(rows, labels)
    pattern = torch.arange(float(output.numel()), device=output.device).cos_().view(output.shape)
    return (output.float() - pattern).square().mean()
