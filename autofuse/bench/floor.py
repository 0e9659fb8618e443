"""The floor of a step: its matrix products at the rate that this machine multiplies matrices at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autofuse.bench.apart import apart
from autofuse.bench.race import device_type
from autofuse.bench.workloads import Workload
from autofuse.hardware import DTYPES, Hardware

__all__ = ["Floor", "count_flops", "floor_of"]


@dataclass(frozen=True)
class Floor:
    """The useful work of a step.

    Args:
        flops: of the products in the eager step's forward and backward, padding and ignored labels
            included: where there are any, less would do.
        rates: dtype name -> GFLOP/s, measured here with all threads.
    """

    flops: int
    rates: dict[str, float]

    def seconds(self, dtype: str) -> float | None:
        """The least that a step in "fp32" or "bf16" can take; None without a rate.

        >>> Floor(2 * 10**9, {"fp32": 100.0}).seconds("fp32")
        0.02
        """
        rate = self.rates.get(dtype)
        return None if rate is None else self.flops / rate / 1e9


def count_flops(workload: Workload) -> int:
    """Floating-point operations of the products in one eager forward and backward."""
    device = device_type()
    model, _, batches = workload.make(1)
    model.to(device)
    batch = {name: tensor.to(device) for name, tensor in batches[0].items()}
    # PyTorch's counter does not know the CPU's fused attention: in pieces, each product is counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        workload.loss(model, batch).backward()
    return int(counter.get_total_flops())


def floor_of(workload: Workload) -> Floor | str:
    """The floor, found in a process of its own while nothing else of the benchmark runs; or why not."""
    try:
        found: Floor = apart(_find, workload)
    except RuntimeError as error:
        return str(error)
    return found


def _find(workload: Workload) -> Floor:
    hardware, threads = Hardware.detect(device_type()), torch.get_num_threads()
    rates = {name: hardware.matmul_rate(DTYPES[name], threads) for name in ("fp32", "bf16")}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    return Floor(count_flops(workload), known)
