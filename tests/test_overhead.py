"""What autofuse itself costs, with margins for a machine that does other things too.

`benchmarks/overhead.py` has the exact figures.
"""

from __future__ import annotations

from benchmarks.overhead import OPTIMIZE_LIMIT, machinery_cost, optimize_cost


def test_optimize_takes_less_than_two_seconds_on_a_thousand_blocks_and_is_linear() -> None:
    small, large = optimize_cost(125, repeats=2), optimize_cost(1000, repeats=2)
    assert large.modules == 4001
    assert large.cpu_s < OPTIMIZE_LIMIT
    # A part that is quadratic would show as up to 8 times the time per module.
    assert large.us_per_module < 2.5 * small.us_per_module


def test_the_machinery_of_a_step_takes_less_than_half_a_millisecond() -> None:
    """Which is 1% of a step of 50 ms."""
    assert machinery_cost(pairs=200).overhead_us < 500
