"""Norms as people write them, and modules that look like norms and are none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 12


class Hand(nn.Module):
    """Layer norm with every name and constant of the subclass's choice."""

    weight_name, bias_name, start = "weight", "bias", 1.0

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        if self.weight_name:
            setattr(self, self.weight_name, nn.Parameter(torch.full((size,), self.start)))
        if self.bias_name:
            setattr(self, self.bias_name, nn.Parameter(torch.zeros(size)))

    def scale(self, y: Tensor) -> Tensor:
        y = y * getattr(self, self.weight_name) if self.weight_name else y
        return y + getattr(self, self.bias_name) if self.bias_name else y


class AB(Hand):
    """Names a and b, the bias first, eps under another name."""

    weight_name, bias_name = "a", "b"

    def __init__(self) -> None:
        super().__init__()
        self._parameters["a"] = self._parameters.pop("a")
        self.variance_epsilon = 1e-12

    def forward(self, hidden_states: Tensor) -> Tensor:
        u = hidden_states.mean(-1, keepdim=True)
        s = (hidden_states - u).pow(2).mean(-1, keepdim=True)
        return self.scale((hidden_states - u) / torch.sqrt(s + self.variance_epsilon))


class NoEpsName(Hand):
    """eps is a number in the code."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
        return self.scale((x - mean) * torch.rsqrt(variance + 3e-5))


class NoEpsAtAll(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale((x - x.mean(-1, keepdim=True)) / x.std(-1, unbiased=False, keepdim=True))


class Torch1(Hand):
    """Through F.layer_norm, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), 1e-5).type_as(x)


class NoBias(Hand):
    bias_name = ""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, None, 1e-5)


class NoAffine(Hand):
    """OLMo's: no parameter at all."""

    weight_name = bias_name = ""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.normalized_shape = (size,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        return F.layer_norm(hidden_states.float(), self.normalized_shape, None, None, eps=1e-5).to(dtype)


class OnePlus(Hand):
    """Scale is 1 + weight, with a bias."""

    start = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], 1 + self.weight, self.bias, 1e-6)


class TwoDimensional(nn.Module):
    """Over the last two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(3, SIZE)), nn.Parameter(torch.zeros(3, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((-2, -1), keepdim=True)
        variance = (x - mean).square().mean((-2, -1), keepdim=True)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.gain + self.shift


class Llama(Hand):
    weight_name, bias_name = "weight", ""

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class Gemma(Hand):
    weight_name, bias_name, start = "weight", "", 0.0

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class ScaleNorm(Hand):
    """RMS norm through the Euclidean norm, with sqrt(d) as a constant."""

    weight_name, bias_name = "g", ""

    def __init__(self) -> None:
        super().__init__()
        self.root = SIZE**0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.root * self.g


class NoWeightRMS(Hand):
    weight_name = bias_name = ""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class Sub(nn.LayerNorm):
    """A subclass that casts: Whisper's, CLIP's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class Double(Sub):
    """A subclass of a subclass."""


ACCEPTED: dict[str, tuple[Any, str]] = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(SIZE), "layer_norm"),
    "nn.LayerNorm without bias": (lambda: nn.LayerNorm(SIZE, bias=False), "layer_norm"),
    "nn.LayerNorm without affine": (lambda: nn.LayerNorm(SIZE, elementwise_affine=False), "layer_norm"),
    "nn.LayerNorm of two dimensions": (lambda: nn.LayerNorm((3, SIZE)), "layer_norm"),
    "nn.LayerNorm eps 1e-12": (lambda: nn.LayerNorm(SIZE, eps=1e-12), "layer_norm"),
    "nn.LayerNorm large eps": (lambda: nn.LayerNorm(SIZE, eps=0.1), "layer_norm"),
    "nn.RMSNorm": (lambda: nn.RMSNorm(SIZE, eps=1e-6), "rms_norm"),
    "nn.RMSNorm eps None": (lambda: nn.RMSNorm(SIZE), "rms_norm"),
    "nn.RMSNorm of two dimensions": (lambda: nn.RMSNorm((3, SIZE), eps=1e-6), "rms_norm"),
    "nn.RMSNorm without affine": (lambda: nn.RMSNorm(SIZE, elementwise_affine=False), "rms_norm"),
    "a and b": (AB, "layer_norm"),
    "eps in the code": (NoEpsName, "layer_norm"),
    "no eps": (NoEpsAtAll, "layer_norm"),
    "F.layer_norm in fp32": (Torch1, "layer_norm"),
    "no bias": (NoBias, "layer_norm"),
    "no affine": (NoAffine, "layer_norm"),
    "1 + weight": (OnePlus, "layer_norm"),
    "two dimensions": (TwoDimensional, "layer_norm"),
    "llama": (Llama, "rms_norm"),
    "gemma": (Gemma, "rms_norm"),
    "scale norm": (ScaleNorm, "rms_norm"),
    "rms without weight": (NoWeightRMS, "rms_norm"),
    "a subclass": (lambda: Sub(SIZE), "layer_norm"),
    "a subclass of it": (lambda: Double(SIZE), "layer_norm"),
}


