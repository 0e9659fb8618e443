"""The autocast dtype of the training step that is running, for the fused modules inside it.

A fused module may give its output in the autocast dtype inside a step, where every consumer casts
down anyway. A direct ``model(...)`` call outside a step keeps the dtypes that it always had, even
under the caller's own autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["at_least", "step_autocast", "step_dtype"]

_dtype: torch.dtype | None = None


@contextmanager
def step_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Mark what runs inside as part of a training step under autocast to ``dtype``."""
    global _dtype
    before, _dtype = _dtype, dtype
    try:
        yield
    finally:
        _dtype = before


def step_dtype(device_type: str) -> torch.dtype | None:
    """The running step's autocast dtype; None outside a step or where autocast is switched off."""
    return _dtype if _dtype is not None and torch.is_autocast_enabled(device_type) else None


def at_least(input: Tensor, dtype: torch.dtype) -> Tensor:
    """``input``, widened to ``dtype`` if that is wider: for a kernel whose output has its input's dtype,
    so that an output that is to be wider is not rounded on the way.

    >>> at_least(torch.ones(1, dtype=torch.bfloat16), torch.float32).dtype
    torch.float32
    >>> at_least(torch.ones(1), torch.bfloat16).dtype
    torch.float32
    """
    return input.to(dtype) if dtype.itemsize > input.dtype.itemsize else input
