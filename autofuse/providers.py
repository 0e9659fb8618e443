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
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "PROVIDERS",
    "Availability",
    "Provider",
    "forget",
    "named_availability",
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
