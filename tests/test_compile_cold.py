"""What a first compiled step does not pay for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_compile import Net, assert_same_step, batch, found
from torch._inductor import config, cpu_vec_isa
from torch._inductor.utils import fresh_cache

from autofuse.compiled import UntriedISAs

on_x86 = pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="the trials of x86 instruction sets")


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[cpu_vec_isa.VecISA]]:
    """Inductor's own function, whatever other tests have applied and not undone."""
    own = cpu_vec_isa.valid_vec_isa_list
    own = own.tried if isinstance(own, UntriedISAs) else own
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", own)
    return own


@on_x86
def test_no_instruction_set_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, original: Callable[[], list[cpu_vec_isa.VecISA]]
) -> None:
    picked = []

    def tried() -> list[cpu_vec_isa.VecISA]:
        picked.append("tried")
        return original()

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", tried)
    net = Net(2)
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    with fresh_cache(dir=str(tmp_path), delete=False):  # so that kernels are compiled
        assert_same_step(net, reference, batch())
    assert len(patch.accepted) == 2
    assert list(tmp_path.rglob("*.main.so")) and not picked

    patch.undo()
    assert cpu_vec_isa.valid_vec_isa_list is tried


@on_x86
def test_the_same_width_is_picked_as_after_the_trials() -> None:
    tried = cpu_vec_isa.valid_vec_isa_list
    with config.patch({"cpp.vec_isa_ok": True}):
        untried = UntriedISAs(tried)()
    assert untried[0].bit_width() == max(isa.bit_width() for isa in tried())
    assert untried[0].nelements(torch.bfloat16) == tried()[0].nelements(torch.bfloat16)


@on_x86
@pytest.mark.parametrize("settings", [{}, {"cpp.vec_isa_ok": True, "max_autotune_gemm": True}])
def test_other_compilations_get_what_was_tried(settings: dict[str, bool]) -> None:
    isas: list[cpu_vec_isa.VecISA] = [cpu_vec_isa.VecAMX()]
    with config.patch(settings):
        assert UntriedISAs(lambda: isas)() is isas


@on_x86
def test_two_patches_can_be_undone_in_any_order() -> None:
    before = cpu_vec_isa.valid_vec_isa_list
    patches = [found(Net(2)) for _ in range(2)]
    for patch in patches:
        patch.apply()
    assert cpu_vec_isa.valid_vec_isa_list is not before
    for patch in patches:
        patch.undo()
    assert cpu_vec_isa.valid_vec_isa_list is before
