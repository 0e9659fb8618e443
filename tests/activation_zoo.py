"""Activations as people write them, and what nearly is one."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn


class Act(nn.Module):
    """A user's module around a formula."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(x)


class Beta(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, hidden):
        return hidden * torch.sigmoid(self.beta * hidden)


class Private(nn.Module):
    def __init__(self):
        super().__init__()
        self._beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self._beta * x)


class Swish(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        return x.mul_(x.sigmoid()) if self.inplace else x.mul(x.sigmoid())


class Counts(nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * x.sigmoid()


class OnlyInTraining(nn.Module):
    def forward(self, x):
        return x * x.sigmoid() if self.training else F.relu(x)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        return g


class Efficient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


class OtherInBF16(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.dtype == torch.bfloat16 else x * x.sigmoid()


def closing_over(scale):
    return lambda x: x * torch.sigmoid(scale * x)


def temperature(x, scale=1.0):
    return x * torch.sigmoid(scale * x)


SPELLINGS = {
    "erf": (lambda: Act(lambda x: x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))), "gelu"),
    "normal": (lambda: Act(lambda x: x * torch.special.ndtr(x)), "gelu"),
    "short constant": (
        lambda: Act(lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x**2)))),
        "gelu (tanh)",
    ),
    "as a sigmoid": (
        lambda: Act(lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
        "gelu (tanh)",
    ),
    "an attribute": (lambda: Beta(1.702), "quick_gelu"),
    "another attribute": (lambda: Beta(1), "silu"),
    "a partial": (lambda: Act(functools.partial(temperature, scale=1.702)), "quick_gelu"),
    "not in place": (Swish, "silu"),
    "its own function": (lambda: Act(Efficient.apply), "silu"),
    "clamp": (lambda: Act(lambda x: x.clamp(min=0) ** 2), "relu_squared"),
    "relu times x": (lambda: Act(lambda x: F.relu(x) * x), "relu_squared"),
}

REFUSED = {
    "1.7": (lambda: Beta(1.7), "none"),
    "another tanh": (
        lambda: Act(lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.0447 * x**3)))),
        "none",
    ),
    "scaled": (lambda: Act(lambda x: 1.001 * F.silu(x)), "none"),
    "clipped far away": (lambda: Act(lambda x: F.gelu(x).clamp(-65504, 65504)), "none"),
    "overflows": (lambda: Act(lambda x: x / (1 + torch.exp(-x))), "none"),
    "no gradient": (lambda: Act(lambda x: (x * x.sigmoid()).detach()), "none"),
    "straight through": (lambda: Act(StraightThrough.apply), "none"),
    "in place": (lambda: Swish(inplace=True), "in place"),
    "private": (Private, "'_beta'"),
    "counts": (Counts, "changes its own state"),
    "random": (lambda: Act(lambda x: F.dropout(x * x.sigmoid(), 1e-6)), "random"),
    "by value": (lambda: Act(lambda x: x * x.sigmoid() if x.amax() < 1e9 else x), "by the values"),
    "a closure": (lambda: Act(closing_over(1.0)), "'scale'"),
    "an object's method": (lambda: Act(Beta(1.0).forward), "mutable attribute 'function'"),
    "evaluation differs": (OnlyInTraining, "none"),
    "halves its output": (lambda: Act(lambda x: (x * x.sigmoid())[..., ::2]), "shape"),
    "one operation": (lambda: Act(F.silu), "one operation already"),
}
