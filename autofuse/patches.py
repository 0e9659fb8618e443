"""Patches: the patches of one training step, from the plan to what became of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.batch import LabelRule, LossWatch
from autofuse.patch import Patch, Settings, Transaction
from autofuse.plan import Plan, row_of
from autofuse.proof import Unprovable
from autofuse.tuning import Prover

__all__ = ["Patches", "first_line"]


class Patches:
    """Applies, proves, blames and undoes the patches of a plan.

    Attributes:
        proved: every patch has been proved or given up.
        asked: a proof has been asked for, whatever came of it.
        moving: the buffers that a step changes, as the proof saw it.
        rule: how the labels that a loss is a mean over are counted, where the proof saw it.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        journal: list[Transaction],
        others: Sequence[nn.Module] = (),
    ) -> None:
        self._plan, self._model, self._optimizers, self._others = plan, model, optimizers, others
        self._settings, self._journal = settings, journal
        self.proved = self._begun = self.asked = False
        self.moving: tuple[Tensor, ...] = ()
        first = next(model.parameters(), None)
        self._kind = "cpu" if first is None else first.device.type
        self._callers_autocast: torch.dtype | None = None
        self.rule: LabelRule | None = None
        for patch in self:
            if patch.pays is None:
                self.apply_or_reject(patch)

    def __iter__(self) -> Any:
        return iter(self._plan.patches.values())

    def get(self, name: str) -> Patch | None:
        return self._plan.patches.get(name)

    @property
    def active(self) -> list[Patch]:
        """The applied patches that act in the forward or the backward."""
        return [patch for patch in self if patch.applied and patch.in_forward]

    @property
    def first_order(self) -> list[Patch]:
        """The patches whose gradients cannot be differentiated again."""
        return [patch for patch in self if patch.accepted and patch.blames is not None]

    # --- applying and taking back ----------------------------------------------------------------

    def change(self, make: Callable[[Transaction], None]) -> None:
        """Make a change around the step (an integration's), which `undo` takes back too."""
        transaction = Transaction()
        self._journal.append(transaction)
        make(transaction)

    def apply(self, patch: Patch) -> None:
        transaction = patch.apply()
        if transaction is not None:
            self._journal[:] = [t for t in self._journal if t.open] + [transaction]

    def apply_or_reject(self, patch: Patch) -> None:
        try:
            self.apply(patch)
        except Exception as error:
            patch.reject(f"it could not be applied: {first_line(error)}")

    def give_up(self, patches: Sequence[Patch], reason: str) -> None:
        for patch in patches:
            patch.undo()
            patch.reject(reason)

    def blame(self, error: Exception) -> None:
        """Take back the patch that broke the caller's own code, which cannot be done again here."""
        for patch in self.first_order:
            if patch.applied and patch.blames is not None and patch.blames(error):
                self.give_up([patch], f"it failed: {first_line(error)}")
                error.add_note(f"autofuse has undone {patch.name}: the same batch will run without it")

    # --- the proof -------------------------------------------------------------------------------

    def prove(
        self,
        loss_of: Callable[[], Tensor],
        batch: Any,
        *,
        inputs: Sequence[Tensor] = (),
        without: Sequence[Patch] = (),
    ) -> None:
        """Prove the patches on a batch; those in ``without`` stay off and wait for another call.

        The gradients of ``inputs`` are compared too.

        An error of the unpatched step is the user's own, and leaves everything as it was. A batch
        that shows nothing (no finite loss, no gradient) leaves the patches off, to be proved on the next.
        """
        self.asked = True
        if without and self._begun:
            return
        patches = [patch for patch in self if patch.in_forward and patch.accepted]
        parameters = [*self._parameters(), *inputs]
        prover = Prover(self._model, parameters, loss_of, self.apply, self._precision, self._others)
        applied = [patch for patch in patches if patch.applied]
        for patch in reversed(applied):
            patch.undo()
        try:
            with LossWatch(self._kind) as watch:
                reference = prover.reference()
            self._callers_autocast = watch.autocast
            self.rule, self.moving = watch.rule(reference.loss, batch), reference.moved
            if patches:
                if not reference.says_something:
                    return
                prover.prove([patch for patch in patches if patch not in without], reference)
        except Unprovable as reason:
            self.give_up(patches, f"it cannot be proved: {reason}")
        except Exception:
            for patch in applied:
                self.apply_or_reject(patch)
            raise
        self.proved, self._begun = not without, True
        for row in self._plan.rows:
            row.error = prover.errors.get(row.name, row.error)

    def _parameters(self) -> list[nn.Parameter]:
        """The model's that are trained, and what else the optimizers hold."""
        held = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
        return list({id(p): p for p in (*self._model.parameters(), *held) if p.requires_grad}.values())

    def _precision(self) -> torch.dtype:
        """The dtype in which the step computes: autocast's, the caller's own autocast's, or that of a
        model in bf16 or fp16."""
        narrow = {p.dtype for p in self._model.parameters()} & {torch.bfloat16, torch.float16}
        return self._settings.autocast_dtype or self._callers_autocast or next(iter(narrow), torch.float32)

    # --- what became of them ---------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, with what has become of each patch by now."""
        for index, row in enumerate(self._plan.rows):
            patch = self.get(row.name)
            if patch is not None:
                new = row_of(patch, "kept" if self.proved or not patch.in_forward else "planned")
                new.error, new.before_ms, new.after_ms = row.error, row.before_ms, row.after_ms
                self._plan.rows[index] = new
        return self._plan

    def decisions(self) -> dict[str, dict[str, str]]:
        return {row.name: {"status": row.status, "reason": row.reason} for row in self.plan.rows}

    def take_over(self, decisions: Mapping[str, Mapping[str, str]]) -> None:
        """Do what another run has decided on the same hardware, without proving it again."""
        for patch in self:
            decision = decisions.get(patch.name, {"status": "rejected", "reason": "not in the state"})
            if decision["status"] in ("kept", "planned"):
                self.apply_or_reject(patch)
            else:
                self.give_up([patch], decision["reason"])
        self.proved = True


def first_line(error: BaseException) -> str:
    """``RuntimeError: what it says`` of an error, without the lines that follow.

    >>> first_line(ValueError("one\\ntwo"))
    'ValueError: one'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]
