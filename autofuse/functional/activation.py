"""Activations in one operation each, which keeps only its input for the backward.

Written out in PyTorch's elementwise operations, an activation makes one pass over memory for each of them,
and keeps several tensors of its input's size for the backward. Measured on 2 cores of a Xeon with AMX,
PyTorch 2.13, input (4, 256, 3072), ms of forward and backward (the least of 30), written out and here:

TIMINGS
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.functional.rms_norm import transformed

__all__ = ["ACTIVATIONS", "REFERENCES", "gelu_tanh", "quick_gelu", "relu_squared"]


def gelu_tanh(input: Tensor) -> Tensor:
    """The GELU by tanh, of BERT's first code and of GPT-2.

    >>> round(gelu_tanh(torch.tensor(1.0)).item(), 4), round(F.gelu(torch.tensor(1.0)).item(), 4)
    (0.8412, 0.8413)
    """
    return F.gelu(input, approximate="tanh")


def quick_gelu(input: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)``; PyTorch has no operation of its own for it.

    Args:
        input: any shape, any floating dtype, which is the output's too.

    >>> x = torch.tensor([-1.0, 0.0, 1.0])
    >>> torch.equal(quick_gelu(x), x * torch.sigmoid(1.702 * x))
    True
    """
    return REFERENCES["quick_gelu"](input) if transformed() else _QuickGELU.apply(input)


def relu_squared(input: Tensor) -> Tensor:
    """``relu(x)^2``; PyTorch has no operation of its own for it.

    Args:
        input: any shape, any floating dtype, which is the output's too.

    >>> relu_squared(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return REFERENCES["relu_squared"](input) if transformed() else _ReLUSquared.apply(input)


# The formulas, as they are usually written out.
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    # Hendrycks, Gimpel 2016, "Gaussian Error Linear Units": x * Phi(x), and its approximations
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu (tanh)": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    # the same paper; Ramachandran, Zoph, Le 2017, "Searching for Activation Functions": swish with beta 1
    "silu": lambda x: x * torch.sigmoid(x),
    # Misra 2019, "Mish: A Self Regularized Non-Monotonic Activation Function"
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    # So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling"
    "relu_squared": lambda x: torch.square(torch.relu(x)),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu (tanh)": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "mish": F.mish,
    "relu_squared": relu_squared,
}


class _QuickGELU(torch.autograd.Function):
    """With u = 1.702 x it is silu(u) / 1.702, whose derivative by x is silu'(u)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid_(x * 1.702).mul_(x)  # not by silu: here a narrow dtype rounds once less

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable(REFERENCES["quick_gelu"], x, g)
        return torch.ops.aten.silu_backward(g, x * 1.702)


class _ReLUSquared(torch.autograd.Function):
    """The derivative is 2 x where x is positive, else 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(REFERENCES["relu_squared"], x, g)
        return torch.ops.aten.threshold_backward(g * x, x, 0).mul_(2)


def _differentiable(reference: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(reference(x), x, g, create_graph=True)
    return gradient
