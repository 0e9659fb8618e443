"""What a few steps spend their time on: by operation and by module, from torch.profiler or for Nsight.

Modules are told apart by a range around each call, which is put there for these steps alone, in the
place that `nn.Module.compile` uses. Hooks would not do: compiled regions and the padding patch step
back where there are any; nor would another ``nn.Module.__call__``, which dynamo would trace.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from autofuse.batch import fresh, tensors
from autofuse.flops import Forward
from autofuse.patch import Transaction

if TYPE_CHECKING:
    from autofuse.step import TrainingStep

__all__ = ["GROUPS", "OUTSIDE", "Cost", "Costs", "NvtxRecorder", "Recorder"]

PRODUCTS, OPTIMIZER, COMPILED = "matrix products", "the optimizer", "compiled regions"
COMMUNICATION, OTHERS, BETWEEN = "communication", "other operations", "between operations"
GROUPS = (PRODUCTS, OPTIMIZER, COMPILED, COMMUNICATION, OTHERS, BETWEEN)
OUTSIDE = "(outside the model)"
ITSELF = "(the model itself)"

_PLACE = "_compiled_call_impl"
_MODULE, _STEP = "autofuse.module:", "autofuse.step"
_PRODUCT = re.compile(r"(::|_)(addmm|mm|bmm|baddbmm|linear|conv\w*|attention)(_|$)")
_GRAPH = re.compile(r"## Call CompiledFxGraph \w+ ##")
_COMMUNICATION = re.compile(
    r"^(_?c10d\w*|FSDP)::|^FullyShardedDataParallel\._|^nccl|^gloo:|^record_param_comms$"
)
_COMPILED = re.compile(r"Compiled|^triton_|^graph_\d")


@dataclass
class Cost:
    """What one operation, or one module (its own operations, not its children's), takes in a step.

    Attributes:
        calls: calls per step; a module's calls of all modules that the name stands for.
        ms: milliseconds per step under the profiler: the device's time on a GPU, else the CPU's.
        backward_ms: of these in the backward.
        share: of the profiled step's whole time.
        group: the kind of work that an operation is, one of `GROUPS`.
    """

    name: str
    calls: float = 0.0
    ms: float = 0.0
    backward_ms: float = 0.0
    share: float = 0.0
    group: str = ""


@dataclass
class Costs:
    """The costs of the profiled steps, the dearest first; ``groups`` adds up to 1."""

    operations: list[Cost] = field(default_factory=list)
    modules: list[Cost] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0


# --- recording ---------------------------------------------------------------------------------


class _Ranges:
    """Puts a range around every module's call and every step, and notes what the model is called with."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._transaction: Transaction | None = None
        self._in_step = False
        self._forwards: list[Forward] = []
        self._noted: Any = None

    @property
    def running(self) -> bool:
        return self._transaction is not None

    def start(self) -> None:
        self._transaction = Transaction()
        clock = self._step.clock
        for name, module in _called(self._step.model):
            self._put_around(module, name, self._transaction)
        self._transaction.set_attribute(clock, "start", self._started(clock.start))
        self._transaction.set_attribute(clock, "stop", self._stopped(clock.stop))

    def stop(self) -> None:
        """Take everything back; nothing to do where nothing runs."""
        if self._in_step:
            self._in_step = False
            self.step_ends()
        if self._transaction is not None:
            self._transaction.rollback()
            self._transaction = None

    def take_forwards(self) -> list[Forward]:
        """What the forwards since the last optimizer step began from."""
        taken, self._forwards = self._forwards, []
        return taken

    def module_range(self, name: str) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def step_begins(self) -> None:
        """The clock starts."""

    def step_ends(self) -> None:
        """The clock stops."""

    def called(self, name: str, inputs: Any, outputs: Any) -> None:
        """A module's forward is done."""

    def _put_around(self, module: nn.Module, name: str, transaction: Transaction) -> None:
        before = vars(module).get(_PLACE)
        call: Callable[..., Any] = module._call_impl if before is None else before
        note, around, called = _unseen(self._note), _unseen(self.module_range), _unseen(self.called)

        def ranged(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(*args, **kwargs)
            if name == ITSELF:
                note(args, kwargs)
            with around(name):
                outputs = call(*args, **kwargs)
            called(name, (args, kwargs), outputs)
            return outputs

        def take_away() -> None:
            if vars(module).get(_PLACE) is not ranged:  # compile was undone in the meantime
                return
            if before is None:
                delattr(module, _PLACE)
            else:
                setattr(module, _PLACE, before)

        if "torch._dynamo" in sys.modules:
            torch._dynamo.eval_frame.skip_code(ranged.__code__)
        setattr(module, _PLACE, ranged)
        transaction.on_undo(take_away)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the forward of a micro-batch begins from, to count its FLOPs later."""
        step = self._step
        if not self._in_step or not torch.is_grad_enabled() or step._busy or not step._patches.proved:
            return
        replay = step._window.replay
        if not replay:
            self._forwards.append(Forward(fresh(args), fresh(kwargs), in_pieces=True))
        elif replay[-1] is not self._noted:  # the model may be called several times for one batch
            self._noted = replay[-1]
            self._forwards.append(Forward(fresh(replay[-1].batch), {}, in_pieces=False))

    def _started(self, start: Callable[..., None]) -> Callable[..., None]:
        clock = self._step.clock

        def started(batch: Any = None) -> None:
            start(batch)
            if clock.is_running and not self._in_step:
                self._in_step = True
                self.step_begins()

        return started

    def _stopped(self, stop: Callable[[], None]) -> Callable[[], None]:
        clock = self._step.clock

        def stopped() -> None:
            stop()
            if self._in_step and not clock.is_running:  # else it began before the recording
                self._in_step = False
                self.step_ends()

        return stopped


def _called(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with their names; of a DataParallel that alone, whose replicas share attributes."""
    if isinstance(model, nn.DataParallel):
        return [(ITSELF, model)]
    scripted = torch.jit.ScriptModule
    return [(path or ITSELF, m) for path, m in model.named_modules() if not isinstance(m, scripted)]


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """What dynamo shall not compile, where a graph break leaves it looking for frames."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


class Recorder(_Ranges):
    """Records a few steps with torch.profiler."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step)
        self._device = step.clock._device
        self._profiler: torch.profiler.profile | None = None
        self._range: record_function | None = None
        self.refused = ""

    def start(self) -> None:
        if torch.autograd._profiler_enabled():
            self.refused = "another profiler is running"
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type in ("cuda", "xpu"):
            kinds.append(getattr(torch.profiler.ProfilerActivity, self._device.type.upper()))
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()
        super().start()

    def stop(self) -> None:
        if self.running and self._profiler is not None:
            super().stop()
            self._profiler.stop()

    def module_range(self, name: str) -> AbstractContextManager[Any]:
        return record_function(_MODULE + name)

    def step_begins(self) -> None:
        self._range = record_function(_STEP)
        self._range.__enter__()

    def step_ends(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def export(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto."""
        assert self._profiler is not None
        self._profiler.export_chrome_trace(str(path))

    def costs(self, steps: int) -> Costs:
        """The costs of a step, of ``steps`` that were recorded."""
        assert self._profiler is not None
        events = [e for e in self._profiler.events() or () if str(e.device_type) == "DeviceType.CPU"]
        return _Attribution(events, on_device=self._device.type in ("cuda", "xpu")).costs(steps)


class NvtxRecorder(_Ranges):
    """Marks every module's forward and backward for Nsight Systems."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step)
        self._open: dict[str, Any] = {}

    @contextmanager
    def module_range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def called(self, name: str, inputs: Any, outputs: Any) -> None:
        """The backward of a module begins with its outputs' nodes, and ends where its inputs' begin.

        Ranges by start and end, since the backwards of branches need not lie inside each other.
        """
        begin, end = _nodes(outputs), _nodes(inputs)
        for node in begin - end:
            node.register_prehook(lambda _: self._begin(name))
        for node in end - begin:
            node.register_prehook(lambda _: self._end(name))

    def _begin(self, name: str) -> None:
        if self.running and name not in self._open:
            self._open[name] = torch.cuda.nvtx.range_start(f"{name} backward")

    def _end(self, name: str) -> None:
        if name in self._open:
            torch.cuda.nvtx.range_end(self._open.pop(name))

    def step_ends(self) -> None:
        for name in list(self._open):  # what needs no gradient of its inputs ends with the backward
            self._end(name)


def _nodes(value: Any) -> set[Any]:
    """The autograd nodes of the ordinary tensors in ``value`` (a lazy one would be built)."""
    found = (t for _, t in tensors(value) if type(t) is Tensor)
    return {t.grad_fn for t in found if t.grad_fn is not None}


# --- reading what was recorded -------------------------------------------------------------------


class _Attribution:
    """Adds up the profiler's events. A backward operation belongs to the module whose forward made its
    autograd node, which the node's sequence number tells."""

    def __init__(self, events: list[Any], on_device: bool) -> None:
        self._on_device = on_device
        roots = sorted((e for e in events if e.cpu_parent is None), key=lambda e: e.time_range.start)
        steps = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == _STEP)
        starts = [start for start, _ in steps]

        def inside(event: Any) -> bool:
            index = bisect_right(starts, event.time_range.start) - 1
            return index >= 0 and event.time_range.start <= steps[index][1]

        self._roots = [event for event in roots if inside(event)]
        self._step_us = sum(end - start for start, end in steps)
        self._makers: dict[tuple[Any, int], str] = {}
        self._operations: dict[str, Cost] = defaultdict(lambda: Cost(""))
        self._modules: dict[str, Cost] = defaultdict(lambda: Cost(""))
        self._groups: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
        for event in self._roots:
            self._find_makers(event, OUTSIDE)
        for event in self._roots:
            self._add(event, OUTSIDE, None, backward=False)

    def _find_makers(self, event: Any, owner: str) -> None:
        if event.name.startswith(_MODULE):
            owner = event.name.removeprefix(_MODULE)
        if event.sequence_nr >= 0 and not event.fwd_thread:
            self._makers[event.thread, event.sequence_nr] = owner  # of several, the last made the node
        for child in event.cpu_children:
            self._find_makers(child, owner)

    def _add(self, event: Any, owner: str, group: str | None, *, backward: bool) -> None:
        name = event.name
        if name.startswith("autograd::engine::evaluate_function"):
            backward = True
            owner = self._makers.get((event.fwd_thread, event.sequence_nr), owner)
        if name.startswith(_MODULE):
            owner = name.removeprefix(_MODULE)
            self._modules[_pattern(owner)].calls += 1
        elif name != _STEP:
            if name.startswith("Optimizer."):
                owner, group = OPTIMIZER, OPTIMIZER
            elif _COMMUNICATION.search(name):  # with the copies into and out of its buffers
                group = group or COMMUNICATION
            self._count(event, owner, group or _group(name), backward)
        for child in event.cpu_children:
            self._add(child, owner, group, backward=backward)

    def _count(self, event: Any, owner: str, group: str, backward: bool) -> None:
        us = self._own_us(event)
        self._groups[group] += us
        costs = [self._modules[_pattern(owner)]]
        if not event.name.startswith("autograd::engine"):
            costs.append(self._operations[_GRAPH.sub("CompiledFxGraph", event.name)])
            costs[-1].calls += 1
            costs[-1].group = group
        for cost in costs:
            cost.ms += us / 1e3
            cost.backward_ms += us / 1e3 if backward else 0.0

    def _own_us(self, event: Any) -> float:
        if not self._on_device:
            return event.self_cpu_time_total
        # A range's "kernel" is the range on the device's time line, with everything inside.
        return 0.0 if event.is_user_annotation else sum(kernel.duration for kernel in event.kernels)

    def costs(self, steps: int) -> Costs:
        if not self._step_us or not steps:
            return Costs()
        groups = {name: us / self._step_us for name, us in self._groups.items()}
        groups[BETWEEN] = max(1.0 - sum(groups.values()), 0.0)
        return Costs(
            self._per_step(self._operations, steps),
            self._per_step(self._modules, steps),
            groups,
            self._step_us / 1e3 / steps,
        )

    def _per_step(self, costs: Mapping[str, Cost], steps: int) -> list[Cost]:
        found = [
            Cost(
                name,
                cost.calls / steps,
                cost.ms / steps,
                cost.backward_ms / steps,
                cost.ms * 1e3 / self._step_us,
                cost.group,
            )
            for name, cost in costs.items()
        ]
        return sorted((cost for cost in found if cost.ms), key=lambda cost: -cost.ms)


def _group(name: str) -> str:
    """What kind of work an operation is.

    >>> _group("aten::addmm"), _group("aten::gelu"), _group("mkldnn::_linear_pointwise")
    ('matrix products', 'other operations', 'matrix products')
    """
    if _PRODUCT.search(name):
        return PRODUCTS
    return COMPILED if _COMPILED.search(name) else OTHERS


def _pattern(path: str) -> str:
    """One name for the like parts of repeated blocks.

    >>> _pattern("h.11.mlp.0"), _pattern("wte")
    ('h.*.mlp.*', 'wte')
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
