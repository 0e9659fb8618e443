"""`Hardware`: named and detected, what it chooses, and that looking leaves no trace."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from autofuse import hardware as module
from autofuse.hardware import Hardware

BF16, FP16 = torch.bfloat16, torch.float16

# name, architecture, compute capability, autocast, (bf16, fp16, tf32) in hardware
CARDS = [
    ("P100", "Pascal", (6, 0), None, (False, True, False)),
    ("V100", "Volta", (7, 0), FP16, (False, True, False)),
    ("T4", "Turing", (7, 5), FP16, (False, True, False)),
    ("A100", "Ampere", (8, 0), BF16, (True, True, True)),
    ("L4", "Ada", (8, 9), BF16, (True, True, True)),
    ("H100", "Hopper", (9, 0), BF16, (True, True, True)),
    ("B200", "Blackwell", (10, 0), BF16, (True, True, True)),
]


@pytest.mark.parametrize(("name", "architecture", "capability", "autocast", "dtypes"), CARDS)
def test_named(name, architecture, capability, autocast, dtypes):
    card = Hardware.named(name)
    assert (card.name, card.architecture, card.compute_capability) == (name, architecture, capability)
    assert (card.kind, card.device_type) == ("cuda", "cuda")
    assert (card.bf16, card.fp16, card.tf32) == dtypes
    dtype, reason = card.autocast_dtype()
    assert dtype is autocast and name in reason
    assert card.tf32_choice()[0] is dtypes[2]
    assert (card.will_not_pay() is None) == (capability >= (7, 0))
    assert architecture in str(card) and name in str(card)
    assert not card.measured and card.matmul_rate(torch.float32) == card.published["fp32"] * 1000
    assert (card.matmul_rate(BF16) is None) == (not dtypes[0])
    assert json.loads(json.dumps(card.to_dict()))["compute_capability"] == "{}.{}".format(*capability)


@pytest.mark.parametrize("name", ["rtx-3090", "NVIDIA GeForce RTX 3090", "RTX3090", "rtx_3090"])
def test_named_whatever_the_spelling(name):
    assert Hardware.named(name).name == "RTX 3090"


@pytest.mark.parametrize(
    "name", ["A10G", "RTX 4090", "H200", "L40S", "MI300X", "cpu-avx2", "Tesla V100-SXM2-32GB"]
)
def test_named_others(name):
    assert Hardware.named(name).architecture


def test_every_named_device_can_say_everything():
    names = [row.name for row in module.card.__globals__["NAMED"]]
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        hardware = Hardware.named(name)
        json.dumps(hardware.to_dict())
        assert str(hardware) and hardware.autocast_dtype()[1] and hardware.tf32_choice()[1]


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown hardware 'V10O'; did you mean V100.*takes one of.*T4"):
        Hardware.named("V10O")
    with pytest.raises(ValueError, match=r"unknown hardware 'zzzzzzzz'\. "):
        Hardware.named("zzzzzzzz")
    with pytest.raises(ValueError, match="unknown provider 'apx'; did you mean 'apex'"):
        Hardware.named("V100", providers={"apx": None})
    with pytest.raises(ValueError, match="unknown provider 'apx'"):
        Hardware.named("cpu", providers={"apx": None})


def test_gtx_16_is_turing_without_tensor_cores():
    card = Hardware.named("GTX 1660 Ti")
    assert card.architecture == "Turing" and card.autocast_dtype()[0] is None
    assert "no tensor cores" in card.will_not_pay() and "torch.compile" not in card.will_not_pay()


def test_pascal_says_what_will_not_pay():
    text = Hardware.named("P100").will_not_pay()
    assert all(word in text for word in ("Pascal", "fp16", "TF32", "torch.compile"))
    assert Hardware.named("P100").providers["triton"] is not None


def test_named_providers():
    card = Hardware.named("V100")
    assert card.providers["triton"] is None and card.providers["inductor"] is None
    assert "not assumed" in card.providers["apex"] and "8.0" in card.providers["flash-attn"]
    assert Hardware.named("V100", providers={"apex": None}).providers["apex"] is None
    assert Hardware.named("cpu", providers={"inductor": "no compiler"}).providers["inductor"] == "no compiler"


@pytest.mark.parametrize(
    ("name", "dtype"), [("cpu-avx2", None), ("cpu-avx512-bf16", None), ("cpu-amx", BF16)]
)
def test_named_cpus_decide_without_measuring(name, dtype, monkeypatch):
    monkeypatch.setattr(module, "measure_matmul_rate", lambda *_: pytest.fail("measured another machine"))
    assert Hardware.named(name).autocast_dtype()[0] is dtype
    assert Hardware.named(name).matmul_rate(torch.float32) is None and Hardware.named(name).rates() == {}


@pytest.mark.parametrize(("bf16", "chosen"), [(165.0, None), (389.0, None), (391.0, BF16), (1800.0, BF16)])
def test_this_cpu_decides_by_the_measured_rate(bf16, chosen, monkeypatch):
    rates = {torch.float32: 300.0, BF16: bf16}
    monkeypatch.setattr(module, "measure_matmul_rate", lambda device, dtype, threads: rates[dtype])
    dtype, reason = Hardware.detect("cpu").autocast_dtype()
    assert dtype is chosen and f"{bf16:.0f} GFLOP/s in bf16" in reason and "300 in fp32" in reason


def test_detect_the_cpu():
    cpu = Hardware.detect("cpu")
    assert cpu is Hardware.detect(torch.device("cpu")) and cpu == Hardware.named("CPU")
    assert cpu.kind == cpu.device_type == "cpu" and cpu.cores >= 1 and cpu.memory > 2**28
    assert ("avx512" in cpu.instruction_sets) == bool(torch.cpu.get_capabilities().get("avx512_f"))
    assert json.dumps(cpu.to_dict()) and cpu.name in str(cpu) and hash(cpu)
    assert not cpu.tf32 and "NVIDIA" in cpu.tf32_choice()[1]


def test_detect_refuses_what_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module._detect.cache_clear()
    with pytest.raises(ValueError, match=r"sees no cuda device.*Hardware\.named"):
        Hardware.detect("cuda:7")
    with pytest.raises(ValueError, match=r"type 'meta'.*expected cpu, cuda"):
        Hardware.detect("meta")


@pytest.fixture
def uncached():
    caches = (module._detect, module._detect_default)
    [cache.cache_clear() for cache in caches]
    yield
    [cache.cache_clear() for cache in caches]


def fake_cuda(monkeypatch, name="NVIDIA L4", capability=(8, 9), initialized=False, **more):
    def properties(device):
        assert initialized, "this would have created a CUDA context"
        return SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], total_memory=24 * 2**30,
            multi_processor_count=58, **more,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_detect_a_cuda_device_that_is_initialised(monkeypatch, uncached):
    fake_cuda(monkeypatch, initialized=True)
    for found in (Hardware.detect(), Hardware.detect("cuda:0")):
        assert (found.name, found.architecture, found.multiprocessors) == ("NVIDIA L4", "Ada", 58)
        assert found.tf32 and found.autocast_dtype()[0] is BF16 and found.memory == 24 * 2**30


@pytest.mark.parametrize("answer", ["NVIDIA L4, 8.9, 23034", "[Not Supported]", None])
def test_detect_without_a_device_creates_no_cuda_context(answer, monkeypatch, uncached, tmp_path):
    fake_cuda(monkeypatch)  # get_device_properties fails the test
    if answer:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if not answer:
        monkeypatch.setenv("PATH", str(tmp_path))
    found = Hardware.detect()
    assert found.kind == "cuda"
    if answer and answer.startswith("NVIDIA"):
        assert (found.name, found.architecture, found.memory) == ("NVIDIA L4", "Ada", 23034 * 2**20)
    else:  # careful: nothing special
        assert found.autocast_dtype()[0] is None and not found.tf32
        assert found.will_not_pay() is None, "nothing is known, so nothing is denied"


@pytest.mark.parametrize(("arch", "dtype"), [("gfx90a:sramecc+", BF16), ("gfx942", BF16), ("gfx1100", None)])
def test_rocm(arch, dtype, monkeypatch, uncached):
    fake_cuda(monkeypatch, "AMD Instinct", (9, 4), initialized=True, gcnArchName=arch)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = Hardware.detect("cuda")
    assert (found.kind, found.device_type, found.compute_capability) == ("rocm", "cuda", None)
    assert (
        found.autocast_dtype()[0] is dtype and not found.tf32 and found.architecture == arch.partition(":")[0]
    )


@pytest.mark.parametrize("supported", [True, False])
def test_xpu(supported, monkeypatch, uncached):
    properties = SimpleNamespace(name="Intel Arc", total_memory=16 * 2**30)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: supported)
    found = Hardware.detect("xpu")
    assert found.kind == "xpu" and found.autocast_dtype()[0] is (BF16 if supported else None)


def test_mps_stays_in_fp32(monkeypatch, uncached):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = Hardware.detect("mps")
    assert found.kind == "mps" and found.autocast_dtype()[0] is None and not found.tf32


def test_the_rate_is_measured_once_quickly_and_leaves_no_trace(monkeypatch):
    module.measure_matmul_rate.cache_clear()
    mm, results = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda a, b: results.append((a.dtype, mm(a, b).dtype)))
    cpu, rng, threads = Hardware.detect("cpu"), torch.get_rng_state(), torch.get_num_threads()
    started = time.perf_counter()
    with torch.autocast("cpu"):  # must not make the fp32 product a bf16 one
        rates = cpu.rates()
    assert time.perf_counter() - started < 2
    assert torch.equal(torch.get_rng_state(), rng) and torch.get_num_threads() == threads
    assert {"fp32", "bf16"} <= set(rates) and all(1 < rate < 1e5 for rate in rates.values())
    assert results and all(given == computed for given, computed in results)
    count = len(results)
    assert cpu.rates() == rates and len(results) == count
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*not torch\.int8"):
        cpu.matmul_rate(torch.int8)


FORK = """
import os, signal, sys, torch
from autofuse.hardware import Hardware
torch.set_num_threads(2)
hardware = Hardware.detect("cpu")
hardware.autocast_dtype(), hardware.rates(threads=int(sys.argv[1]))
assert torch.get_num_threads() == 2
if os.fork() == 0:
    signal.alarm(30)  # a child that hangs dies with an exit code that is not 0
    w = torch.ones(512, 512, requires_grad=True)
    (torch.ones(2048, 512) @ w).relu().sum().backward()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_after_the_measurement_can_train():
    assert subprocess.run([sys.executable, "-c", FORK, "1"], timeout=60).returncode == 0


def test_detect_cpu_does_not_touch_cuda():
    code = (
        "import torch\n"
        "def fail(*a, **k): raise AssertionError('touched CUDA')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'get_device_properties'):\n"
        "    setattr(torch.cuda, name, fail)\n"
        "from autofuse.hardware import Hardware\n"
        "h = Hardware.detect('cpu'); h.autocast_dtype(); h.rates(); h.to_dict(); str(h)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
