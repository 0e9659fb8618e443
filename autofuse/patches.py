"""Patches: the patches of one training step, from the plan to what became of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autofuse.batch import LabelRule, LossWatch
from autofuse.distributed import Agreement
from autofuse.errors import first_line
from autofuse.patch import Patch, Settings, Transaction
from autofuse.plan import Plan, Row, as_saved, row_of
from autofuse.proof import Unprovable
from autofuse.proving import Prover
from autofuse.trial import Trial

__all__ = ["Patches"]


class Patches:
    """Applies, proves, blames and undoes the patches of a plan.

    Args:
        at_once: apply all patches now, and leave applied what is proved. Otherwise nothing is
            applied but for a proof, until a tuner does it.

    Attributes:
        proved: every patch has been proved or given up.
        kept: the names of those that are decided for.
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
        *,
        agreement: Agreement | None = None,
        at_once: bool = True,
    ) -> None:
        self._agreement, self._at_once = agreement or Agreement(), at_once
        self.kept: set[str] = set()
        self._plan, self._model, self._optimizers, self._others = plan, model, optimizers, others
        self._settings, self._journal = settings, journal
        self.proved = self._begun = self.asked = False
        self._shown_nothing = self._rest = 0
        self.moving: tuple[Tensor, ...] = ()
        first = next(model.parameters(), None)
        self._kind = "cpu" if first is None else first.device.type
        self._callers_autocast: torch.dtype | None = None
        self.rule: LabelRule | None = None
        for patch in self if at_once else ():
            if patch.pays is None:
                self.apply_or_reject(patch)
            if not patch.in_forward and patch.applied:
                self.kept.add(patch.name)

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

    def apply_all(self, patches: Sequence[Patch]) -> None:
        """In their order; those in the forward that are applied are taken back first, so that it holds."""
        chosen = [patch for patch in self if patch in patches and patch.accepted]
        if all(patch.applied for patch in chosen):
            return
        self.undo_all([patch for patch in chosen if patch.in_forward])
        for patch in chosen:
            self.apply_or_reject(patch)

    def undo_all(self, patches: Sequence[Patch]) -> None:
        for patch in reversed(patches):
            patch.undo()

    def keep(self, patches: Sequence[Patch]) -> None:
        for patch in patches:
            self.apply_or_reject(patch)
            if patch.applied:
                self.kept.add(patch.name)

    def replace(self, old: Patch, new: Patch) -> None:
        """Put another form of a patch in its place."""
        new.name = old.name
        self._plan.patches[old.name] = new

    def switch(self, leave: Patch, enter: Patch) -> None:
        """From one form of a patch to another."""
        leave.undo()
        self.replace(leave, enter)
        self.apply_or_reject(enter)

    def give_up(self, patches: Sequence[Patch], reason: str) -> None:
        for patch in patches:
            patch.undo()
            patch.reject(reason)
            self.kept.discard(patch.name)

    def blame(self, error: BaseException) -> None:
        """Take back the patch that broke the caller's own code, which cannot be done again here."""
        for patch in self.first_order:
            if not isinstance(error, Exception):
                return
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
        due: Sequence[Patch] | None = None,
    ) -> None:
        """Prove the patches on a batch; those in ``without`` stay off and wait for another call.

        Of a tuner's, those that are ``due`` are proved on top of those that are kept already, and taken
        back. Once every patch has been proved on one batch, or has failed, ``proved`` is set.

        The gradients of ``inputs`` are compared too.

        An error of the unpatched step is the user's own, and leaves everything as it was. A batch
        that shows nothing (no finite loss, no gradient) leaves the patches off, to be proved on the next.
        """
        self.asked = True
        if without and self._begun:
            return
        patches = [patch for patch in self if patch.in_forward and patch.accepted]
        if due is not None:
            patches = [patch for patch in patches if patch in due or patch.applied]
        prover = Prover(
            self._model,
            [*self._parameters(), *inputs],
            loss_of,
            self.apply,
            self.replace,
            self._precision,
            self._others,
            self._agreement,
        )
        applied = [patch for patch in patches if patch.applied]
        for patch in reversed(applied):
            patch.undo()
        try:
            with LossWatch(self._kind) as watch:
                reference = prover.reference()
            self._callers_autocast = watch.autocast
            self.rule, self.moving = watch.rule(reference.loss, batch), reference.moved
            if patches:
                if not self._agreement.all(reference.says_something):
                    self._shown_nothing += 1
                    self._rest = 2 ** min(self._shown_nothing, 10)
                    for patch in applied if due is not None else ():
                        self.apply_or_reject(patch)  # a tuner has decided for these
                    return
                known = [patch for patch in applied if due is not None and patch.name in self.kept]
                prover.prove([patch for patch in patches if patch not in without], reference, known)
        except Unprovable as reason:
            self.give_up(patches, f"it cannot be proved: {reason}")
        except BaseException:
            for patch in reversed(self.active):
                patch.undo()
            for patch in applied:
                self.apply_or_reject(patch)
            raise
        self._after_proof(prover, applied, due)
        self.proved, self._begun = not without, True

    def rests(self) -> bool:
        """Whether to leave this batch alone, since the last ones have shown nothing; longer each time."""
        self._rest = max(self._rest - 1, 0)
        return self._rest > 0

    def _after_proof(self, prover: Prover, applied: Sequence[Patch], due: Sequence[Patch] | None) -> None:
        """What was proved for a tuner is taken back: the tuner introduces it."""
        for row in self._plan.rows:
            row.error = prover.errors.get(row.name, row.error)
        now = [patch for patch in self if patch.in_forward and patch.applied]
        if due is None:
            self.kept |= {patch.name for patch in now}
            return
        before = {patch.name for patch in applied}
        for patch in reversed(now):
            if patch.name not in before:
                patch.undo()
        self.kept -= {patch.name for patch in applied if not patch.accepted}

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
                new = row_of(patch, "kept" if patch.name in self.kept else "planned")
                self._plan.rows[index] = replace(row, status=new.status, reason=new.reason, sites=new.sites)
        return self._plan

    def row(self, patch: Patch) -> Row:
        return self._plan[patch.name]

    def record(self, patch: Patch, trial: Trial, *, further: bool = False) -> None:
        """Note in its row what a trial has found; ``further``: on top of what was found before."""
        row, found = self.row(patch), trial.estimate()
        saved = (row.gain or 0.0) if further else 0.0
        gain, low, high = (1 - (1 - saved) * (1 - share) for share in (found.gain, found.low, found.high))
        if not further:
            row.before_ms = found.before * 1e3
            row.peak_before_mb = trial.peak_mb(0)
        row.after_ms, row.peak_after_mb = found.after * 1e3, trial.peak_mb(1)
        row.gain, row.interval = gain, (low, high)

    def decisions(self) -> dict[str, dict[str, Any]]:
        return {row.name: row.to_dict() for row in self.plan.rows}

    def take_over(self, decisions: Mapping[str, Mapping[str, Any]]) -> None:
        """Do what another run has decided on the same hardware, without proving it again."""
        for patch in list(self):
            row = Row.from_dict(dict(decisions[patch.name])) if patch.name in decisions else None
            if row is not None and row.status == "kept":
                form = as_saved(patch, row)
                if form is not patch:
                    self.switch(patch, form)
                self.keep([form])
                index = self._plan.rows.index(self._plan[patch.name])
                self._plan.rows[index] = row
            else:
                reason = "not in the state" if row is None else row.reason
                undecided = row is not None and row.status == "planned"
                self.give_up([patch], "it was not decided" if undecided else reason)
        self.proved = True
