"""Tuning by several ranks: the first one's clock decides, any can object; all do the same in each step."""

import os
import types

import pytest
import torch
import torch.multiprocessing as mp
from doubles import forward_patcher, register
from test_wrappers import free_port
from torch import nn
from tuned import Slow, Time, batch, takes

import autofuse
import autofuse.clock

STEPS = 60


def nan_on_one_rank(rank, world, port, results):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"loss_fn": nn.functional.mse_loss, "precision": "fp32", "measure": False}
    step = autofuse.optimize(model, optimizer, **options)
    for number in range(10):
        x, y = batch(10 * number + rank)
        step(x * float("nan") if rank == 1 and number in (3, 7) else x, y)
    results[rank] = (
        step.counters.steps,
        step.counters.skipped,
        [p.detach().clone() for p in model.parameters()],
    )
    torch.distributed.destroy_process_group()


def test_a_loss_that_is_nan_on_one_rank_reaches_no_weights():
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(nan_on_one_rank, (2, free_port(), results), nprocs=2)
        first, second = results[0], results[1]
    assert first[:2] == second[:2] == (8, 2)
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all())


def wrapped(kind, model, world):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), "module."
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), ""


def in_process(rank, world, port, kind, results):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    time = Time()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(autofuse.clock, "time", types.SimpleNamespace(perf_counter=time.perf_counter))
        # What saves time on rank 0 costs time on rank 1, and the other way round.
        good, slow = ((0.4, 1.6), (1.6, 0.4))[rank]
        torch.manual_seed(0)
        inner = nn.Sequential(Slow(time), Slow(time), nn.Linear(8, 1))
        model, at = wrapped(kind, inner, world)
        wrong = forward_patcher(f"{at}2", lambda forward: lambda x: forward(x) * (1 + 0.01 * rank))
        outside = {"in_forward": kind == "ddp"}  # under FSDP nothing in the forward can be proved
        good, slow = takes(f"{at}0", good, **outside), takes(f"{at}1", slow, **outside)
        register(monkeypatch, good=good, slow=slow, wrong_on_rank_1=wrong)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        names = ["good", "slow", "wrong_on_rank_1"]
        step = autofuse.optimize(
            model, optimizer, loss_fn=nn.functional.mse_loss, only=names, precision="fp32"
        )
        seen = []
        for number in range(STEPS):
            step(*batch(10 * number + rank))
            seen.append((inner[0].seconds != 1.0, inner[1].seconds != 1.0, "forward" in vars(inner[2])))
        assert not step.tuning, str(step.report)
        results[rank] = {
            "seen": seen,
            "status": {name: (step.report[name].status, step.report[name].reason) for name in names},
            "weights": [getattr(p, "full_tensor", p.clone)().detach() for p in model.parameters()],
        }
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_do_the_same_at_the_same_step(kind):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(in_process, (2, free_port(), kind, results), nprocs=2)
        first, second = results[0], results[1]
    assert first["seen"] == second["seen"]
    assert any(good for good, _, _ in first["seen"]) and any(slow for _, slow, _ in first["seen"])
    assert first["seen"][-1] == (True, False, False)
    assert first["status"] == second["status"]
    assert first["status"]["good"][0] == "kept" and first["status"]["slow"][0] == "rejected"
    why = "changes the result" if kind == "ddp" else "cannot be proved under FSDP"
    assert why in first["status"]["wrong_on_rank_1"][1]  # rank 0 saw nothing wrong
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
