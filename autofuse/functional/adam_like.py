"""Which Adam a hand-written optimizer is, told from what it does.

`recognise` gives a copy of the optimizer small parameters, gradients of very different size and three
sets of hyper-parameters, and compares what it does to them with every `Rule`. All the numbers of all
the steps must agree with exactly one rule, up to rounding in float64; then its state is compared with
the rule's moments to find out under which names and types it keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autofuse.functional.adam import Hyper, Rule, reference_update
from autofuse.functional.optimizer_probe import (
    RecordingGroup,
    close,
    gradients,
    parameters,
    probe_clone,
    unhooked_step,
)
from autofuse.patch import Rejected

__all__ = ["ABSENT", "Keys", "Layout", "counted", "recognise"]

ABSENT = "<absent>"  # the recorded value of a key that a group does not have

_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "lr": (("lr",), ("learning_rate",), ("alpha",), ("step_size",)),
    "betas": (("betas",), ("beta1", "beta2"), ("b1", "b2"), ("beta_1", "beta_2")),
    "eps": (("eps",), ("epsilon",), ("e",)),
    "weight_decay": (("weight_decay",), ("wd",), ("weight_decay_rate",), ("l2",), ("decay",)),
}
_SHAPES = ((4, 3), (5,), (), (2, 3, 1, 2))
_SCALES = (1.0, 0.01, 5.0, 300.0, 1.0, 1e4)  # small and large: a clipped gradient or update shows
_LATE_STEPS = (9, 999, 1_000_000)  # a schedule inside, or a warm-up, shows
# (lr, beta1, beta2, eps, weight_decay): each so large that its place in the formula matters
_SETTINGS = ((0.05, 0.8, 0.95, 1e-3, 0.3), (0.2, 0.5, 0.99, 0.1, 0.02))
_TOLERANCE = 1e-5  # of an update: some compute in float32 whatever the dtype
_RULES = tuple(
    Rule(decay, correction, raw)
    for decay in ("l2", "before", "after")
    for correction, raw in ((True, False), (True, True), (False, False))
)


@dataclass(frozen=True)
class Keys:
    """The names of the hyper-parameters in a param group; ``weight_decay`` is None if there is none."""

    lr: str
    betas: tuple[str, ...]
    eps: str
    weight_decay: str | None

    def read(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group[self.betas[0]] if len(self.betas) == 1 else (group[key] for key in self.betas)
        decay = group[self.weight_decay] if self.weight_decay else 0.0
        return Hyper(group[self.lr], beta1, beta2, group[self.eps], decay)

    def write(self, group: dict[str, Any], hyper: Hyper) -> None:
        lr, beta1, beta2, eps, decay = hyper
        group[self.lr], group[self.eps] = lr, eps
        if len(self.betas) == 1:
            group[self.betas[0]] = type(group[self.betas[0]])((beta1, beta2))
        else:
            group[self.betas[0]], group[self.betas[1]] = beta1, beta2
        if self.weight_decay:
            group[self.weight_decay] = decay

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name in (self.lr, *self.betas, self.eps, self.weight_decay) if name)


@dataclass(frozen=True)
class Layout:
    """What is known of one param group of a hand-written Adam.

    Args:
        order: the keys of ``state[p]`` in the order in which a first step makes them.
        step: the key of the step count, in ``state[p]`` or (``step_in_group``) in the group; None
            where nothing is counted.
        step_type: ``int``, ``float``, or the dtype of a 0-d tensor.
        reads: every other key of the group that a step looks at, with its value: the recognition
            holds for these values alone.
        closure: its step calls a closure once and returns its value. Where it does otherwise, its
            own step is run when there is one.
    """

    rule: Rule
    keys: Keys
    first: str
    second: str
    order: tuple[str, ...]
    step: str | None
    step_in_group: bool
    step_type: Any
    reads: tuple[tuple[str, Any], ...]
    closure: bool = True

    def holds_for(self, group: dict[str, Any]) -> bool:
        return all(group.get(key, ABSENT) == value for key, value in self.reads)


class _Refused(Exception):
    """Why an optimizer is left alone."""


def recognise(optimizer: Optimizer, group: dict[str, Any]) -> Layout | Rejected:
    """The layout of ``group`` of a hand-written Adam, or why it is none. Run it under `quiet`."""
    try:
        return _recognise(optimizer, group)
    except _Refused as refusal:
        return Rejected(str(refusal))
    except Exception as error:  # a hostile optimizer must not stop the training
        return Rejected(f"its step fails on a probe ({type(error).__name__}: {str(error)[:120]})")


def _recognise(optimizer: Optimizer, group: dict[str, Any]) -> Layout:
    reads = _reads(optimizer, group)
    keys = Keys(**{role: _key(role, group, reads) for role in _NAMES})
    decaying = dict(group)
    keys.write(decaying, Hyper(*_SETTINGS[0]))
    reads |= _reads(optimizer, decaying)  # keys that are looked up only where there is a decay
    own = keys.read(group)
    if any(isinstance(value, Tensor) for value in own):
        raise _Refused("its hyper-parameters are tensors")
    settings = [own, *(Hyper(*setting) for setting in _SETTINGS)]
    runs = [_Run(optimizer, group, keys, hyper) for hyper in settings]
    rules = [r for r in _RULES if keys.weight_decay or r.decay == "before"]
    rules = [rule for rule in rules if all(run.follows(rule) for run in runs)]
    if len(rules) != 1:
        raise _Refused("it is no known Adam: its updates differ" if not rules else "its rule is ambiguous")
    layout = _layout(runs, rules[0], keys, group, reads)
    for run in runs:
        run.check_late_steps(layout)
    return replace(layout, closure=_calls_closure(optimizer, group, layout))


def _reads(optimizer: Optimizer, group: dict[str, Any]) -> frozenset[str]:
    """The keys of the group that a step looks up."""
    recorder = RecordingGroup(group)
    generator = torch.Generator().manual_seed(0)
    recorder["params"] = parameters(_SHAPES, torch.float64, torch.device("cpu"), generator)
    clone = probe_clone(optimizer, [recorder])
    for param in recorder["params"]:
        param.grad = torch.ones_like(param)
    unhooked_step(type(optimizer))(clone)
    return frozenset(recorder.seen - {"params"})


def _key(role: str, group: dict[str, Any], reads: frozenset[str]) -> Any:
    for names in _NAMES[role]:
        if all(name in group and name in reads for name in names):
            return names if role == "betas" else names[0]
    if role == "weight_decay":
        return None
    raise _Refused(f"no {role} is read from its param groups")


class _Run:
    """One copy of the optimizer taken through some steps, with what it did and was given."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], keys: Keys, hyper: Hyper) -> None:
        generator = torch.Generator().manual_seed(1)
        self.params = parameters(_SHAPES, torch.float64, torch.device("cpu"), generator)
        self.group = {**group, "params": self.params}
        self.keys, self.generator = keys, generator
        keys.write(self.group, hyper)
        self.hyper = keys.read(self.group)
        self.optimizer = probe_clone(optimizer, [self.group])
        self.step = unhooked_step(type(optimizer))
        self.before = {key: value for key, value in self.group.items() if key != "params"}
        attributes = _attributes(self.optimizer)
        random_state = torch.get_rng_state()
        self.start = [p.detach().clone() for p in self.params]
        self.history = [self._take(index, scale) for index, scale in enumerate(_SCALES, 1)]
        self.changed = self._changed_keys()
        if _attributes(self.optimizer) != attributes:
            raise _Refused("it keeps state in its own attributes")
        if not torch.equal(random_state, torch.get_rng_state()):
            raise _Refused("its step draws random numbers")

    def _take(self, index: int, scale: float, late: bool = True) -> tuple[list[Tensor | None], list[Tensor]]:
        grads = gradients(self.params, index, scale, self.generator, late=late)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()  # some add the decay to it in place
        if self.step(self.optimizer) is not None:
            raise _Refused("its step returns something without a closure")
        return grads, [p.detach().clone() for p in self.params]

    def _changed_keys(self) -> list[str]:
        return [key for key in self.group if key != "params" and _differs(self.group, self.before, key)]

    @property
    def group_step(self) -> str | None:
        """The key of a step count kept in the group."""
        if not self.changed:
            return None
        key = self.changed[0]
        value, start = self.group[key], self.before.get(key, 0)
        counted = isinstance(value, int) and isinstance(start, int) and value - start == len(_SCALES)
        if len(self.changed) > 1 or not counted:
            raise _Refused(f"it changes {', '.join(map(repr, self.changed))} of its param groups")
        return key

    def follows(self, rule: Rule) -> bool:
        """Whether every update is the rule's; leaves the rule's moments and counts in ``self``."""
        self.first = [torch.zeros_like(p) for p in self.start]
        self.second = [torch.zeros_like(p) for p in self.start]
        self.counts = [0] * len(self.start)
        shared = self.group_step is not None
        origin = int(self.before.get(self.group_step, 0)) if self.group_step else 0
        previous = self.start
        for number, (grads, after) in enumerate(self.history, 1):
            for i, grad in enumerate(grads):
                expected = previous[i].clone()
                if grad is not None:
                    self.counts[i] = origin + number if shared else self.counts[i] + 1
                    args = (self.counts[i], expected, grad, self.first[i], self.second[i])
                    reference_update(rule, self.hyper, *args)
                if not _same_update(after[i], expected, previous[i]):
                    return False
            previous = after
        return True

    def check_late_steps(self, layout: Layout) -> None:
        """Far into a training, from moments that are large and small."""
        for count in _LATE_STEPS:
            first, second = self._set_moments(layout, count)
            before = [p.detach().clone() for p in self.params]
            grads, after = self._take(count, 1.0, late=False)
            for i, grad in enumerate(grads):
                assert grad is not None
                expected = before[i].clone()
                reference_update(layout.rule, self.hyper, count + 1, expected, grad, first[i], second[i])
                state = self.optimizer.state[self.params[i]]
                same = _same_update(after[i], expected, before[i]) and (
                    close(state[layout.first], first[i], _TOLERANCE)
                    and close(state[layout.second], second[i], _TOLERANCE)
                )
                if not same:
                    raise _Refused(f"it is no known Adam: its updates differ at step {count + 1}")

    def _set_moments(self, layout: Layout, count: int) -> tuple[list[Tensor], list[Tensor]]:
        firsts, seconds = [], []
        if layout.step and layout.step_in_group:
            self.group[layout.step] = count
        for param in self.params:
            state = self.optimizer.state[param]
            noise = torch.randn(param.shape, dtype=torch.float64, generator=self.generator)
            state[layout.first].copy_(noise * 10)
            state[layout.second].copy_(noise.square() * 1e-4)
            if layout.step and not layout.step_in_group:
                state[layout.step] = counted(layout.step_type, count)
            firsts.append(state[layout.first].double().clone())
            seconds.append(state[layout.second].double().clone())
        return firsts, seconds


