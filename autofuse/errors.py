"""What an error says in one line, and whether memory ran out."""

from __future__ import annotations

import torch

__all__ = ["first_line", "is_out_of_memory", "message"]


def message(error: BaseException) -> str:
    """What an error says, without the lines that follow.

    >>> message(ValueError("one\\ntwo"))
    'one'
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def first_line(error: BaseException) -> str:
    """The same with the error's class.

    >>> first_line(ValueError("one\\ntwo"))
    'ValueError: one'
    """
    return f"{type(error).__name__}: {message(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    """
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    True
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
