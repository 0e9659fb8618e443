"""The `memory` patch: page faults go, numbers stay, undo gives memory back; where it is not made, and why."""

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autofuse
from autofuse.hardware import Hardware
from autofuse.patch import Context, Patch, Rejected, Site
from patchers import memory

resource = pytest.importorskip("resource", reason="limits and page faults are told on Unix alone")
here = Context(nn.Linear(2, 2), (), Hardware.detect("cpu"))
GB = 10**9
FREE = "MemTotal: 10000000 kB\nMemAvailable: {} kB\nHugePages_Total: 0\n"


@pytest.fixture(autouse=True)
def nobody_keeps_memory(monkeypatch):
    gc.collect()
    monkeypatch.setattr(memory, "_holders", 0)  # models of other tests may be alive


glibc_alone = pytest.mark.skipif(
    not sys.platform.startswith("linux") or isinstance(memory.find(here), Rejected),
    reason="needs glibc's malloc as it comes, and a quarter of the memory free",
)

# Tensors of 41 MB each, above what glibc ever takes from the heap by itself (32 MB).
TOY = """
import json, resource, sys, torch, autofuse
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(20000, 64), torch.randn(20000, 1)
losses, seen = [], []
def train():
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
def now():
    pages = int(open("/proc/self/statm").read().split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, pages * resource.getpagesize()
def look():
    train()
    before = now()[0]
    train()
    seen.append((now()[0] - before, now()[1]))
look()
step = autofuse.optimize(model, optimizer, loss_fn=nn.functional.mse_loss, measure=False, only=sys.argv[1:])
look()
step.undo()
undone = now()[1]
look()
print(json.dumps([*seen, undone, losses]))
"""


def python(code, *arguments, **environment):
    environment, root = {**os.environ, "OMP_NUM_THREADS": "1", **environment}, Path(__file__).parent.parent
    command = [sys.executable, "-c", code, *arguments]
    return json.loads(subprocess.check_output(command, env=environment, cwd=root))


def files(monkeypatch, **texts):
    """The system's files of these names (_ for . in them) have these texts, no other can be read."""
    monkeypatch.setattr(memory, "_read", lambda path: texts.get(Path(path).name.replace(".", "_"), ""))


@glibc_alone
def test_page_faults_go_the_losses_stay_and_undo_gives_memory_back():
    (before, _), (kept, full), (after, _), undone, losses = python(TOY, "memory")
    assert losses == python(TOY)[-1]
    assert before > 10_000 and kept < before / 50 and after > 5 * kept
    assert full - undone > 2 * 41e6  # two of its tensors at least


@glibc_alone
def test_undo_does_not_leave_the_threshold_where_glibc_stopped_adapting_it():
    code = """if True:
        import ctypes, autofuse.patch, patchers.memory as memory
        memory._change(transaction := autofuse.patch.Transaction(), [])
        transaction.rollback()
        block = memory._libc().malloc(1 << 20)  # its chunk's flag IS_MMAPPED: no
        print(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)
    """
    assert python(code) == 0


@glibc_alone
@pytest.mark.parametrize("measure", [False, True])
def test_the_step_applies_it_and_a_second_call_finds_nothing_more_to_do(measure):
    arguments = (model := nn.Linear(8, 8)), torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"loss_fn": nn.functional.mse_loss, "only": ["memory"], "precision": "fp32"}
    step = autofuse.optimize(*arguments, measure=measure, **chosen)
    assert any(step(torch.ones(2, 8), torch.ones(2, 8)) and memory._holders == 1 for _ in range(100))
    again = autofuse.optimize(*arguments, measure=False, **chosen).plan["memory"]
    if not measure:  # a tuner that was stopped has decided nothing
        assert again.status == "rejected" and "keeps freed memory already" in again.reason
    step.undo(), step.undo()
    assert memory._holders == 0 and isinstance(memory.find(here), Patch)