def counted(step_type: Any, count: int) -> Any:
    """A step count of the recorded type."""
    return torch.tensor(count, dtype=step_type) if isinstance(step_type, torch.dtype) else step_type(count)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: repr(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}


def _differs(after: dict[str, Any], before: dict[str, Any], key: str) -> bool:
    if key not in before:
        return True
    a, b = after[key], before[key]
    return type(a) is not type(b) or (repr(a) != repr(b) if isinstance(a, Tensor) else bool(a != b))


def _same_update(after: Tensor, expected: Tensor, previous: Tensor) -> bool:
    # below a rounding error of the parameter an update says nothing
    rounding = 1e-14 * float(previous.norm())
    return close(after - previous, expected - previous, _TOLERANCE, rounding)


# --- where it keeps its state -----------------------------------------------------------------------


def _layout(
    runs: Sequence[_Run], rule: Rule, keys: Keys, group: dict[str, Any], reads: frozenset[str]
) -> Layout:
    for run in runs:
        run.follows(rule)  # the moments of this rule, not of the last one tried
    first, second = (_moment(runs, name) for name in ("first", "second"))
    states = [run.optimizer.state[p] for run in runs for p in run.params]
    order = tuple(states[0])
    if any(tuple(state) != order for state in states):
        raise _Refused("its state has other keys for other parameters")
    group_step = runs[0].group_step
    others = [key for key in order if key not in (first, second)]
    step = group_step or _state_step(runs, others)
    extra = [key for key in others if key != step]
    if extra:
        raise _Refused(f"it keeps more state than two moments and a count: {', '.join(map(repr, extra))}")
    if step is None and rule.bias_correction:
        raise _Refused("its step count is not found in its state or its param groups")
    values = tuple((key, group.get(key, ABSENT)) for key in sorted(reads - keys.names - {group_step}))
    if any(isinstance(value, (Tensor, dict, list)) for _, value in values):
        raise _Refused("its param groups hold more than numbers and flags")
    value = states[0][step] if step and not group_step else 0
    kind = value.dtype if isinstance(value, Tensor) else type(value)
    return Layout(rule, keys, first, second, order, step, group_step is not None, kind, values)