# --- look-alikes ----------------------------------------------------------------------------------


class AnnotatedTransformerNorm(Hand):
    """The unbiased deviation, and eps outside of the root."""

    weight_name, bias_name = "a_2", "b_2"

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + 1e-6) + self.b_2


class EpsOutsideNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=False)
        return self.scale((x - mean) / (std + 1e-3))


class L2Norm(Hand):
    bias_name = ""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight


class BatchLikeNorm(Hand):
    """Over the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt())


class GatedNorm(Hand):
    """Mamba-2's: a second input that may be there."""

    bias_name = ""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * F.silu(gate)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


FLAG = False
FLAGS = {"swap": False}


class FlagNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) if FLAG else F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-5)


class FlagsNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) if FLAGS["swap"] else F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class CounterNorm(Hand):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class RecordingNorm(Hand):
    """Keeps its last input for others to read."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class RandomNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + torch.rand_like(x) * 1e-3, x.shape[-1:], self.weight, self.bias)


class DropoutNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x, x.shape[-1:], self.weight, self.bias), 0.1, self.training)


class ModeNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return y if self.training else y * 1.001


class ClampNorm(Hand):
    """Clamps large inputs: equal everywhere else."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.clamp(-100, 100), x.shape[-1:], self.weight, self.bias)


class StopGradientNorm(Hand):
    """The same forward, another backward: statistics are constants."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True).detach()
        variance = x.var(-1, unbiased=False, keepdim=True).detach()
        return self.scale((x - mean) * torch.rsqrt(variance + 1e-5))


class LayerNorm(Hand):
    """Called LayerNorm, and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(torch.tanh(x))


class OtherMathsNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class ResidualNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class MaskListNorm(Hand):
    """A list that somebody may change."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"double": False}

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return y * 2 if self.options["double"] else y


class TupleNorm(Hand):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias), x


class InPlaceNorm(Hand):
    """Shifts its input in place, which the output does not show."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.add_(0.5), x.shape[-1:], self.weight, self.bias)


class GlobalTensorNorm(Hand):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight * TEMPERATURE, self.bias)


TEMPERATURE = torch.ones(())


def closure_norm() -> nn.Module:
    state = [1.0]

    class ClosureNorm(Hand):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias) * state[0]

    return ClosureNorm()


def replaced() -> nn.Module:
    norm = nn.LayerNorm(SIZE)
    norm.forward = lambda x: F.layer_norm(x, (SIZE,), norm.weight, norm.bias) * 2  # type: ignore[method-assign]
    return norm


def weight_normed() -> nn.Module:
    norm = nn.LayerNorm(SIZE)
    nn.utils.parametrizations.weight_norm(norm, "weight", dim=None)
    return norm


LOOK_ALIKES: dict[str, Any] = {
    "annotated transformer": AnnotatedTransformerNorm,
    "eps outside": EpsOutsideNorm,
    "L2 norm": L2Norm,
    "over the rows": BatchLikeNorm,
    "gated": GatedNorm,
    "a global flag": FlagNorm,
    "a global mapping": FlagsNorm,
    "a global tensor": GlobalTensorNorm,
    "a closure": closure_norm,
    "a mutable attribute": MaskListNorm,
    "a counter": CounterNorm,
    "a record": RecordingNorm,
    "randomness": RandomNorm,
    "dropout": DropoutNorm,
    "training and evaluation differ": ModeNorm,
    "clamps": ClampNorm,
    "another backward": StopGradientNorm,
    "named LayerNorm": LayerNorm,
    "other mathematics": lambda: OtherMathsNorm(SIZE),
    "residual": lambda: ResidualNorm(SIZE),
    "gives a tuple": TupleNorm,
    "in place": InPlaceNorm,
    "replaced on the instance": replaced,
    "parametrized": weight_normed,
}
# What is left alone without a word: PyTorch's own other norms.
OTHERS: dict[str, Any] = {
    "GroupNorm": lambda: nn.GroupNorm(3, SIZE),
    "BatchNorm1d": lambda: nn.BatchNorm1d(SIZE),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(SIZE, affine=True),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "PReLU": lambda: nn.PReLU(SIZE),
    "Softmax": lambda: nn.Softmax(-1),
    "Identity": lambda: nn.Identity(),
}
