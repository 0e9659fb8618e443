"""`Hardware`: what a machine can do, found out here or looked up for a machine elsewhere.

What a dtype is worth is *measured* on this machine's own device, and *published* (the maker's data
sheet, dense peak) for a machine that is only named.
"""

from __future__ import annotations

import csv
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from autofuse.cards import Card, card, nvidia_architecture
from autofuse.providers import Availability, Capability, named_availability
from autofuse.timing import measure_matmul_rate

__all__ = ["DTYPES", "Hardware"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# How many times as fast as fp32 a CPU must multiply in bf16 before autocast can pay: the casts that
# autocast adds, and everything that is not a matrix product, eat a smaller advantage.
WORTHWHILE = 1.3

# ROCm architectures with matrix units that are as fast in bf16 as in fp16 (MI200, MI300, MI350).
_FAST_ROCM = ("gfx90a", "gfx94", "gfx95")


@dataclass(frozen=True)
class Hardware:
    """What one device can do.

    Args:
        name: the maker's name for it.
        kind: "cuda", "rocm", "xpu", "mps" or "cpu".
        device_type: torch's name for such devices ("cuda" for ROCm too).
        architecture: "Pascal", "Volta", ... for NVIDIA; "gfx942" for ROCm; "x86_64" for CPUs.
        compute_capability: CUDA's; None elsewhere and where it is not known.
        memory: bytes of the device's memory; None if not known.
        multiprocessors: streaming multiprocessors (compute units); None if not known.
        bf16, fp16, tf32: whether the hardware computes in it. Not what torch accepts (a T4 takes
            bf16 and emulates it), and not whether it pays: that is what `autocast_dtype` answers.
        instruction_sets: a CPU's, of "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx",
            "amx_fp16", "neon", "arm_bf16", "arm_fp16", "sve".
        cores: CPU cores that this process may use; None for a machine that is only named.
        providers: provider -> None if it is usable here, else the reason why not.
        published: dtype -> dense peak in TFLOP/s from the data sheet; None where it is measured.

    >>> Hardware.named("T4").architecture, Hardware.named("T4").bf16, Hardware.named("T4").fp16
    ('Turing', False, True)
    """

    name: str
    kind: str
    device_type: str
    architecture: str
    compute_capability: Capability | None = None
    memory: int | None = None
    multiprocessors: int | None = None
    bf16: bool = False
    fp16: bool = False
    tf32: bool = False
    instruction_sets: tuple[str, ...] = ()
    cores: int | None = None
    providers: Mapping[str, str | None] = field(default_factory=dict, hash=False, repr=False, compare=False)
    published: Mapping[str, float] | None = field(default=None, hash=False, repr=False)

    # --- making one ----------------------------------------------------------------------------

    @staticmethod
    def detect(device: torch.device | str | None = None) -> Hardware:
        """The hardware behind ``device``; without one, the accelerator if there is any, else the CPU.

        Creates no CUDA context unless a CUDA device is asked for. Cached for the process.

        >>> Hardware.detect("cpu").kind
        'cpu'
        """
        if device is None:
            return _detect_default(torch.cuda.is_initialized())
        return _detect(str(torch.device(device)))

    @staticmethod
    def named(name: str, providers: Mapping[str, str | None] | None = None) -> Hardware:
        """The hardware of that name, to plan for a machine elsewhere; "cpu" is this machine's CPU.

        Triton and a C++ compiler are taken to be usable there and the optional packages to be absent.

        Args:
            providers: what is known better: ``{"apex": None}`` for a package that works there, or
                ``{"inductor": "no compiler"}`` for one that does not.

        >>> Hardware.named("a100").tf32
        True
        >>> Hardware.named("A101")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: unknown hardware 'A101'; did you mean A10, A10G or A100? ...
        """
        if str(name).strip().casefold() != "cpu":
            return _from_card(card(name), providers)
        here = Hardware.detect("cpu")
        named_availability("cpu", given=providers)  # refuses unknown names
        return replace(here, providers={**here.providers, **providers}) if providers else here

    # --- what it says --------------------------------------------------------------------------

    def autocast_dtype(self) -> tuple[torch.dtype | None, str]:
        """The dtype that pays for autocast here (None: stay in fp32), and why, in one sentence.

        >>> Hardware.named("V100").autocast_dtype()[0], Hardware.named("H100").autocast_dtype()[0]
        (torch.float16, torch.bfloat16)
        """
        choose = {"cuda": _autocast_cuda, "rocm": _autocast_rocm, "xpu": _autocast_xpu, "cpu": _autocast_cpu}
        return choose.get(self.kind, _autocast_unknown)(self)

    def tf32_choice(self) -> tuple[bool, str]:
        """Whether TF32 pays here, and why, in one sentence.

        >>> Hardware.named("V100").tf32_choice()[0]
        False
        """
        if self.tf32:
            return True, f"{self.architecture} multiplies float32 matrices on its tensor cores in TF32"
        if self.kind == "cuda":
            return False, f"TF32 needs an NVIDIA GPU from Ampere on, and {self._label()} is not one"
        return (
            False,
            f"TF32 is a mode of NVIDIA GPUs from Ampere on, and {self.name} is not one ({self.kind})",
        )

    def will_not_pay(self) -> str | None:
        """What is not worth trying on hardware without tensor cores; None on all other hardware.

        >>> print(Hardware.named("P100").will_not_pay())  # doctest: +ELLIPSIS
        P100 (Pascal) has no tensor cores: autocast to fp16 or bf16, TF32, ... will not pay ...
        """
        if self.kind != "cuda" or self.compute_capability is None or self.tensor_cores:
            return None
        compiled = self.compute_capability < (7, 0)
        return (
            f"{self._label()} has no tensor cores: autocast to fp16 or bf16, TF32"
            + (", and torch.compile and Liger (Triton needs compute capability 7.0)" if compiled else "")
            + " will not pay or not run here. Fused optimizers and norms, less padding and logits that "
            "are never built still pay."
        )

    @property
    def tensor_cores(self) -> bool:
        """Whether it is an NVIDIA GPU with tensor cores: Volta and newer, but no GTX 16xx."""
        capability = self.compute_capability
        return self.kind == "cuda" and capability is not None and capability >= (7, 0) and not _is_gtx16(self)

    @property
    def measured(self) -> bool:
        """Whether `matmul_rate` is measured on this machine, rather than published."""
        return self.cores is not None

    def matmul_rate(self, dtype: torch.dtype, threads: int = 1) -> float | None:
        """GFLOP/s of a matrix product in ``dtype``; None where it is not known.

        Measured at the first call (tens of milliseconds) and cached for the process. It consumes no
        random numbers; with ``threads=1`` it opens no thread pool. For named hardware it is the
        published dense peak. ``threads`` counts on CPUs alone.

        >>> Hardware.named("A100").matmul_rate(torch.bfloat16)
        312000.0
        """
        if dtype not in DTYPES.values():
            raise ValueError(f"matmul_rate knows {', '.join(map(str, DTYPES.values()))}, not {dtype!r}")
        if self.measured:
            return measure_matmul_rate(self.device_type, dtype, threads)
        name = next(name for name, known in DTYPES.items() if known == dtype)
        peak = (self.published or {}).get(name)
        return None if peak is None else peak * 1000.0

    def rates(self, threads: int = 1) -> dict[str, float]:
        """dtype name -> GFLOP/s, of those that are known: measured here, published elsewhere."""
        if not self.measured:
            return {name: peak * 1000.0 for name, peak in (self.published or {}).items()}
        names = ["fp32", "bf16", *(["fp16"] if self.fp16 else [])]
        rates = {name: self.matmul_rate(DTYPES[name], threads) for name in names}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it (measures nothing)."""
        capability = self.compute_capability
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "compute_capability": None if capability is None else ".".join(map(str, capability)),
            "instruction_sets": list(self.instruction_sets),
            "providers": dict(self.providers),
            "published": None if self.published is None else dict(self.published),
        }

    def __str__(self) -> str:
        dtypes = [name for name in ("tf32", "bf16", "fp16") if getattr(self, name)]
        capability = self.compute_capability
        facts = [
            self.architecture,
            None if capability is None else "compute capability " + ".".join(map(str, capability)),
            None if self.memory is None else f"{self.memory / 2**30:.0f} GiB",
            None if self.multiprocessors is None else f"{self.multiprocessors} multiprocessors",
            f"{self.cores} cores" if self.kind == "cpu" and self.cores else None,
            " ".join(self.instruction_sets) or None,
            None if self.kind == "cpu" else f"computes in {', '.join(['fp32', *dtypes])}",
        ]
        return f"{self.name} ({', '.join(fact for fact in facts if fact)})"

    def _label(self) -> str:
        return f"{self.name} ({self.architecture})"


# --- what pays ---------------------------------------------------------------------------------


def _autocast_cuda(hardware: Hardware) -> tuple[torch.dtype | None, str]:
    label, capability = hardware._label(), hardware.compute_capability
    if capability is None:
        return None, f"{label}: fp32, since its compute capability is not known before CUDA is initialised"
    if capability >= (8, 0):
        return torch.bfloat16, f"{label} is as fast in bf16 as in fp16, and bf16 needs no loss scaling"
    if hardware.tensor_cores:
        return torch.float16, f"{label} has tensor cores for fp16 alone and only emulates bf16"
    return None, f"{label} has no tensor cores, so neither fp16 nor bf16 autocast would pay"


def _autocast_rocm(hardware: Hardware) -> tuple[torch.dtype | None, str]:
    if hardware.architecture.startswith(_FAST_ROCM):
        return torch.bfloat16, f"{hardware._label()} has matrix cores that are fast in bf16"
    return None, f"{hardware._label()}: fp32, since bf16 is known to pay on the MI200 and MI300 series only"


def _autocast_xpu(hardware: Hardware) -> tuple[torch.dtype | None, str]:
    if hardware.bf16:
        return torch.bfloat16, f"{hardware.name} (xpu) computes in bf16, as PyTorch says"
    return None, f"PyTorch says that {hardware.name} (xpu) does not compute in bf16"


def _autocast_cpu(hardware: Hardware) -> tuple[torch.dtype | None, str]:
    if not hardware.measured:
        if "amx" in hardware.instruction_sets:
            return torch.bfloat16, f"{hardware.name} has AMX, which is made for bf16 (not measured: not here)"
        return (
            None,
            f"{hardware.name} has no AMX, without which bf16 is rarely faster than fp32 (not measured)",
        )
    fp32, bf16 = hardware.matmul_rate(torch.float32), hardware.matmul_rate(torch.bfloat16)
    if fp32 is None or bf16 is None:
        return None, f"the matmul rates of {hardware.name} could not be measured, so it stays in fp32"
    pays = bf16 >= WORTHWHILE * fp32
    return torch.bfloat16 if pays else None, (
        f"one thread of {hardware.name} multiplies matrices at {bf16:.0f} GFLOP/s in bf16 and "
        f"{fp32:.0f} in fp32 (measured): {bf16 / fp32:.2f} times as fast, and {WORTHWHILE} times is needed"
    )


def _autocast_unknown(hardware: Hardware) -> tuple[torch.dtype | None, str]:
    return None, f"{hardware.name} ({hardware.kind}): fp32, since nobody has measured that less pays there"


def _is_gtx16(hardware: Hardware) -> bool:
    """The GTX 16 series is Turing (compute capability 7.5) with the tensor cores left out."""
    return "GTX 16" in hardware.name


# --- named -------------------------------------------------------------------------------------


def _from_card(card: Card, providers: Mapping[str, str | None] | None) -> Hardware:
    device_type = "cuda" if card.kind == "rocm" else card.kind
    return Hardware(
        name=card.name,
        kind=card.kind,
        device_type=device_type,
        architecture=card.architecture or nvidia_architecture(card.compute_capability),
        compute_capability=card.compute_capability,
        memory=None if card.memory_gib is None else card.memory_gib * 2**30,
        multiprocessors=card.multiprocessors,
        instruction_sets=card.instruction_sets,
        providers=named_availability(device_type, card.compute_capability, providers),
        published=card.tflops,
        **_dtypes(card.kind, card.compute_capability, card.instruction_sets),
    )


def _dtypes(kind: str, capability: Capability | None, instruction_sets: tuple[str, ...]) -> dict[str, Any]:
    """Which dtypes the hardware itself computes in."""
    if kind == "cuda":
        ampere = capability is not None and capability >= (8, 0)
        return {"bf16": ampere, "fp16": capability is not None and capability >= (5, 3), "tf32": ampere}
    if kind == "cpu":
        bf16, fp16 = {"avx512_bf16", "amx", "arm_bf16"}, {"avx512_fp16", "amx_fp16", "arm_fp16"}
        return {
            name: not known.isdisjoint(instruction_sets) for name, known in (("bf16", bf16), ("fp16", fp16))
        }
    return {"bf16": kind == "rocm", "fp16": True}


# --- detected ----------------------------------------------------------------------------------


@functools.cache
def _detect_default(cuda_initialized: bool) -> Hardware:
    if (
        torch.cuda.device_count()
    ):  # asks NVML; is_available would start the driver, which forks do not survive
        return _detect("cuda") if cuda_initialized else _cuda_from_outside()
    for kind, module in (("xpu", torch.xpu), ("mps", torch.backends.mps)):
        if module.is_available():
            return _detect(kind)
    return _detect("cpu")


@functools.cache
def _detect(device: str) -> Hardware:
    where = torch.device(device)
    detect = {"cpu": _cpu, "cuda": _cuda, "xpu": _xpu, "mps": _mps}.get(where.type)
    if detect is None:
        raise ValueError(
            f"autofuse does not know devices of type {where.type!r}: expected cpu, cuda, xpu or mps; "
            "move the model to one of them first"
        )
    module: Any = torch.backends.mps if where.type == "mps" else getattr(torch, where.type)
    if not module.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} sees no {where.type} device here; use Hardware.detect() for what "
            'is here, or Hardware.named("A100") to plan for a machine elsewhere'
        )
    return detect(where)


def _cpu(device: torch.device) -> Hardware:
    sets = _instruction_sets(torch.cpu.get_capabilities())
    return Hardware(
        name=_cpu_name(),
        kind="cpu",
        device_type="cpu",
        architecture=platform.machine() or "unknown architecture",
        memory=_host_memory(),
        instruction_sets=sets,
        cores=_cores(),
        providers=Availability("cpu"),
        **_dtypes("cpu", None, sets),
    )


def _cuda(device: torch.device) -> Hardware:
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        architecture = properties.gcnArchName.partition(":")[0]
        return _accelerator("rocm", properties.name, architecture, properties)
    capability = (properties.major, properties.minor)
    return _accelerator("cuda", properties.name, nvidia_architecture(capability), properties, capability)


def _xpu(device: torch.device) -> Hardware:
    properties = torch.xpu.get_device_properties(device)
    found = _accelerator("xpu", properties.name, "xpu", properties)
    return replace(found, bf16=torch.xpu.is_bf16_supported())


def _mps(device: torch.device) -> Hardware:
    return _accelerator("mps", _cpu_name(), platform.machine(), memory=_host_memory())


def _accelerator(
    kind: str,
    name: str,
    architecture: str,
    properties: Any = None,
    capability: Capability | None = None,
    memory: int | None = None,
) -> Hardware:
    device_type = "cuda" if kind == "rocm" else kind
    return Hardware(
        name=name,
        kind=kind,
        device_type=device_type,
        architecture=architecture,
        compute_capability=capability,
        memory=getattr(properties, "total_memory", memory),
        multiprocessors=getattr(properties, "multi_processor_count", None),
        cores=_cores(),
        providers=Availability(device_type, capability),
        **_dtypes(kind, capability, ()),
    )


def _cuda_from_outside() -> Hardware:
    """The first visible GPU, asked of the driver's own tool, so that no CUDA context is created.

    A process with a context cannot fork workers that use CUDA. Where the tool is missing the card
    is taken to be able to do nothing special; ``detect("cuda")`` knows better.
    """
    if torch.version.hip:
        return _accelerator("rocm", "ROCm device", "unknown architecture")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", "-i", first, "--query-gpu=name,compute_cap,memory.total"]
    try:
        answer = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        )
        name, capability, mebibytes = (cell.strip() for cell in next(csv.reader(answer.stdout.splitlines())))
        major, minor = map(int, capability.split("."))
        memory = int(mebibytes) * 2**20 if mebibytes.isdecimal() else None  # "[N/A]" on shared memory
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError):
        return _accelerator("cuda", "CUDA device", nvidia_architecture(None))
    return _accelerator("cuda", name, nvidia_architecture((major, minor)), None, (major, minor), memory)


def _instruction_sets(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The instruction sets that matter for training, of those that torch found, weakest first.

    >>> _instruction_sets({"architecture": "x86_64", "avx2": True, "avx512_f": True, "amx_tile": False})
    ('avx2', 'avx512')
    """
    x86 = {"avx2": "avx2", "avx512": "avx512_f", "avx512_bf16": "avx512_bf16", "avx512_fp16": "avx512_fp16"}
    x86 |= {"amx": "amx_bf16", "amx_fp16": "amx_fp16"}
    arm = {"neon": "neon", "arm_fp16": "fp16_arith", "arm_bf16": "bf16", "sve": "sve"}
    return tuple(name for name, theirs in (x86 | arm).items() if found.get(theirs))


@functools.cache
def _cpu_name() -> str:
    """The CPU's name as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    if sys.platform == "darwin":
        answer = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        if answer.stdout.strip():
            return answer.stdout.strip()
    return platform.processor() or platform.machine() or "CPU"


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory() -> int | None:
    """Bytes of main memory that this process may use, a container's limit included."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total
