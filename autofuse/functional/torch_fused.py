"""torch's own optimizers made fused in place, and kept so over loads, saves and new groups.

``fused=True`` is a constructor's argument, but what it sets is a flag in each param group. Around the
flag there is more to do than torch's constructor does: torch's fused SGD fails when a parameter gets
its first gradient late, and starts from uninitialised memory when the very first step is skipped for
an overflow; torch's fused CPU kernels give wrong numbers, silently, where a gradient is laid out in
memory in another way than its parameter. `FusedFlags` sees to these before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from autofuse.functional.adam import _dense, fits_kernel
from autofuse.functional.optimizer_probe import probe_clone, probe_shapes, quiet, same_training, unhooked_step
from autofuse.patch import Transaction

__all__ = ["FusedFlags", "is_torch_optimizer", "prove", "refusal"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CAPTURABLE_DEVICES = ("cuda", "xpu", "hpu")
_CHECKED = "_need_device_dtype_check_for_fused"
_FLAGS = ("fused", "foreach")  # SGD prefers foreach where both are set


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Whether its step is that of a torch optimizer that has a fused one."""
    step = unhooked_step(type(optimizer))
    return any(
        isinstance(optimizer, base) and step is unhooked_step(base) for base in (AdamW, Adam, SGD, Adagrad)
    )


def refusal(optimizer: Optimizer, group: dict[str, Any], sparse: Collection[Tensor] = ()) -> str | None:
    """Why a group is left alone; None if its step can be fused.

    Args:
        sparse: parameters whose gradients will be sparse.
    """
    if group.get("fused"):
        return "already fused"
    if group.get("differentiable") or optimizer.defaults.get("differentiable"):
        return "differentiable=True: no gradient flows through a fused step"
    tensors = [key for key in optimizer.defaults if isinstance(group.get(key), Tensor)]
    if tensors or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return f"its {(tensors or ['betas'])[0]} is a tensor"
    if group.get("momentum") and group.get("dampening"):
        return "momentum with dampening: torch's fused SGD cannot start it late"
    if group.get("capturable") and any(p.device.type not in _CAPTURABLE_DEVICES for p in group["params"]):
        return "capturable=True on a device that cannot capture"
    for param in group["params"]:
        reason = _param_refusal(param, sparse)
        if reason is not None:
            return reason
    return None


def _param_refusal(param: Tensor, sparse: Collection[Tensor]) -> str | None:
    if any(param is other for other in sparse) or (param.grad is not None and param.grad.is_sparse):
        return "sparse gradients have no fused step"
    if param.is_complex():
        return "complex parameters have no fused step"
    if param.dtype not in _DTYPES:
        return f"no fused step for {param.dtype}"
    if param.device.type not in _get_fused_kernels_supported_devices():
        return f"no fused step on {param.device.type}"
    if type(param) not in (Tensor, torch.nn.Parameter) and type(param).__name__ != "DTensor":
        return f"no fused step for the tensor class {type(param).__name__}"
    return None if _dense(param) else "a parameter with gaps in memory has no fused step"


# --- the proof --------------------------------------------------------------------------------------


