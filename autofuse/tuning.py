"""The tuner: what each patch does, found out on the user's real steps; it is kept or undone.

Every step that is taken meanwhile is a valid training step: what is tried has been proved to give the
same result. All cheap patches are there from the first step on; then comes the loop as it was, to
compare with, and each patch once without, or one after the other where all together do not help. A patch is
timed against the steps right before; where the answer is not clear at once, steps with and without it
take turns until it is, or until the budget is spent: then the loop stays as it was without the patch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autofuse.clock import Sample, StepClock
from autofuse.distributed import Agreement
from autofuse.errors import first_line
from autofuse.patch import ASSUMED_STEPS, Patch, Rejected
from autofuse.patches import Patches
from autofuse.progress import Progress
from autofuse.report import Tuning
from autofuse.trial import Trial

__all__ = ["Tuner"]

# A trial ends when this many of its steps had something in them that happens once.
UNSETTLED = 10
# Steps after which a change that outlasts its undo has its full effect, or none any more.
LASTING_STEPS = 2
RECENT = 6  # the latest steps of a state, which the next one is compared with
INNER_GAIN = 0.02  # what a module's patch may cost inside a compiled region, if it brought less alone
# A step that is this much faster than the one before is still getting faster: caches fill, pages are mapped.
SETTLED, MOST_SETTLING = 0.05, 5
UPGRADE_GAIN = 0.05  # a form that saves less leaves nothing for a dearer one
# Turns are at least this long, so that changing over costs little where steps are short.
TURN_SECONDS, TURN_STEPS = 0.1, 8
BEGINS_WITH = 0, 2  # the first turn of a trial, by the state that it begins with
# What tuning may cost beyond the training that it performs, in steps of the loop as it was; compiling,
# which is weighed against the steps to come, is not counted.
BUDGET = 40

# Yields the patches that are due for a proof, or None to be sent the next step's sample.
Steps = Generator[Sequence[Patch] | None, Any, Any]
State = Callable[[], object]


class Tuner:
    """Decides about the patches of one training step.

    Args:
        patches: none of them is applied yet.
        agreement: the processes that train the same model: all decide by the first one's clock.
        clock: tells of each step, for as long as something is to be decided.
        steps: optimizer steps to come, if known.

    Attributes:
        due: the patches that are to be proved on the next batch.
    """

    def __init__(
        self, patches: Patches, agreement: Agreement, clock: StepClock, steps: int | None = None
    ) -> None:
        self._patches, self._agreement, self._clock = patches, agreement, clock
        self._in_all = steps or ASSUMED_STEPS
        self._progress, self._news = Progress(), "tuning"
        self.tuning = Tuning("waiting")
        self.due: Sequence[Patch] | None = None
        self._recent: list[Sample] = []
        self._trials: dict[str, Trial] = {}
        self._together: tuple[set[str], Trial] | None = None  # names, and the trial of all of them
        self._in_company: set[str] = set()  # what is left out once, all together having helped
        self._uncounted = 0.0  # seconds of steps in which something was compiled or proved
        self._tokens, self._per_token = 0, 0.0  # of all steps; seconds of the loop as it was
        self._script = self._tune()
        clock.listen(self._sample)
        self._go_on(None)

    @property
    def active(self) -> bool:
        return self.tuning.state in ("waiting", "measuring")

    def prove(self, loss_of: Callable[[], Tensor], batch: Any, **options: Any) -> None:
        """Prove on a batch what is due; a batch that shows nothing leaves it for the next."""
        start, self._patches.proved = time.perf_counter(), False
        self._patches.prove(loss_of, batch, due=self.due, **options)
        self.tuning.seconds += self._agreement.of_first(time.perf_counter() - start)
        if self._patches.proved:
            self._go_on(None)

    def cannot_prove(self) -> None:
        """Go on with what needs no proof."""
        if self.due is not None:
            self._go_on(None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """What is being measured, on a terminal, while a step runs; gone when the loop goes on."""
        if self.active:
            self._progress.update(self._news)
        try:
            yield
        finally:
            self._progress.close()

    def _sample(self, sample: Sample) -> None:
        """An optimizer step was taken."""
        if not self.active:
            return
        sample = self._agreement.of_first(sample)
        tuning = self.tuning
        tuning.state = "measuring"
        tuning.steps += 1
        tuning.seconds += sample.seconds
        self._tokens += max(sample.tokens, 1)
        if sample.one_off:
            self._uncounted += sample.seconds
        if self.due is None:
            self._go_on(sample)
        if self._per_token:
            tuning.extra_seconds = tuning.seconds - self._tokens * self._per_token

    def stop(self, reason: str) -> None:
        """Decide nothing more: what is kept or has helped in company stays, the rest is given up."""
        if not self.active:
            return
        self._script.close()
        patches = self._patches
        patches.keep([p for p in self._undecided() if p.name in self._in_company])
        patches.give_up(self._undecided(), reason)
        patches.apply_all([p for p in patches if p.name in patches.kept])
        if (known := self._of_kept()) is not None:
            self._sum_up(known)
        self.tuning.notes.append(f"Tuning was stopped: {reason}.")
        self._finish()

    def _go_on(self, sample: Sample | None) -> None:
        try:
            self.due = self._script.send(sample)
        except StopIteration:
            self._finish()
        except Exception as error:  # not in the user's loop, whatever it is
            self.stop(f"tuning ended early ({first_line(error)})")

    def _finish(self) -> None:
        self.tuning.state, self.due = "done", None
        self._clock.unlisten(self._sample)

    # --- the order of things ---------------------------------------------------------------------

    def _tune(self) -> Steps:
        patches = self._patches
        cheap = [p for p in patches if p.accepted and p.pays is None and not p.encloses]
        patches.apply_all([p for p in cheap if p.lasting and not p.in_forward])  # for the proof's runs too
        yield cheap
        if not self._undecided():
            return
        precision = [p for p in cheap if not p.exact and p.accepted]
        exact = [p for p in cheap if p.exact]
        patches.keep([p for p in precision if p.forced])
        together = yield from self._introduce_together(self._among_undecided(cheap))
        for patch in self._among_undecided(precision):
            yield from self._introduce_precision(patch, exact if together else [])
        as_proved = all(p.name in patches.kept for p in precision)
        if together and as_proved:
            yield from self._try_without_each(exact)
        else:
            if not as_proved and any(p.in_forward for p in self._among_undecided(exact)):
                yield self._among_undecided(exact)  # at the precision that it is now
            for patch in self._among_undecided(exact):
                yield from self._introduce(patch)
        for patch in self._undecided():
            yield from self._introduce_dear(patch)
        yield from self._compare_with_nothing()

    def _among_undecided(self, chosen: Sequence[Patch]) -> list[Patch]:
        names = {p.name for p in chosen}  # another form may have taken a patch's place
        return [p for p in self._undecided() if p.name in names]

    def _undecided(self) -> list[Patch]:
        return [p for p in self._patches if p.accepted and p.name not in self._patches.kept]

    def _introduce(self, patch: Patch) -> Steps:
        """Keep a proved patch if it makes the step faster, else undo it."""
        patches = self._patches
        if not patch.accepted or patch.name in patches.kept:
            return
        if self._overspent():
            self._drop(patch, "not tried: tuning has spent its budget")
            return
        if self._is_idle(patch):
            return
        states = patch.undo, self._applying(patch)
        trial = Trial(patch.worth)
        helps = yield from self._try(trial, states, [patch])
        self._decide(patch, trial, states, helps)

    def _introduce_precision(self, patch: Patch, exact: Sequence[Patch]) -> Steps:
        """Alone against the loop as it was. Where that is too little, in the company of the exact patches,
        which are proved without it first: they leave less of a step, of which it saves more."""
        trial, states = Trial(patch.worth), (patch.undo, self._applying(patch))
        helps = yield from self._try(trial, states, [patch])
        promising = trial.measured and trial.estimate().gain > 0 and not self._overspent()
        company: Sequence[Patch] = []
        if exact and promising and patch.accepted and not helps and not patch.forced:
            self._settle(trial, states, False)
            yield self._among_undecided(exact)
            company, trial = self._among_undecided(exact), Trial(patch.worth)
            self._patches.apply_all(company)
            yield from self._collect_anew()
            helps = yield from self._try(trial, states, [patch, *(p for p in company if not p.lasting)])
        self._decide(patch, trial, states, helps)
        if company:
            self._patches.undo_all(company)
            yield from self._collect_anew()

    def _decide(self, patch: Patch, trial: Trial, states: tuple[State, State], helps: bool) -> None:
        if not patch.accepted:
            return
        if trial.measured:
            self._patches.record(patch, trial)
            self._trials[patch.name] = trial
        self.tuning.order.append(patch.name)
        self._settle(trial, states, helps or patch.forced)
        if helps or patch.forced:
            self._patches.keep([patch])
        else:
            self._drop(patch, trial.why_not())

    def _introduce_together(self, chosen: Sequence[Patch]) -> Steps:
        """All that is proved at once, so that the step is fast from the first on; whether that clearly helps.

        The loop is then as it was, and what each of them does is to be found out."""
        trial, helps, several = Trial(), False, len(chosen) >= 2
        states = self._without_and_with(chosen)
        states[several]()
        yield None  # the first step makes the optimizer's state, and whatever else is made once
        yield from self._settled()
        yield from self._collect(2)
        if several:
            helps = yield from self._try(trial, states, chosen, holds=1)
            self._settle(trial, states, False)
        if len(self._recent) < 2:  # it failed before the loop as it was had its turn
            yield from self._collect_anew()
        self.tuning.baseline_ms = 1e3 * self._seconds()
        self._per_token = sum(s.seconds for s in self._recent) / sum(max(s.tokens, 1) for s in self._recent)
        if helps and all(p.accepted for p in chosen):
            self._together = {p.name for p in chosen} | self._patches.kept, trial
        return helps

    def _try_without_each(self, chosen: Sequence[Patch]) -> Steps:
        """What has been found to help together, each once without."""
        patches, undecided = self._patches, self._among_undecided(chosen)
        if not undecided:
            return
        self._in_company = {p.name for p in undecided}
        patches.apply_all(undecided)
        yield from self._collect_anew()
        for patch in reversed(undecided):
            if not patch.accepted or self._is_idle(patch):
                continue
            if patch.lasting:
                patch.reason += " (timed with the others alone: it outlasts being undone)"
                patches.keep([patch])
                continue
            if self._overspent():
                patch.reason += " (not timed alone: tuning has spent its budget)"
                patches.keep([patch])
                continue
            trial, states = Trial(patch.worth), (patch.undo, self._applying(patch))
            helps = yield from self._try(trial, states, [patch], holds=1)
            if patch.accepted and not helps and trial.looks_faster:  # and all together is known to be
                helps, patch.reason = True, f"{patch.reason} (probably: it could not be told for certain)"
            self._decide(patch, trial, states, helps)

    def _is_idle(self, patch: Patch) -> bool:
        """Keep what has had nothing to do so far: nothing about it can be timed."""
        if patch.idle is None or not self._agreement.of_first(patch.idle()):
            return False
        self._patches.keep([patch])
        patch.reason += " (not timed: no batch so far had anything for it)"
        return True

    def _introduce_dear(self, patch: Patch) -> Steps:
        """A patch with a price (compile): prove it only where it pays; then try what it encloses
        without, and its dearer forms."""
        verdict = None if patch.pays is None else patch.pays(self._seconds())
        reason = self._agreement.objection(verdict.reason if isinstance(verdict, Rejected) else None)
        if reason is not None:
            self._drop(patch, reason)
            return
        patch.pays = None
        spent = self.tuning.seconds
        yield [patch]
        price = self.tuning.seconds - spent
        self._uncounted += price  # weighed against the steps to come
        if patch.accepted:
            yield from self._collect_anew()
        yield from self._introduce(patch)
        if patch.applied and patch.encloses:
            yield from self._try_without_inner(patch, price)
        if patch.applied:
            yield from self._upgrade(patch)

    def _try_without_inner(self, outer: Patch, price: float) -> Steps:
        """What wins alone may lose in company: a fused norm inside a compiled region."""
        for patch in [p for p in self._patches if p.in_modules and p.applied]:
            gain = max(self._patches.row(patch).gain or 0.0, INNER_GAIN)
            if gain * self._seconds() * self._steps_left < price or self._overspent():
                continue  # compiling without it would cost more than that could bring
            trial = Trial()
            states = self._applying(patch), patch.undo
            helps = yield from self._try(trial, states, [outer])
            self._settle(trial, states, helps)
            if helps:
                self._drop(patch, f"it helps alone, but not in {outer.name}: {trial.estimate()} less without")

    def _upgrade(self, patch: Patch) -> Steps:
        """Replace a kept patch by its dearer forms, as long as that pays."""
        patches = self._patches
        while patch.upgrade is not None:
            gain = patches.row(patch).gain
            if gain is not None and gain < UPGRADE_GAIN:
                patch.reason += f"; it saves less than {UPGRADE_GAIN:.0%}, so that no dearer form was tried"
                return
            better = patch.upgrade(self._seconds())
            reason = self._agreement.objection(better.reason if isinstance(better, Rejected) else None)
            if reason is not None or isinstance(better, Rejected):
                patch.reason += f"; {reason}"
                return
            trial, helps, form = Trial(), False, better.reason
            states = self._switching(better, patch), self._switching(patch, better)
            patch.undo()
            patches.replace(patch, better)
            try:
                yield [better]
                if better.accepted:
                    states[0]()
                    yield from self._collect_anew()
                    helps = yield from self._try(trial, states, [better])
            except GeneratorExit:
                states[0]()
                raise
            self._settle(trial, states, helps)
            if not helps:
                why = trial.why_not() if better.accepted else better.reason
                patch.reason += f"; the next form ({form}) was not kept: {why}"
                return
            patches.record(better, trial, further=True)
            self._trials.clear()
            patch = better

    def _compare_with_nothing(self) -> Steps:
        """All that is kept, at once, against the loop as it was: never slower is a promise."""
        tuning, patches = self.tuning, self._patches
        kept = [p for p in patches if p.name in patches.kept]
        if all(patches.row(p).gain is None for p in kept):
            tuning.final_ms = tuning.baseline_ms
            return
        if (known := self._of_kept()) is not None:
            self._sum_up(known)
            return
        trial = Trial()
        states = self._without_and_with(kept)
        helps = yield from self._try(trial, states, kept, holds=None)
        if not trial.measured:
            patches.apply_all(kept)
            return
        found = trial.estimate()
        stays = helps or found.gain > 0 or any(p.forced for p in kept)
        self._settle(trial, states, stays)
        self._sum_up(trial)
        if not stays:
            tuning.final_ms, tuning.interval = tuning.baseline_ms, None
            for patch in kept:
                self._drop(patch, f"all that was kept is slower together than the loop as it was: {found}")

    def _of_kept(self) -> Trial | None:
        """The trial of just what is kept, if there was one."""
        trials = [*(({name}, trial) for name, trial in self._trials.items()), *filter(None, [self._together])]
        return next((trial for names, trial in trials if names == self._patches.kept), None)

    def _sum_up(self, trial: Trial) -> None:
        tuning, found = self.tuning, trial.estimate()
        tuning.baseline_ms, tuning.final_ms = found.before * 1e3, found.after * 1e3
        tuning.interval = found.low, found.high
        tokens = [sample.tokens for arm in (0, 1) for sample in trial.of(arm)]
        tuning.tokens_per_step = sum(tokens) / len(tokens)
        tuning.peak_before_mb, tuning.peak_after_mb = trial.peak_mb(0), trial.peak_mb(1)

    # --- one trial -------------------------------------------------------------------------------

    def _try(
        self, trial: Trial, states: tuple[State, State], new: Sequence[Patch], holds: int | None = 0
    ) -> Steps:
        """Whether the second state's steps are clearly faster than the first's.

        Args:
            new: the trial ends if one of them is rejected.
            holds: which of the states is there now, so that the latest steps are samples of it; None:
                those steps are not to be trusted.
        """
        turn, changed, unsettled = 0, -1, 0  # changed: the first turn after the state that was there
        if holds is not None:
            yield from self._collect(2)
            turn = BEGINS_WITH[holds]
            for sample in self._recent[-4:]:
                trial.add(sample, turn)
            turn = changed = turn + 1
        while trial.verdict() is None and not trial.exhausted and unsettled <= UNSETTLED:
            if self._overspent() and trial.measured:
                break
            states[trial.arm(turn)]()
            first = turn == changed
            uncounted = LASTING_STEPS if any(p.lasting for p in new) else int(first)
            for _ in range(self._turn(trial)):
                sample = yield None
                while sample.one_off or uncounted > 0:
                    if sample.one_off and first:
                        trial.samples.clear()  # the machine of before a compilation may be another
                    first, uncounted, unsettled = False, uncounted - 1, unsettled + sample.one_off
                    if unsettled > UNSETTLED or not all(p.accepted for p in new):
                        return False
                    sample = yield None
                if not all(p.accepted for p in new):
                    return False
                trial.add(sample, turn)
                self._tell(trial, new)
                if trial.verdict() is not None:
                    break
            turn += 1
        return bool(trial.verdict())

    def _settle(self, trial: Trial, states: tuple[State, State], second: bool) -> None:
        states[second]()
        self._recent = trial.of(int(second))[-RECENT:]

    def _collect(self, count: int) -> Steps:
        """Steps of the state as it is, to compare the next one with."""
        while len(self._recent) < count:
            sample = yield None
            if not sample.one_off:
                self._recent.append(sample)

    def _settled(self) -> Steps:
        """Steps until they do not get faster any more; the last one is a sample of the state."""
        for _ in range(MOST_SETTLING):
            yield from self._collect(len(self._recent) + 1)
            if len(self._recent) > 1 and self._recent[-1].pace > (1 - SETTLED) * self._recent[-2].pace:
                break
        self._recent = self._recent[-1:]

    def _collect_anew(self) -> Steps:
        """The same, after a long proof or a change of state, whose first step is not like the others."""
        yield None
        self._recent = []
        yield from self._collect(2)

    def _turn(self, trial: Trial) -> int:
        """Steps in a row of one state: few, but so many that changing over costs little."""
        seconds = [s.seconds for arm in (0, 1) for s in trial.of(arm)] or [s.seconds for s in self._recent]
        mean = sum(seconds) / max(len(seconds), 1)
        return max(2, min(TURN_STEPS, round(TURN_SECONDS / max(mean, 1e-6))))

    def _seconds(self) -> float:
        """Of a step as it is now."""
        return sum(s.seconds for s in self._recent) / max(len(self._recent), 1)

    @property
    def _steps_left(self) -> int:
        return max(self._in_all - self.tuning.steps, 0)

    def _overspent(self) -> bool:
        tuning = self.tuning
        if not self._per_token:
            return False
        expected = self._tokens * self._per_token  # by the token: batches may get longer
        return tuning.seconds - self._uncounted - expected > BUDGET * expected / max(tuning.steps, 1)

    def _without_and_with(self, chosen: Sequence[Patch]) -> tuple[State, State]:
        return (lambda: self._patches.undo_all(chosen)), (lambda: self._patches.apply_all(chosen))

    def _applying(self, patch: Patch) -> State:
        return lambda: self._patches.apply_or_reject(patch)

    def _switching(self, leave: Patch, enter: Patch) -> State:
        return lambda: self._patches.switch(leave, enter)

    def _drop(self, patch: Patch, reason: str) -> None:
        if patch.name in self._patches.kept | self._in_company:
            self._trials.clear()  # they were made in its company
        self._patches.give_up([patch], reason)

    def _tell(self, trial: Trial, new: Sequence[Patch]) -> None:
        name = new[0].name if len(new) == 1 else "all together"
        found = f"{trial.estimate()} faster, {len(trial.samples)} steps" if trial.measured else "measuring"
        self._news = f"{name}: {found}"
