"""How long something takes on this machine: the median of a few runs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["measure_matmul_rate", "median_seconds", "waiting_for"]


@functools.cache
def measure_matmul_rate(device_type: str, dtype: torch.dtype, threads: int) -> float | None:
    """GFLOP/s of square matrix products: the median of a few, after a warm-up."""
    size = 512 if device_type == "cpu" else 4096
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # 1: nothing below may open the OpenMP pool, not even `arange`
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            numbers = torch.arange(size * size, dtype=torch.float32, device=device_type)
            matrix = numbers.remainder_(7).sub_(3).view(size, size).to(dtype)
            seconds = median_seconds(lambda: torch.mm(matrix, matrix), waiting_for(device_type))
    except RuntimeError:  # a dtype that this device has no matrix product for
        return None
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / seconds / 1e9


def waiting_for(device_type: str) -> Callable[[], object]:
    """What waits until such a device has done what it was given."""
    return (lambda: None) if device_type == "cpu" else getattr(torch, device_type).synchronize


def median_seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median time of up to nine runs, or of as many as fit into a tenth of a second."""
    for _ in range(2):  # oneDNN and cuBLAS choose their kernel in the first call
        started = time.perf_counter()
        run()
        wait()
        if time.perf_counter() - started > 0.05:
            break
    times: list[float] = []
    while len(times) < 9 and sum(times) < 0.1:
        started = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
