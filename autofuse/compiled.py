"""Compiled calls: a module's call through Inductor in ordinary training, and eagerly in any other case.

One `SharedCompilation` serves all modules of a `Kind`. Its graphs are counted: a storm of them first turns
dynamic shapes on and then ends in eager code, as every failure of the compiler does, for good.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.experimental._config
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.hooks import RemovableHandle

from autofuse.errors import first_line, is_out_of_memory
from autofuse.regions import Kind, hook_reason, is_plain_context

__all__ = ["CompiledCall", "OwnStorms", "SharedCompilation", "UntriedISAs", "is_compile_error"]

# A kind of region needs one graph for the first shape and one for each size that turns out to vary; as many
# again where some blocks get an input without gradient. Where that is more than this, or never ends, graphs
# in which all sizes vary are tried, of which nothing should need more than this either.
RECOMPILE_LIMIT = 4

_log = logging.getLogger("autofuse")
_REGION, _numbers = "region_", itertools.count()


# --- calling -----------------------------------------------------------------------------------


class SharedCompilation:
    """One compilation, shared by modules that look alike, and given up once and for all if it fails.

    Args:
        on_note: told what has changed while it goes on, in words.
        on_failure: told why it is given up, and for which paths.
    """

    def __init__(
        self,
        kind: Kind,
        device: torch.device,
        on_note: Callable[[str], None],
        on_failure: Callable[[str, Iterable[str]], None],
    ) -> None:
        self.failure: str | None = None
        self.device = device
        self.paths = kind.paths
        self.on_failure = on_failure
        self._on_note = on_note
        self._integers = kind.dynamic
        self._dynamic: bool | None = None  # dynamo's own choice: the sizes that were seen to vary
        self._first: list[Hashable] | None = None  # the sizes of the first call

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """The compiled ``module(...)``; made at the first call, since Inductor takes seconds to import."""
        # A code object and a name of its own: dynamo hangs its caches, and its limit of graphs, on the
        # one, and what it learns about the sizes that vary on the other.
        name = f"{_REGION}{next(_numbers)}"
        function = types.FunctionType(_call_module.__code__.replace(co_name=name), globals(), name)
        compiled = torch.compile(function, dynamic=self._dynamic, **_compile_arguments(self.device))
        changes = []
        if self._integers:  # those in which the modules differ are inputs, not constants
            config: Any = torch.compiler.config
            sources = ",".join(filter(None, [config.dynamic_sources, *self._integers]))
            changes.append(config._make_closure_patcher(dynamic_sources=sources))
        if self._dynamic:  # sizes that happen to be equal may differ in the next batch
            symbols: Any = torch.fx.experimental._config
            changes.append(symbols._make_closure_patcher(use_duck_shape=False))
        return _with_settings(compiled, changes) if changes else compiled

    def note(self, inputs: Any) -> None:
        """Remember the sizes of the first call's inputs."""
        if self._first is None:
            self._first = _sizes(inputs)

    def survives(self, error: Exception, inputs: Any) -> str | None:
        """None if ``error`` was a storm of graphs that dynamic shapes may end; else why to give up."""
        if type(error).__name__ != "FailOnRecompileLimitHit":
            return first_line(getattr(error, "inner_exception", error))  # what the backend raised
        if self._dynamic:
            return f"more than {RECOMPILE_LIMIT} graphs, and as many again with dynamic shapes"
        if self._first == _sizes(inputs):  # it needs another graph for something else
            return f"more than {RECOMPILE_LIMIT} graphs, for inputs of the same shapes"
        self._dynamic = True
        del self.run  # and with it its graphs
        where = f"{self.paths[0]} …" if len(self.paths) > 1 else self.paths[0] or "the model"
        self._on_note(f"{where}: dynamic shapes after {RECOMPILE_LIMIT} graphs")
        return None

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.on_failure(reason, self.paths)
        _log.warning("compile: %s run eagerly from now on: %s", ", ".join(self.paths) or "the model", reason)