def _moment(runs: Sequence[_Run], name: str) -> str:
    found = None
    for run in runs:
        for param, expected in zip(run.params, getattr(run, name), strict=True):
            state = run.optimizer.state[param]
            same = {
                key
                for key, value in state.items()
                if isinstance(value, Tensor)
                and value.dtype == param.dtype
                and close(value, expected, _TOLERANCE)
                and value.shape == param.shape
            }
            found = same if found is None else found & same
    if found is None or len(found) != 1:
        raise _Refused(f"its {name} moment is not found in its state as a tensor of the parameter's dtype")
    return found.pop()


def _state_step(runs: Sequence[_Run], candidates: Sequence[str]) -> str | None:
    def counts(key: str) -> bool:
        return all(
            _is_count(run.optimizer.state[param][key], count)
            for run in runs
            for param, count in zip(run.params, run.counts, strict=True)
        )

    found = [key for key in candidates if counts(key)]
    return found[0] if len(found) == 1 else None


def _is_count(value: Any, count: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.device.type == "cpu" and value.item() == count
    return type(value) in (int, float) and value == count


def _calls_closure(optimizer: Optimizer, group: dict[str, Any], layout: Layout) -> bool:
    """Whether a closure is called once and its value returned; checks a step without gradients too."""
    generator = torch.Generator().manual_seed(2)
    params = parameters(((2,),), torch.float64, torch.device("cpu"), generator)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(True)
        return 1.5

    probe = probe_clone(optimizer, [{**group, "params": params}])
    step = unhooked_step(type(optimizer))
    start = params[0].detach().clone()
    step(probe)
    if not torch.equal(start, params[0]) or probe.state.get(params[0]):
        raise _Refused("it moves parameters that have no gradient")
    key = layout.step or ""
    if layout.step_in_group and probe.param_groups[0].get(key) != group.get(key, 0) + 1:
        raise _Refused("it counts only some of its steps")
    try:
        return step(probe, closure) == 1.5 and len(calls) == 1
    except Exception:
        return False  # it takes none
