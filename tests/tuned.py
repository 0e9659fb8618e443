"""Nets whose layers take the time that a test lets pass, patchers that change it, and loops around them."""

import copy

import torch
from torch import nn

import autofuse
from autofuse.patch import Patch, Site

__all__ = ["Slow", "Time", "batch", "net", "plain", "takes", "tune"]


class Time:
    """Stands in for the clock's time: seconds pass only where a test lets them."""

    def __init__(self):
        self.now, self.speed = 0.0, 1.0

    def perf_counter(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds * self.speed


class Slow(nn.Module):
    """A layer that takes a second and a half, of which a patch can save or to which it can add."""

    def __init__(self, time, seconds=1.0):
        super().__init__()
        self.linear, self.time, self.seconds = nn.Linear(8, 8), time, seconds

    def forward(self, x):
        self.time.passes(self.seconds)
        return self.linear(x)

    def __deepcopy__(self, memo):
        new = Slow(self.time, self.seconds)
        new.linear = copy.deepcopy(self.linear, memo)
        return new


def net(time, layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(time) for _ in range(layers)), nn.Linear(8, 1))


def takes(path, seconds, **options):
    """A patcher whose patch gives the same result in so many seconds."""

    def find(context):
        module = context.model.get_submodule(path)

        def change(transaction, sites):
            transaction.set_attribute(module, "seconds", seconds)

        return Patch([Site(path, "Slow", "double", "tests")], change, reason="for a test", **options)

    return find


def batch(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


def tune(model, *, steps=200, names=(), optimizer=None, **options):
    """Steps until everything is decided; returns the step and the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"loss_fn": nn.functional.mse_loss, "only": names, "precision": "fp32", **options}
    step, losses = autofuse.optimize(model, optimizer, **settings), []
    for number in range(steps):
        losses.append(step(*batch(number)).item())
        if not step.tuning:
            break
    return step, losses


def plain(model, steps):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for number in range(steps):
        x, y = batch(number)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
