"""Calls of attention, for the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16


def qkv(tokens: int = 12, keys: int = 12, heads: int = 4, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + keys)
    shapes = (4, tokens), (heads, keys), (heads, keys)
    return [torch.randn(2, h, n, 8, generator=generator).to(dtype).requires_grad_() for h, n in shapes]


def outcome(attend: Any, given: list[Tensor], mask: Tensor | None, **options: Any) -> list[Tensor]:
    out = attend(*given, mask, **options)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, direction)]


LOWER = torch.ones(12, 12).tril().bool()
ADDED = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(4))
