"""Trying an optimizer out on small tensors, without a trace on the real one or on the process."""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = [
    "RecordingGroup",
    "close",
    "gradients",
    "parameters",
    "probe_clone",
    "probe_shapes",
    "quiet",
    "same_training",
    "unhooked_step",
]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@contextmanager
def quiet() -> Iterator[None]:
    """One thread (even a tiny kernel would open the OpenMP pool), no warnings, no global step hooks,
    and every random state as it was."""
    threads = torch.get_num_threads()
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    global_hooks: tuple[Any, ...] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    kept = [dict(hooks) for hooks in global_hooks]
    try:
        torch.set_num_threads(1)
        for hooks in global_hooks:
            hooks.clear()
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for hooks, entries in zip(global_hooks, kept, strict=True):
            hooks.update(entries)
        torch.set_num_threads(threads)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class RecordingGroup(dict[str, Any]):
    """A param group that remembers which of its keys were looked up (also those it does not have).

    >>> group = RecordingGroup(lr=0.1, name="head")
    >>> group["lr"], group.get("amsgrad"), sorted(group.seen)
    (0.1, None, ['amsgrad', 'lr'])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.seen.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self.seen.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self.seen.update(super().keys())
        return super().values()


def unhooked_step(cls: type) -> Callable[..., Any]:
    """``cls.step`` without the wrapper by which torch runs step hooks."""
    step: Any = cls.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_plain(v) for v in value)
    return isinstance(value, _PLAIN)


def probe_clone(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], cls: type[Optimizer] | None = None
) -> Optimizer:
    """An optimizer of the same class with other groups and no state, made without ``__init__``.

    Of the attributes only plain values are taken over. Tensors, modules and other objects are left
    out, because a step on them would reach the real training; an optimizer that needs them fails on
    the probe and is left alone.
    """
    cls = cls or type(optimizer)
    clone: Any = object.__new__(cls)
    own = {name: value for name, value in vars(optimizer).items() if _plain(value)}
    own |= {name: OrderedDict() for name in _HOOKS}
    own |= {"state": defaultdict(dict), "param_groups": list(groups), "defaults": dict(optimizer.defaults)}
    vars(clone).update(own)
    return clone


def parameters(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> list[Tensor]:
    return [nn.Parameter(_random(shape, dtype, device, generator)) for shape in shapes]


def gradients(
    params: Sequence[Tensor],
    step: int,
    scale: float,
    generator: torch.Generator,
    *,
    late: bool = True,
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Gradients for one step: with ``late`` the second parameter gets its first at step 3, and the
    third has none at step 4, as in a net with branches."""
    made = [scale * _random(tuple(p.shape), dtype or p.dtype, p.device, generator) for p in params]
    missing = {(1, 1), (1, 2), (2, 4)} if late else set()
    return [None if (i, step) in missing else g for i, g in enumerate(made)]


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


def close(actual: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """Whether the difference is small against the whole tensor (not element by element: where exact
    arithmetic gives zero, a ratio says nothing). NaN is close to nothing.

    >>> close(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 0.0]), 1e-6)
    True
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return actual.shape == expected.shape and bool(
        (actual - expected).norm() <= relative * expected.norm() + absolute
    )


# --- two optimizers side by side --------------------------------------------------------------------

_TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-13}
_STEP_SCALES = (1.0, 0.1, 10.0, 1.0, 0.01)

Start = Callable[[list[Tensor]], tuple[Optimizer, Callable[[], object]]]


def probe_shapes(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Small shapes of the kinds there are among ``params``."""
    shapes: list[tuple[int, ...]] = [(4, 3), (5,), (2, 3, 2, 2)]
    if any(p.ndim == 0 for p in params):
        shapes.append(())
    if any(p.numel() == 0 for p in params):
        shapes.append((0, 3))
    return shapes


def same_training(
    plain: Start, fused: Start, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether two optimizers do the same to parameters and state over a few steps.

    ``plain`` and ``fused`` take parameters and return the optimizer and what takes a step. Below
    float32 both are held against float64: the fused one may be 1.5 times as far off.
    """
    a, b = (_train(start, shapes, dtype, device) for start in (plain, fused))
    if [t.dtype for t in a] != [t.dtype for t in b]:
        return False
    if dtype in _TOLERANCES:
        return all(close(y, x, _TOLERANCES[dtype]) for x, y in zip(a, b, strict=True))
    exact = _train(plain, shapes, torch.float64, device, rounded_to=dtype)
    # a rounding of the dtype itself is nobody's error
    slack = torch.finfo(dtype).eps / 4
    return all(
        close(y, r, 0.0, 1.5 * float((x.double() - r).norm()) + slack * float(r.norm()))
        for x, y, r in zip(a, b, exact, strict=True)
    )


def _train(
    start: Start,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    rounded_to: torch.dtype | None = None,
) -> list[Tensor]:
    """Parameters and state tensors after a few steps from the same numbers."""
    generator = torch.Generator().manual_seed(3)
    given = rounded_to or dtype
    made = parameters(shapes, given, device, generator)
    params: list[Tensor] = [nn.Parameter(p.detach().to(dtype)) for p in made]
    for param in params:
        if param.ndim == 4:  # a convolution's weight in the other memory format
            param.data = param.data.contiguous(memory_format=torch.channels_last)
    optimizer, step = start(params)
    for index, scale in enumerate(_STEP_SCALES, 1):
        grads = gradients(params, index, scale, generator, dtype=given)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(dtype)
        step()
    state = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [t.detach() for t in [*params, *(v for v in state if isinstance(v, Tensor) and v.ndim)]]
