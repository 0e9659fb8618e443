"""Attention in bf16 on a CPU by whole matrix products, where that takes less time than PyTorch's own.

PyTorch's bf16 kernel for CPUs goes through the scores block by block, which pays where sequences are long.
Where they are short, its backward has a fixed cost for each head of each row; and with dropout there is no
kernel: separate operations run in float32. Measured on 2 cores of a Xeon with AMX, PyTorch 2.13, ms of
forward and backward, causal, by PyTorch and here (rows x heads x tokens x channels of a head):

    16x12x64x64 21.1 and 3.9, 64x6x65x64 61 and 10.7, 8x12x128x64 21.6 and 7.0, 4x12x256x64 16.0 and 8.7,
    4x8x256x32 8.9 and 4.6, 2x8x256x128 6.7 and 4.5, 2x16x384x64 18.8 and 13.1, 4x12x512x64 48 and 43,
    2x12x1024x64 56 and 86; with dropout 8x12x128x64 25.1 and 16.4, 4x12x256x64 45.8 and 31.0

For one head, with mask M, dropout's mask K of zeros and ones, c = 1 / (1 - p), and G the gradient of O::

    S = scale Q K^T + M    P = softmax(S)    O = c (K P) V
    dV = c (K P)^T G    dP = K (G V^T)    dS = P (dP - rowsum(dP P))
    dQ = c scale dS K    dK = c scale dS^T Q

(Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Dao et al. 2022, https://arxiv.org/abs/2205.14135,
appendix B.2.) Scores and softmax are in float32, as in PyTorch's kernel: scores in bf16 made its error four
times as large. The probabilities are kept in bf16 for the backward: 2 bytes a score, 4 with dropout. Errors
against float64 are 0.6 to 1.4 times the kernel's, by tensor and shape, and with dropout 1.4 to 2.3 times
those of the float32 operations (64 to 512 tokens of normal numbers).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SHORT", "by_products", "is_faster", "obstacle", "reference"]

# The most tokens, of queries or of keys, whichever are more.
SHORT = 384

_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why such a call is not for products, however short it may be; None where it is.

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> obstacle(x, x, x) is None, obstacle(x.float(), x.float(), x.float())
    (True, 'its attention computes in float32')
    """
    if not all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in (query, key, value)):
        return "its attention is not of ordinary tensors on a CPU"
    dtype = _computes_in(query, key, value)
    if dtype != torch.bfloat16:
        return f"its attention computes in {str(dtype).removeprefix('torch.')}"
    return None


