"""The patches of a plan, proved on a real batch: all at once where they pass, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autofuse.distributed import Agreement
from autofuse.errors import first_line, is_out_of_memory
from autofuse.patch import Patch, Rejected
from autofuse.proof import Error, Outcome, compare, evaluate, widened

__all__ = ["Prover"]

# Of a change of precision only this can be asked: that the loss is still the same loss.
SAME_LOSS = 0.1


class Prover:
    """Proves patches against the unpatched step.

    Args:
        loss_of: the forward of one step on one batch, with whatever is applied at the moment.
        apply: applies a patch and keeps the way back.
        replace: puts another form of a patch in its place.
        precision: the dtype in which the step computes at the moment.
        others: modules beside the model that the step may change (a criterion's buffers).
        agreement: the processes that must all come to the same verdict.

    Attributes:
        errors: by the name of a patch, the largest relative error that was found, for those that were proved
            together of all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        loss_of: Callable[[], Tensor],
        apply: Callable[[Patch], None],
        replace: Callable[[Patch, Patch], None],
        precision: Callable[[], torch.dtype],
        others: Sequence[nn.Module],
        agreement: Agreement,
    ) -> None:
        self._model, self._parameters, self._loss_of = model, parameters, loss_of
        self._apply, self._replace, self._precision = apply, replace, precision
        self._others, self._agreement = others, agreement
        self._own: Error | None = None  # the unpatched step's own error at a lower precision
        self.errors: dict[str, float] = {}

    def prove(self, patches: Sequence[Patch], reference: Outcome, known: Sequence[Patch] = ()) -> None:
        """Apply and prove the patches; what fails is undone and rejected with its reason.

        Changes of precision come first, since the others are held against what they leave. Those are proved
        together, or in turn where together they fail.

        Args:
            known: those that were proved on an earlier batch, and are only applied.
        """
        self._unpatched, self._seconds = reference, reference.seconds
        for patch in patches:
            if patch.accepted and not patch.exact:
                self._prove_forms(patch, reference)
        exact = [patch for patch in patches if patch.accepted and patch.exact]
        new = [patch for patch in exact if patch not in known]
        reason, alone = None, len(new) == len(exact)
        if new:
            reference, reason = self._repeat(reference, again=False)
        company = [patch for patch in new if patch.pays is None and not patch.encloses]
        if alone and self._prove_together(company, reference):
            new = [patch for patch in new if patch not in company]
        elif alone and new:
            reference, reason = self._repeat(reference, again=True)
        for patch in exact:
            if patch in known:
                self._apply(patch)
        for patch in new:
            if reason is not None:
                patch.reject(reason)
            else:
                self._prove_forms(patch, reference)

    def _prove_together(self, patches: Sequence[Patch], reference: Outcome) -> bool:
        """All at once, which takes a single run, or a second one with the other forms of those that have
        one; False where that is too few or they fail, so that each is to be proved by itself."""
        if len(patches) < 2:
            return False
        reason = self._objection(patches, reference)
        if reason is None:
            return True
        forms = {patch: patch.fallback() for patch in patches if patch.fallback is not None}
        others = {patch: form for patch, form in forms.items() if isinstance(form, Patch) and form.accepted}
        for patch, other in others.items():
            other.name = patch.name
        if not others or self._objection([others.get(p, p) for p in patches], reference) is not None:
            return False
        for patch, other in others.items():
            self._replace(patch, other)
            other.reason += f" (in another form: together with all others {reason})"
        return True

    def _objection(self, patches: Sequence[Patch], reference: Outcome) -> str | None:
        """None if all of them together give the same result, else why not; then they are undone."""
        try:
            for patch in patches:
                self._apply(patch)
            outcome = self._outcome(reference)
            error = compare(reference, outcome)
            within = error.within(self._own, self._precision())
            reason = None if within else f"it changes the result: {error}"
        except Exception as exception:  # whose fault it is, the proof of each will say
            reason = f"it failed on the first batch: {first_line(exception)}"
        reason = self._agreement.objection(reason)
        if reason is not None:
            for patch in reversed(patches):
                patch.undo()
            return reason
        self.errors |= {patch.name: error.largest for patch in patches}
        self._seconds = outcome.seconds
        return None

    def _repeat(self, reference: Outcome, *, again: bool) -> tuple[Outcome, str | None]:
        """What the exact patches are held against, and why nothing can be: a step that differs from
        itself, if it is to be run ``again``."""
        precision, outcome, within = self._precision(), self._unpatched, True
        if again:
            outcome = self._evaluate()
            drift, self._seconds = compare(self._unpatched, outcome), outcome.seconds
            within = drift.within(self._own, precision)
        if self._own is None and precision != torch.float32:
            with widened(self._model):  # a narrow model is held against itself in float32
                reference = self._evaluate()
            self._own = compare(reference, outcome)
        if self._agreement.all(within):
            return reference, None
        return reference, f"the unpatched step itself is not reproducible, so nothing can be proved: {drift}"

    def _prove_forms(self, patch: Patch, reference: Outcome) -> None:
        """A patch, or the form of it that falls back on less."""
        reason = self._prove_one(patch, reference)
        if reason is None:
            return
        patch.undo()
        other = None if patch.fallback is None else patch.fallback()
        if isinstance(other, Patch) and other.accepted:
            self._replace(patch, other)
            self._prove_forms(other, reference)
            if other.accepted:
                other.reason += f" (in another form: {reason})"
        else:
            patch.reject(reason)

    def reference(self) -> Outcome:
        """The unpatched step. An error here is the user's own."""
        return self._evaluate()

    def _evaluate(self) -> Outcome:
        return evaluate(self._loss_of, self._model, self._parameters, self._others)

    def _prove_one(self, patch: Patch, reference: Outcome) -> str | None:
        """None if the patch is kept by all, else why not."""
        verdict = patch.pays(self._seconds) if patch.pays is not None else None
        if isinstance(verdict, Rejected):
            return self._agreement.objection(verdict.reason)
        try:
            self._apply(patch)
            outcome = self._outcome(reference)
        except Exception as exception:
            return self._agreement.objection(f"it failed on the first batch: {first_line(exception)}")
        error = compare(reference, outcome)
        self.errors[patch.name] = error.largest
        within = error.within(self._own, self._precision()) if patch.exact else error.loss <= SAME_LOSS
        reason = self._agreement.objection(None if within else f"it changes the result: {error}")
        if reason is None:
            self._seconds = outcome.seconds
            if not patch.exact:
                self._own, self._unpatched = error, outcome
        return reason

    def _outcome(self, reference: Outcome) -> Outcome:
        """The step as it is now. The gradients that it is compared with are moved away if memory runs out."""
        try:
            return self._evaluate()
        except Exception as exception:
            if not is_out_of_memory(exception):
                raise
        reference.gradients[:] = [None if g is None else g.cpu() for g in reference.gradients]
        return self._evaluate()
