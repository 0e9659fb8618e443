"""What autofuse itself costs: the call of ``optimize``, and the machinery around each step.

    python -m benchmarks.overhead [--json]

Everything runs on one thread and is measured in CPU seconds of the process, which are the seconds of
an idle machine whatever else runs on this one. The wall clock is shown beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autofuse

BLOCKS = (125, 250, 500, 1000)
OPTIMIZE_LIMIT = 2.0  # seconds, for the largest
STEP_MS, STEP_LIMIT = 50.0, 0.01  # the step's length, and the share of it that may be overhead

Step = Callable[[Tensor, Tensor], Any]


class Block(nn.Module):
    """A small pre-norm block with a residual connection: four modules with the block itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(blocks: int, width: int = 16) -> nn.Module:
    """A model of so many blocks; the same numbers in it every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


@contextmanager
def one_thread() -> Iterator[None]:
    """On one thread, so that CPU time is the time that a step takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- optimize ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizeCost:
    """The least CPU and wall seconds of ``optimize(measure=False, compile=False)``."""

    blocks: int
    modules: int
    cpu_s: float
    wall_s: float

    @property
    def us_per_module(self) -> float:
        return self.cpu_s / self.modules * 1e6


def optimize_cost(blocks: int, repeats: int = 3) -> OptimizeCost:
    """Each time with a new model; what a process needs once (the matmul rates) is left out."""
    _optimize(stack(1))
    times = []
    with one_thread():
        for _ in range(repeats):
            model = stack(blocks)
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            _optimize(model)
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return OptimizeCost(
        blocks, sum(1 for _ in model.modules()), min(c for c, _ in times), min(w for _, w in times)
    )


def _optimize(model: nn.Module) -> autofuse.TrainingStep:
    optimizer = torch.optim.AdamW(model.parameters())
    return autofuse.optimize(
        model, optimizer, loss_fn=nn.functional.mse_loss, measure=False, compile=False, precision="fp32"
    )


# --- the step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """A step by hand and the same step by autofuse with no patch at all; medians in milliseconds."""

    by_hand_ms: float
    autofuse_ms: float
    overhead_us: float  # the median of the differences, pair by pair

    @property
    def overhead(self) -> float:
        return self.overhead_us / 1e3 / self.by_hand_ms


def step_cost(blocks: int, width: int, batch: int, pairs: int) -> StepCost:
    """Interleaved, and in both orders in turn."""
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    targets = torch.zeros(batch, width)
    by_hand, by_autofuse = _step_by_hand(stack(blocks, width)), _step_by_autofuse(stack(blocks, width))
    order = [by_hand, by_autofuse]
    times: dict[Step, list[float]] = {step: [] for step in order}
    with one_thread():
        for pair in range(pairs + 5):
            for step in order if pair % 2 else reversed(order):
                start = time.process_time()
                step(inputs, targets)
                times[step].append(time.process_time() - start)
    hand, fused = times[by_hand][5:], times[by_autofuse][5:]
    difference = median(b - a for a, b in zip(hand, fused, strict=True))
    return StepCost(median(hand) * 1e3, median(fused) * 1e3, difference * 1e6)


def _step_by_hand(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _step_by_autofuse(model: nn.Module) -> Step:
    return autofuse.optimize(
        model,
        torch.optim.AdamW(model.parameters()),
        loss_fn=nn.functional.mse_loss,
        precision="fp32",
        compile=False,
        only=(),
    )


def machinery_cost(pairs: int = 500) -> StepCost:
    """On a model that is next to nothing, so that the difference is the machinery alone."""
    return step_cost(blocks=1, width=4, batch=2, pairs=pairs)


def long_step_cost(pairs: int = 200) -> StepCost:
    """On a model of 24 blocks, with the batch that makes a step about `STEP_MS` long."""
    blocks, width, batch = 24, 128, 256
    probe = step_cost(blocks, width, batch, pairs=5).by_hand_ms
    return step_cost(blocks, width, max(1, round(batch * STEP_MS / probe)), pairs)


# --- what is shown -----------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    start = time.perf_counter()
    _optimize(stack(1))
    first = time.perf_counter() - start
    costs = [optimize_cost(blocks) for blocks in BLOCKS]
    step = long_step_cost()
    return {
        "first_call_s": first,
        "optimize": [{**asdict(c), "us_per_module": c.us_per_module} for c in costs],
        "linearity": costs[-1].us_per_module / costs[0].us_per_module,
        "machinery": asdict(machinery_cost()),
        "step": {**asdict(step), "overhead": step.overhead},
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="optimize(measure=False, compile=False)", title_justify="left")
    for column in ("blocks", "modules", "CPU seconds", "wall seconds", "us per module"):
        table.add_column(column, justify="right")
    for cost in result["optimize"]:
        table.add_row(
            f"{cost['blocks']:,}",
            f"{cost['modules']:,}",
            f"{cost['cpu_s']:.3f}",
            f"{cost['wall_s']:.3f}",
            f"{cost['us_per_module']:.0f}",
        )
    console.print(table)
    console.print(
        f"A module of {BLOCKS[-1]:,} blocks costs {result['linearity']:.2f} times one of {BLOCKS[0]}. "
        f"The first call in a process, which measures the hardware, took {result['first_call_s']:.2f} s.\n"
    )
    table = Table(title="One step by hand and by autofuse without any patch", title_justify="left")
    for column in ("model", "by hand, ms", "autofuse, ms", "overhead, us", "overhead"):
        table.add_column(column, justify="right")
    for name, cost in (("next to nothing", result["machinery"]), ("24 blocks", result["step"])):
        share = f"{cost['overhead']:.2%}" if "overhead" in cost else ""
        table.add_row(
            name,
            f"{cost['by_hand_ms']:.3f}",
            f"{cost['autofuse_ms']:.3f}",
            f"{cost['overhead_us']:.0f}",
            share,
        )
    console.print(table)


def failures(result: dict[str, Any]) -> list[str]:
    """Which of the promised costs are exceeded, in words."""
    largest, step = result["optimize"][-1], result["step"]
    found = []
    if largest["cpu_s"] > OPTIMIZE_LIMIT:
        found.append(f"optimize took {largest['cpu_s']:.1f} s on {largest['blocks']:,} blocks")
    if result["linearity"] > 1.5:
        found.append(f"optimize is not linear: {result['linearity']:.2f} times the time per module")
    if step["overhead"] > STEP_LIMIT:
        found.append(f"the overhead of a step is {step['overhead']:.1%}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 where a promised cost is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    result = measure()
    console = Console()
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, console)
    exceeded = failures(result)
    for failure in exceeded:
        print(f"exceeded: {failure}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
