"""Compile: repeated blocks through Inductor, in place, one compilation for all that look alike.

Each block keeps its class, its name and its parameters; only ``module._compiled_call_impl`` is set,
as `nn.Module.compile` does it. What is set there is a `CompiledCall`, which runs compiled code in
ordinary training alone and the module's own eager code in every other case: evaluation, hooks,
vmap, a graph that fails. Dropout draws eager's very numbers (Inductor's ``fallback_random``).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

import torch
import torch._functorch.config
from torch import nn

from autofuse.compiled import CompiledCall, OwnStorms, SharedCompilation, UntriedISAs, is_compile_error
from autofuse.patch import ASSUMED_STEPS, Context, Patch, Rejected, Site, Transaction, class_name
from autofuse.regions import Kind, Strategy, find_kinds, hook_reason, sharded_reason

order = 90

# From cheap to dear. A step begins with the first and asks for the next one when it has kept that
# (`Patch.upgrade`).
STRATEGIES: tuple[Strategy, ...] = ("regions", "body", "model")

# Seconds to compile forward and backward, per compilation, and what compiling saves of a step.
# Measured with no Inductor cache on 2 CPU cores, GPT-2 with 6 blocks, 4x128 tokens, fp32: regions 18
# and 24 s, body 34 and 39 s (without and with dropout), all with the trials of instruction sets, which
# are left out by now: 2.4 of the 12.1 s that dynamo, Inductor and g++ took with torch 2.13, the header
# precompiled, in one run with little else going on. That header takes 7 s, once for a machine.
_COLD_SECONDS: dict[Strategy, float] = {"regions": 20.0, "body": 40.0, "model": 40.0}
_SAVING = 0.2
# What each form saves of the step that the one before has left: assumed, and low. The body's CPU seconds
# were 0.95 of the regions' (the same GPT-2, fp32, four interleaved steps on a busy machine, whose noise
# was as large); the model adds the head and the loss, and was not measured.
_FURTHER_SAVING: dict[Strategy, float] = {"body": 0.05, "model": 0.05}


# --- finding -----------------------------------------------------------------------------------


def find(context: Context, strategy: Strategy = "regions") -> Patch | Rejected:
    """The parts of the model that can be compiled, or why there are none."""
    reason = _cannot(context)
    if reason is not None:
        return Rejected(reason)
    kinds, strategy = _kinds(context, strategy)
    patch = _patch(context, kinds, strategy)
    if context.compile is not True:
        patch.pays = functools.partial(_pays, len(kinds), strategy, _SAVING, context.steps)
    return patch


def _kinds(context: Context, strategy: Strategy) -> tuple[list[Kind], Strategy]:
    """What the strategy compiles, and the name of the one that this is."""
    kinds = find_kinds(context.model, strategy)
    return kinds, "model" if kinds[0].modules[0] is context.model else strategy


def _cannot(context: Context) -> str | None:
    """Why nothing at all can be compiled, or None."""
    if context.compile is False:
        return "compile=False was asked for"
    providers = getattr(context.hardware, "providers", None) or {}
    reason = providers.get("inductor")
    if reason is not None:
        return f"Inductor cannot be used: {reason}"
    if sys.version_info >= (3, 15):
        return "torch.compile does not support this Python yet"
    disabled = [
        name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(name) == "1"
    ]
    if disabled:
        return f"{disabled[0]}=1 is set"
    if isinstance(context.model, nn.DataParallel):
        return "nn.DataParallel copies its modules' attributes to every device"
    if isinstance(context.model, torch.jit.ScriptModule):
        return "the model is a TorchScript module"
    if context.device.type not in ("cpu", "cuda", "xpu"):
        return f"not on {context.device.type} devices"
    if any(module._compiled_call_impl is not None or _is_optimized(module) for _, module in context.modules):
        return "already compiled"
    return None


def _is_optimized(module: nn.Module) -> bool:
    """Whether ``module`` is what `torch.compile` returns. Dynamo is slow to import: never for this."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def _site(path: str, module: nn.Module) -> Site:
    site = Site(path, class_name(module), operation="compile", provider="inductor")
    reason = sharded_reason(module) or hook_reason(module)
    return site if reason is None else site.rejected(reason)


