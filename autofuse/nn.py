"""Drop-in norm classes, with the constructors of Apex's, on any device.

As in Apex, the statistics are in float32 and under autocast the output is in the autocast dtype,
so that no float32 copy is written only to be cast down by the next matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autofuse.functional.layer_norm import choose as choose_layer_norm
from autofuse.functional.layer_norm import layer_norm
from autofuse.functional.rms_norm import choose as choose_rms_norm
from autofuse.functional.rms_norm import rms_norm
from autofuse.hardware import Hardware

__all__ = ["FusedLayerNorm", "FusedRMSNorm"]


def _out_dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


@lru_cache(maxsize=8)
def _provider(operation: str, device: torch.device) -> str:
    return {"layer_norm": choose_layer_norm, "rms_norm": choose_rms_norm}[operation](Hardware.detect(device))


def _choose(operation: str, input: Tensor) -> str:
    return "torch" if input.device.type == "cpu" else _provider(operation, input.device)


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm with ``apex.normalization.FusedLayerNorm``'s constructor; an ``nn.LayerNorm``.

    Args:
        normalized_shape: the trailing dimensions to normalise over: an int or a sequence.
        eps: added to the variance.
        elementwise_affine: have a ``weight`` and a ``bias`` of ``normalized_shape``.
        memory_efficient: accepted as Apex does; the numbers are the same.

    Shape: (..., *normalized_shape) to the same shape, in the input's dtype, or under autocast in
    the autocast dtype.

    >>> norm = FusedLayerNorm(8)
    >>> isinstance(norm, nn.LayerNorm), norm(torch.ones(2, 8)).shape
    (True, torch.Size([2, 8]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            out_dtype=_out_dtype(input),
            provider=_choose("layer_norm", input),
        )


class FusedRMSNorm(nn.RMSNorm):
    """RMS norm with ``apex.normalization.FusedRMSNorm``'s constructor; an ``nn.RMSNorm``.

    Args and shapes as `FusedLayerNorm`, without a bias.

    >>> FusedRMSNorm(8)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            out_dtype=_out_dtype(x),
            provider=_choose("rms_norm", x),
        )