def is_faster(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    **options: Any,
) -> bool:
    """Whether a call without `obstacle` is trained, of the kind that was measured, and faster by products.

    Args:
        query, key, value: (rows, heads, tokens, channels).

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> is_faster(x, x, x), is_faster(x.detach(), x.detach(), x.detach())
    (True, False)
    """
    if not all(x.dim() == 4 and x.shape[-1] == query.shape[-1] for x in (query, key, value)):
        return False
    rows, heads = query.shape[:2]
    groups = heads % max(1, key.shape[1]) == 0 if enable_gqa else heads == key.shape[1]
    if key.shape[:3] != value.shape[:3] or key.shape[0] != rows or not groups or query.numel() == 0:
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if attn_mask is not None and (is_causal or not _plain(attn_mask)):
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    if dropout_p > 0.0:
        return dropout_p < 1.0
    # The switch is that of CPUs' kernel too: without it the caller wants the plain operations.
    if not torch.compiler.is_compiling() and not torch.backends.cuda.flash_sdp_enabled():
        return False
    return max(query.shape[-2], key.shape[-2]) <= SHORT


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of tensors for which `is_faster` holds, in bf16.

    With dropout it draws the numbers that PyTorch draws, so that the same ones are dropped.

    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    >>> by_products(x, x, x).shape
    torch.Size([1, 1, 4, 8])
    """
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None and attn_mask.is_floating_point() and torch.is_autocast_enabled("cpu"):
        attn_mask = attn_mask.to(torch.bfloat16)  # makes float32's lowest number an infinity, as PyTorch does
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        q, k, v = (x.to(torch.bfloat16) for x in (query, key, value))
        out: Tensor = _Products.apply(q, k, v, attn_mask, dropout_p, is_causal, scale)
    return out


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The same by PyTorch: ``F.scaled_dot_product_attention``."""
    return F.scaled_dot_product_attention(*args, **kwargs)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        q, k, v = _heads(query), _heads(key), _heads(value)
        scores = torch.bmm(q.float() * scale, k.float().transpose(1, 2))
        added, blind = _causal(scores) if is_causal else _added(mask)
        if added is not None:
            scores.view(*query.shape[:3], -1).add_(added)
        p = torch.softmax(scores, -1)
        narrow, kept, grow = p.to(q.dtype), None, 1 / (1 - dropout_p)
        if dropout_p > 0.0:
            kept = torch.bernoulli(narrow, 1 - dropout_p)  # only the shape of the first argument counts
            out = torch.bmm(p.mul_(grow).to(q.dtype) * kept, v).view(query.shape)
        else:  # laid out as the query is, as by PyTorch
            out = torch.empty_like(query).copy_(torch.bmm(narrow, v).view(query.shape))
        ctx.save_for_backward(query, key, value, narrow, kept, added, blind)  # no copies by heads: smaller
        ctx.scale, ctx.grow = scale, grow
        return _unless(blind, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, p, kept, added, blind = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
                out = _written_out(query, key, value, kept, added, blind, ctx.scale, ctx.grow)
                wanted = [x for x in (query, key, value) if x.requires_grad]
                found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
                gradients = (next(found) if x.requires_grad else None for x in (query, key, value))
                return *gradients, *[None] * 4
            q, k, v, g = _heads(query), _heads(key), _heads(value), _heads(_unless(blind, grad))
            dv = torch.bmm((p if kept is None else p * kept).transpose(1, 2), g)
            dp = torch.bmm(g, v.transpose(1, 2))
            dp = dp if kept is None else dp.mul_(kept)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq, dk = torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q)
            factors = ctx.scale * ctx.grow, ctx.scale * ctx.grow, ctx.grow
        scaled = ((x if f == 1 else x * f) for x, f in zip((dq, dk, dv), factors, strict=True))
        return *(x.view(y.shape) for x, y in zip(scaled, (query, key, value), strict=True)), *[None] * 4


def _heads(x: Tensor) -> Tensor:
    """(rows, heads, tokens, channels) -> (rows * heads, tokens, channels)."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor | None,
    added: Tensor | None,
    blind: Tensor | None,
    scale: float,
    grow: float,
) -> Tensor:
    """The same in differentiable operations, for a backward through the backward."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    p = torch.softmax(scores if added is None else scores + added, -1)
    p = p if kept is None else p * kept.view(p.shape) * grow
    return _unless(blind, p @ value.float()).to(query.dtype)


def _causal(scores: Tensor) -> tuple[Tensor, None]:
    size = scores.shape[-2:]
    return torch.full(size, -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1), None


def _added(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(what is added to the scores, which queries see no key). Those see all here, so that nothing becomes
    NaN, and their output is zero, as PyTorch's is."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    blind = (mask == -torch.inf).all(-1, keepdim=True)
    return mask.float().masked_fill(blind, 0.0), blind


def _unless(blind: Tensor | None, x: Tensor) -> Tensor:
    return x if blind is None else x.masked_fill(blind, 0.0)


def _computes_in(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    """The dtype of the kernel; of mixed ones without autocast the first, and PyTorch will refuse them."""
    dtypes = query.dtype, key.dtype, value.dtype
    if torch.is_autocast_enabled("cpu") and all(dtype in _CAST_BY_AUTOCAST for dtype in dtypes):
        return torch.get_autocast_dtype("cpu")
    return next((dtype for dtype in dtypes if dtype != torch.bfloat16), torch.bfloat16)


def _plain(mask: Tensor) -> bool:
    """A mask that is not trained, and that PyTorch takes beside bf16."""
    kinds = (torch.bool, torch.bfloat16, torch.float32)
    return type(mask) is Tensor and not mask.requires_grad and mask.dtype in kinds and mask.dim() >= 2
