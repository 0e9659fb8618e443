"""Adams as legacy repositories write them, and optimizers that look like one, for the tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class NanoAdamW(Optimizer):
    """As in minimal GPT repositories: m, v, t, decay first, under no_grad."""

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.95), weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - lr * group["weight_decay"])
                m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
                p.sub_(lr * m / (v.sqrt() + group["eps"]))


class OldHFAdamW(Optimizer):
    """As in early transformers: eps before the correction, decay after the update."""

    def __init__(
        self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1, correct_bias: bool = True
    ) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"correct_bias": correct_bias})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                size = group["lr"]
                if group["correct_bias"]:
                    size *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                p.data.addcdiv_(state["exp_avg"], denominator, value=-size)
                if group["weight_decay"] > 0:
                    p.data.add_(p.data, alpha=-group["lr"] * group["weight_decay"])
        return loss


class L2Adam(Optimizer):
    """As torch's was: decay added to the gradient in place, a tensor count, beta1 and beta2 apart."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(
            params, {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": weight_decay}
        )

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad, state = p.grad.data, self.state[p]
                if not state:
                    state.update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(p.data),
                        exp_avg_sq=torch.zeros_like(p.data),
                    )
                state["step"] += 1
                if group["weight_decay"] != 0:
                    grad.add_(p.data, alpha=group["weight_decay"])
                state["exp_avg"].mul_(group["beta1"]).add_(grad, alpha=1 - group["beta1"])
                state["exp_avg_sq"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
                step = state["step"].item()
                m = state["exp_avg"] / (1 - group["beta1"] ** step)
                v = state["exp_avg_sq"] / (1 - group["beta2"] ** step)
                p.data.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


class GroupStepAdam(NanoAdamW):
    """One count for the whole group, as in Apex."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m, v = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
                p.sub_(group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p))


class BertAdam(Optimizer):
    """As in pytorch-pretrained-bert: no bias correction, a clip and a schedule inside if asked for."""

    def __init__(self, params: Any, lr: float = 1e-2, t_total: int = -1, max_grad_norm: float = -1.0) -> None:
        defaults = {"lr": lr, "b1": 0.9, "b2": 0.999, "e": 1e-6, "weight_decay": 0.01}
        super().__init__(params, defaults | {"t_total": t_total, "max_grad_norm": max_grad_norm})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if len(state) == 0:
                    state.update(step=0, next_m=torch.zeros_like(p.data), next_v=torch.zeros_like(p.data))
                if group["max_grad_norm"] > 0:
                    torch.nn.utils.clip_grad_norm_(p, group["max_grad_norm"])
                state["next_m"].mul_(group["b1"]).add_(p.grad.data, alpha=1 - group["b1"])
                state["next_v"].mul_(group["b2"]).addcmul_(p.grad.data, p.grad.data, value=1 - group["b2"])
                update = state["next_m"] / (state["next_v"].sqrt() + group["e"])
                if group["weight_decay"] > 0:
                    update += group["weight_decay"] * p.data
                rate = group["lr"]
                if group["t_total"] != -1:
                    rate *= max(0.0, 1 - state["step"] / group["t_total"])
                p.data.add_(-rate * update)
                state["step"] += 1


class PlainAdam(Optimizer):
    """The textbook's, with no weight decay at all; what look-alikes are made from."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": [0.9, 0.99], "eps": 1e-8})

    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return m / (v.sqrt() + group["eps"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), step=0)
                state["step"] += 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).add_((1 - beta2) * p.grad**2)
                m, v = state["m"] / (1 - beta1 ** state["step"]), state["v"] / (1 - beta2 ** state["step"])
                p.sub_(group["lr"] * self.update(p, m, v, group, state["step"]))
        return loss


# --- look-alikes ------------------------------------------------------------------------------------


class Lamb(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        update = super().update(p, m, v, group, step)
        return update * (p.norm() / update.norm()).clamp(0, 10).nan_to_num(1.0)


class Lion(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return m.sign()


class ClippedUpdate(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return super().update(p, m, v, group, step).clamp(-50, 50)


class ClippedGradient(PlainAdam):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1000.0)
        return super().step(closure)


class WarmUp(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return super().update(p, m, v, group, step) * (1.0 if step < 100_000 else 0.1)


class RateElsewhere(PlainAdam):
    rate = 0.01

    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return super().update(p, m, v, group, step) * self.rate / group["lr"]


class DecaysMatricesOnly(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return super().update(p, m, v, group, step) + (0.1 * p if p.ndim > 1 else 0.0)


class Noisy(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return super().update(p, m, v, group, step) + 0 * torch.randn_like(p)


class EpsInside(PlainAdam):
    def update(self, p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
        return m / (v + group["eps"]).sqrt()


class Counting(PlainAdam):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class Lookahead(PlainAdam):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("slow", p.detach().clone())


class TwiceTheClosure(PlainAdam):
    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None and closure() else super().step(closure)


class Hostile(PlainAdam):
    def step(self, closure: Any = None) -> Any:
        raise SystemError("no")


class ReachesForTheModel(PlainAdam):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.model = nn.Linear(2, 2)

    def step(self, closure: Any = None) -> Any:
        for p in self.model.parameters():
            p.data.add_(1.0)
        return super().step(closure)
