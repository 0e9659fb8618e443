"""`FusedAdam`: a drop-in for ``apex.optimizers.FusedAdam`` that runs on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autofuse.functional.adam import Hyper, Rule, adam_update

__all__ = ["FusedAdam"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master_param"


class FusedAdam(Optimizer):
    """Adam and AdamW in one kernel, with Apex's constructor and Apex's state names.

    Apex's kernel is used on CUDA where Apex is installed with its extensions, else torch's fused
    kernel. State dicts load both ways between this class and Apex's: ``exp_avg`` and ``exp_avg_sq``
    per parameter (float32 for 16-bit parameters, after loading too) and ``step`` in the group.

    Args:
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        amsgrad: refused, as Apex does.
        set_grad_none: what ``zero_grad()`` without an argument does.
        capturable: the learning rate and the step count are tensors on the device, so that a step
            can be captured in a CUDA graph.
        master_weights: 16-bit parameters are updated through a float32 copy, kept as
            ``state[p]["master_param"]`` and saved with the state dict. Without it each step rounds
            to the parameter's dtype. Unlike Apex's it does not need ``capturable``.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([weight], lr=0.1)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.9000, 0.9000])
    """

    providers = ("apex", "torch")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if max_grad_norm is not None:
            raise ValueError(
                "FusedAdam has no max_grad_norm: before optimizer.step(), call "
                f"torch.nn.utils.clip_grad_norm_(parameters, {max_grad_norm})"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self.adam_w_mode = int(adam_w_mode)
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.capturable:
            group = self.param_groups[-1]
            device = group["params"][0].device if group["params"] else None
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()

    def __getstate__(self) -> dict[str, Any]:
        own = ("adam_w_mode", "set_grad_none", "capturable", "master_weights")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # the base class casts what it loads to the parameters' dtype, which would round float32
        # moments and masters of 16-bit parameters: those are taken over once more as they are
        saved_ids: Iterable[Any] = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        params: Iterable[Tensor] = chain.from_iterable(g["params"] for g in self.param_groups)
        for saved_id, param in zip(saved_ids, params, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                if name in (*_MOMENTS, _MASTER):
                    self.state[param][name] = value.to(param.device, _wide(param.dtype), copy=True)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:
        """One optimization step; all arguments but ``closure`` are refused, as Apex does."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError("FusedAdam.step takes a closure or nothing: the rest is in its constructor")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not group["params"]:
            return
        if any(p.grad.is_sparse for p in params):
            raise RuntimeError(
                "FusedAdam does not support sparse gradients, please consider SparseAdam instead"
            )
        states = [self._state_of(p) for p in params]
        step = self._count(group)
        work = [state.get(_MASTER, p) for p, state in zip(params, states, strict=True)]
        beta1, beta2 = group["betas"]
        adam_update(
            Rule("before" if self.adam_w_mode else "l2", bool(group["bias_correction"])),
            Hyper(group["lr"], beta1, beta2, group["eps"], group["weight_decay"]),
            step,
            work,
            [p.grad for p in params],
            *([state[name] for state in states] for name in _MOMENTS),
            providers=self.providers,
        )
        for param, master in zip(params, work, strict=True):
            if master is not param:
                param.copy_(master)

    def _count(self, group: dict[str, Any]) -> Any:
        """The group's step count, one further. A parameter that has no gradient yet is counted too,
        as in Apex."""
        if self.capturable:
            device = group["params"][0].device
            step = torch.as_tensor(group.get("step", 0), dtype=torch.float32, device=device)
            group["step"] = step if step is group.get("step") else step.clone()
            group["step"] += 1
        else:
            group["step"] = int(group.get("step", 0)) + 1
        return group["step"]

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        dtype = _wide(param.dtype)
        for name in _MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights and param.dtype != dtype and _MASTER not in state:
            state[_MASTER] = param.detach().to(dtype, copy=True)
        return state


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments and masters.

    >>> _wide(torch.bfloat16), _wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)
