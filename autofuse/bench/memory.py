"""The peak of what one step allocates beside the weights, the optimizer's state and the batch.

Gradients, activations, logits and whatever is temporary: the running sum of PyTorch's own allocations
and frees, once of all, and once without the tensors that end up as the parameters' gradients, which
are as large as the weights whatever is done about logits. The rise of the process's resident memory,
which also sees what other libraries allocate, is beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Memory", "Meter"]


@dataclass(frozen=True)
class Memory:
    """The peak of one step above what was there before it, in bytes."""

    peak: int
    others: int  # the peak of all but the tensors that end up as the parameters' gradients
    resident: int | None  # the rise of resident memory; None where the system does not tell


class Meter:
    """Measures two steps: the first one's resident memory, the second one's allocations."""

    def __init__(self, device_type: str) -> None:
        self._device = device_type
        self._number = 0
        self._gradients: set[int] = set()
        self._rise: int | None = None

    def before(self) -> None:
        if self._number == 0:
            self._start = _resident("VmRSS", reset=True)
            return
        self._hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: self._gradients.update(_gradients(optimizer))
        )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()

    def after(self) -> None:
        if self._number == 0:
            most = _resident("VmHWM")
            if most is not None and self._start is not None and self._device == "cpu":
                self._rise = most - self._start
        else:
            self._profile.__exit__(None, None, None)
            self._hook.remove()
        self._number += 1

    def result(self) -> Memory:
        events = _allocations(self._profile, self._device)
        last = {address: index for index, (address, size) in enumerate(events) if size > 0}
        others = [
            size
            for index, (address, size) in enumerate(events)
            if address not in self._gradients or index < last.get(address, 0)
        ]
        return Memory(
            peak=max(accumulate((size for _, size in events), initial=0)),
            others=max(accumulate(others, initial=0)),
            resident=self._rise,
        )


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Where the gradients lie that the optimizer is about to use."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            yield parameter.grad.untyped_storage().data_ptr()


def _allocations(seen: torch.profiler.profile, device: str) -> list[tuple[int, int]]:
    """What PyTorch's allocator gave out and took back, in order: (address, bytes), negative if taken back."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events, waiting = [], seen.profiler.kineto_results.experimental_event_tree()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == device:
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(events, key=lambda e: e[0])]


def _resident(line: str, reset: bool = False) -> int | None:
    """``line`` of the process's status, in bytes; ``reset`` starts the peak anew."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
