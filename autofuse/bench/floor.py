"""The floor of a step: its matrix products at the rate that this machine multiplies matrices at."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autofuse.bench.apart import apart
from autofuse.bench.race import device_type
from autofuse.bench.workloads import Workload
from autofuse.hardware import DTYPES, Hardware
from autofuse.timing import median_seconds, waiting_for

__all__ = ["Floor", "count_flops", "floor_of", "products_alone"]

_aten = torch.ops.aten
PRODUCTS = _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default


@dataclass(frozen=True)
class Floor:
    """The useful work of a step.

    Args:
        flops: of the products in the eager step's forward and backward, padding and ignored labels
            included: where there are any, less would do.
        rates: dtype name -> GFLOP/s, measured here with all threads.
        alone: dtype name -> seconds that the eager step's own products take, each run by itself: no step
            that makes the same calls can take less, whatever the rate of square matrices.
    """

    flops: int
    rates: dict[str, float]
    alone: dict[str, float] = field(default_factory=dict)

    def seconds(self, dtype: str) -> float | None:
        """The least that a step in "fp32" or "bf16" can take; None without a rate.

        >>> Floor(2 * 10**9, {"fp32": 100.0}).seconds("fp32")
        0.02
        """
        rate = self.rates.get(dtype)
        return None if rate is None else self.flops / rate / 1e9


def count_flops(workload: Workload) -> int:
    """Floating-point operations of the products in one eager forward and backward."""
    # PyTorch's counter does not know the CPU's fused attention: in pieces, each product is counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        _forward_and_backward(workload, torch.float32)
    return int(counter.get_total_flops())


def products_alone(workload: Workload, dtype: torch.dtype) -> float:
    """Seconds that the products of one eager forward and backward take in ``dtype``, under autocast where
    that is not float32: each on fresh tensors of the same shapes and layouts, and nothing else between."""
    with _Calls() as calls, sdpa_kernel(SDPBackend.MATH):
        _forward_and_backward(workload, dtype)
    wait = waiting_for(device_type())
    total = 0.0
    with torch.no_grad():
        for (operation, tensors), count in calls.found.items():
            args = [_tensor(*layout) for layout in tensors]
            total += count * median_seconds(functools.partial(operation, *args), wait)
    return total


class _Calls(TorchDispatchMode):
    """Counts the products by operation and by shape, strides and dtype of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            tensors = tuple(_layout(x) for x in args if isinstance(x, Tensor))
            self.found[func, tensors] += 1
        return func(*args, **(kwargs or {}))


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return torch.full((size,), 0.5, dtype=dtype, device=device_type()).as_strided(shape, strides)


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.stride(), x.dtype


def _forward_and_backward(workload: Workload, dtype: torch.dtype) -> None:
    device = device_type()
    model, _, batches = workload.make(1)
    model.to(device)
    batch = {name: tensor.to(device) for name, tensor in batches[0].items()}
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = workload.loss(model, batch)
    loss.backward()


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
    alone = {name: products_alone(workload, DTYPES[name]) for name in known}
    return Floor(count_flops(workload), known, alone)
