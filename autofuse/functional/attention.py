"""Attention over short sequences that computes in float32 where it would compute in bf16 on a CPU.

The backward of PyTorch's bf16 kernel for CPUs has a fixed cost for each head of each row, which is most
of its time where sequences are short. Measured on 2 cores of a Xeon with AMX, PyTorch 2.13, ms of the
backward in bf16, and of casting to float32 and float32's:

    8 rows, 8 heads, 64 channels: 64 tokens 6.9 and 2.3, 128 tokens 14.4 and 8.0, 192 tokens 14.0 and
    13.5, 256 tokens 22 and 22 to 25, 512 tokens 63 and 88; 32 channels: 128 tokens 14.1 and 4.5, 256
    tokens 17.8 and 12.9; 128 channels: 128 tokens 18 and 16

The forward takes longer in float32 (128 tokens, 64 channels: 2.5 ms, and 1.1 in bf16), which is less than
the backward saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SHORT", "in_float32", "is_short", "obstacle"]

# The most tokens (of queries or of keys, whichever are more) times channels of a head that are short.
SHORT = 8192

_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> str | None:
    """Why such a call is not for float32, however short it may be; None where it is.

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> obstacle(x, x, x) is None, obstacle(x.float(), x.float(), x.float())
    (True, 'its attention computes in float32')
    """
    if not all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in (query, key, value)):
        return "its attention is not of ordinary tensors on a CPU"
    dtype = _computes_in(query, key, value)
    if dtype != torch.bfloat16:
        return f"its attention computes in {str(dtype).removeprefix('torch.')}"
    if dropout_p != 0.0:
        return "its attention has dropout, for which it could draw other numbers"
    return None


def is_short(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> bool:
    """Whether a call without `obstacle` is trained, short, and of the kind that was measured.

    Args:
        query, key, value: (rows, heads, tokens, channels).

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> is_short(x, x, x), is_short(x.detach(), x.detach(), x.detach())
    (True, False)
    """
    if not all(x.dim() == 4 and x.shape[-1] == query.shape[-1] for x in (query, key, value)):
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if attn_mask is not None and not _plain(attn_mask):
        return False
    return max(query.shape[-2], key.shape[-2]) * query.shape[-1] <= SHORT


def in_float32(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` in float32; the output in bf16, as it would have been.

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> in_float32(x, x, x).dtype
    torch.bfloat16
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        if torch.is_autocast_enabled("cpu"):  # which makes float32's lowest number an infinity, as here
            attn_mask = attn_mask.to(torch.bfloat16)
        attn_mask = attn_mask.float()
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask, 0.0, is_causal, **options
        )
        return out.to(torch.bfloat16)


def _computes_in(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    """The dtype of the kernel; of mixed ones without autocast the first, and PyTorch will refuse them."""
    dtypes = query.dtype, key.dtype, value.dtype
    if torch.is_autocast_enabled("cpu") and all(dtype in _CAST_BY_AUTOCAST for dtype in dtypes):
        return torch.get_autocast_dtype("cpu")
    return next((dtype for dtype in dtypes if dtype != torch.bfloat16), torch.bfloat16)


def _plain(mask: Tensor) -> bool:
    """A mask that is not trained, and that PyTorch takes beside bf16."""
    kinds = (torch.bool, torch.bfloat16, torch.float32)
    return type(mask) is Tensor and not mask.requires_grad and mask.dtype in kinds
