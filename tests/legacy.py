"""Legacy nets, without transformers: what is found in repositories of the last ten years."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LEGACY", "Legacy", "gan"]

WIDTH, CLASSES, VOCABULARY, LENGTH = 16, 3, 50, 8


# --- norms as they were written by hand ---------------------------------------------------------


class GammaBetaNorm(nn.Module):
    """BERT's first PyTorch port."""

    def __init__(self, size: int, variance_epsilon: float = 1e-12) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size))
        self.variance_epsilon = variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * ((x - mean) / torch.sqrt(variance + self.variance_epsilon)) + self.beta


class HandRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.scale


class NanoNorm(nn.Module):
    """LayerNorm with an optional bias, from before PyTorch had one."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class ChannelsFirstNorm(nn.Module):
    """ConvNeXt's: normalises over dimension 1."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


# --- nets ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two pre-norm blocks of a hand-written norm."""

    def __init__(self, norm: Callable[[int], nn.Module], dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(torch.tanh(layer(norm(x))))
        return self.head(x)


class NanoGPT(nn.Module):
    """nanoGPT in small: returns (logits, loss), with the head tied to the embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([NanoBlock(dropout) for _ in range(2)])
        self.ln_f = NanoNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


class NanoBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = NanoNorm(WIDTH, bias=False), NanoNorm(WIDTH, bias=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.proj(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class EncoderNet(nn.Module):
    """A classifier on nn.TransformerEncoder."""

    def __init__(self, dropout: float, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=not norm_first
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).mean(1)


class ConvNet(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = ChannelsFirstNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.last(self.dropout(x.mean((2, 3)))))


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Legacy:
    """A net, its batches and its loss: ``loss_fn(net(inputs), targets)``."""

    name: str
    build: Callable[[float], nn.Module]
    batch_kind: Callable[[torch.Generator], tuple[Any, ...]]
    loss_fn: Callable[..., Tensor] | None = F.cross_entropy
    forward: Callable[..., Tensor] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What ``optimize`` must be told."""
        return {"loss_fn": self.loss_fn, "forward": self.forward}

    def model(self, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build(dropout)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.train()

    def batch(self, seed: int = 1) -> tuple[Any, ...]:
        return self.batch_kind(torch.Generator().manual_seed(seed))


def _vectors(generator: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def _sequences(generator: torch.Generator) -> tuple[Any, ...]:
    inputs = torch.randn(4, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (4,), generator=generator)


def _images(generator: torch.Generator) -> tuple[Any, ...]:
    images = torch.randn(4, 3, 6, 6, generator=generator)
    return images, torch.randint(0, CLASSES, (4,), generator=generator)


def _text(generator: torch.Generator) -> tuple[Any, ...]:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].contiguous()
    targets[0, :2] = -1
    return ((tokens[:, :-1].contiguous(), targets),)


def _nano_forward(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)[1]


_ALL = [
    Legacy("gamma-beta", lambda dropout: Residual(GammaBetaNorm, dropout), _vectors),
    Legacy("rms", lambda dropout: Residual(HandRMSNorm, dropout), _vectors),
    Legacy("nanogpt", NanoGPT, _text, None, _nano_forward),
    Legacy("encoder", EncoderNet, _sequences),
    Legacy("encoder-pre", lambda dropout: EncoderNet(dropout, norm_first=True), _sequences),
    Legacy("conv", ConvNet, _images),
]
LEGACY = {legacy.name: legacy for legacy in _ALL}


# --- a GAN: two nets, two optimizers ---------------------------------------------------------------


class GAN(nn.Module):
    """Generator and discriminator in one module, so that one call optimizes both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), GammaBetaNorm(WIDTH), nn.Linear(WIDTH, 6))
        self.discriminator = nn.Sequential(
            nn.Linear(6, WIDTH), nn.LeakyReLU(0.2), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.discriminator(self.generator(noise))


def gan(seed: int = 0) -> tuple[GAN, torch.optim.Optimizer, torch.optim.Optimizer]:
    """(net, the generator's optimizer, the discriminator's)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = GAN()
    rate = {"lr": 1e-2, "betas": (0.5, 0.999)}
    return (
        net,
        torch.optim.Adam(net.generator.parameters(), **rate),
        torch.optim.Adam(net.discriminator.parameters(), **rate),
    )
