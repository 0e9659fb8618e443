"""A trial: steps without and with a change, and what follows from their times.

The estimate is the effect of the change on the logarithm of a step's time, by least squares with a
mean of its own for each block of turns and each shape of batch in it: what else the machine does
comes and goes more slowly than turns, and shapes are never mixed up. The interval is Student's, 95%.
Where a shape hardly comes twice in a block, shapes are compared over all blocks; where shapes hardly
repeat at all, the time is taken to follow a power of the number of tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean
from typing import NamedTuple

from autofuse.clock import Sample

__all__ = ["Estimate", "Trial"]

# Two steps that happen to agree to the microsecond prove nothing: no machine repeats itself better than this.
LEAST_NOISE = 0.01
# Less than this is not worth a change.
LEAST_GAIN = 0.01
# What does not even look faster need not be measured as closely.
HOPELESS = 0.05
# Of so many steps one, that which fits least, is left out: something else was running.
LEFT_OUT = 10
# Steps on each side before a trial ends undecided; more where steps are short, as many as fit in a second.
STEPS, MOST_STEPS, SECONDS = 12, 100, 1.0

# Student's t for 1, 2, ... degrees of freedom, two-sided.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
# A verdict is looked for after each step, which finds something sooner or later: it needs more than 95%.
_T99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977)


@dataclass(frozen=True)
class Estimate:
    """What a change saves of a step's time, as a share: 0.25 is a quarter.

    Attributes:
        low, high: the 95% confidence interval of ``gain``.
        before, after: seconds of a step without and with the change.
    """

    gain: float
    low: float
    high: float
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.gain:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass
class Trial:
    """Collects samples until the answer is clear.

    Args:
        worth: the share of a step's time that the change must save.

    >>> trial = Trial()
    >>> for turn in range(4):
    ...     for seconds in (1.00, 1.02):
    ...         trial.add(Sample(seconds / (1 + trial.arm(turn)), None, 64, (8, 8)), turn)
    >>> print(trial.estimate())
    50.0% (48.8% to 51.1%)
    >>> trial.verdict()
    True
    """

    worth: float = 0.0
    samples: list[tuple[int, int, Sample]] = field(default_factory=list)  # (block, arm, sample)

    @staticmethod
    def arm(turn: int) -> int:
        """Without (0) or with (1) the change: 0 1, 1 0, 0 1, and so on, two turns to a block.

        >>> [Trial.arm(turn) for turn in range(6)]
        [0, 1, 1, 0, 0, 1]
        """
        return (turn + turn // 2) % 2

    def add(self, sample: Sample, turn: int) -> None:
        self.samples.append((turn // 2, self.arm(turn), sample))

    def count(self, arm: int) -> int:
        return len(self.of(arm))

    def of(self, arm: int) -> list[Sample]:
        """The samples without (0) or with (1) the change."""
        return [sample for _, a, sample in self.samples if a == arm]

    def peak_mb(self, arm: int) -> float | None:
        """The device's peak of allocated memory, in 10^6 bytes, where it counts it."""
        peaks = [sample.peak for sample in self.of(arm) if sample.peak is not None]
        return max(peaks) / 1e6 if peaks else None

    def why_not(self) -> str:
        """Why the change is not worth it, in words."""
        if not self.measured:
            return "its steps never settled, so that it could not be timed"
        found, steps = self.estimate(), len(self.samples)
        if found.high < 0:
            return f"it is slower: {-found.gain:.1%} ({-found.high:.1%} to {-found.low:.1%}) in {steps} steps"
        least = (
            f"less than the {self.worth:.0%} that its accuracy is worth" if self.worth else "no clear gain"
        )
        return f"{least}: {found} in {steps} steps"

    @property
    def measured(self) -> bool:
        """Whether there is anything to conclude from."""
        return min(self.count(0), self.count(1)) >= 2

    @property
    def looks_faster(self) -> bool:
        """Whether it probably helps, though that is not certain."""
        return self.measured and self.estimate().gain > max(self.worth, LEAST_GAIN)

    @property
    def exhausted(self) -> bool:
        """Whether the budget of the trial is spent."""
        mean = sum(s.seconds for *_, s in self.samples) / max(len(self.samples), 1)
        limit = min(max(STEPS, math.ceil(SECONDS / max(mean, 1e-6) / 2)), MOST_STEPS)
        return min(self.count(0), self.count(1)) >= limit

    def verdict(self) -> bool | None:
        """True: it helps. False: it does not, or not enough to be seen. None: go on measuring."""
        if not self.measured:
            return None
        found = self.estimate(sure=True)
        if found.low > self.worth:
            return True
        least = LEAST_GAIN if found.gain > 0 else HOPELESS
        if found.high < max(self.worth, least):
            return False
        if not self.exhausted:
            return None
        return self.worth > 0 and found.gain >= self.worth and found.low > 0

    def estimate(self, *, sure: bool = False) -> Estimate:
        """What the change saves; ``sure`` gives the 99% interval, which verdicts are made by."""
        before = [math.log(sample.seconds) for sample in self.of(0)]
        level = math.exp(sum(before) / len(before)) if before else math.nan
        fitted = _fit(self._points(), sure)
        if fitted is None:
            return Estimate(0.0, -math.inf, 1.0, level, level)
        slope, half = fitted
        gain, low, high = (1 - math.exp(slope + sign * half) for sign in (0, 1, -1))
        return Estimate(gain, low, high, level, level * math.exp(slope))

    def _points(self) -> list[_Point]:
        """The logarithms of the times, in groups that are comparable and have both kinds of steps."""
        varied = len({sample.shape for *_, sample in self.samples}) > 2 / 3 * len(self.samples)
        keys: Sequence[Callable[[int, Sample], Hashable]] = [
            lambda block, sample: (block, sample.shape),
            lambda block, sample: (0, sample.shape),
        ]
        if varied:
            keys = [lambda block, sample: (block, _optimizer(sample))]
        for key in keys:
            groups: dict[Hashable, list[_Point]] = defaultdict(list)
            for block, arm, sample in self.samples:
                group, tokens = key(block, sample), math.log(max(sample.tokens, 1))
                groups[group].append(_Point(group, arm, math.log(sample.seconds), tokens))
            points = [p for group in groups.values() if len({p.x for p in group}) == 2 for p in group]
            if 2 * len(points) >= len(self.samples):
                break
        return points


