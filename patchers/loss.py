"""The output layer's product with the vocabulary is not built while training (`autofuse.lazy`).

Output layers are found without names: what ``get_output_embeddings()`` says of the model or of any
module in it, else every linear layer that widens its input to many classes or shares its weight with
an embedding, else the embeddings, whose weight the model's forward may multiply with by itself
(`autofuse.tied`). Whether their output does reach a cross entropy, the first steps show: a layer whose
logits are always read by something else gets its class back, and the report says by what.
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

from autofuse.functional.linear_cross_entropy import choose
from autofuse.lazy import Fate, lazy_linear
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name, fused_class
from autofuse.probe import quiet
from autofuse.tied import arm, disarm, is_armed

__all__ = ["find", "order"]

order = 30

# Below this many classes the logits are no larger than other activations, and building them costs
# what not building them saves (measured on a CPU: even at 1024, 1.2 to 1.4 times as fast at 8192).
MIN_CLASSES = 1024

# Losses in a row that needed the real logits, before the layer is left alone.
PATIENCE = 2

# Look-ups in a row in an embedding after which no product with its weight came.
PATIENCE_WITH_EMBEDDINGS = 4


def find(context: Context) -> Patch | Rejected:
    """Every module that looks like an output layer; accepted where it is a plain linear layer."""
    provider = choose(context.hardware)
    sites, done = [], 0
    for path, module in _candidates(context):
        if hasattr(module, "_autofuse_original"):
            done += 1
            continue
        reason = _unfit(module)
        if reason is None:
            sites.append(Site(path, class_name(module), "linear_cross_entropy", provider))
        else:
            sites.append(Site(path, class_name(module), reason=reason))
    chosen = [site for site in sites if site.accepted]
    if not chosen:
        reason = "nothing more to do: the logits are lazy already" if done else "no output layer was found"
        return Patch(sites, reason=reason if done or not sites else sites[0].reason)
    paths = {site.path for site in chosen}
    modules = {path: module for path, module in context.modules if path in paths}

    def change(transaction: Transaction, accepted: Sequence[Site]) -> None:
        for site in accepted:
            module = modules[site.path]
            _uses[module] = _Use(
                str(site.provider), functools.partial(_reject, weakref.ref(patch), site.path)
            )
            transaction.on_undo(functools.partial(_forget, weakref.ref(module)))
            swapped = _swapped_embedding if isinstance(module, nn.Embedding) else _swapped
            transaction.set_class(module, swapped(type(module)))

    patch = Patch(sites, change, reason="the logits are not built for the loss, nor are ignored rows")
    return patch


def _forget(reference: weakref.ref[nn.Module]) -> None:
    module = reference()
    if module is not None:
        _uses.pop(module, None)
        if isinstance(module, nn.Embedding):
            disarm(module.weight)


def _reject(patch: weakref.ref[Patch], path: str, reason: str) -> None:
    found = patch()  # weak: what `_uses` holds for a module must not keep the module alive
    if found is not None:
        found.reject(reason, [path])


# --- candidates --------------------------------------------------------------------------------


def _candidates(context: Context) -> list[tuple[str, nn.Module]]:
    """What a model calls its output layer; where none does, what is shaped like one; where nothing is,
    the embeddings."""
    named = {id(head) for _, module in context.modules for head in _output_layers(module)}
    if named:
        return [(path, module) for path, module in context.modules if id(module) in named]
    embeddings = [(path, m) for path, m in context.modules if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for _, m in embeddings}
    linear = [(path, m) for path, m in context.modules if isinstance(m, nn.Linear) and m.weight is not None]
    shaped: list[tuple[str, nn.Module]] = [
        (path, m)
        for path, m in linear
        if m.out_features >= MIN_CLASSES and (m.out_features > 4 * m.in_features or id(m.weight) in tied)
    ]
    return shaped or [(path, m) for path, m in embeddings if m.num_embeddings >= MIN_CLASSES]


def _output_layers(module: nn.Module) -> list[nn.Module]:
    """What the module says its output layer is: that layer itself, if it is wrapped by something that
    does nothing to its output (PEFT's ``modules_to_save``)."""
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # there is no such method, or it is for another kind of model
        return []
    if not isinstance(head, nn.Module):
        return []
    inner = [m for m in head.modules() if m is not head and isinstance(m, nn.Linear)]
    return [_passed_through(head, inner) or head] if inner else [head]


def _passed_through(head: nn.Module, inner: Sequence[nn.Linear]) -> nn.Module | None:
    """The one of ``inner`` whose output is the very output of ``head``."""
    outputs: dict[int, Any] = {}
    handles = [
        m.register_forward_hook(lambda m, args, out: outputs.__setitem__(id(out), (m, out))) for m in inner
    ]
    try:
        with quiet(), torch.no_grad():
            weight = inner[0].weight
            found = head(torch.zeros(1, inner[0].in_features, dtype=weight.dtype, device=weight.device))
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
    module, _ = outputs.get(id(found), (None, None))
    return module


def _unfit(module: nn.Module) -> str | None:
    """Why the module's logits have to be built, or None."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if module._modules:
        return "it is more than a linear layer (an adapter, a parametrization?)"
    if weight is None:
        return "its weight is not a parameter of its own (weight norm, quantization?)"
    if any(type(p) is not nn.Parameter for p in (weight, bias) if p is not None):
        return f"its weight is a {type(weight).__name__} (sharded or quantized?)"
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        return "its weight is not a dense matrix of floating point numbers (sharded or quantized?)"
    if weight.shape[0] < MIN_CLASSES:
        return f"{weight.shape[0]} classes: building so few logits costs less than not building them"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if _hooked(module) and not isinstance(module, nn.Embedding):
        return "it has hooks, which see its output"
    return None


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._global_forward_hooks
        or nn.modules.module._global_backward_hooks
        or nn.modules.module._global_backward_pre_hooks
    )


# --- the changed layer -------------------------------------------------------------------------


@dataclass
class _Use:
    """How one output layer's logits have been used so far."""

    provider: str = "torch"
    reject: Callable[[str], None] = lambda reason: None
    last: Fate | None = None
    fused: bool = False
    misses: int = 0
    unanswered: int = 0  # look-ups in an embedding since its weight was multiplied

    def next(self) -> Fate | None:
        """The next call's fate, or None if the layer had better be left alone."""
        self._learn()
        if self.misses >= PATIENCE:
            reader = self.last.materialized_by if self.last else None
            self.reject(f"its output is always needed: it is read by {reader}, and by no cross entropy")
            return None
        self.last = Fate(self.provider)
        return self.last

    def _learn(self) -> None:
        last = self.last
        if last is None:
            return
        self.fused = self.fused or last.fused
        if not self.fused and last.materialized_by is not None:
            self.misses += 1


_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()


class _LazyProduct(TorchFunctionMode):
    """Inside it, the product with the layer's weight is lazy, whatever else the layer's forward does."""

    def __init__(self, weight: Tensor, fate: Fate) -> None:
        super().__init__()
        self.weight, self.fate, self.made = weight, fate, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) in (2, 3) and args[1] is self.weight and _fits(*args):
            self.made = True
            x, weight, *bias = args
            return lazy_linear(x, weight, bias[0] if bias else None, self.fate)
        return func(*args, **(kwargs or {}))


