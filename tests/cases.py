"""Families and legacy nets alike, and the plain loop that they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from families import FAMILIES, Family
from legacy import LEGACY, Legacy
from torch import Tensor, nn

import autofuse

__all__ = ["CASES", "PLAIN", "arguments", "close", "loss_of", "optimize", "options", "plain_loop"]

Case = Family | Legacy
CASES: dict[str, Case] = {**FAMILIES, **LEGACY}
PLAIN = {"precision": "fp32", "compile": False}  # nothing that changes more than rounding
LOSS, GRADIENT = 1e-5, 1e-4  # the promise, relative


def arguments(case: Case, seed: int = 1) -> tuple[Any, ...]:
    """What ``step(...)`` is called with."""
    batch = case.batch(seed)
    return batch if isinstance(batch, tuple) else (batch,)


def options(case: Case) -> dict[str, Any]:
    return case.options if isinstance(case, Legacy) else {}


def optimize(case: Case, model: nn.Module, optimizer: Any = None, **others: Any) -> autofuse.TrainingStep:
    return autofuse.optimize(model, optimizer, **{**options(case), **PLAIN, "measure": False, **others})


def loss_of(case: Case, model: nn.Module, seed: int = 1) -> Tensor:
    """The loss as a loop without autofuse computes it."""
    batch = arguments(case, seed)
    if isinstance(case, Family):
        return model(**batch[0]).loss
    if case.forward is not None:
        return case.forward(model, *batch)
    inputs, targets = batch
    return case.loss_fn(model(inputs), targets)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def plain_loop(case: Case, model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    """The losses of a loop written by hand, one batch per step."""
    losses = []
    for number in range(steps):
        loss = loss_of(case, model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fast_loop(case: Case, step: autofuse.TrainingStep, steps: int = 3) -> list[float]:
    return [step(*arguments(case, number)).item() for number in range(steps)]


def close(a: Any, b: Any, tolerance: float = LOSS) -> bool:
    """Whether numbers agree to a relative tolerance, element by element."""
    return bool(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=tolerance, atol=0))


def gradient_error(plain: nn.Module, fast: nn.Module) -> float:
    """The norm of the difference of all gradients over the norm of the plain model's."""
    difference = total = 0.0
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            difference += (a.grad.double() - b.grad.double()).square().sum().item()
            total += a.grad.double().square().sum().item()
    assert total > 0
    return (difference / total) ** 0.5


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """Every tensor in the outputs of a model, by path."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict) or hasattr(value, "items"):
        found = [tensors(item, f"{path}.{key}") for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        found = [tensors(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return {}
    return {name: tensor for each in found for name, tensor in each.items()}


def outputs(case: Case, model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """All tensors that a direct call of the model gives."""
    batch = arguments(case, seed)
    if isinstance(case, Family):
        return tensors(model(**batch[0]))
    inputs = batch[0][0] if case.forward is not None else batch[0]
    return tensors(model(inputs))
