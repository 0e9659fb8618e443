"""What the processes that train one model decide together: by rank 0's clock, and by anybody's objection."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed
from torch import nn

__all__ = ["Agreement"]

T = TypeVar("T")


class Agreement:
    """Makes all ranks do the same; alone, it gives back what it is given.

    Attributes:
        several: whether there are others to agree with.

    >>> alone = Agreement()
    >>> alone.of_first(3), alone.objection(None), alone.all(True)
    (3, None, True)
    """

    def __init__(self, group: Any = None, *, several: bool = False) -> None:
        self._group, self.several = group, several

    @classmethod
    def between(cls, model: nn.Module) -> Agreement:
        """The processes that share the model's gradients or parameters, as its wrapper tells."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return cls()
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return cls(module.process_group, several=True)
            if any(c.__name__ in ("FSDPModule", "FullyShardedDataParallel") for c in type(module).__mro__):
                return cls(several=True)
        return cls()

    def _size(self) -> int:
        active = self.several and torch.distributed.is_initialized()
        return torch.distributed.get_world_size(self._group) if active else 1

    def of_first(self, value: T) -> T:
        """The value that the group's first rank has."""
        if self._size() == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def objection(self, reason: str | None) -> str | None:
        """The reason of the first rank that has one; None where nobody objects."""
        if self._size() == 1:
            return reason
        reasons: list[str | None] = [None] * self._size()
        torch.distributed.all_gather_object(reasons, reason, group=self._group)
        return next((r for r in reasons if r), None)

    def all_finite(self, flag: bool, device: torch.device) -> bool:
        """The same for each step's own question, by one number on the device instead of a pickle."""
        if self._size() == 1:
            return flag
        number = torch.tensor(float(flag), device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(number)

    def all(self, flag: bool) -> bool:
        """Whether it is true of all."""
        return self.objection(None if flag else "no") is None
