"""A GPT with hand-written parts: what is found in repositories of the last ten years."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HandAdam", "HandWritten"]


class HandNorm(nn.Module):
    """A layer norm written out, with the names of BERT's first PyTorch port."""

    def __init__(self, size: int, variance_epsilon: float = 1e-12) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size))
        self.variance_epsilon = variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * ((x - mean) / torch.sqrt(variance + self.variance_epsilon)) + self.beta


class HandGELU(nn.Module):
    """GELU in its tanh form, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class HandAttention(nn.Module):
    """Causal attention with its probabilities in memory."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mask: Any = self.mask
        scores = scores.masked_fill(~mask[: x.shape[1], : x.shape[1]], -1e9)
        context = torch.softmax(scores, -1) @ value
        out: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return out


class HandBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = HandNorm(width), HandNorm(width)
        self.attention = HandAttention(width, heads, length)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), HandGELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return result


class HandWritten(nn.Module):
    """A pre-norm GPT.

    >>> net = HandWritten(vocabulary=11, width=8, layers=1, heads=2, length=4)
    >>> net(torch.tensor([[1, 2, 3, 4]])).shape
    torch.Size([1, 4, 11])
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([HandBlock(width, heads, length) for _ in range(layers)])
        self.norm = HandNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) tokens -> (rows, length, vocabulary) logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class HandAdam(torch.optim.Optimizer):
    """Adam written out, one parameter after the other.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> optimizer = HandAdam([weight], lr=0.1)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> round(weight.item(), 4)
    0.9
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                unbiased_mean = mean / (1 - beta1 ** state["step"])
                unbiased_square = square / (1 - beta2 ** state["step"])
                p.add_(unbiased_mean / (unbiased_square.sqrt() + group["eps"]), alpha=-group["lr"])
        return loss
