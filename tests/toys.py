"""Models so small that compiling one takes seconds, as a user gives them to the benchmark."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["InThread", "broken", "classifier", "with_optimizer", "without_loss", "wrong_shapes"]


class Classifier(nn.Module):
    """Tokens -> a class for each, with the loss among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def classifier() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 64, (4, 8), generator=generator) for _ in range(2)]
    return Classifier(), [{"input_ids": tokens, "labels": tokens.flip(1)} for tokens in made]


def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, list[dict[str, Tensor]]]:
    model, batches = classifier()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), batches


def broken() -> nn.Module:
    return classifier()[0]


def without_loss() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    return nn.Linear(4, 2), [{"input": torch.zeros(3, 4)}]


def wrong_shapes() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, (batch, *_) = classifier()
    model.head = nn.Linear(17, 64)
    return model, [batch]


class InThread(Thread):
    """Stands for a candidate's process: to start one takes ten times as long as these models train."""

    def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
        *others, end = args  # the parent closes its copy of the pipe's end, a process has one of its own
        super().__init__(target=target, args=(*others, Connection(os.dup(end.fileno()))), daemon=daemon)

    def join(self, timeout: float | None = 60.0) -> None:
        super().join(timeout)

    def kill(self) -> None:
        raise AssertionError("a candidate did not end")
