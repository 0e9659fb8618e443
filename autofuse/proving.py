"""The patches of a plan, proved one at a time on a real batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autofuse.distributed import Agreement
from autofuse.patch import Patch, Rejected
from autofuse.proof import Error, Outcome, compare, evaluate, widened

__all__ = ["Prover", "is_out_of_memory"]

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
        errors: by the name of a patch, the largest relative error that was found.
        seconds: by the name of a patch, how long forward and backward took without and with it.
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
        self.seconds: dict[str, tuple[float, float]] = {}

    def prove(self, patches: Sequence[Patch], reference: Outcome) -> None:
        """Apply and prove each patch in turn; what fails is undone and rejected with its reason."""
        again = self._evaluate()
        drift, self._seconds = compare(reference, again), again.seconds
        if self._precision() != torch.float32:  # a narrow model is held against itself in float32
            with widened(self._model):
                reference = self._evaluate()
            self._own = compare(reference, again)
        reproducible = self._agreement.all(drift.within())
        for patch in patches:
            if not patch.accepted:
                continue
            if not reproducible:
                reason = f"the unpatched step itself is not reproducible, so nothing can be proved: {drift}"
                patch.reject(reason)
            else:
                self._prove_forms(patch, reference)

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
            return self._agreement.objection(f"it failed on the first batch: {_first_line(exception)}")
        error = compare(reference, outcome)
        self.errors[patch.name] = error.largest
        within = error.within(self._own, self._precision()) if patch.exact else error.loss <= SAME_LOSS
        reason = self._agreement.objection(None if within else f"it changes the result: {error}")
        if reason is None:
            self.seconds[patch.name] = self._seconds, outcome.seconds
            self._seconds = outcome.seconds
            if not patch.exact:
                self._own = error
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


def is_out_of_memory(error: BaseException) -> bool:
    """
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    True
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