@glibc_alone
def test_it_stays_for_the_other_model_and_goes_with_a_model_that_is_forgotten():
    first, second = memory.find(here), memory.find(here)
    first.apply(), second.apply(), first.undo(), first.undo()
    assert memory._holders == 1
    del second
    assert memory._holders == 0


@glibc_alone
def test_the_environment_is_respected(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=1")
    assert isinstance(memory.find(here), Patch)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.top_pad=1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert memory.find(here).reason.endswith(": MALLOC_ARENA_MAX, GLIBC_TUNABLES")


@glibc_alone
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make another malloc")
def test_another_malloc_is_left_alone(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("void *__libc_malloc(long); void *malloc(long size) {return __libc_malloc(size);}")
    subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, source], check=True)
    code = "import json; from patchers import memory; print(json.dumps(memory._replaced()))"
    assert python(code) is False
    assert python(code, LD_PRELOAD=str(library)) is True


@glibc_alone
def test_what_is_free_decides_of_the_machine_and_of_each_control_group(monkeypatch):
    files(monkeypatch)
    assert "how much memory is free cannot be read" in memory.find(here).reason
    files(monkeypatch, meminfo=FREE.format(2_400_000))
    assert memory.find(here).reason == "24% of memory is free, and keeping some takes 25%"
    roomy, used = {"meminfo": FREE.format(9_000_000)}, f"{9 * GB // 10}\n"
    one = {"cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n"}
    one |= {"memory_limit_in_bytes": f"{GB}\n", "memory_usage_in_bytes": used}
    two = {"cgroup": "0::/a/b\n", "memory_max": f"{GB}\n", "memory_current": used}
    for group, cached in ((one, "total_inactive_file"), (two, "inactive_file")):
        files(monkeypatch, **roomy, **group)
        assert "10% of memory is free" in memory.find(here).reason
        files(monkeypatch, **roomy, **group, memory_stat=f"anon 1\n{cached} {8 * GB // 10}\n")
        assert isinstance(memory.find(here), Patch)  # what is cached of files is as good as free
    files(monkeypatch, **roomy, **{**two, "memory_max": "max\n"})
    assert isinstance(memory.find(here), Patch)


def test_other_machines_and_other_systems_are_an_answer_not_an_error(monkeypatch):
    assert "itself" in memory.find(Context(here.model, (), Hardware.named("H100"))).reason
    monkeypatch.setattr(memory, "_replaced", lambda: pytest.fail("this machine was asked about another"))
    assert isinstance(memory.find(Context(here.model, (), Hardware.named("cpu-amx"))), Patch)
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: object())  # a library without malloc
    assert memory._replaced()
    for answer in ("", None, "musl 1.2"):
        monkeypatch.setattr(os, "confstr", lambda _, answer=answer: answer, raising=False)
        assert "not glibc" in memory.find(here).reason
    monkeypatch.delattr(os, "confstr")
    assert "not glibc" in memory.find(here).reason


@pytest.mark.parametrize("limit", ["overcommit", "addresses", None])
def test_addresses_are_reserved_only_where_they_cost_nothing(monkeypatch, limit):
    asked = []
    libc = type("Libc", (), {"malloc": lambda _, size: asked.append(size)})()
    policy = "2\n" if limit == "overcommit" else "0\n"
    files(monkeypatch, overcommit_memory=policy, meminfo=FREE.format(8_000_000))
    most = GB if limit == "addresses" else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    memory._reserve(libc)
    assert asked == ([] if limit else [8_000_000 * 1024 // 2])


def test_a_refusal_leaves_nothing_behind(monkeypatch):
    calls = []
    refuses = {"mallopt": lambda _, *given: calls.append(given), "malloc_trim": lambda *_: 1}
    monkeypatch.setattr(memory, "_libc", type("Libc", (), refuses))
    files(monkeypatch)
    patch = Patch([Site("malloc", "glibc", operation="keep")], memory._change)
    with pytest.raises(RuntimeError, match="refused"):
        patch.apply()
    assert memory._holders == 0 and not patch.applied
    assert calls[0] == (memory.M_MMAP_MAX, 0) and (memory.M_MMAP_MAX, 65536) in calls