def _with_settings(compiled: Callable[..., Any], changes: Sequence[Callable[[], Any]]) -> Callable[..., Any]:
    """``compiled``, called under settings that are context variables: no other thread or code sees them.

    A closure patcher takes 2 us a call, where ``config.patch()`` takes 15.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        reverts = [change() for change in changes]
        try:
            return compiled(*args, **kwargs)
        finally:
            for revert in reverts:
                revert()

    return run


def _sizes(inputs: Any) -> list[Hashable]:
    """The shapes of the tensors among a call's inputs, and its integers."""
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, (int, torch.Tensor))]
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]


def _call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _compile_arguments(device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"fallback_random": True}
    if device.type == "cpu":
        options["cpp.vec_isa_ok"] = True  # see `UntriedISAs`
    # One graph or an error, so that no part is silently left out, be it for a graph break or a storm.
    return {
        "backend": "inductor",
        "options": options,
        "fullgraph": True,
        "recompile_limit": RECOMPILE_LIMIT,
    }


class OwnStorms(logging.Filter):
    """Keeps from the terminal what dynamo logs of our storms: the report says it in one line."""

    logger = logging.getLogger("torch._dynamo.convert_frame")

    def filter(self, record: logging.LogRecord) -> bool:
        return f"'{_REGION}" not in str(record.args)


class UntriedISAs:
    """Inductor's ``cpu_vec_isa.valid_vec_isa_list``, without its trials where ``cpp.vec_isa_ok`` is set.

    Else Inductor compiles and loads a trial for each instruction set that the CPU reports, up to seven of
    them, one after the other; ``cpp.vec_isa_ok`` alone skips the first. The others are for AMX, VNNI and
    bf16, which nothing but the templates of matrix products is written for, and those are never chosen
    without ``max_autotune``. What the compiler then cannot do after all is an error like any other, and
    ends in eager code. Any other compilation gets ``tried()``, and nothing is cached for it.
    """

    def __init__(self, tried: Callable[[], list[Any]]) -> None:
        self.tried = tried

    def __call__(self) -> list[Any]:
        from torch._inductor import config, cpu_vec_isa

        try:
            supported = cpu_vec_isa.x86_isa_checker()
            known = [isa for isa in (cpu_vec_isa.VecAVX512(), cpu_vec_isa.VecAVX2()) if str(isa) in supported]
        except AttributeError:  # of another version
            return self.tried()
        skip = known and config.cpp.vec_isa_ok and not (config.max_autotune or config.max_autotune_gemm)
        return known if skip else self.tried()