def _patch(context: Context, kinds: Sequence[Kind], strategy: Strategy) -> Patch:
    sites = [_site(path, module) for kind in kinds for path, module in kind]
    if not any(site.accepted for site in sites):
        return Patch(sites, reason=sites[0].reason)
    calls: dict[str, CompiledCall] = {}

    def change(transaction: Transaction, sites: Sequence[Site]) -> None:
        # Else backward(retain_graph=True) fails: AOTAutograd reads this when compiling and in the backward.
        transaction.hold(torch._functorch.config, "donated_buffer", False)
        if context.device.type == "cpu":
            _skip_trials(transaction)
        storms = OwnStorms()
        OwnStorms.logger.addFilter(storms)
        transaction.on_undo(functools.partial(OwnStorms.logger.removeFilter, storms))
        for site in sites:
            module = calls[site.path].module()
            if module is not None:
                transaction.set_attribute(module, "_compiled_call_impl", calls[site.path])

    def note(text: str) -> None:
        patch.reason = f"{patch.reason}; {text}"

    patch = Patch(
        sites,
        change,
        reason=_reason(kinds, strategy),
        blames=is_compile_error,
        encloses=True,
        forced=context.compile is True,
        upgrade=None if strategy == "model" else functools.partial(_upgrade, context, kinds, strategy),
    )
    # Made once and kept through undo and apply, so that a proof does not compile everything twice.
    for kind in kinds:
        shared = SharedCompilation(kind, context.device, note, patch.reject)
        calls.update((path, CompiledCall(module, path, shared)) for path, module in kind)
    return patch


def _skip_trials(transaction: Transaction) -> None:
    from torch._inductor import cpu_vec_isa  # slow to import

    tried = getattr(cpu_vec_isa, "valid_vec_isa_list", None)  # not every version has to have it
    if tried is not None and not isinstance(tried, UntriedISAs):  # one serves all: undone in any order
        transaction.set_attribute(cpu_vec_isa, "valid_vec_isa_list", UntriedISAs(tried))


def _reason(kinds: Sequence[Kind], strategy: Strategy) -> str:
    if strategy == "model":
        return "the whole model is compiled at once"
    if strategy == "body":
        return f"what holds the repeated blocks is compiled: {len(kinds)} compilation(s)"
    blocks = sum(len(kind.paths) for kind in kinds)
    return f"{blocks} repeated blocks share {len(kinds)} compilation(s)"


# --- what it costs, and what it saves ----------------------------------------------------------


def _pays(
    compilations: int, strategy: Strategy, share: float, steps: int | None, step_seconds: float
) -> Rejected | None:
    """Whether the steps still to come earn back what compiling costs.

    >>> _pays(1, "regions", 0.2, 10_000, 0.5) is None
    True
    >>> print(_pays(1, "regions", 0.2, 20, 0.5).reason)
    would not pay: compiling takes about 20 s, and 20% of 20 steps of 500 ms is 2 s
    """
    remaining = ASSUMED_STEPS if steps is None else steps
    cost, saved = compilations * _COLD_SECONDS[strategy], share * step_seconds * remaining
    if saved > cost:
        return None
    assumed = " (an assumed number; steps= tells)" if steps is None else ""
    return Rejected(
        f"would not pay: compiling takes about {cost:.0f} s, and {share:.0%} of {remaining:,} steps"
        f"{assumed} of {step_seconds * 1e3:.0f} ms is {saved:.0f} s"
    )


def _upgrade(
    context: Context, kinds: Sequence[Kind], strategy: Strategy, step_seconds: float
) -> Patch | Rejected:
    """The next dearer form, if it pays. It contains the modules of ``kinds``: undo theirs first."""
    dearer = STRATEGIES[STRATEGIES.index(strategy) + 1]
    others, name = _kinds(context, dearer)
    verdict = _pays(len(others), name, _FURTHER_SAVING[name], context.steps, step_seconds)
    if verdict is not None:
        return Rejected(f"compiling the {name} {verdict.reason}")
    patch = _patch(context, others, name)
    return patch if patch.accepted else Rejected(patch.reason)
