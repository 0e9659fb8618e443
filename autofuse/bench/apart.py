"""A function in a fresh process of its own, so that what it leaves behind or breaks is gone with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from autofuse.errors import first_line

__all__ = ["Failure", "apart"]

PATIENCE = 1800.0  # seconds


@dataclass(frozen=True)
class Failure:
    """What went wrong in a process, as text: not every error can be pickled."""

    reason: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        return Failure(first_line(error))


def apart(function: Callable[..., Any], *arguments: Any, seconds: float = PATIENCE) -> Any:
    """What ``function(*arguments)`` returns in another process; all of it must be picklable.

    Raises:
        RuntimeError: it raised, died, or took longer than ``seconds``.

    >>> apart(divmod, 7, 2)
    (3, 1)
    >>> apart(divmod, 7, 0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    RuntimeError: ZeroDivisionError: ...
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(seconds) else Failure(f"no answer in {seconds:.0f} s")
    except EOFError:
        answer = Failure("its process has died")
    finally:
        ours.close()
        process.kill()
        process.join()
    if isinstance(answer, Failure):
        raise RuntimeError(answer.reason)
    return answer


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], parent: Connection) -> None:
    try:
        parent.send(function(*arguments))
    except Exception as error:
        parent.send(Failure.of(error))
