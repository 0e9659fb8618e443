"""Layer norm: statistics in float32 at least, and the output in the dtype that is asked for.

Ba, Kiros, Hinton 2016, "Layer Normalization": ``(x - mean) / sqrt(var + eps) * weight + bias``,
with the biased variance over the trailing ``normalized_shape`` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.precision import at_least

if TYPE_CHECKING:
    from autofuse.hardware import Hardware

__all__ = ["PROVIDERS", "choose", "layer_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    provider: str = "torch",
) -> Tensor:
    """Layer norm over the trailing dimensions, whatever the mix of dtypes.

    Args:
        input: (..., *normalized_shape), any floating dtype.
        weight, bias: ``normalized_shape``, any floating dtype, or None.
        out_dtype: the output's dtype; the input's by default.
        provider: a key of `PROVIDERS`.

    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> layer_norm(x, (3,), out_dtype=torch.bfloat16).dtype
    torch.bfloat16
    >>> torch.equal(layer_norm(x, (3,)), F.layer_norm(x, (3,)))
    True
    """
    shape = list(normalized_shape)
    return PROVIDERS[provider](input, shape, weight, bias, eps, out_dtype or input.dtype)


def _torch(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    input = at_least(input, dtype)
    # The CPU's kernel adds up the parameters' gradients in the input's dtype: at 8,192 rows of bfloat16
    # they are 7% off. In float32 they are right, and autocast would have computed there anyway.
    if input.device.type == "cpu":
        input = at_least(input, torch.float32)
    # The native kernel takes float32 parameters beside a narrower input on the CPU alone; elsewhere,
    # and for a wider input, they must match the input.
    if not (input.device.type == "cpu" and _is(weight, torch.float32) and _is(bias, torch.float32)):
        weight = weight if weight is None else weight.to(input.dtype)
        bias = bias if bias is None else bias.to(input.dtype)
    elif input.dtype == torch.float64:
        weight, bias = _to(weight, input.dtype), _to(bias, input.dtype)
    if not torch.is_autocast_enabled(input.device.type):
        return F.layer_norm(input, shape, weight, bias, eps).to(dtype)
    with torch.autocast(input.device.type, enabled=False):  # which would copy the input to float32
        return F.layer_norm(input, shape, weight, bias, eps).to(dtype)


def _is(parameter: Tensor | None, dtype: torch.dtype) -> bool:
    return parameter is None or parameter.dtype == dtype


def _to(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _apex(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    if weight is None or bias is None:
        return _torch(input, shape, weight, bias, eps, dtype)
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_layer_norm_affine

    # Apex's mixed kernel reads the input in its dtype and writes the output in the parameters'.
    return mixed_dtype_fused_layer_norm_affine(input, weight.to(dtype), bias.to(dtype), shape, eps)


def _liger(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    if weight is None or bias is None or len(shape) != 1:
        return _torch(input, shape, weight, bias, eps, dtype)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(at_least(input, dtype), weight, bias, eps).to(dtype)


Kernel = Callable[[Tensor, list[int], Tensor | None, Tensor | None, float, torch.dtype], Tensor]
PROVIDERS: dict[str, Kernel] = {"apex": _apex, "liger": _liger, "torch": _torch}


def choose(hardware: Hardware) -> str:
    """Apex's kernel on CUDA where it works (it alone writes a narrower output directly), else torch's."""
    usable = hardware.kind == "cuda" and hardware.providers.get("apex", "absent") is None
    return "apex" if usable else "torch"
