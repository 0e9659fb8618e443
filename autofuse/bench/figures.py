"""What came of a race, as JSON can hold it, and the goals that are held against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

from autofuse.bench.candidates import CANDIDATES
from autofuse.bench.floor import Floor
from autofuse.bench.memory import Memory
from autofuse.bench.race import Runner, best
from autofuse.bench.workloads import BIG_VOCABULARY, Workload

__all__ = [
    "Goal",
    "goals",
    "goals_over_all",
    "memory",
    "memory_goals",
    "results",
    "spread",
    "until_fast",
]

NEVER_SLOWER = 1.03  # times the best hand-tuned, on every model
FASTER, ON_HALF = 0.85, 0.5  # times the best hand-tuned, on this share of the models
SOON = 1 / 3  # of the time that the whole model's compilation takes until it is useful
SAME_LOSS = 1e-4  # relative, in fp32, in each step
LESS_MEMORY = 1 / 3  # of eager's
# "Fast": the median of so many steps, and for good the mean of the warm-up's rest, times the final time.
WINDOW, FINAL_SPEED, STAYS = 3, 1.05, 1.10


# --- figures -----------------------------------------------------------------------------------


def results(
    workload: Workload, runners: Sequence[Runner], floor: Floor | str | None = None
) -> dict[str, Any]:
    """What is known of all candidates. Seconds, unless a name says something else."""
    hand = best(runners)
    eager = next((r for r in runners if r.candidate.kind == "eager"), None)
    return {
        "title": workload.title,
        "floor_goal": workload.floor_goal,
        "best_hand_tuned": None if hand is None else hand.candidate.name,
        "floor": _floor_figures(floor),
        "candidates": [_row(runner, hand, None if workload.random else eager, floor) for runner in runners],
    }


def _floor_figures(floor: Floor | str | None) -> dict[str, Any]:
    if not isinstance(floor, Floor):
        return {"failure": floor}
    seconds = {f"{dtype}_s": floor.seconds(dtype) for dtype in floor.rates}
    return {"flops": floor.flops, "rates_gflops": floor.rates, **seconds, "alone_s": floor.alone}


def _row(
    runner: Runner, hand: Runner | None, reference: Runner | None, floor: Floor | str | None
) -> dict[str, Any]:
    rounds, warm_up = runner.rounds, runner.warm_up
    ratios = _ratios(runner.rounds, hand.rounds if hand else ())
    cpu = _ratios(runner.cpu, hand.cpu if hand else ())
    step = median(rounds) if rounds else None
    least = floor.seconds(runner.computes_in) if isinstance(floor, Floor) else None
    peaks = [turn.cuda_peak for turn in runner.turns if turn.cuda_peak is not None]
    return {
        **asdict(runner.candidate),
        "failure": runner.failure,
        "seconds": rounds,
        "median_s": step,
        "iqr_s": spread(rounds),
        "ratio": median(ratios) if ratios else None,
        "ratio_iqr": spread(ratios),
        "cpu_s": runner.cpu,
        "cpu_ratio": median(cpu) if cpu else None,
        "setup_s": runner.setup,
        "warm_up_s": warm_up.seconds,
        "settled": warm_up.settled,
        "until_fast_s": until_fast(runner.setup, warm_up.seconds, rounds, step),
        "fast_for_good_s": until_fast(runner.setup, warm_up.seconds, rounds, step, for_good=True),
        "computes_in": runner.computes_in,
        "floor_share": least / step if least and step else None,
        "cuda_peak_bytes": max(peaks, default=None),
        "losses": runner.losses,
        "loss_difference": _loss_difference(runner, reference),
        "report": runner.report,
    }


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=False)]


def _loss_difference(runner: Runner, reference: Runner | None) -> float | None:
    """The largest relative one to eager's, step by step; None where they need not agree."""
    if reference is None or runner.computes_in != "fp32" or not runner.rounds:
        return None
    pairs = zip(runner.losses, reference.losses, strict=False)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)


def until_fast(
    setup: float,
    warm_up: Sequence[float],
    rounds: Sequence[float],
    final: float | None,
    *,
    for_good: bool = False,
) -> float | None:
    """Seconds until a step takes its ``final`` time: the end of the first three steps in a row whose
    median is at most 1.05 times that.

    Args:
        for_good: and after which the rest of the warm-up takes at most 1.10 times that per step on
            average: whatever tuning still costs later (proofs, compilations, the slower steps of a
            trial) is in that average.

    >>> until_fast(2.0, [30.0, 1.0, 1.0], [1.0], 1.0)
    34.0
    >>> warm_up = [1.0, 1.0, 1.0, 30.0, 1.0, 1.0, 1.0]  # a compilation was to come
    >>> [until_fast(0.0, warm_up, [1.0], 1.0, for_good=good) for good in (False, True)]
    [3.0, 33.0]
    """
    if final is None:
        return None
    seconds = [*warm_up, *rounds]
    for end, passed in enumerate(accumulate(seconds, initial=setup)):
        window, rest = seconds[max(0, end - WINDOW) : end], warm_up[end:] if for_good else ()
        quick = len(window) == WINDOW and median(window) <= FINAL_SPEED * final
        if quick and sum(rest) <= STAYS * final * len(rest):
            return passed
    return None


