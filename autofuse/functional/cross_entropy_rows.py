"""The rows of a cross entropy: which are computed, each row's loss and gradient, and their sum.

With p = softmax(x) and target masses a_c (one-hot, smoothed, class-weighted, or probabilities; A is
their sum), a row's loss is ``-sum_c a_c log p_c`` and its derivative by x_c is ``A p_c - a_c``. These
are the definitions of `torch.nn.CrossEntropyLoss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Epilogue", "Labels", "Loss", "Probabilities", "Rows"]

Epilogue = Callable[..., Tensor]


@dataclass(frozen=True)
class Loss:
    """What `F.cross_entropy` takes beside its input, with the class dimension last.

    Args:
        target: labels (n,), or probabilities (n, V).
        class_weight: (V,), or None.
        reduction, ignore_index, label_smoothing: as in `F.cross_entropy`.
        epilogue: what is done to the logits before the loss: ``epilogue(logits, *tensors)``, elementwise
            or with a tensor along the classes; or None.
        dtype: of the product.
        chunk: rows at a time; chosen from the shape if None.
    """

    target: Tensor
    class_weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    epilogue: Epilogue | None = None
    dtype: torch.dtype = torch.float32
    chunk: int | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


# --- the targets: losses and gradients of a chunk ----------------------------------------------


@dataclass(frozen=True)
class Labels:
    """Rows whose target is one class each. ``scale`` is a factor of each row's loss."""

    labels: Tensor
    weight: Tensor | None
    smoothing: float
    classes: int

    @property
    def scale(self) -> Tensor | None:
        return None if self.weight is None or self.smoothing else self.weight[self.labels]

    def _masses(self, rows: slice, like: Tensor) -> tuple[Tensor, Tensor | float]:
        """(mass at the label, mass at every class), for a smoothed target."""
        uniform = self.smoothing / self.classes
        if self.weight is None:
            return like.new_full((rows.stop - rows.start, 1), 1 - self.smoothing), uniform
        return (1 - self.smoothing) * self.weight[self.labels[rows], None], uniform * self.weight

    def losses(self, logp: Tensor, rows: slice) -> Tensor:
        at_label = logp.gather(1, self.labels[rows, None])[:, 0]
        if not self.smoothing:
            return -at_label
        mass, uniform = self._masses(rows, logp)
        everywhere = logp @ uniform if isinstance(uniform, Tensor) else logp.sum(1) * uniform
        return -(mass[:, 0] * at_label + everywhere)

    def gradient_(self, p: Tensor, rows: slice) -> Tensor:
        labels = self.labels[rows, None]
        if not self.smoothing:
            return p.scatter_add_(1, labels, p.new_full(labels.shape, -1.0))
        mass, uniform = self._masses(rows, p)
        total = uniform.sum() if isinstance(uniform, Tensor) else self.smoothing
        return p.mul_(mass + total).sub_(uniform).scatter_add_(1, labels, -mass)


@dataclass(frozen=True)
class Probabilities:
    """Rows whose target is a distribution."""

    target: Tensor
    weight: Tensor | None
    smoothing: float
    classes: int
    scale: Tensor | None = None

    def _masses(self, rows: slice, dtype: torch.dtype) -> Tensor:
        masses = self.target[rows].to(dtype)
        if self.smoothing:
            masses = masses * (1 - self.smoothing) + self.smoothing / self.classes
        return masses if self.weight is None else masses * self.weight

    def losses(self, logp: Tensor, rows: slice) -> Tensor:
        return -torch.linalg.vecdot(self._masses(rows, logp.dtype), logp)

    def gradient_(self, p: Tensor, rows: slice) -> Tensor:
        masses = self._masses(rows, p.dtype)
        return p.mul_(masses.sum(1, keepdim=True)).sub_(masses)


# --- the rows that are computed ----------------------------------------------------------------


class Rows:
    """Which of a loss's rows are computed, and how their losses are joined."""

    def __init__(self, loss: Loss, classes: int) -> None:
        self.loss, self.n = loss, loss.target.shape[0]
        self.used: Tensor | None = None  # the rows that are computed, where not all are
        self.target: Labels | Probabilities
        weight = None if loss.class_weight is None else loss.class_weight.detach().to(loss.wide)
        if loss.target.is_floating_point():
            if loss.ignore_index >= 0:
                raise RuntimeError("ignore_index is not supported for floating point target")
            self.target = Probabilities(loss.target.detach(), weight, loss.label_smoothing, classes)
            return
        labels = loss.target.long()
        used = (labels != loss.ignore_index).nonzero()[:, 0]
        if len(used) < self.n:
            self.used, labels = used, labels[used]
        if labels.device.type == "cpu" and len(labels):
            low, high = (int(x) for x in labels.aminmax())
            if low < 0 or high >= classes:
                raise IndexError(f"Target {low if low < 0 else high} is out of bounds.")
        self.target = Labels(labels, weight, loss.label_smoothing, classes)

    def select(self, per_row: Tensor) -> Tensor:
        return per_row if self.used is None else per_row[self.used]

    def spread(self, rows: Tensor) -> Tensor:
        """Back to all rows; the ignored ones get exactly zero."""
        if self.used is None:
            return rows
        return rows.new_zeros(self.n, *rows.shape[1:]).index_copy_(0, self.used, rows)

    def denominator(self) -> Tensor:
        """What the mean divides by: the weights of the labels, or the number of rows that count."""
        loss, target = self.loss, self.target
        if isinstance(target, Labels) and target.weight is not None:
            return target.weight[target.labels].sum()
        count = self.n if self.used is None else len(self.used)
        return torch.tensor(count, dtype=loss.wide, device=loss.target.device)

    def coefficient(self) -> Tensor:
        """The derivative of the joined loss by each computed row's."""
        count = self.n if self.used is None else len(self.used)
        one = torch.ones((), dtype=self.loss.wide, device=self.loss.target.device)
        return (one if self.loss.reduction == "sum" else one / self.denominator()).expand(count)

    def join(self, losses: Tensor) -> Tensor:
        if self.loss.reduction == "none":
            return self.spread(losses)
        return losses.sum() if self.loss.reduction == "sum" else losses.sum() / self.denominator()
