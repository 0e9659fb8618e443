"""The patches of a plan, introduced one at a time on a real batch and kept only if they are proved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from autofuse.patch import Patch, Rejected
from autofuse.proof import Error, Outcome, compare, evaluate, widened

__all__ = ["Prover"]

# A change of precision costs accuracy: it must win by more than the noise of a single measurement.
WORTH_ITS_ACCURACY = 1.15
LONG_RUN = 0.2  # seconds
# Of a change of precision itself only this can be asked: that the loss is still the same loss.
SAME_LOSS = 0.1


class Prover:
    """Proves patches against the unpatched step.

    Args:
        loss_of: the forward of one step on one batch, with whatever is applied at the moment.
        apply: applies a patch and keeps the way back.
        precision: the dtype in which the step computes at the moment.
        others: modules beside the model that the step may change (a criterion's buffers).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        loss_of: Callable[[], Tensor],
        apply: Callable[[Patch], None],
        precision: Callable[[], torch.dtype],
        others: Sequence[nn.Module] = (),
    ) -> None:
        self._model, self._parameters, self._loss_of = model, parameters, loss_of
        self._apply, self._precision, self._others = apply, precision, others
        self._own: Error | None = None  # the unpatched step's own error at a lower precision
        self.errors: dict[str, float] = {}

    def prove(self, patches: Sequence[Patch], reference: Outcome) -> None:
        """Apply and prove each patch in turn; what fails is undone and rejected with its reason."""
        again = self._evaluate()
        drift, seconds = compare(reference, again), again.seconds
        if self._precision() != torch.float32:  # a narrow model is held against itself in float32
            with widened(self._model):
                reference = self._evaluate()
            self._own = compare(reference, again)
        for patch in patches:
            if not patch.accepted:
                continue
            if not drift.within():
                reason = f"the unpatched step itself is not reproducible, so nothing can be proved: {drift}"
            else:
                reason = self._prove_one(patch, reference, seconds) or ""
            if reason:
                patch.undo()
                patch.reject(reason)

    def reference(self) -> Outcome:
        """The unpatched step. An error here is the user's own."""
        return self._evaluate()

    def _evaluate(self) -> Outcome:
        return evaluate(self._loss_of, self._model, self._parameters, self._others)

    def _prove_one(self, patch: Patch, reference: Outcome, seconds: float) -> str | None:
        """None if the patch is kept, else why not."""
        verdict = patch.pays(seconds) if patch.pays is not None else None
        if isinstance(verdict, Rejected):
            return verdict.reason
        try:
            self._apply(patch)
            outcome = self._evaluate()
        except Exception as exception:
            return f"it failed on the first batch: {_first_line(exception)}"
        error = compare(reference, outcome)
        self.errors[patch.name] = error.largest
        if patch.exact:
            return None if error.within(self._own, self._precision()) else f"it changes the result: {error}"
        if not error.loss <= SAME_LOSS:
            return f"it changes the result: {error}"
        reason = self._slower(patch) if patch.timed else None
        if reason is None:
            self._own = error
        return reason

    def _slower(self, patch: Patch) -> str | None:
        """Interleaved pairs of runs on the first batch, more of them where a run is short."""
        with_it, without = [self._evaluate().seconds], []
        long = with_it[0] > LONG_RUN
        pairs = 3 if long else 5
        for _ in range(pairs):
            patch.undo()
            without.append(self._evaluate().seconds)
            self._apply(patch)
            with_it.append(self._evaluate().seconds)
        ratios = [a / b for a, b in zip(without, with_it[1:], strict=True)]
        if median(ratios) >= WORTH_ITS_ACCURACY and (long or min(ratios) >= 1):
            return None
        return (
            f"not worth its accuracy: the first batch took {median(with_it[1:]) * 1e3:.1f} ms with it and "
            f"{median(without) * 1e3:.1f} ms without"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
