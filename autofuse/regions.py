"""Regions: the parts of a model that are worth compiling, found by structure alone.

Deep models repeat one block. Blocks that look alike (the same class, the same parameter names and
shapes, side by side in one container) can share a single compilation, which makes compiling a
model of a hundred blocks as cheap as compiling one block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.modules import module as _module

__all__ = [
    "Kind",
    "Stack",
    "Strategy",
    "eagerly",
    "find_kinds",
    "find_stacks",
    "hook_reason",
    "is_fsdp",
    "is_plain_context",
    "sharded_reason",
    "signature",
]

Strategy = Literal["regions", "body", "model"]


@dataclass(frozen=True)
class Stack:
    """Blocks that look alike, side by side in the module called ``container``."""

    container: str
    paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Kind:
    """Modules that share one compilation; ``dynamic`` names the integers in which they differ."""

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    dynamic: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.paths, self.modules, strict=True)


def signature(module: nn.Module) -> Hashable:
    """What two modules must have in common to be run by the same compiled code.

    >>> a, b, c = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2)
    >>> signature(a) == signature(b), signature(a) == signature(c)
    (True, False)
    """
    tensors = tuple((name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False))
    return type(module), tensors


def find_stacks(model: nn.Module) -> list[Stack]:
    """The outermost stacks of at least two like blocks, in the order of the model.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ModuleList(block() for _ in range(3)))
    >>> [stack.paths for stack in find_stacks(model)]
    [('1.0', '1.1', '1.2')]
    """
    return list(_stacks(model, "", set()))


def _stacks(module: nn.Module, path: str, seen: set[int]) -> Iterator[Stack]:
    if id(module) in seen:  # a module that is used twice counts once
        return
    seen.add(id(module))
    children = list(module.named_children())
    repeated: set[int] = set()
    if _is_sequence(module):
        for alike in _alike(children):
            repeated.update(id(block) for _, block in alike)
            yield Stack(path, tuple(_join(path, name) for name, _ in alike), tuple(b for _, b in alike))
    for name, child in children:
        if id(child) not in repeated:
            yield from _stacks(child, _join(path, name), seen)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_sequence(module: nn.Module) -> bool:
    """Whether the order of the children means something (`ModuleList`, `Sequential`, and their like)."""
    return bool(module._modules) and all(name.isdigit() for name in module._modules)


def _alike(children: Sequence[tuple[str, nn.Module]]) -> list[list[tuple[str, nn.Module]]]:
    groups: dict[Hashable, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, child in children:
        if _is_block(child):
            groups[signature(child)].append((name, child))
    return [group for group in groups.values() if len(group) > 1]


def _is_block(module: nn.Module) -> bool:
    """A block is called, has parts, and learns; a single Linear or a list of modules is none."""
    return _callable(module) and bool(module._modules) and next(module.parameters(), None) is not None


def _callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def find_kinds(model: nn.Module, strategy: Strategy = "regions") -> list[Kind]:
    """What to compile: each block of a stack, the bodies that hold the stacks, or the model.

    Args:
        strategy: "regions" compiles every block, with one compilation for each stack; "body" the
            smallest callable module around each stack; "model" everything at once. Without any
            stack all three mean the model.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(block(), block()))
    >>> [[kind.paths for kind in find_kinds(model, how)] for how in ("regions", "body", "model")]
    [[('1.0', '1.1')], [('1',)], [('',)]]
    """
    stacks = [] if strategy == "model" else find_stacks(model)
    if not stacks:
        return [Kind(("",), (model,))]
    if strategy == "regions":
        return [Kind(stack.paths, stack.blocks, _varying_integers(stack.blocks)) for stack in stacks]
    bodies = {_body(model, stack.container) for stack in stacks}
    outermost = sorted(path for path in bodies if not any(_inside(path, other) for other in bodies))
    return [Kind((path,), (model.get_submodule(path),)) for path in outermost]


def _body(model: nn.Module, path: str) -> str:
    while path and not _callable(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(other + "."))


def _varying_integers(blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """The integer attributes in which the blocks differ (a layer's index), as dynamo calls them.

    Dynamo takes a module's integers for constants, so that an index alone makes a graph per block.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for block in blocks:
        for path, module in block.named_modules():
            source = "L['module']" + "".join(f"._modules['{name}']" for name in path.split(".") if name)
            for name, value in vars(module).items():
                if type(value) is int:
                    values[f"{source}.{name}"].add(value)
    return tuple(source for source, seen in values.items() if len(seen) > 1)


_GLOBAL_HOOKS = (
    ("forward hook", _module._global_forward_hooks),
    ("forward pre-hook", _module._global_forward_pre_hooks),
    ("backward hook", _module._global_backward_hooks),
    ("backward pre-hook", _module._global_backward_pre_hooks),
)
_HOOKS = tuple(
    (kind, f"_{kind.replace('pre-hook', 'pre_hook').replace(' ', '_')}s") for kind, _ in _GLOBAL_HOOKS
)


def hook_reason(region: nn.Module) -> str | None:
    """Which hook keeps ``region`` from being compiled: dynamo does not guard against hooks.

    >>> layer = nn.Sequential(nn.Linear(2, 2))
    >>> hook_reason(layer) is None
    True
    >>> handle = layer[0].register_forward_hook(print)
    >>> hook_reason(layer)
    "a forward hook on '0' must run eagerly"
    """
    for kind, hooks in _GLOBAL_HOOKS:
        if hooks:
            return f"a global module {kind} must run eagerly"
    for path, module in region.named_modules():
        own = vars(module)
        for kind, attribute in _HOOKS:
            if own.get(attribute):
                return f"a {kind} on {path or 'it'!r} must run eagerly"
    return None


def is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP, of either version, shards any of it."""
    kinds = {type(module) for module in model.modules()}
    names = {cls.__name__ for kind in kinds for cls in kind.__mro__}
    return not names.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def sharded_reason(region: nn.Module) -> str | None:
    """Whether FSDP manages the region's parameters, which then come and go between calls."""
    if is_fsdp(region):
        return "sharded by FSDP: its parameters are gathered by hooks, which a compiled region would skip"
    if any(type(parameter).__name__ == "DTensor" for parameter in region.parameters()):
        return "sharded parameters (DTensor)"
    return None


_eager = False


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled regions run their eager code inside: for a proof, whose shapes and dtypes come once."""
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before


def is_plain_context() -> bool:
    """Whether ordinary tensors are computed here: no vmap, no fake tensors, no tracing, no modes."""
    return (
        not _eager
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )
