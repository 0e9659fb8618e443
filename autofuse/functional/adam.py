"""Adam's update, fused: one kernel over many tensors, and the plain formula it must agree with.

For a gradient g of a parameter p at its step t (Kingma & Ba 2015, "Adam", algorithm 1; Loshchilov &
Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2)::

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    p = p - lr * m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps)

What implementations differ in is a `Rule`. torch's fused kernels know one rule with two kinds of
decay; the others are reached by handing them other numbers, which `_for_kernel` computes.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["PROVIDERS", "Hyper", "Provider", "Rule", "adam_update", "fits_kernel", "reference_update"]


@dataclass(frozen=True)
class Rule:
    """Which Adam it is.

    Args:
        decay: ``l2`` adds it to the gradient (Adam), ``before`` shrinks the parameter before the
            update (AdamW), ``after`` shrinks it after the update (AdamW of early transformers).
        bias_correction: False leaves out both divisions by 1 - b^t (BertAdam).
        raw_eps: eps is added to sqrt(v) before it is bias-corrected (PyTorch before 1.3,
            transformers' AdamW), as in the last paragraph of section 2 of Kingma & Ba.
    """

    decay: Literal["l2", "before", "after"] = "before"
    bias_correction: bool = True
    raw_eps: bool = False


class Hyper(NamedTuple):
    """The numbers of one step. ``lr`` may be a tensor for the fused kernels alone."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@torch.no_grad()
def reference_update(
    rule: Rule, hyper: Hyper, step: float, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """One step of one tensor, in place, in plain PyTorch: any layout, any floating dtype.

    >>> p, m, v = torch.ones(1), torch.zeros(1), torch.zeros(1)
    >>> reference_update(Rule(), Hyper(0.1, 0.9, 0.99, 1e-8, 0.0), 1, p, torch.ones(1), m, v)
    >>> p, m, v
    (tensor([0.9000]), tensor([0.1000]), tensor([0.0100]))
    """
    lr, beta1, beta2, eps, weight_decay = float(hyper.lr), *hyper[1:]
    work, grad = param.to(exp_avg.dtype), grad.to(exp_avg.dtype)
    if rule.decay == "l2":
        grad = grad + weight_decay * work
    elif rule.decay == "before":
        work = work * (1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1 = 1 - beta1**step if rule.bias_correction else 1.0
    root2 = math.sqrt(1 - beta2**step) if rule.bias_correction else 1.0
    denominator = exp_avg_sq.sqrt() / root2 + (eps / root2 if rule.raw_eps else eps)
    work = work - lr / correction1 * exp_avg / denominator
    if rule.decay == "after":
        work = work * (1 - lr * weight_decay)
    param.copy_(work)


# --- which tensors a kernel can take ---------------------------------------------------------------


def fits_kernel(param: Tensor, *others: Tensor) -> bool:
    """Whether a kernel that walks over memory meets the same element of all tensors at once.

    torch's fused CPU kernels do not look at strides: a gradient that is laid out in another way
    than its parameter, or a parameter with gaps, gives wrong numbers without an error.

    >>> fits_kernel(torch.ones(2, 3), torch.ones(2, 3)), fits_kernel(torch.ones(2, 3), torch.ones(3, 2).t())
    (True, False)
    """
    if param.is_contiguous():
        return all(other.is_contiguous() for other in others)
    stride = param.stride()
    return all(other.stride() == stride for other in others) and _dense(param)


def _dense(tensor: Tensor) -> bool:
    """No gaps and no overlaps: some order of the dimensions makes it contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


# --- providers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """An implementation of the update over lists of tensors of one device and one dtype.

    Args:
        why_not: a reason why it cannot be used for parameters on a device, of a dtype; else None.
        call: ``call(rule, hyper, step, params, grads, exp_avgs, exp_avg_sqs)``.
    """

    name: str
    why_not: Callable[[str, torch.dtype], str | None]
    call: Callable[..., None]


_WIDTHS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CHUNK = 2048 * 32  # elements per CUDA block: what Apex's own multi_tensor_applier hands over


def _torch_why_not(device: str, dtype: torch.dtype) -> str | None:
    if device not in ("cpu", "cuda", "mps", "xpu"):
        return f"torch has no fused Adam for {device}"
    return None if dtype in _WIDTHS else f"torch's fused Adam does not know {dtype}"


def _for_kernel(rule: Rule, hyper: Hyper, step: Any) -> tuple[Hyper, Any]:
    """The numbers that make torch's kernel (decay first, eps outside) follow ``rule``."""
    lr, beta1, beta2, eps, weight_decay = hyper
    if rule.raw_eps and rule.bias_correction:
        eps /= math.sqrt(1 - beta2 ** float(step))
    if rule.decay == "after" and weight_decay:
        # (p - lr u)(1 - lr w) = p(1 - lr w) - lr(1 - lr w) u: a decay before, at another rate
        left = 1 - float(lr) * weight_decay
        lr, weight_decay = lr * left, weight_decay / left
    return Hyper(lr, beta1, beta2, eps, weight_decay), step if rule.bias_correction else 1e30


def _torch_call(
    rule: Rule,
    hyper: Hyper,
    step: float | Tensor,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
) -> None:
    kernel_hyper, step = _for_kernel(rule, hyper, step)
    # the kernels want one dtype: low-precision parameters with float32 moments are widened for it
    wide = [p.to(m.dtype) for p, m in zip(params, exp_avgs, strict=True)]
    step_tensor = step if isinstance(step, Tensor) else torch.full((), float(step), device=wide[0].device)
    kernel: Any = torch._fused_adam_ if rule.decay == "l2" else torch._fused_adamw_
    kernel(
        wide,
        [g.to(m.dtype) for g, m in zip(grads, exp_avgs, strict=True)],
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step_tensor] * len(wide),
        **kernel_hyper._asdict(),
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
    for param, result in zip(params, wide, strict=True):
        if result is not param:
            param.copy_(result)


def _apex_why_not(device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda":
        return "Apex's kernel runs on CUDA alone"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"Apex's kernel does not know {dtype}"
    try:
        importlib.import_module("amp_C").multi_tensor_adam  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"apex: built without CUDA extensions ({error})"
    return None


def _apex_call(
    rule: Rule,
    hyper: Hyper,
    step: float | Tensor,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
) -> None:
    importlib.import_module("amp_C").multi_tensor_adam(
        _CHUNK,
        torch.zeros(1, dtype=torch.int, device=params[0].device),  # a flag by which others tell it to skip
        [list(grads), list(params), list(exp_avgs), list(exp_avg_sqs)],
        float(hyper.lr),
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        int(step),
        0 if rule.decay == "l2" else 1,
        1 if rule.bias_correction else 0,
        hyper.weight_decay,
    )


def _apex_takes(
    rule: Rule, step: float | Tensor, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> bool:
    return (
        not isinstance(step, Tensor)  # its capturable variant is another function: torch's kernel does that
        and rule.decay != "after"
        and not (rule.raw_eps and rule.bias_correction)
        and grad.dtype == param.dtype
        and exp_avg.dtype == exp_avg_sq.dtype == torch.float32
        and all(t.is_contiguous() for t in (param, grad, exp_avg, exp_avg_sq))
    )


PROVIDERS = {
    "apex": Provider("apex", _apex_why_not, _apex_call),
    "torch": Provider("torch", _torch_why_not, _torch_call),
}


@cache
def _why_not(provider: str, device: str, dtype: torch.dtype) -> str | None:
    return PROVIDERS[provider].why_not(device, dtype)


def _provider(
    names: Sequence[str], rule: Rule, hyper: Hyper, step: float | Tensor, tensors: tuple[Tensor, ...]
) -> str | None:
    """The first provider that can take these tensors: None is the plain formula."""
    param, grad, exp_avg, exp_avg_sq = tensors
    if not fits_kernel(*tensors) or exp_avg.dtype != exp_avg_sq.dtype:
        return None
    if rule.decay == "after" and float(hyper.lr) * hyper.weight_decay == 1:
        return None  # nothing is left of the parameter: no other rate says the same
    for name in names:
        # the dtype it computes in is the moments' for torch, the parameters' for Apex
        dtype = param.dtype if name == "apex" else exp_avg.dtype
        if _why_not(name, param.device.type, dtype) is None and (
            name != "apex" or _apex_takes(rule, step, param, grad, exp_avg, exp_avg_sq)
        ):
            return name
    return None


@torch.no_grad()
def adam_update(
    rule: Rule,
    hyper: Hyper,
    step: float | Tensor,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    providers: Sequence[str] = ("torch",),
) -> None:
    """One step ``step`` (1 is the first) of many tensors, in place, fused wherever a provider can.

    >>> p, m, v = [torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)]
    >>> adam_update(Rule(), Hyper(0.1, 0.9, 0.99, 1e-8, 0.0), 1, p, [torch.ones(1)], m, v)
    >>> p
    [tensor([0.9000])]
    """
    buckets: defaultdict[tuple[Any, ...], list[tuple[Tensor, ...]]] = defaultdict(list)
    for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        name = _provider(providers, rule, hyper, step, tensors)
        if name is None:
            reference_update(rule, hyper, float(step), *tensors)
        else:
            buckets[name, tensors[0].device, *(t.dtype for t in tensors[:3])].append(tensors)
    for (name, *_), bucket in buckets.items():
        PROVIDERS[name].call(rule, hyper, step, *map(list, zip(*bucket, strict=True)))