def spread(values: Sequence[float]) -> float:
    """The interquartile range.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def memory(workload: Workload = BIG_VOCABULARY) -> dict[str, Any]:
    """The peaks of eager and of autofuse, each after its warm-up in a fresh process, in bytes."""
    peaks: dict[str, Memory] = {}
    for name in ("eager", "autofuse", "autofuse-fp32"):
        runner = Runner(workload, CANDIDATES[name])
        try:
            runner.start()
            runner.settle()
            peak = runner.memory()
        finally:
            runner.finish()
        if peak is None:
            raise RuntimeError(f"the memory of {name}: {runner.failure}")
        peaks[name] = peak
    eager, fused = peaks["eager"], peaks["autofuse"]
    return {
        "title": workload.title,
        "peaks": {name: asdict(peak) for name, peak in peaks.items()},
        "ratio": fused.peak / eager.peak,
        "ratio_of_others": fused.others / eager.others,
    }


# --- goals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """Something promised, and what came of it.

    >>> print(Goal("share of the floor", 0.9, 0.85, at_least=True))
    met: share of the floor: 0.9 (goal: at least 0.85)
    >>> print(Goal("time of a step", 1.1, 1.03, spread=0.02))
    NOT MET: time of a step: 1.1, spread 0.02 (goal: at most 1.03)
    """

    what: str
    value: float
    limit: float
    spread: float = 0.0
    at_least: bool = False

    @property
    def met(self) -> bool:
        """False for a value that is not a number, too."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        spread = f", spread {self.spread:.2g}" if self.spread else ""
        verdict = "met" if self.met else "NOT MET"
        limit = f"{'at least' if self.at_least else 'at most'} {self.limit:.3g}"
        return f"{verdict}: {self.what}: {self.value:.3g}{spread} (goal: {limit})"


def goals(result: Mapping[str, Any]) -> Iterator[Goal]:
    """What is promised of one model: autofuse after its tuning, and every fp32 loss.

    Only what was asked for is judged: nothing about autofuse where it did not take part, nothing
    relative to the best hand-tuned without one.
    """
    title, rows = result["title"], {row["name"]: row for row in result["candidates"]}
    ours, hand = rows.get("autofuse"), result["best_hand_tuned"]
    if ours is not None and hand is not None:
        ratio = float("inf") if ours["ratio"] is None else ours["ratio"]
        yield Goal(f"{title}: autofuse over {hand}", ratio, NEVER_SLOWER, ours["ratio_iqr"])
    compiled = [row["until_fast_s"] for row in rows.values() if _compiled_by_hand(row)]
    if ours is not None and compiled and min(compiled) > 0:
        share = float("inf") if ours["until_fast_s"] is None else ours["until_fast_s"] / min(compiled)
        yield Goal(f"{title}: autofuse's time until fast over whole-model compile's", share, SOON)
    if ours is not None and result["floor_goal"] is not None:
        share = ours["floor_share"] or 0.0
        what = f"{title}: autofuse's share of the floor in {ours['computes_in']}"
        yield Goal(what, share, result["floor_goal"], at_least=True)
    losses = [row["loss_difference"] for row in rows.values() if row["loss_difference"] is not None]
    if losses:
        yield Goal(f"{title}: the largest difference of an fp32 loss", max(losses), SAME_LOSS)


def _compiled_by_hand(row: Mapping[str, Any]) -> bool:
    return row["kind"] == "hand-tuned" and row["compiled"] and row["until_fast_s"] is not None


def goals_over_all(found: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    """What is promised of all models together."""
    rows = [row for result in found for row in result["candidates"] if row["name"] == "autofuse"]
    if len(found) > 1 and rows:
        faster = sum(row["ratio"] is not None and row["ratio"] < FASTER for row in rows)
        what = f"share of the models on which autofuse takes less than {FASTER} of the best hand-tuned"
        yield Goal(what, faster / len(rows), ON_HALF, at_least=True)


def memory_goals(result: Mapping[str, Any]) -> Iterator[Goal]:
    """The memory promised, with the parameters' gradients and without."""
    what = f"{result['title']}: autofuse's memory over eager's"
    yield Goal(what, result["ratio"], LESS_MEMORY)
    yield Goal(f"{what}, without gradients of parameters", result["ratio_of_others"], LESS_MEMORY)
