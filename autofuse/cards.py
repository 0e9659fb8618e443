"""Hardware elsewhere: facts from the makers' data sheets, nothing measured."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autofuse.providers import Capability

__all__ = ["NAMED", "Card", "card", "nvidia_architecture"]


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
    if not isinstance(name, str):
        raise TypeError(f'expected the name of some hardware, such as "H100", not {name!r}')
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
