"""Looking at a module by running a copy of it, without leaving a trace.

The copy lies on the CPU in float32 with parameters of its own, the random generators are put back,
and everything runs on the calling thread: even a tiny ``F.layer_norm`` may open the OpenMP pool,
after which a forked child would hang.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import random
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CannotProbe",
    "RandomState",
    "attributes_read",
    "generator",
    "isolated_copy",
    "keeps_something",
    "modules_behind",
    "outside_dependence",
    "quiet",
    "random_state",
    "signature",
    "single_input",
]

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class CannotProbe(Exception):
    """The module cannot be looked at; the message says why."""


def generator(seed: int = 0) -> torch.Generator:
    """A private random generator: probes draw from it and never from the user's."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class RandomState:
    """The state of every random generator: torch's, Python's and, where it is loaded, NumPy's."""

    torch: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RandomState:
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            random.getstate(),
            None if numpy is None else numpy.get_state(legacy=False),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


@contextmanager
def random_state() -> Iterator[None]:
    """Every random generator is afterwards as it was before.

    >>> before = torch.get_rng_state()
    >>> with random_state():
    ...     _ = torch.rand(3), random.random()
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    state = RandomState.capture()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def quiet() -> Iterator[None]:
    """Single-threaded, without autocast, and every random generator as it was afterwards.

    >>> before = torch.get_rng_state()
    >>> with quiet():
    ...     _ = torch.rand(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    threads, default_dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with (
            random_state(),
            warnings.catch_warnings(action="ignore"),  # PyTorch's, of inputs that are ours
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
            # The mode is dear: it sees every call. It is needed only where another device is the default.
            nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(default_dtype)
        torch.set_num_threads(threads)


def isolated_copy(module: nn.Module) -> nn.Module:
    """A copy of a leaf module on the CPU, in float32, without hooks, with uninitialised parameters.

    Raises:
        CannotProbe: a parameter is not a plain dense tensor, or an attribute cannot be copied.
    """
    new = type(module).__new__(type(module))
    namespace: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name == "_parameters":
            value = {key: _fresh(key, parameter) for key, parameter in value.items()}
        elif "hooks" in name:
            value = OrderedDict()
        elif name == "_compiled_call_impl":
            continue
        elif isinstance(value, types.MethodType) and value.__self__ is module:
            value = types.MethodType(value.__func__, new)
        elif not isinstance(value, PLAIN):
            try:
                value = copy.deepcopy(value)
            except Exception as error:
                raise CannotProbe(f"its attribute {name!r} cannot be copied ({error})") from error
        namespace[name] = value
    vars(new).update(namespace)
    return new


def _fresh(name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
        raise CannotProbe(f"its parameter {name!r} is a {type(parameter).__name__} of {parameter.dtype}")
    return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))


def single_input(cls: type[nn.Module]) -> str | None:
    """The name of the one argument that ``cls.forward`` takes; None if it takes more or none.

    >>> single_input(nn.LayerNorm), single_input(nn.Bilinear)
    ('input', None)
    """
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return parameters[0].name if len(parameters) == 1 and parameters[0].kind in kinds else None


def signature(module: nn.Module) -> Any:
    """What tells modules apart that may compute different things: class, parameters' shapes, attributes.

    >>> signature(nn.LayerNorm(4)) == signature(nn.LayerNorm(4)), nn.LayerNorm(4) == nn.LayerNorm(4)
    (True, False)
    """
    attributes = tuple(
        (name, _by_value(value, module))
        for name, value in vars(module).items()
        if name != "training" and name not in _INTERNAL
    )
    parameters = tuple((n, None if p is None else p.shape) for n, p in module._parameters.items())
    return type(module), parameters, attributes


_INTERNAL = frozenset((*vars(nn.Module()), *nn.Module.__dict__))


def _by_value(value: Any, module: nn.Module) -> Any:
    """The value where it is plain, else the object's identity."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_by_value(item, module) for item in value)
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return value.__func__
    if isinstance(value, functools.partial):
        parts = value.func, *value.args, *value.keywords, *value.keywords.values()
        return functools.partial, tuple(_by_value(part, module) for part in parts)
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def keeps_something(probe: nn.Module, input: Tensor) -> bool:
    """Whether a call sets an attribute, which a fused forward would not do."""
    before = {name: id(value) for name, value in vars(probe).items()}
    probe(input)
    return before != {name: id(value) for name, value in vars(probe).items()}


def attributes_read(module: nn.Module) -> set[str]:
    """The names of the module's own attributes that its forward may read.

    >>> sorted(attributes_read(nn.LayerNorm(4)))
    []
    """
    return {name for f in _reachable(module) for name in f.__code__.co_names if name in vars(module)}


def outside_dependence(module: nn.Module) -> str | None:
    """What else than its input, parameters and plain attributes ``module.forward`` reads, in words.

    Looks at the bytecode of forward and of the Python functions that it calls: a global or a
    closure that holds a value (rather than a function, class or module), and an attribute that
    holds a mutable object, may change behind the recognition's back.
    """
    for function in _reachable(module):
        for name, value in _global_reads(function):
            if not callable(value) and not isinstance(value, (types.ModuleType, torch.dtype)):
                return f"its forward depends on the global {name!r}"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            value = _cell_value(cell)
            if name != "__class__" and not callable(value) and not isinstance(value, types.ModuleType):
                return f"its forward depends on the variable {name!r} of an enclosing function"
        for name in function.__code__.co_names:
            if not _constant(vars(module).get(name), module):
                return f"its forward depends on its mutable attribute {name!r}"
    return None


def modules_behind(function: Any, depth: int = 3) -> list[nn.Module]:
    """The modules that a function reaches: itself, its object, what it is bound to, closes over or
    reads from globals (a criterion with buffers, a teacher, a discriminator).

    >>> teacher = nn.Linear(2, 2)
    >>> modules_behind(lambda x: teacher(x)) == [teacher]
    True
    """
    if isinstance(function, nn.Module):
        return [function]
    if depth == 0 or isinstance(function, (type, types.ModuleType, types.BuiltinFunctionType)):
        return []
    behind: list[Any] = []
    if isinstance(function, functools.partial):
        behind = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, types.MethodType):
        behind = [function.__self__, function.__func__]
    elif isinstance(function, types.FunctionType):
        behind = [_cell_value(cell) for cell in function.__closure__ or ()]
        behind += [value for _, value in _global_reads(function)]
    elif isinstance(function, (list, tuple)):
        behind = list(function)
    elif hasattr(function, "__dict__") and not isinstance(function, torch.Tensor):
        behind = list(vars(function).values())
    return [module for value in behind for module in modules_behind(value, depth - 1)]


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _constant(value: Any, module: nn.Module) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_constant(item, module) for item in value)
    if isinstance(value, functools.partial):
        return all(_constant(v, module) for v in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):  # an object's may read its state
        return value.__self__ is module or isinstance(value.__self__, (types.ModuleType, type, type(None)))
    return isinstance(value, PLAIN) or callable(value)


def _reachable(module: nn.Module, limit: int = 30) -> list[types.FunctionType]:
    """The module's forward and the functions of its Python module, its methods and its attributes that it
    may call."""
    cls = type(module)
    found: list[types.FunctionType] = []
    todo: list[Any] = [cls.forward]
    home = {base.__module__ for base in cls.__mro__ if base.__module__.split(".")[0] != "torch"}
    while todo and len(found) < limit:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, types.FunctionType) or function in found:
            continue
        if function.__module__ not in home:
            continue
        found.append(function)
        todo += [value for _, value in _global_reads(function)]
        todo += [_cell_value(cell) for cell in function.__closure__ or ()]
        for name in function.__code__.co_names:
            method = inspect.getattr_static(cls, name, None)
            todo.append(getattr(method, "__func__", getattr(method, "fget", method)))
            attribute = vars(module).get(name)
            while isinstance(attribute, functools.partial):
                attribute = attribute.func
            todo.append(getattr(attribute, "__func__", attribute))
    return found


def _global_reads(function: types.FunctionType) -> list[tuple[str, Any]]:
    names = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    return [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]