class CompiledCall:
    """What a module's ``_compiled_call_impl`` is set to: compiled in training, eager in any other case."""

    __slots__ = ("_handles", "failure", "module", "path", "shared")

    def __init__(self, module: nn.Module, path: str, shared: SharedCompilation) -> None:
        self.module = weakref.ref(module)
        self.path = path
        self.shared = shared
        self.failure: str | None = None
        self._handles = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None  # it is calling us
        if torch.compiler.is_compiling() or not self._applies(module):
            return module._call_impl(*args, **kwargs)
        random = _random_state(self.shared.device)
        try:
            return self._compiled(module, args, kwargs)
        except Exception as error:
            if _passes_through(error):
                raise
            reason = self.shared.survives(error, (args, kwargs))
        _set_random_state(self.shared.device, random)
        if reason is None:
            return self(*args, **kwargs)
        result = module._call_impl(*args, **kwargs)  # an error of the user's own comes out here, as it is
        self.shared.fail(reason)
        return result

    def _applies(self, module: nn.Module) -> bool:
        return (
            module.training
            and torch.is_grad_enabled()
            and self.failure is None
            and self.shared.failure is None
            and is_plain_context()
            and not self._is_hooked(module)
        )

    def _is_hooked(self, module: nn.Module) -> bool:
        """Dynamo does not guard against hooks. Whoever registers one makes a handle, which counts up."""
        latest = RemovableHandle.next_id
        if latest == self._handles:
            return False
        self._handles = latest
        self.failure = hook_reason(module)
        if self.failure is not None:
            self.shared.on_failure(self.failure, [self.path])
        return self.failure is not None

    def _compiled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.shared.note((args, kwargs))
        if len(self.shared.paths) == 1 or not any(map(_is_store, map(type, (*args, *kwargs.values())))):
            return self.shared.run(module, *args, **kwargs)
        stores = Deferred()
        result = self.shared.run(
            module,
            *(stores.stand_in(value) for value in args),
            **{name: stores.stand_in(value) for name, value in kwargs.items()},
        )
        stores.replay()
        return result


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Taken before each compiled call (1 us), so that one that fails half-way can be done over."""
    on_gpu = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


def _set_random_state(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


# --- key-value caches --------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _is_store(cls: Any) -> bool:
    """Whether ``cls`` looks like a cache of keys and values that every block of a stack writes to."""
    return callable(getattr(cls, "get_seq_length", None))


class Deferred:
    """Writes to a shared cache of keys and values, put off until the compiled block is done.

    Language models make such a cache in training too. Each block writes to its own layer of it, so
    that traced writes would need a graph per block. A stand-in notes what is written, and an empty
    layer gives back what was written to it.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    def stand_in(self, value: Any) -> Any:
        cls: Any = type(value)
        if not _is_store(cls):
            return value
        new = _noting(cls)
        vars(new).update(vars(value), _autofuse_updates=[])
        self._pairs.append((value, new))
        return new

    def replay(self) -> None:
        """Make the writes; raises, before any, if what was assumed of the cache is not so."""
        updates = [(store, *update) for store, new in self._pairs for update in new._autofuse_updates]
        for store, _, _, args, kwargs in updates:
            if store.get_seq_length(args[0] if args else kwargs.get("layer_idx", 0)) != 0:
                raise RuntimeError("the cache of keys and values that it is given is not empty")
        for store, key, value, args, kwargs in updates:
            store.update(key, value, *args, **kwargs)


def _noting(cls: Any) -> Any:
    if not callable(getattr(cls, "update", None)):
        raise RuntimeError(f"its blocks share a {cls.__name__}, which would need a graph for each")
    noting = _noting_class(cls)
    return object.__new__(noting)


@functools.lru_cache(maxsize=64)
def _noting_class(cls: Any) -> type:
    def update(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._autofuse_updates.append((key, value, args, kwargs))
        return key, value

    return type(cls.__name__, (cls,), {"update": update, "__module__": cls.__module__})


# --- errors ------------------------------------------------------------------------------------

_COMPILER_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
_COMPILER_FILES = tuple(os.path.join(*package.split("."), "") for package in _COMPILER_PACKAGES)


def is_compile_error(exception: BaseException) -> bool:
    """Whether undoing the compile patch and doing the step over may help.

    True for the errors of dynamo, AOTAutograd, Inductor and Triton, for what their generated code
    raises (forward or backward, double backward included); never for running out of memory.

    >>> is_compile_error(ValueError("the user's own"))
    False
    """
    if not isinstance(exception, Exception) or is_out_of_memory(exception):
        return False
    return any(_is_from_compiler(error) for error in _chain(exception))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_from_compiler(error: BaseException) -> bool:
    if any(cls.__module__.startswith(_COMPILER_PACKAGES) for cls in type(error).__mro__):
        return True
    traceback = error.__traceback__
    while traceback is not None:
        if any(part in traceback.tb_frame.f_code.co_filename for part in _COMPILER_FILES):
            return True
        traceback = traceback.tb_next
    return False


def _passes_through(error: Exception) -> bool:
    """Not for us: out of memory, which eager would be too, and checkpoint's way to end a forward."""
    return is_out_of_memory(error) or isinstance(error, _StopRecomputationError)
