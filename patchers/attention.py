"""The `attention` patch: on a CPU, short attention in bf16 by whole matrix products.

Candidates are found without names: the innermost modules with at least two matrices to project with.
In training such a module's own forward runs inside a `TorchFunctionMode` that sees the calls of
``F.scaled_dot_product_attention``, and makes those that are short or have dropout by
`autofuse.functional.attention.by_products`. The first of its calls shows whether there are any: a module
without (an MLP) gets its class back, and so does one whose attention is in another dtype. One whose
sequences were long so far stays, since those of a later batch may be short.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autofuse.functional.attention import by_products, is_faster, obstacle
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name, fused_class
from autofuse.regions import is_plain_context

__all__ = ["find", "order"]

order = 25

NOT_CALLED = "its forward does not call F.scaled_dot_product_attention"
HIDDEN = "F.multi_head_attention_forward does its attention, and shows nobody how"


def find(context: Context) -> Patch | Rejected:
    """Every module that may compute attention; accepted until its first call shows that it does not."""
    reason = _cannot(context)
    if reason is not None:
        return Rejected(reason)
    found = _candidates(context)
    candidates = [(path, module) for path, module in found if not hasattr(module, "_autofuse_original")]
    if not candidates:
        done = "nothing more to do: short attention is computed by products already"
        return Rejected(done if found else "no module projects with two matrices, as attention does")
    sites = [_site(path, module) for path, module in candidates]
    modules = {site.path: module for site, (_, module) in zip(sites, candidates, strict=True)}
    uses = {path: _Use() for path in modules}

    def change(transaction: Transaction, accepted: Sequence[Site]) -> None:
        for site in accepted:
            module = modules[site.path]
            _uses[module] = uses[site.path]  # a proof takes it back and makes it again: it is not forgotten
            transaction.set_class(module, _swapped(type(module)))

    patch = Patch(
        sites,
        change,
        reason="whole matrix products, with scores in float32, instead of block by block",
        idle=lambda: not any(use.faster for use in uses.values()),
    )
    for path, use in uses.items():
        use.reject = functools.partial(_reject, weakref.ref(patch), path)
    return patch


def _cannot(context: Context) -> str | None:
    """Why there is nothing to gain anywhere in the model, or None."""
    hardware = context.hardware
    if hardware.kind != "cpu":
        return f"it is CPUs whose bf16 attention takes longer than products, and {hardware.name} is not one"
    asked = context.settings.autocast_dtype == torch.bfloat16 or context.precision == "bf16"
    narrow = any(p.dtype == torch.bfloat16 for p in context.model.parameters())
    if asked or narrow or (context.precision == "auto" and hardware.autocast_dtype()[0] == torch.bfloat16):
        return None
    return "the step does not compute in bf16, whose attention takes longer than products"


def _reject(patch: weakref.ref[Patch], path: str, reason: str) -> None:
    found = patch()  # weak: what `_uses` holds for a module must not keep the module alive
    if found is not None:
        found.reject(reason, [path])


# --- candidates --------------------------------------------------------------------------------


def _candidates(context: Context) -> list[tuple[str, nn.Module]]:
    """The innermost modules that project with two matrices or more."""
    found: list[tuple[str, nn.Module]] = []
    around: set[str] = set()  # the paths of what holds one
    for path, module in reversed(context.modules):  # what is inside comes first
        if path not in around and (_projections(module) >= 2 or isinstance(module, nn.MultiheadAttention)):
            found.append((path, module))
            names = path.split(".")
            around.update(".".join(names[:n]) for n in range(len(names)))
    return found[::-1]


def _projections(module: nn.Module) -> int:
    """How many children hold one matrix, themselves or in a child of their own (a wrapper, an adapter)."""
    if type(module).forward in (nn.Module.forward, nn.Sequential.forward):  # it holds others, no more
        return 0
    return sum(_projects(child) for child in module.children() if not isinstance(child, nn.Embedding))


def _projects(module: nn.Module) -> bool:
    inner = [] if type(module).forward is nn.Module.forward else list(module.children())
    return _has_matrix(module) or sum(map(_has_matrix, inner)) == 1


def _has_matrix(module: nn.Module) -> bool:
    return any(p is not None and p.dim() == 2 for p in module._parameters.values())


def _site(path: str, module: nn.Module) -> Site:
    site = Site(path, class_name(module), "attention by products", "torch")
    if not path:
        return site.rejected("the model itself keeps its class")
    if isinstance(module, nn.MultiheadAttention):
        return site.rejected(HIDDEN)
    if isinstance(module, torch.jit.ScriptModule):
        return site.rejected("it is a TorchScript module")
    if "forward" in vars(module):
        return site.rejected("its forward was replaced on the instance")
    return site


# --- the changed module ------------------------------------------------------------------------


@dataclass
class _Use:
    """What the calls of one module have shown so far."""

    reject: Callable[[str], None] = lambda reason: None
    attends: bool = False
    faster: bool = False


_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()


class _ByProducts(TorchFunctionMode):
    """Inside it, attention is computed by products where that is faster, and what there was is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.attends = self.faster = False
        self.why_not = NOT_CALLED

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            self.why_not = HIDDEN
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # the method calls super(), which Dynamo cannot trace from here
        return func(*args, **(kwargs or {}))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        why_not = obstacle(query, key, value)
        if why_not is not None:
            self.why_not = why_not
        else:
            self.attends = True
            if is_faster(query, key, value, *args, **options):
                self.faster = True
                return by_products(query, key, value, *args, **options)
        return F.scaled_dot_product_attention(query, key, value, *args, **options)


def _swapped(cls: type[nn.Module]) -> type[nn.Module]:
    original = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # nothing is learned while it is traced
            with _ByProducts():
                return original(self, *args, **kwargs)
        if not is_plain_context():
            return original(self, *args, **kwargs)
        with _ByProducts() as seen:
            out = original(self, *args, **kwargs)
        use = _uses.setdefault(self, _Use())  # a copy of a changed module has none
        use.attends, use.faster = use.attends or seen.attends, use.faster or seen.faster
        if not use.attends:  # one that has stays: a change of precision may be tried, and taken back
            use.reject(seen.why_not)
            self.__class__ = cls
        return out

    return fused_class(cls, "attention by products", forward, live=None)
