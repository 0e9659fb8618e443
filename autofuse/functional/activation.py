"""Activations in one operation each, which keeps only its input for the backward.

Written out in PyTorch's elementwise operations, an activation makes one pass over memory for each of them,
and keeps several tensors of its input's size for the backward. Measured on 2 cores of a Xeon with AMX,
PyTorch 2.13, input (4, 256, 3072), ms of forward and backward (the least of 30), written out and here, and
MiB kept for the backward:

    float32: GELU by tanh 20.7 and 7.0 (MiB: 48 and 12), GELU 16.6 and 4.4 (36 and 12), quick GELU 7.3 and
    4.6 (24 and 12), SiLU 6.2 and 2.1 (24 and 12), squared ReLU 5.8 and 3.8 (12 and 12), Mish 11.7 and 14.1
    (24 and 12)

    bfloat16 under autocast: GELU by tanh 16.5 and 6.4, GELU 11.5 and 3.3, quick GELU 5.2 and 3.6, SiLU 4.6
    and 1.9, squared ReLU 2.5 and 2.2, Mish 10.9 and 13.9; half the MiB

so that Mish stays written out on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.functional.rms_norm import transformed

if TYPE_CHECKING:
    from autofuse.hardware import Hardware

__all__ = ["ACTIVATIONS", "REFERENCES", "gelu_tanh", "obstacle", "quick_gelu", "relu_squared"]


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


def obstacle(name: str, hardware: Hardware) -> str | None:
    """Why the activation does not gain on such a machine; None where it does.

    >>> from autofuse import Hardware
    >>> obstacle("mish", Hardware.named("cpu-amx")), obstacle("mish", Hardware.named("A100"))
    ("PyTorch's own Mish takes longer on a CPU than the written-out one", None)
    """
    slow = name == "mish" and hardware.kind == "cpu"
    return "PyTorch's own Mish takes longer on a CPU than the written-out one" if slow else None


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