def prove(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Take tiny parameters through plain and fused steps; the reason if they differ. Run under `quiet`."""
    shapes = probe_shapes(group["params"])
    for device, dtype in sorted({(p.device, p.dtype) for p in group["params"]}, key=str):
        for changes in ({}, {"lr": 0.05, "weight_decay": 0.1}):
            own = {**group, **{key: value for key, value in changes.items() if key in group}}
            plain, fused = _starter(optimizer, own, False), _starter(optimizer, own, True)
            try:
                same = same_training(plain, fused, shapes, dtype, device)
            except Exception as error:
                return f"its fused step fails on a probe ({type(error).__name__}: {str(error)[:120]})"
            if not same:
                return f"its fused step differs from its plain one in {dtype} on {device.type}"
    return None


def _starter(optimizer: Optimizer, group: dict[str, Any], fused: bool) -> Callable[..., Any]:
    def start(params: list[Tensor]) -> tuple[Optimizer, Callable[[], None]]:
        # foreach and the loop are the same mathematics: the probe need not try both
        own = {**group, "params": params, "fused": fused, "foreach": False}
        clone = probe_clone(optimizer, [own])

        def step() -> None:
            if fused:
                _prepare(clone, own)
            unhooked_step(type(clone))(clone)

        return clone, step

    return start


# --- before each step -------------------------------------------------------------------------------


def _prepare(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Make a group fit for the fused kernel; a reason if that is not possible."""
    momentum = group.get("momentum", 0)
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided or grad.dtype != param.dtype:
            return "its gradients have another layout or dtype than its parameters"
        state = optimizer.state.get(param) or {}
        moments = [key for key, value in state.items() if key != "step" and isinstance(value, Tensor)]
        if not fits_kernel(param, grad, *(state[key] for key in moments)):
            if not _dense(param):
                return "a parameter has gaps in memory"
            param.grad = _laid_out_as(param, grad)
            state.update({key: _laid_out_as(param, state[key]) for key in moments})
        if momentum and state.get("momentum_buffer") is None:
            if group.get("dampening"):
                return "torch's fused SGD cannot start a momentum with dampening late"
            # from zeros, the first step gives the gradient itself: what torch's plain SGD starts with
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return None


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


# --- the upgrade ------------------------------------------------------------------------------------


class FusedFlags:
    """The fused flags of one torch optimizer, from `apply` until the transaction is taken back."""

    def __init__(self, optimizer: Optimizer, indices: Collection[int]) -> None:
        self.optimizer = optimizer
        self.fused = [index in indices for index in range(len(optimizer.param_groups))]
        self.originals = [_flags(group) for group in optimizer.param_groups]
        self.default = optimizer.defaults.get("fused")
        self.moved: dict[Tensor, Tensor] = {}  # parameter -> its step count where it was
        self.kinds = {index: _kinds(group) for index, group in enumerate(optimizer.param_groups)}

    def apply(self, transaction: Transaction) -> None:
        optimizer = self.optimizer
        transaction.on_undo(self._restore)
        if not hasattr(optimizer, _CHECKED):  # torch's fused step makes it
            transaction.on_undo(lambda: vars(optimizer).pop(_CHECKED, None))
        for index, fused in enumerate(self.fused):
            if fused:
                self._fuse(index)
        if all(self.fused):  # then a scaler may leave its scale and its overflow to the kernel
            transaction.set_attribute(optimizer, "_step_supports_amp_scaling", True)
            transaction.set_item(optimizer.defaults, "fused", True)
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._after_save),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ):
            transaction.on_undo(handle.remove)
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            given = param_group.get("fused", self.default) if isinstance(param_group, dict) else None
            add(param_group)
            self._judge_new_group(given)

        transaction.set_attribute(optimizer, "add_param_group", add_param_group)

    def _fuse(self, index: int) -> None:
        group = self.optimizer.param_groups[index]
        group["fused"] = True
        if group.get("foreach"):
            group["foreach"] = None
        for param in group["params"]:
            state = self.optimizer.state.get(param) or {}
            step = state.get("step")
            if isinstance(step, Tensor) and (step.device, step.dtype) != (param.device, torch.float32):
                self.moved[param] = step
                state["step"] = step.to(param.device, torch.float32)

    def _unfuse(self, index: int) -> None:
        group = self.optimizer.param_groups[index]
        _set_flags(group, self.originals[index])
        self.fused[index] = False
        for param in group["params"]:
            state = self.optimizer.state.get(param) or {}
            if isinstance(state.get("step"), Tensor):
                step, original = state["step"], self.moved.pop(param, None)
                state["step"] = _plain_step(step, group) if original is None else original.copy_(step)

    def _restore(self) -> None:
        for index, fused in enumerate(self.fused):
            if fused:
                self._unfuse(index)

    def _judge_new_group(self, given: bool | None) -> None:
        """``given`` is the flag it would have had without the upgrade."""
        group = self.optimizer.param_groups[-1]
        group["fused"] = given
        self.originals.append(_flags(group))
        reason = refusal(self.optimizer, group)
        if reason is None:
            with quiet():
                reason = prove(self.optimizer, group)
        self.fused.append(reason is None)
        if reason is None:
            self._fuse(len(self.fused) - 1)
        elif not given:
            self._leave_scaling_to_the_scaler()

    def _leave_scaling_to_the_scaler(self) -> None:
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def _no_longer(self, index: int) -> str | None:
        """Why a group cannot be stepped by the fused kernel any more; None if it can."""
        group = self.optimizer.param_groups[index]
        if self.kinds.get(index) != _kinds(group):  # model.bfloat16(), or a parameter of another kind
            with quiet():
                reason = refusal(self.optimizer, {**group, "fused": None}) or prove(self.optimizer, group)
            if reason is not None:
                return reason
            self.kinds[index] = _kinds(group)
        return _prepare(self.optimizer, group)

    # --- torch calls these ---

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # it makes the gradients that are to be looked at
            with torch.enable_grad():
                loss = closure()
        for index, fused in enumerate(self.fused):
            if fused and self._no_longer(index) is not None:
                self._unfuse(index)
                self._leave_scaling_to_the_scaler()
                _unscale(optimizer)
        return None if closure is None else ((args[0], lambda: loss), {})

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """What is saved is a plain optimizer's: flags as they were, step counts where it has them."""
        for index, packed in enumerate(state_dict["param_groups"]):  # copies, made for this dict
            if not self.fused[index]:
                continue
            _set_flags(packed, self.originals[index])
            for number in packed["params"]:
                state = state_dict["state"].get(number, {})
                step = state.get("step")
                if isinstance(step, Tensor) and _plain_step(step, packed) is not step:
                    state_dict["state"][number] = {**state, "step": _plain_step(step, packed)}

    def _after_load(self, optimizer: Optimizer) -> None:
        self.moved.clear()
        self.originals = [_flags(group) for group in optimizer.param_groups]
        for index, fused in enumerate(self.fused):
            if fused:
                self._fuse(index)


def _kinds(group: dict[str, Any]) -> set[tuple[torch.dtype, str]]:
    """The kinds of parameters for which the fused step was proved."""
    return {(param.dtype, param.device.type) for param in group["params"]}


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _FLAGS if key in group}


def _set_flags(group: dict[str, Any], flags: dict[str, Any]) -> None:
    for key in _FLAGS:
        if key in flags:
            group[key] = flags[key]
        else:
            group.pop(key, None)


def _plain_step(step: Tensor, group: dict[str, Any]) -> Tensor:
    """A step count as a plain optimizer keeps it: on the CPU, unless it can be captured."""
    if group.get("capturable"):
        return step
    wide = torch.get_default_dtype() == torch.float64
    return step.to("cpu", torch.float64 if wide else torch.float32)


def _unscale(optimizer: Any) -> None:
    """Do what a scaler left to the fused kernel, for a step that has just become a plain one."""
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if overflow is not None and overflow.item():
            param.grad = None  # the step is skipped
        elif scale is not None:
            param.grad.div_(scale.to(param.grad.device))
    if overflow is not None or scale is not None:
        optimizer.grad_scale = optimizer.found_inf = None
