"""Wrappers that hold a reference to the model never notice: PEFT, DDP, FSDP2, the Trainer, Accelerate."""

import os
import warnings

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import autofuse


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.first, self.norm = nn.Linear(16, 16), nn.RMSNorm(16)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def batches(rank, count=4):
    draw = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 16, generator=draw), torch.randn(4, 16, generator=draw)) for _ in range(count)]


def train(model, optimizer, rank, use):
    losses, loss_fn = [], nn.functional.mse_loss
    if use:
        step = autofuse.optimize(
            model, optimizer, loss_fn=loss_fn, precision="fp32", compile=False, measure=False
        )
        assert step.model is model
        losses = [step(x, y).item() for x, y in batches(rank)]
        assert step.report["norms"].status == "kept", step.report["norms"].reason
        return losses, step
    for x, y in batches(rank):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, None


def in_process(rank, world, port, kind, results):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    found = []
    for use in (False, True):
        torch.manual_seed(0)
        model = Net()
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (world,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, step = train(model, optimizer, rank, use and kind == "ddp")
        if use and kind == "fsdp2":  # left alone where it cannot be shown to work, and trained right
            step = autofuse.optimize(
                model, optimizer, loss_fn=nn.functional.mse_loss, precision="fp32", measure=False
            )
            losses += [step(x, y).item() for x, y in batches(rank)]
            assert step.report["norms"].status == step.report["precision"].status == "rejected"
            for x, y in batches(rank):  # in pieces
                with step.autocast():
                    loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss)
                assert step.update()
                losses.append(loss.item())
            found.append(losses)
        elif kind == "fsdp2":
            losses += train(model, optimizer, rank, False)[0]
            losses += train(model, optimizer, rank, False)[0]
            found.append(losses)
        else:
            found.append(losses)
    torch.distributed.destroy_process_group()
    results[rank] = found


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_in_two_processes(kind):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(in_process, (2, free_port(), kind, results), nprocs=2)
        for rank in (0, 1):
            plain, fused = results[rank]
            assert plain == pytest.approx(fused, rel=1e-5), rank
        assert results[0][0] != results[1][0]  # the ranks saw different batches


def test_peft_adapters():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=100
    )
    ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    losses = []
    for use in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        names = list(model.state_dict())
        if use:
            step = autofuse.optimize(model, optimizer, precision="fp32", compile=False, measure=False)
            losses.append([step(batch).item() for _ in range(3)])
            assert list(model.state_dict()) == names and step.report["norms"].status == "kept"
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        else:
            losses.append([])
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def trainer(tmp_path, **arguments):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 100, (32, 16), generator=draw)
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch",
            **arguments,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        eval_dataset=[{"input_ids": row, "labels": row} for row in rows[:4]],
    )


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_in_one_line(tmp_path):
    plain = trainer(tmp_path)
    expected = logged(plain)
    fused = trainer(tmp_path)
    step = autofuse.optimize(fused, precision="fp32", compile=False, measure=False)
    assert step.model is fused.model and step.optimizer is fused.optimizer
    assert logged(fused) == pytest.approx(expected, rel=1e-5)
    report = step.report
    assert report.proved and report["norms"].status == report["optimizer"].status == "kept"
    assert (report.counters.steps, report.counters.micro_batches) == (4, 8)
    assert fused.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    step.undo()
    assert "compute_loss" not in vars(fused) and type(fused.model.transformer.ln_f) is nn.LayerNorm


def test_a_trainers_own_mixed_precision_stays_its_own(tmp_path):
    expected = logged(trainer(tmp_path, bf16=True))
    fused = trainer(tmp_path, bf16=True)
    step = autofuse.optimize(fused, compile=False, measure=False)
    assert step.plan["precision"].status == "rejected"
    assert logged(fused) == pytest.approx(expected, rel=1e-2)
    assert step.report["norms"].status == "kept", step.report["norms"].reason
    with pytest.raises(ValueError, match="fp16=True"):
        autofuse.optimize(trainer(tmp_path), precision="fp16", measure=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 4}, "gradient_accumulation_steps"),
        ({"clip_grad_norm": 1.0}, "max_grad_norm"),
        ({"loss_fn": nn.functional.mse_loss}, "compute_loss_func"),
        ({"on_nonfinite": "raise"}, "TrainerCallback"),
    ],
)
def test_what_is_the_trainers_own_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        autofuse.optimize(trainer(tmp_path), **{"measure": False, **options})


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    losses = []
    for use in (False, True):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.append(train(model, optimizer, 0, use)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
