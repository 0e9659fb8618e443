"""Every provider of a fused operation: whether its numbers are right, and how long it takes.

An operation here is its inputs, the same computed without fusion, and its table of providers. The
numbers are right if the output and each gradient are as near to a float64 reference as the unfused
operation's own are, times 1.5, or within a small limit of the dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.bench.apart import Failure
from autofuse.functional import adam, layer_norm, linear_cross_entropy, rms_norm
from autofuse.hardware import Hardware

EAGER = "eager"
ALWAYS = ("torch", "native", EAGER)  # they come with PyTorch
AS_GOOD = 1.5  # times the unfused operation's own error
LIMIT = {torch.float32: 1e-5, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Run = Callable[[str, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Operation:
    """One fused operation at one size.

    Args:
        make: device -> the leaves, those in which gradients are taken first.
        run: (provider, leaves) -> output; "eager" is the unfused operation, in the leaves' dtypes.
        exact: leaves in float64 -> output.
        leaves: how many of the leaves have gradients.
    """

    name: str
    size: str
    dtype: torch.dtype
    providers: tuple[str, ...]
    make: Callable[[str], list[Tensor]]
    run: Run
    exact: Callable[[Sequence[Tensor]], Tensor]
    leaves: int

    @property
    def title(self) -> str:
        return f"{self.name}, {self.size}, {NAMES[self.dtype]}"


def usable(provider: str, hardware: Hardware) -> str | None:
    """Why a provider cannot be used, or None."""
    return None if provider in ALWAYS else hardware.providers.get(provider, "not known here")


# --- the operations ----------------------------------------------------------------------------


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)


def _layer_norm(rows: int, width: int, dtype: torch.dtype) -> Operation:
    def make(device: str) -> list[Tensor]:
        x = _random(rows, width, seed=0, device=device, dtype=dtype)
        weight = 1 + _random(width, seed=1, device=device, dtype=torch.float32, scale=0.1)
        return [x, weight, _random(width, seed=2, device=device, dtype=torch.float32)]

    def run(provider: str, leaves: Sequence[Tensor]) -> Tensor:
        x, weight, bias = leaves
        if provider == EAGER:  # as autocast has it
            return F.layer_norm(x.float(), (width,), weight, bias, 1e-5).to(x.dtype)
        return layer_norm.layer_norm(x, (width,), weight, bias, 1e-5, provider=provider)

    return Operation(
        "layer norm",
        f"{rows} x {width}",
        dtype,
        tuple(layer_norm.PROVIDERS),
        make,
        run,
        lambda leaves: F.layer_norm(leaves[0], (width,), leaves[1], leaves[2], 1e-5),
        3,
    )


def _rms_norm(rows: int, width: int, dtype: torch.dtype) -> Operation:
    def make(device: str) -> list[Tensor]:
        x = _random(rows, width, seed=0, device=device, dtype=dtype)
        return [x, 1 + _random(width, seed=1, device=device, dtype=torch.float32, scale=0.1)]

    def run(provider: str, leaves: Sequence[Tensor]) -> Tensor:
        x, weight = leaves
        if provider == EAGER:  # written out, as most models have it
            return rms_norm.reference(x, 1, weight, 1e-6, 0.0).to(x.dtype)
        return rms_norm.rms_norm(x, (width,), weight, 1e-6, provider=provider)

    return Operation(
        "RMS norm",
        f"{rows} x {width}",
        dtype,
        tuple(rms_norm.PROVIDERS),
        make,
        run,
        lambda leaves: rms_norm.reference(leaves[0], 1, leaves[1], 1e-6, 0.0),
        2,
    )


def _loss(rows: int, width: int, classes: int, dtype: torch.dtype) -> Operation:
    def make(device: str) -> list[Tensor]:
        hidden = _random(rows, width, seed=0, device=device, dtype=dtype)
        weight = _random(classes, width, seed=1, device=device, dtype=dtype, scale=width**-0.5)
        labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(2))
        labels[::7] = -100
        return [hidden, weight, labels.to(device)]

    def run(provider: str, leaves: Sequence[Tensor]) -> Tensor:
        hidden, weight, labels = leaves
        if provider == EAGER:
            return F.cross_entropy(F.linear(hidden, weight).float(), labels)
        return linear_cross_entropy.linear_cross_entropy(hidden, weight, labels, provider=provider)

    return Operation(
        "linear cross entropy",
        f"{rows} x {width} x {classes}",
        dtype,
        tuple(linear_cross_entropy.PROVIDERS),
        make,
        run,
        lambda leaves: F.cross_entropy(F.linear(leaves[0], leaves[1]), leaves[2]),
        2,
    )


# rows and widths of the norms; rows, width and classes of the losses
SIZES: Mapping[str, tuple[int, tuple[int, ...], tuple[tuple[int, int, int], ...]]] = {
    "toy": (64, (32,), ((64, 32, 96),)),
    "check": (1000, (768, 4096), ((1000, 768, 50_257),)),
    "time": (8192, (768, 4096), ((8192, 768, 50_257), (4096, 2048, 32_000))),
}


def operations(sizes: str) -> list[Operation]:
    """All with gradients; ``sizes`` is a key of `SIZES`."""
    rows, widths, losses = SIZES[sizes]
    dtypes = (torch.float32, torch.bfloat16)
    norms = [kind(rows, w, dtype) for kind in (_layer_norm, _rms_norm) for w in widths for dtype in dtypes]
    return norms + [_loss(*size, dtype) for size in losses for dtype in dtypes]


# --- whether they are right --------------------------------------------------------------------


def _outcome(run: Callable[[Sequence[Tensor]], Tensor], leaves: Sequence[Tensor], count: int) -> list[Tensor]:
    """The output and the gradients in the first ``count`` leaves, in float64."""
    own = [leaf.detach().requires_grad_(i < count) for i, leaf in enumerate(leaves)]
    out = run(own)
    pattern = torch.arange(out.numel(), device=out.device).remainder_(7).sub_(3).view(out.shape)
    out.backward(pattern.to(out.dtype) if out.dim() else torch.ones_like(out))
    return [out.detach().double(), *(leaf.grad.double() for leaf in own[:count] if leaf.grad is not None)]


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative, of each: the norm of the difference over the norm."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def check(provider: str, device: str, toy: bool) -> list[dict[str, Any]]:
    """One row per operation that ``provider`` has: the worst error, what is allowed, and whether it holds."""
    rows = []
    for operation in operations("toy" if toy else "check"):
        if provider not in operation.providers:
            continue
        row: dict[str, Any] = {"operation": operation.title, "provider": provider}
        try:
            row |= _check_one(operation, provider, device)
        except Exception as error:
            row |= {"right": False, "failure": Failure.of(error).reason}
        rows.append(row)
    if provider in adam.PROVIDERS:
        rows += _check_adam(provider, device)
    return rows


def _check_one(operation: Operation, provider: str, device: str) -> dict[str, Any]:
    leaves, count = operation.make(device), operation.leaves
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
    exact = _outcome(operation.exact, wide, count)
    own = _errors(_outcome(lambda found: operation.run(EAGER, found), leaves, count), exact)
    errors = _errors(_outcome(lambda found: operation.run(provider, found), leaves, count), exact)
    allowed = [max(AS_GOOD * error, LIMIT[operation.dtype]) for error in own]
    right = all(error <= limit for error, limit in zip(errors, allowed, strict=True))
    worst = max(range(len(errors)), key=lambda i: errors[i] / allowed[i])
    return {"right": right, "error": errors[worst], "allowed": allowed[worst], "eager_error": own[worst]}


def _check_adam(provider: str, device: str) -> Iterator[dict[str, Any]]:
    hyper, shapes = adam.Hyper(0.1, 0.9, 0.999, 1e-8, 0.1), ((3, 5), (17,), (64, 9))
    for decay in ("l2", "before"):
        row: dict[str, Any] = {"operation": f"Adam, decay {decay}, fp32", "provider": provider}
        reason = adam.PROVIDERS[provider].why_not(device, torch.float32)
        if reason is not None:
            yield row | {"right": None, "failure": reason}
            continue
        try:
            rule = adam.Rule(decay)  # type: ignore[arg-type]
            error = max(_adam_errors(rule, hyper, provider, shapes, device))
            yield row | {"right": error <= LIMIT[torch.float32], "error": error, "allowed": 1e-5}
        except Exception as error:
            yield row | {"right": False, "failure": Failure.of(error).reason}


def _adam_errors(
    rule: adam.Rule, hyper: adam.Hyper, provider: str, shapes: Sequence[tuple[int, ...]], device: str
) -> list[float]:
    """Of three steps' changes together, relative to float64's."""
    start = [_random(*s, seed=i, device=device, dtype=torch.float32) for i, s in enumerate(shapes)]
    params, exact = [p.clone() for p in start], [p.double() for p in start]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    wide = [[torch.zeros_like(p) for p in exact] for _ in range(2)]
    for step in (1, 2, 3):
        grads = [_random(*s, seed=10 * step, device=device, dtype=torch.float32) for s in shapes]
        adam.PROVIDERS[provider].call(rule, hyper, step, params, grads, *moments)
        for p, g, m, v in zip(exact, grads, *wide, strict=True):
            adam.reference_update(rule, hyper, step, p, g.double(), m, v)
    changes = [p.double() - s.double() for p, s in zip(params, start, strict=True)]
    return _errors(changes, [p - s.double() for p, s in zip(exact, start, strict=True)])


# --- how long they take ------------------------------------------------------------------------


def timings(provider: str, device: str, toy: bool) -> list[dict[str, Any]]:
    """One row per operation: milliseconds of forward and backward, and the memory's peak above the inputs."""
    rows = []
    for operation in operations("toy" if toy else "time"):
        if provider not in (*operation.providers, EAGER):
            continue
        row: dict[str, Any] = {"operation": operation.title, "provider": provider}
        try:
            leaves = [
                leaf.requires_grad_(i < operation.leaves) for i, leaf in enumerate(operation.make(device))
            ]
            row |= _time(lambda o=operation, own=leaves: _both_ways(o, provider, own), device, toy)  # type: ignore[misc]
        except Exception as error:
            row["failure"] = Failure.of(error).reason
        rows.append(row)
    return rows + _time_adam(provider, device, toy)


