"""Small models, batches and loops to be watched, with what is known of them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autofuse

ROWS, WIDTH, CLASSES = 6, 16, 2048


class Words(nn.Module):
    """A language model without anything between its embedding and its output layer but dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.norm(self.embedding(input_ids))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def words_batches(count: int, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(CLASSES, (2, rows // 2), generator=random)
        labels = ids.clone()
        labels[:, 0] = -100
        yield {"input_ids": ids, "labels": labels}


def step_of(model: nn.Module, **options: Any) -> Any:
    options = {"precision": "fp32", "compile": False, "measure": False} | options
    return autofuse.optimize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), **{"measure": False, **options}
    )


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *extra, nn.Linear(32, 1))


def mse_step(model: nn.Module, **options: Any) -> Any:
    return step_of(model, loss_fn=F.mse_loss, **options)


PAIR = (torch.linspace(-1, 1, 32).view(4, 8), torch.ones(4, 1))


def hand_count(rows: int = ROWS) -> int:
    """Forward, the weight's gradient and the input's, of the output layer."""
    return 3 * 2 * rows * WIDTH * CLASSES


def as_calls(step: Any, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
    return [step(batch) for batch in batches]


def in_pieces(step: Any, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
    losses = []
    for batch in batches:
        with step.autocast():
            loss = step.model(**batch)["loss"]
        step.backward(loss)
        step.update()
        losses.append(loss.detach())
    return losses
