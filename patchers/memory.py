"""The `memory` patch: on a CPU, memory that a step frees stays in the process for the next step.

glibc gives large blocks back to the system as soon as they are freed. The next step gets them anew, and the
system has to clear and map them again, page by page of 4 KiB: GPT-2 with 81 M parameters and 1,024 tokens
a batch takes 110,000 page faults a step, 0.2 s of CPU time. GPUs do not have this, since PyTorch keeps their
memory itself. So `mallopt` (man 3 mallopt) is told to take all blocks from the heap and never to trim it, and
the heap is grown at once and advised to use huge pages, where a fault maps 2 MiB.

That holds for the whole process, and it keeps the most memory that it ever had in use. `undo` gives the
settings the values that glibc itself comes to once large blocks are freed (it adapts them, and cannot be
asked what they are), and what is free goes back to the system.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from autofuse.patch import Context, Patch, Rejected, Site, Transaction

__all__ = ["find", "order"]

order = 55

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER_TRIM, NEVER_MMAP = -1, 0
TRIM_THRESHOLD, MMAP_MAX = 64 << 20, 65536  # what glibc adapts the first to at the most, and its default
MADV_HUGEPAGE = 14
HUGE = 2 << 20
# The share of the machine's memory that must be free for keeping some to do no harm.
MIN_FREE = 0.25
ALLOCATORS = "jemalloc", "tcmalloc", "mimalloc"

_kept = False  # for the process, as the setting is


def find(context: Context) -> Patch | Rejected:
    """glibc's malloc, where the step runs on a CPU and nobody has chosen otherwise."""
    reason = _cannot(context)
    if reason is not None:
        return Rejected(reason)
    site = Site("malloc", f"glibc {_glibc()}", operation="keep freed memory", provider="glibc")
    reason = (
        "memory that a step frees stays for the next one, which need not have it cleared and mapped again"
    )
    return Patch([site], _change, reason=reason, in_forward=False)


def _cannot(context: Context) -> str | None:
    if context.hardware.kind != "cpu":
        return f"PyTorch keeps the memory of {context.hardware.name} itself"
    if _glibc() is None:
        return "the C library is not glibc, whose malloc this is about"
    if _kept:
        return "nothing more to do: this process keeps freed memory already"
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    chosen += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    if chosen:
        return f"the environment sets how memory is kept: {', '.join(chosen)}"
    loaded = _read("/proc/self/maps")
    other = next((name for name in ALLOCATORS if f"lib{name}" in loaded), None)
    if other is not None:
        return f"{other} is loaded, which keeps freed memory itself"
    free = _free()
    if free is None or free < MIN_FREE:
        told = "how much memory is free cannot be read" if free is None else f"{free:.0%} of memory is free"
        return f"{told}, and keeping some takes {MIN_FREE:.0%}"
    return None


def _change(transaction: Transaction, sites: Sequence[Site]) -> None:
    libc = _libc()
    transaction.on_undo(_give_back)
    _set_kept(True)
    if not (libc.mallopt(M_MMAP_MAX, NEVER_MMAP) and libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)):
        raise RuntimeError("glibc's mallopt refused to keep freed memory")
    libc.malloc_trim(0)  # what is free now would stay in small pages
    _reserve(libc)


def _give_back() -> None:
    libc = _libc()
    libc.mallopt(M_MMAP_MAX, MMAP_MAX)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    libc.malloc_trim(0)
    _set_kept(False)


def _set_kept(kept: bool) -> None:
    global _kept
    _kept = kept


def _reserve(libc: Any) -> None:
    """Grow the heap by half of what is free, and advise it to use huge pages. It costs addresses, no memory."""
    if _read("/proc/sys/vm/overcommit_memory").strip() == "2":
        return  # there it does: others could not have it
    known = _memory()
    block = libc.malloc(int(known[0] / 2)) if known is not None else None
    if not block:
        return
    for line in _read("/proc/self/maps").splitlines():
        if line.endswith("[heap]"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            start = -(-start // HUGE) * HUGE
            if start < end:
                libc.madvise(start, end - start, MADV_HUGEPAGE)  # a kernel without them refuses: no harm
    libc.free(block)


# --- the system --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def _glibc() -> str | None:
    """Its version; None for another C library."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION").split()[-1]  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _free() -> float | None:
    """The share of memory that is free, of the machine's or of the container's, whichever is less."""
    known = _memory()
    return None if known is None else known[0] / known[1]


def _memory() -> tuple[float, float] | None:
    """Bytes that are free and bytes in all, where the share that is free is least; None if unknown."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    machine = {words[0]: 1024.0 * float(words[1]) for words in lines if len(words) > 1}
    if "MemAvailable:" not in machine:
        return None
    found = [(machine["MemAvailable:"], machine["MemTotal:"])]
    group = "/sys/fs/cgroup/memory."
    limit, used = _read(f"{group}max").strip(), _read(f"{group}current").strip()
    if limit.isdecimal() and used.isdecimal():
        found.append((float(limit) - float(used), float(limit)))
    return min(found, key=lambda pair: pair[0] / pair[1])