def _both_ways(operation: Operation, provider: str, leaves: Sequence[Tensor]) -> None:
    out = operation.run(provider, leaves)
    out.backward(torch.ones_like(out))
    for leaf in leaves:
        leaf.grad = None


def _time_adam(provider: str, device: str, toy: bool) -> list[dict[str, Any]]:
    shapes = (
        ((64, 16), (16,)) if toy else ((50_257, 768), *[(768, 3072), (3072, 768), (768, 2304), (768,)] * 12)
    )
    params = [torch.zeros(s, device=device) for s in shapes]
    row = {"operation": f"AdamW, {sum(p.numel() for p in params):,} fp32 parameters", "provider": provider}
    rule, hyper = adam.Rule("before"), adam.Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01)
    grads, first, second = ([torch.ones_like(p) for p in params] for _ in range(3))
    if provider == EAGER:
        own = torch.optim.AdamW(params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        return [{**row, **_time(own.step, device, toy)}]
    if provider not in adam.PROVIDERS or adam.PROVIDERS[provider].why_not(device, torch.float32):
        return []
    call = adam.PROVIDERS[provider].call
    try:
        return [{**row, **_time(lambda: call(rule, hyper, 1, params, grads, first, second), device, toy)}]
    except Exception as error:
        return [{**row, "failure": Failure.of(error).reason}]


def _time(run: Callable[[], object], device: str, toy: bool) -> dict[str, Any]:
    warm_up, repeats = (1, 3) if toy else (5, 30)
    for _ in range(warm_up):
        run()
    if device != "cuda":
        return {"ms": median(_seconds(run) * 1e3 for _ in range(repeats)), "peak_bytes": None}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return {"ms": median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def providers(hardware: Hardware) -> Mapping[str, str | None]:
    """Every provider that any operation has -> why it cannot be used, or None."""
    tables = (layer_norm, rms_norm, linear_cross_entropy, adam)
    names = dict.fromkeys(name for table in tables for name in table.PROVIDERS)
    return {name: usable(name, hardware) for name in names}