def _swapped(cls: type[nn.Module]) -> type[nn.Module]:
    original = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _may_be_lazy(self):
            return original(self, *args, **kwargs)
        use = _uses.get(self)
        if use is None:  # a copy of a changed layer
            use = _uses[self] = _Use()
        fate = use.next()
        if fate is None:
            self.__class__ = cls
            return original(self, *args, **kwargs)
        with _LazyProduct(self.weight, fate) as product:  # type: ignore[arg-type]
            out = original(self, *args, **kwargs)
        if not product.made and self.weight.requires_grad:
            fate.materialized_by = "its own forward"
        return out

    return fused_class(cls, "lazy logits", forward, live=("weight", "bias"))


def _swapped_embedding(cls: type[nn.Module]) -> type[nn.Module]:
    original = cls.forward

    def forward(self: nn.Embedding, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if torch.compiler.is_compiling() or not _trains(self) or torch._C._current_graph_task_id() != -1:
            return out  # compiled, not trained, or recomputed in the backward
        use = _uses.get(self)
        if use is None:  # a copy of a changed embedding
            use = _uses[self] = _Use()
        use.unanswered += is_armed(self.weight)
        if use.unanswered >= PATIENCE_WITH_EMBEDDINGS:
            use.reject("an embedding, and no product with its weight follows")
            self.__class__ = cls  # type: ignore[assignment]
            disarm(self.weight)
            return out
        disarm(self.weight)  # for another call of the model
        if type(self.weight) is nn.Parameter:
            arm(self.weight, functools.partial(_product, weakref.ref(self), cls))
        return out

    return fused_class(cls, "lazy product", forward, live=("weight",))


def _product(
    reference: weakref.ref[nn.Embedding], cls: type[nn.Module], x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """The lazy product of ``x`` with the embedding's weight; None where it had better be a real one."""
    module = reference()
    use = None if module is None else _uses.get(module)
    if module is None or use is None or not (_trains(module) and _fits(x, module.weight, bias)):
        return None
    use.unanswered = 0
    fate = use.next()
    if fate is None:
        module.__class__ = cls  # type: ignore[assignment]
        return None
    return lazy_linear(x, module.weight, bias, fate)


def _may_be_lazy(module: nn.Module) -> bool:
    """Training, with a plain weight, and nothing looks inside."""
    return _trains(module) and not _hooked(module) and type(module._parameters.get("weight")) is nn.Parameter


def _trains(module: nn.Module) -> bool:
    """Training, with gradients, by autograd's tape alone."""
    if not module.training or not torch.is_grad_enabled():
        return False
    others = torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    return not (others or torch.autograd.forward_ad._current_level >= 0)


def _fits(x: Any, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Ordinary tensors, whose product is possible and has a gradient."""
    if type(x) is not Tensor or x.dim() < 2 or not (bias is None or type(bias) in (Tensor, nn.Parameter)):
        return False
    if not (x.requires_grad or weight.requires_grad) or x.shape[-1] != weight.shape[1]:
        return False
    if x.device != weight.device or not x.is_floating_point():
        return False
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return same or torch.is_autocast_enabled(x.device.type)
