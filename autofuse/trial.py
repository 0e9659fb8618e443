"""A trial: steps without and with a change, and what follows from their times.

The estimate is the effect of the change on the logarithm of a step's time, by least squares with a
mean of its own for each block of turns and each shape of batch in it: what else the machine does
comes and goes more slowly than turns, and shapes are never mixed up. The interval is Student's, 95%.
Where a shape hardly comes twice in a block, shapes are compared over all blocks; where shapes hardly
repeat at all, times per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autofuse.clock import Sample

__all__ = ["Estimate", "Trial"]

# Two steps that happen to agree to the microsecond prove nothing: no machine repeats itself better than this.
LEAST_NOISE = 0.01
# Less than this is not worth a change.
LEAST_GAIN = 0.01
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
        if min(self.count(0), self.count(1)) < 2:
            return "its steps never settled, so that it could not be timed"
        found, steps = self.estimate(), len(self.samples)
        if found.high < 0:
            return f"it is slower: {-found.gain:.1%} ({-found.high:.1%} to {-found.low:.1%}) in {steps} steps"
        least = (
            f"less than the {self.worth:.0%} that its accuracy is worth" if self.worth else "no clear gain"
        )
        return f"{least}: {found} in {steps} steps"

    @property
    def exhausted(self) -> bool:
        """Whether the budget of the trial is spent."""
        mean = sum(s.seconds for *_, s in self.samples) / max(len(self.samples), 1)
        limit = min(max(STEPS, math.ceil(SECONDS / max(mean, 1e-6) / 2)), MOST_STEPS)
        return min(self.count(0), self.count(1)) >= limit

    def verdict(self) -> bool | None:
        """True: it helps. False: it does not, or not enough to be seen. None: go on measuring."""
        if min(self.count(0), self.count(1)) < 2:
            return None
        found = self.estimate(sure=True)
        if found.low > self.worth:
            return True
        if found.high < max(self.worth, LEAST_GAIN):
            return False
        if not self.exhausted:
            return None
        return self.worth > 0 and found.gain >= self.worth and found.low > 0

    def estimate(self, *, sure: bool = False) -> Estimate:
        """What the change saves; ``sure`` gives the 99% interval, which verdicts are made by."""
        before = [math.log(sample.seconds) for sample in self.of(0)]
        level = math.exp(sum(before) / len(before)) if before else math.nan
        points = self._points()
        fitted = _fit(points, sure)
        if fitted is not None and len(points) >= LEFT_OUT:
            points = _fitting(points, fitted[0])
            fitted = _fit(points, sure)
        if fitted is None:
            return Estimate(0.0, -math.inf, 1.0, level, level)
        slope, half = fitted
        gain, low, high = (1 - math.exp(slope + sign * half) for sign in (0, 1, -1))
        return Estimate(gain, low, high, level, level * math.exp(slope))

    def _points(self) -> list[_Point]:
        """The logarithms of the times, in groups that are comparable and have both kinds of steps."""
        for key, per_token in _GROUPINGS:
            groups: dict[Hashable, list[_Point]] = defaultdict(list)
            for block, arm, sample in self.samples:
                time = sample.seconds / (max(sample.tokens, 1) if per_token else 1)
                group = key(block, sample)
                groups[group].append(_Point(group, arm, math.log(time)))
            points = [p for group in groups.values() if len({p.x for p in group}) == 2 for p in group]
            if 2 * len(points) >= len(self.samples):
                break
        return points


class _Point(NamedTuple):
    group: Hashable
    x: int
    y: float


_GROUPINGS: Sequence[tuple[Callable[[int, Sample], Hashable], bool]] = (
    (lambda block, sample: (block, sample.shape), False),
    (lambda block, sample: sample.shape, False),
    (lambda block, sample: (block, sample.shape[0] if isinstance(sample.shape, tuple) else None), True),
)


def _means(points: Sequence[_Point]) -> dict[Hashable, tuple[float, float]]:
    groups: dict[Hashable, list[_Point]] = defaultdict(list)
    for point in points:
        groups[point.group].append(point)
    return {g: (sum(p.x for p in ps) / len(ps), sum(p.y for p in ps) / len(ps)) for g, ps in groups.items()}


def _fitting(points: Sequence[_Point], slope: float) -> list[_Point]:
    """Without those that are farthest from the line."""
    means = _means(points)

    def distance(point: _Point) -> float:
        x, y = means[point.group]
        return abs(point.y - y - slope * (point.x - x))

    return sorted(points, key=distance)[: len(points) - len(points) // LEFT_OUT]


def _fit(points: Sequence[_Point], sure: bool) -> tuple[float, float] | None:
    """(slope of y over x with a mean for each group, half of its interval); None with too few points."""
    means = _means(points)
    away = [(p.x - means[p.group][0], p.y - means[p.group][1]) for p in points]
    sxx, sxy, syy = sum(x * x for x, _ in away), sum(x * y for x, y in away), sum(y * y for _, y in away)
    freedom = len(points) - len(means) - 1
    if sxx == 0 or freedom < 1:
        return None
    slope = sxy / sxx
    noise = max(max(syy - slope * sxy, 0.0) / freedom, LEAST_NOISE**2)
    return slope, _t(freedom, sure) * math.sqrt(noise / sxx)


def _t(freedom: int, sure: bool) -> float:
    """
    >>> _t(1, False), round(_t(30, False), 2), round(_t(30, True), 2)
    (12.71, 2.04, 2.74)
    """
    table, limit, slope = (_T99, 2.576, 5.0) if sure else (_T95, 1.96, 2.5)
    return table[freedom - 1] if freedom <= len(table) else limit + slope / freedom
