"""The `memory` patch: on a CPU, memory that a step frees stays in the process for the next step.

glibc gives large blocks back to the system as soon as they are freed. The next step gets them anew, and the
system has to clear and map them again, page by page of 4 KiB. (GPUs do not have this: PyTorch keeps their
memory itself.) So `mallopt` (man 3 mallopt) is told to take all blocks from the heap and never to trim it,
and the heap is grown at once and advised to use huge pages, where a fault maps 2 MiB.

It costs memory: GPT-2 with 81 M parameters and 1,024 tokens a batch had a peak of 2.70 GB of resident memory
without it and 3.1 to 3.5 GB with it, for a step 9 to 13% shorter (page faults: 106,000 without, none with).
What was in use once is kept until `undo`, and pieces that no block fits into come on top. ``skip=["memory"]``
does without.

The setting is the process's, for all that it runs, and processes forked later inherit it. It stays as long as
one model has the patch; then what is free goes back to the system, and the settings get the values that glibc
itself comes to once large blocks are freed: it adapts them until they are set, and does not tell them.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from autofuse.patch import Context, Patch, Rejected, Site, Transaction

__all__ = ["find", "order"]

order = 55

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
NEVER_TRIM, NEVER_MMAP = -1, 0
# What glibc adapts the first two to at the most, and its default of the third.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = 64 << 20, 32 << 20, 65536
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15  # mman.h
HUGE = 2 << 20
# The share of the machine's memory that must be free for keeping some to do no harm.
MIN_FREE = 0.25
# Where the hierarchies of control groups are, and what is read of each group: by their versions.
GROUPS = {
    1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}

_holders = 0  # how many patches of this process keep memory now


def find(context: Context) -> Patch | Rejected:
    """glibc's malloc, where the step runs on a CPU and nobody has chosen otherwise."""
    reason = _cannot(context)
    if reason is not None:
        return Rejected(reason)
    site = Site("malloc", "glibc", operation="keep freed memory", provider="glibc")
    reason = (
        "memory that a step frees stays for the next one, which need not have it cleared and mapped again"
    )
    return Patch([site], _change, reason=reason, in_forward=False, lasting=True)


def _cannot(context: Context) -> str | None:
    if context.hardware.kind != "cpu":
        return f"PyTorch keeps the memory of {context.hardware.name} itself"
    if not context.hardware.measured:
        return None  # another machine: what follows is about this one
    if not _is_glibc():
        return "the C library is not glibc, whose malloc this is about"
    if _holders:
        return "nothing more to do: this process keeps freed memory already"
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    chosen += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    if chosen:
        return f"the environment sets how memory is kept: {', '.join(chosen)}"
    if _replaced():
        return "another library's malloc stands in for glibc's, and keeps freed memory in its own way"
    known = _memory()
    if not known:
        return f"how much memory is free cannot be read, and keeping some takes {MIN_FREE:.0%}"
    free = min(free / total for free, total in known)
    if free < MIN_FREE:
        return f"{free:.0%} of memory is free, and keeping some takes {MIN_FREE:.0%}"
    return None


def _change(transaction: Transaction, sites: Sequence[Site]) -> None:
    global _holders
    libc = _libc()
    release = weakref.finalize(transaction, _release)  # also when the model is gone without an undo
    release.atexit = False
    transaction.on_undo(release)  # which calls it once
    _holders += 1
    if _holders > 1:
        return
    if not (libc.mallopt(M_MMAP_MAX, NEVER_MMAP) and libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)):
        raise RuntimeError("glibc's mallopt refused to keep freed memory")
    libc.malloc_trim(0)  # what is free now would stay in small pages
    _reserve(libc)


def _release() -> None:
    global _holders
    _holders -= 1
    if _holders:
        return
    libc = _libc()
    libc.mallopt(M_MMAP_MAX, MMAP_MAX)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    libc.malloc_trim(0)
    _advise(libc, MADV_NOHUGEPAGE)


def _reserve(libc: Any) -> None:
    """Grow the heap by half of what is free, and advise it to use huge pages: it costs addresses alone."""
    if _read("/proc/sys/vm/overcommit_memory").strip() == "2" or _limited():
        return  # there it does cost what others could not have
    block = libc.malloc(int(min((free for free, _ in _memory()), default=0)) // 2)
    if block:
        _advise(libc, MADV_HUGEPAGE)
        libc.free(block)


def _advise(libc: Any, advice: int) -> None:
    """Huge pages for the heap or not, where the system leaves that to the process: else nothing changes."""
    if "[madvise]" not in _read("/sys/kernel/mm/transparent_hugepage/enabled"):
        return
    for line in _read("/proc/self/maps").splitlines():
        if line.endswith("[heap]"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            start = -(-start // HUGE) * HUGE
            if start < end:
                libc.madvise(start, end - start, advice)  # a kernel without them refuses: no harm


# --- the system --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False


def _replaced() -> bool:
    """Whether the process's malloc is another library's (jemalloc, tcmalloc, mimalloc, ...)."""
    try:
        used, own = (ctypes.cast(ctypes.CDLL(name).malloc, ctypes.c_void_p) for name in (None, "libc.so.6"))
    except (AttributeError, OSError, TypeError):
        return True
    return used.value != own.value


def _limited() -> bool:
    """Whether the process's addresses are limited (ulimit -v, -d)."""
    import resource  # not on Windows

    limits = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[0]
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _memory() -> list[tuple[float, float]]:
    """(bytes free, bytes in all) of the machine and of each control group with a limit; empty if unknown."""
    machine = dict(re.findall(r"^(\w+): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    if not machine.keys() >= {"MemAvailable", "MemTotal"}:
        return []
    return [(1024.0 * int(machine["MemAvailable"]), 1024.0 * int(machine["MemTotal"])), *_groups()]


def _groups() -> Iterator[tuple[float, float]]:
    """The same of the control groups around this process; what they cache of files counts as free."""
    for controllers, path in re.findall(r"^\d+:([^:]*):(.+)$", _read("/proc/self/cgroup"), re.MULTILINE):
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else None
        if version is None:
            continue
        root, *names, cached = GROUPS[version]
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            limit, used = (_read(f"{root}{group}/{name}").strip() for name in names)
            if limit.isdecimal() and used.isdecimal() and int(limit) > 0:
                cache = re.search(rf"^{cached} (\d+)$", _read(f"{root}{group}/memory.stat"), re.MULTILINE)
                yield float(limit) - float(used) + (float(cache[1]) if cache else 0.0), float(limit)
