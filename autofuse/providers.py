"""What is to be had: the providers of fused operations here, and the hardware elsewhere.

Each provider is a frozen row of `PROVIDERS`, each device that `Hardware.named` knows one of `NAMED`.
Nothing is imported until somebody asks, a package that breaks on import is a reason and never an
error, and each question is answered once per process.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "NAMED",
    "PROVIDERS",
    "Availability",
    "Card",
    "Provider",
    "card",
    "forget",
    "named_availability",
    "nvidia_architecture",
]

Capability = tuple[int, int]


def _nothing_more(device_type: str | None) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """One provider of fused operations.

    Args:
        name: what plans and reports call it.
        import_path: the module that must import for it to work.
        absent: what to do when the package is not there, as the end of a sentence.
        forward, backward: which of the two it computes.
        dtypes: the names of the dtypes it takes ("fp32", "bf16", "fp16").
        devices: the torch device types it runs on.
        traceable: torch.compile can trace through it without breaking the graph.
        min_capability: the least CUDA compute capability, where there is one.
        probe: looks further than the import: ``probe(device_type)`` says what is wrong, or None.
        note: what a user should know although it is usable.

    >>> PROVIDERS["apex"].suits("cpu")
    'runs on cuda only, and this is cpu'
    """

    name: str
    import_path: str
    absent: str
    forward: bool = True
    backward: bool = True
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    devices: tuple[str, ...] = ("cuda",)
    traceable: bool = False
    min_capability: Capability | None = None
    probe: Callable[[str | None], str | None] = field(default=_nothing_more, repr=False)
    note: Callable[[], str | None] = field(default=lambda: None, repr=False)

    def check(self, device_type: str | None = None) -> str | None:
        """Why it cannot be used, or None if it can. Never raises; cached for the process."""
        return _check(self, device_type)

    def suits(self, device_type: str, capability: Capability | None = None) -> str | None:
        """Why it would not run on such a device wherever it is installed, or None if it would."""
        if device_type not in self.devices:
            return f"runs on {', '.join(self.devices)} only, and this is {device_type}"
        if self.min_capability and capability and capability < self.min_capability:
            need, have = (".".join(map(str, pair)) for pair in (self.min_capability, capability))
            return f"needs compute capability {need} or higher, and this device has {have}"
        return None

    def reason(self, device_type: str, capability: Capability | None = None) -> str | None:
        """Why it cannot be used here on such a device, or None if it can.

        A package that is absent, or for other devices, is not imported to find that out.
        """
        return _absent(self) or self.suits(device_type, capability) or self.check(device_type)

    @property
    def version(self) -> str | None:
        """The version installed, read without importing anything; None if there is none."""
        with contextlib.suppress(Exception):
            return importlib.metadata.version(_DISTRIBUTIONS.get(self.name, self.name))
        return None


class Availability(Mapping[str, str | None]):
    """Provider name -> None if it is usable on a device, else the reason; found out when read.

    >>> Availability("cpu")["apex"] is None  # its kernels are CUDA kernels
    False
    """

    def __init__(self, device_type: str, capability: Capability | None = None) -> None:
        self.device_type = device_type
        self.capability = capability

    def __getitem__(self, name: str) -> str | None:
        return PROVIDERS[name].reason(self.device_type, self.capability)

    def __iter__(self) -> Iterator[str]:
        return iter(PROVIDERS)

    def __len__(self) -> int:
        return len(PROVIDERS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device_type!r}, {self.capability!r})"


def named_availability(
    device_type: str,
    capability: Capability | None = None,
    given: Mapping[str, str | None] | None = None,
) -> dict[str, str | None]:
    """What to assume of a machine that is not this one: Triton and a C++ compiler, nothing else.

    Args:
        given: what is known better: None for a usable provider, else the reason why not.

    >>> assumed = named_availability("cuda", (8, 0), {"apex": None})
    >>> [name for name, reason in assumed.items() if reason is None]
    ['apex', 'triton', 'inductor']
    """
    _refuse_unknown(given or {})

    def assume(row: Provider) -> str | None:
        unsuited = row.suits(device_type, capability)
        if unsuited or row.name in ("triton", "inductor"):
            return unsuited
        return f"not assumed to be installed there; pass providers={{{row.name!r}: None}} if it is"

    return {name: assume(row) for name, row in PROVIDERS.items()} | dict(given or {})


def forget() -> None:
    """Forget every answer, so that a package installed in the meantime is seen."""
    importlib.invalidate_caches()
    _check.cache_clear()


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in PROVIDERS:
            near = difflib.get_close_matches(name, PROVIDERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown provider {name!r}{hint} Known: {', '.join(PROVIDERS)}")


# --- how the questions are answered ------------------------------------------------------------


@functools.cache
def _check(provider: Provider, device_type: str | None) -> str | None:
    try:
        return _absent(provider) or provider.probe(device_type) or _import_failure(provider.import_path)
    except Exception as error:  # a probe looks into strangers' packages
        return f"cannot be examined: {_in_one_line(error)}"


def _absent(provider: Provider) -> str | None:
    root = provider.import_path.partition(".")[0]
    return None if _installed(root) else f"not installed; {provider.absent}"


def _installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # an importer of somebody else's that fails
        return False


def _import_failure(module: str) -> str | None:
    """Why ``module`` cannot be imported, or None; what it prints or warns stays unseen."""
    quiet = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: some packages exit when they miss something
        return f"installed, but importing {module} fails with {_in_one_line(error)}; reinstall it"
    return None


def _in_one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."


def _parts(package: str) -> set[str]:
    """The names of the files and folders of a package, read without importing it."""
    module = sys.modules.get(package)
    spec = None if module is not None else importlib.util.find_spec(package)
    paths = getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None) or []
    return {entry.stem for path in paths if Path(path).is_dir() for entry in Path(path).iterdir()}


# --- what is wrong with each -------------------------------------------------------------------

_DISTRIBUTIONS = {"liger": "liger-kernel", "flash-attn": "flash_attn", "inductor": "torch"}

# Apex's own packages that any build has, and the extension modules that only CUDA builds have.
_APEX_PACKAGES = {"normalization", "optimizers"}
_APEX_EXTENSIONS = ("amp_C", "fused_layer_norm_cuda")


def _apex(device_type: str | None) -> str | None:
    if not _parts("apex") >= _APEX_PACKAGES:
        return (
            "installed, but it is a different package of that name (`pip install apex` fetches one); "
            "uninstall it and build NVIDIA's Apex from source"
        )
    missing = [name for name in _APEX_EXTENSIONS if not _installed(name)]
    if missing:
        return (
            f"built without CUDA extensions ({', '.join(missing)} missing); "
            "rebuild it with its --cpp_ext and --cuda_ext options"
        )
    return None


def _apex_note() -> str | None:
    if not _installed("apex") or _apex(None) or "amp" in _parts("apex"):
        return None
    return "its kernels are usable, but apex.amp has been removed from this version: use torch.amp"


def _flash_attn(device_type: str | None) -> str | None:
    if _installed("flash_attn_2_cuda"):
        return None
    return "built without its CUDA extension (flash_attn_2_cuda missing); reinstall it where nvcc is"


def _liger(device_type: str | None) -> str | None:
    triton = PROVIDERS["triton"].check(device_type)
    return f"needs triton, which is {triton}" if triton else None


def _inductor(device_type: str | None) -> str | None:
    """What Inductor generates code with: Triton on GPUs, a C++ compiler on CPUs."""
    if device_type == "mps":
        return None  # Metal's compiler is a part of macOS
    if device_type in ("cuda", "xpu"):
        triton = PROVIDERS["triton"].check(device_type)
        return f"generates Triton code, and triton is {triton}" if triton else None
    # The same choice as torch._inductor.config.cpp.cxx, without the second that importing it takes.
    given = os.environ.get("CXX")
    compiler = given or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if shutil.which(compiler):
        return None
    what = f"the C++ compiler that $CXX names, {compiler!r}," if given else f"the C++ compiler {compiler}"
    others = [name for name in ("g++", "clang++") if name != compiler and shutil.which(name)]
    todo = f"set CXX={others[0]}, which is there" if others else "install one, or set CXX to one"
    return f"{what} is not on PATH; {todo}"


PROVIDERS: Mapping[str, Provider] = {
    row.name: row
    for row in (
        Provider(
            "apex",
            "apex.normalization",
            "build it from NVIDIA's sources (`pip install apex` fetches another package)",
            probe=_apex,
            note=_apex_note,
        ),
        Provider(
            "liger",
            "liger_kernel.ops",
            "pip install liger-kernel",
            devices=("cuda", "xpu"),
            min_capability=(7, 0),
            probe=_liger,
        ),
        Provider(
            "flash-attn",
            "flash_attn",
            "pip install flash-attn --no-build-isolation",
            dtypes=("bf16", "fp16"),
            min_capability=(8, 0),
            traceable=True,
            probe=_flash_attn,
        ),
        Provider(
            "xformers",
            "xformers.ops",
            "pip install xformers",
            min_capability=(7, 0),
        ),
        Provider(
            "triton",
            "triton",
            "it comes with PyTorch's CUDA builds",
            devices=("cuda", "xpu"),
            traceable=True,
            min_capability=(7, 0),
        ),
        Provider(
            "inductor",
            "torch",  # it is a part of PyTorch; what may be missing is the compiler behind it
            "install PyTorch",
            devices=("cpu", "cuda", "xpu", "mps"),
            traceable=True,
            min_capability=(7, 0),
            probe=_inductor,
        ),
    )
}


# --- hardware elsewhere: facts from the makers' data sheets, nothing measured ---------------------


@dataclass(frozen=True)
class Card:
    """One row: what does not follow from the compute capability.

    ``tflops`` are **published** peaks in TFLOP/s per dtype: dense (no sparsity), at boost clock,
    tensor cores with fp32 accumulation where the data sheet tells. Real products reach a part of it.
    """

    name: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory_gib: int | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    kind: str = "cuda"
    architecture: str = ""
    instruction_sets: tuple[str, ...] = ()


def _peaks(fp32: float, fp16: float, tf32: float | None = None) -> dict[str, float]:
    """Cards with TF32 have bf16 at the rate of fp16; older ones have neither."""
    return {"fp32": fp32, **({} if tf32 is None else {"tf32": tf32, "bf16": fp16}), "fp16": fp16}


_AVX512 = ("avx2", "avx512")

NAMED: tuple[Card, ...] = (
    # Maxwell and Pascal: no tensor cores (fp16 at 1/64 of the fp32 rate on all Pascals but the P100)
    Card("M40", (5, 2), 24, 24, {"fp32": 7.0}),
    Card("P100", (6, 0), 56, 16, _peaks(10.6, 21.2), ("P100-SXM2", "P100-PCIE-16GB")),
    Card("P40", (6, 1), 30, 24, {"fp32": 12.0}),
    Card("P4", (6, 1), 20, 8, {"fp32": 5.5}),
    Card("GTX 1080 Ti", (6, 1), 28, 11, {"fp32": 11.3}),
    # Volta and Turing: tensor cores for fp16
    Card("V100", (7, 0), 80, 16, _peaks(15.7, 125), ("V100-SXM2", "V100-SXM2-16GB")),
    Card("V100-32GB", (7, 0), 80, 32, _peaks(15.7, 125), ("V100-SXM2-32GB",)),
    Card("TITAN V", (7, 0), 80, 12, _peaks(14.9, 110)),
    Card("T4", (7, 5), 40, 16, _peaks(8.1, 65)),
    Card("RTX 2080 Ti", (7, 5), 68, 11, _peaks(13.4, 53.8)),
    Card("Quadro RTX 6000", (7, 5), 72, 24, _peaks(16.3, 130.5)),
    Card("GTX 1660 Ti", (7, 5), 24, 6, _peaks(5.4, 10.9)),
    # Ampere: bf16 and TF32 from here on
    Card("A100", (8, 0), 108, 40, _peaks(19.5, 312, 156), ("A100-40GB", "A100-SXM4-40GB")),
    Card("A100-80GB", (8, 0), 108, 80, _peaks(19.5, 312, 156), ("A100-SXM4-80GB",)),
    Card("A30", (8, 0), 56, 24, _peaks(10.3, 165, 82)),
    Card("A10", (8, 6), 72, 24, _peaks(31.2, 125, 62.5)),
    Card("A10G", (8, 6), 80, 24, _peaks(35, 70, 35)),
    Card("A40", (8, 6), 84, 48, _peaks(37.4, 149.7, 74.8)),
    Card("RTX A6000", (8, 6), 84, 48, _peaks(38.7, 154.8, 77.4), ("A6000",)),
    Card("RTX 3080", (8, 6), 68, 10, _peaks(29.8, 59.5, 29.8)),
    Card("RTX 3090", (8, 6), 82, 24, _peaks(35.6, 71, 35.6)),
    # Ada
    Card("L4", (8, 9), 58, 24, _peaks(30.3, 121, 60)),
    Card("L40S", (8, 9), 142, 48, _peaks(91.6, 362, 183)),
    Card("RTX 4090", (8, 9), 128, 24, _peaks(82.6, 165.2, 82.6)),
    Card("RTX 6000 Ada", (8, 9), 142, 48, _peaks(91.1, 364, 182)),
    # Hopper
    Card("H100", (9, 0), 132, 80, _peaks(67, 989, 494), ("H100-SXM", "H100 80GB HBM3")),
    Card("H100-PCIe", (9, 0), 114, 80, _peaks(51, 756, 378)),
    Card("H200", (9, 0), 132, 141, _peaks(67, 989, 494)),
    Card("GH200", (9, 0), 132, 96, _peaks(67, 989, 494)),
    # Blackwell
    Card("B200", (10, 0), 148, 180, _peaks(75, 2250, 1125)),
    Card("RTX 5090", (12, 0), 170, 32, _peaks(104.8, 209.5, 104.8)),
    # AMD, per device that PyTorch sees (half a board of the MI250X)
    Card("MI210", None, 104, 64, {"fp32": 22.6, "bf16": 181, "fp16": 181}, (), "rocm", "gfx90a"),
    Card("MI250X", None, 110, 64, {"fp32": 23.9, "bf16": 191.5, "fp16": 191.5}, (), "rocm", "gfx90a"),
    Card("MI300X", None, 304, 192, {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4}, (), "rocm", "gfx942"),
    # CPUs by what they can do
    Card("cpu-avx2", kind="cpu", architecture="x86_64", instruction_sets=("avx2",)),
    Card("cpu-avx512", kind="cpu", architecture="x86_64", instruction_sets=_AVX512),
    Card("cpu-avx512-bf16", kind="cpu", architecture="x86_64", instruction_sets=(*_AVX512, "avx512_bf16")),
    Card("cpu-amx", kind="cpu", architecture="x86_64", instruction_sets=(*_AVX512, "avx512_bf16", "amx")),
)


def _key(name: str) -> str:
    """What is compared of a name: "NVIDIA GeForce RTX 3090" and "rtx-3090" are the same."""
    return re.sub(r"nvidia|tesla|geforce|amd|instinct|[^a-z0-9]", "", name.casefold())


def card(name: str) -> Card:
    """The row of that name; a ValueError with the nearest names for any other."""
    found = next((row for row in NAMED if _key(name) in map(_key, (row.name, *row.aliases))), None)
    if found is None:
        raise ValueError(_unknown(name))
    return found


def _unknown(name: str) -> str:
    keys = {_key(row.name): row.name for row in NAMED} | {"cpu": "cpu"}
    near = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=3, cutoff=0.5)]
    hint = (
        "; did you mean " + " or ".join(filter(None, [", ".join(near[:-1]), near[-1]])) + "?" if near else "."
    )
    return f"unknown hardware {name!r}{hint} Hardware.named takes one of: {', '.join(keys.values())}"


def nvidia_architecture(capability: Capability | None) -> str:
    """NVIDIA's name for the architecture of a compute capability.

    >>> nvidia_architecture((7, 5)), nvidia_architecture((8, 9)), nvidia_architecture((12, 0))
    ('Turing', 'Ada', 'Blackwell')
    """
    if capability is None:
        return "unknown architecture"
    since = {(3, 0): "Kepler", (5, 0): "Maxwell", (6, 0): "Pascal", (7, 0): "Volta", (7, 5): "Turing"}
    since |= {(8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
    since |= {(13, 0): "newer than Blackwell"}
    return next((name for least, name in reversed(since.items()) if capability >= least), "older than Kepler")
