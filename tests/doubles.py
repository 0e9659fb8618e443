"""Patchers for tests: each registered beside ours, or in the place of one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autofuse import registry
from autofuse.patch import Patch, Site

__all__ = ["Entry", "Switch", "forward_patcher", "register"]


class Entry:
    """Looks like an entry point whose module has a ``find``."""

    def __init__(self, find: Callable[..., Any] | Exception, order: float = 60.0) -> None:
        self.find, self.order = find, order

    def load(self) -> Any:
        if isinstance(self.find, Exception):
            raise self.find
        return self


def register(monkeypatch: Any, **finders: Any) -> None:
    """Adds patchers to the registry; one named as one of ours takes its place."""
    ours = registry._entries()
    added = {name: find if isinstance(find, Entry) else Entry(find) for name, find in finders.items()}
    monkeypatch.setattr(registry, "_entries", lambda: {**ours, **added})


class Switch:
    """When on, the double misbehaves."""

    on = False
    calls = 0


def forward_patcher(
    path: str, make: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
) -> Any:
    """A patcher that replaces the forward of the module at ``path`` by ``make(forward)``."""

    def find(context: Any) -> Patch:
        module: nn.Module = context.model.get_submodule(path)

        def change(transaction: Any, sites: Any) -> None:
            transaction.set_attribute(module, "forward", make(type(module).forward.__get__(module)))

        return Patch([Site(path, "a class", "double", "tests")], change, reason="for a test")

    return find


class ScaledGradient(torch.autograd.Function):
    """The identity; its gradient is multiplied, or raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, switch: Any) -> Tensor:
        ctx.factor, ctx.switch = factor, switch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.switch is not None and ctx.switch.on:
            raise RuntimeError("the double's backward fails")
        return gradient * ctx.factor, None, None