class _Point(NamedTuple):
    group: Hashable
    x: float  # the arm
    y: float  # the logarithm of the seconds
    z: float  # that of the tokens


def _optimizer(sample: Sample) -> Hashable:
    """Which optimizers the step was for: steps of others are other steps."""
    return sample.shape[0] if isinstance(sample.shape, tuple) and sample.shape else None


def _centred(points: Sequence[_Point]) -> tuple[list[_Point], int]:
    """The points without their groups' means and without what the tokens explain, and how many
    figures were estimated for that."""
    groups: dict[Hashable, list[_Point]] = defaultdict(list)
    for point in points:
        groups[point.group].append(point)
    centred = []
    for group, own in groups.items():
        x, y, z = mean(p.x for p in own), mean(p.y for p in own), mean(p.z for p in own)
        centred += [_Point(group, p.x - x, p.y - y, p.z - z) for p in own]
    szz = sum(p.z**2 for p in centred)
    if szz < 1e-12:
        return centred, len(groups)
    a, b = sum(p.x * p.z for p in centred) / szz, sum(p.y * p.z for p in centred) / szz
    return [_Point(p.group, p.x - a * p.z, p.y - b * p.z, 0.0) for p in centred], len(groups) + 1


def _fit(points: Sequence[_Point], sure: bool) -> tuple[float, float] | None:
    """(the effect of the arm, half of its interval); None with too few points."""
    centred, estimated = _centred(points)
    if len(points) >= LEFT_OUT:
        slope = _slope(centred)[0]
        worst = sorted(range(len(points)), key=lambda i: abs(centred[i].y - slope * centred[i].x))
        left = {id(p) for p in (centred[i] for i in worst[len(points) - len(points) // LEFT_OUT :])}
        centred = [p for p in centred if id(p) not in left]
    slope, sxx = _slope(centred)
    freedom = len(centred) - estimated - 1
    if sxx < 1e-12 or freedom < 1:
        return None
    rest = sum((p.y - slope * p.x) ** 2 for p in centred)
    noise = max(rest / freedom, LEAST_NOISE**2)
    return slope, _t(freedom, sure) * math.sqrt(noise / sxx)


def _slope(centred: Sequence[_Point]) -> tuple[float, float]:
    sxx = sum(p.x**2 for p in centred)
    return (sum(p.x * p.y for p in centred) / sxx if sxx else 0.0), sxx


def _t(freedom: int, sure: bool) -> float:
    """
    >>> _t(1, False), round(_t(30, False), 2), round(_t(30, True), 2)
    (12.71, 2.04, 2.74)
    """
    table, limit, slope = (_T99, 2.576, 5.0) if sure else (_T95, 1.96, 2.5)
    return table[freedom - 1] if freedom <= len(table) else limit + slope / freedom
