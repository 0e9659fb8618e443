"""What stands around a model: hooks, checkpointing, frozen weights, schedulers, PEFT, forks, neighbours."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cases import (
    CASES,
    PLAIN,
    adamw,
    arguments,
    close,
    fast_loop,
    gradient_error,
    loss_of,
    optimize,
    plain_loop,
)
from test_promises import shape_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import autofuse

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]
every_case = pytest.mark.parametrize("name", CASES)
HERE = Path(__file__).parent


# --- hooks ---------------------------------------------------------------------------------------


class Recorder:
    """Hooks of every kind on every module; each notes what it saw in the order of the calls."""

    def __init__(self, model):
        self.seen = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, args, path=path: self.note(path, "pre", args))
            module.register_forward_hook(lambda m, args, out, path=path: self.note(path, "post", out))
            module.register_full_backward_hook(lambda m, a, b, path=path: self.note(path, "backward", b))

    def note(self, path, kind, value):
        tensor = value[0] if isinstance(value, tuple) and value else value
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            self.seen.append((path, kind, tensor.dtype, tuple(tensor.shape), tensor.norm().item()))
        else:
            self.seen.append((path, kind, None, None, 0.0))


@pytest.mark.parametrize("name", ["bert-cls", "llama", "rms", "encoder", "nanogpt"])
@pytest.mark.parametrize("moment", ["before", "after", "later"])
def test_hooks_see_what_they_saw(name, moment):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    expected = Recorder(plain)
    found = Recorder(fast) if moment == "before" else None
    optimizer = adamw(fast)
    step = optimize(case, fast, optimizer, measure=False)
    found = Recorder(fast) if moment == "after" else found
    losses = [step(*arguments(case, 0)).item()]
    found = found or Recorder(fast)
    plain_optimizer = adamw(plain)
    wanted = plain_loop(case, plain, plain_optimizer, 1)
    expected.seen.clear(), found.seen.clear()
    losses.append(step(*arguments(case, 0)).item())
    wanted += plain_loop(case, plain, plain_optimizer, 1)
    assert close(losses, wanted)
    assert [entry[:4] for entry in found.seen] == [entry[:4] for entry in expected.seen]
    norms = [torch.tensor([entry[4] for entry in recorder.seen]) for recorder in (found, expected)]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "gamma-beta"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_hook_that_changes_the_output_of_a_norm_does_so(name, moment):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    path = optimize(case, case.model(), measure=False).plan["norms"].accepted[0].path

    def double(module, inputs, output):
        return output * 2

    plain.get_submodule(path).register_forward_hook(double)
    if moment == "before":
        fast.get_submodule(path).register_forward_hook(double)
    step = optimize(case, fast, adamw(fast), measure=False)
    if moment == "after":
        fast.get_submodule(path).register_forward_hook(double)
    assert close(fast_loop(case, step, 3), plain_loop(case, plain, adamw(plain), 3))


def test_gradient_hooks_on_parameters():
    case = CASES["llama"]
    plain, fast = case.model(), case.model()
    for model in (plain, fast):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
    step = optimize(case, fast, measure=False)
    step(*arguments(case))
    loss_of(case, plain).backward()
    assert gradient_error(plain, fast) < 1e-4


def test_an_optimizer_that_steps_inside_the_backward():
    """register_post_accumulate_grad_hook: the proof must not make it step."""
    case = CASES["gpt2"]
    models = [case.model(), case.model()]
    steps = []
    for model in models:
        each = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

        def act(parameter, each=each):
            steps.append(1)
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(act)
    loss_of(case, models[0], 0).backward()
    taken = len(steps)
    step = optimize(case, models[1], measure=False)
    step(*arguments(case, 0))
    assert len(steps) == 2 * taken
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


# --- gradient checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "t5", "llama", "gemma2", "qwen2-moe", "vit", "mamba"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing(name, reentrant):
    case = CASES[name]
    plain, fast = case.model(0.1), case.model(0.1)
    for model in (plain, fast):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(2)
    expected = plain_loop(case, plain, adamw(plain), 3)
    torch.manual_seed(2)
    step = optimize(case, fast, adamw(fast), measure=False)
    assert close(fast_loop(case, step, 3), expected)
    assert step.report["norms"].status == "kept", step.report["norms"].reason


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_written_by_hand(reentrant):
    plain = Checkpointed(reentrant)
    fast = copy.deepcopy(plain)
    inputs, targets = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    torch.manual_seed(2)
    loss = nn.functional.mse_loss(plain(inputs), targets)
    loss.backward()
    inputs.grad = None
    torch.manual_seed(2)
    step = autofuse.optimize(fast, loss_fn=nn.functional.mse_loss, **{"measure": False, **PLAIN})
    assert close(step(inputs, targets).item(), loss.item())
    assert gradient_error(plain, fast) < 1e-4
    assert inputs.grad is not None


# --- frozen parameters, PEFT ------------------------------------------------------------------------


def freeze(model, which):
    for name, parameter in model.named_parameters():
        norm, odd = parameter.dim() == 1, sum(map(ord, name)) % 2
        if {"norms": norm, "all but norms": not norm, "some": odd}[which]:
            parameter.requires_grad_(False)


@every_case
@pytest.mark.parametrize("which", ["norms", "all but norms", "some"])
def test_frozen_parameters_stay_and_the_others_train_as_before(name, which):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    freeze(plain, which), freeze(fast, which)
    frozen = {n: p.detach().clone() for n, p in fast.named_parameters() if not p.requires_grad}
    assert frozen
    step = optimize(case, fast, adamw(fast), measure=False)
    assert close(fast_loop(case, step, 3), plain_loop(case, plain, adamw(plain), 3))
    for parameter_name, value in frozen.items():
        parameter = fast.get_parameter(parameter_name)
        assert torch.equal(parameter, value) and parameter.grad is None and not parameter.requires_grad


def test_unfreezing_and_freezing_in_mid_training():
    case = CASES["bert-cls"]
    plain, fast = case.model(), case.model()
    freeze(plain, "norms"), freeze(fast, "norms")
    step = optimize(case, fast, measure=False)
    step(*arguments(case))
    for model in (plain, fast):
        model.zero_grad()
        model.requires_grad_(True)
        model.bert.embeddings.requires_grad_(False)
    loss_of(case, plain).backward()
    step(*arguments(case))
    assert gradient_error(plain, fast) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-cls"])
def test_peft_adapters(name, tmp_path):
    peft = pytest.importorskip("peft")
    case = CASES[name]
    target = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert-cls": ["query", "value"]}[name]
    wrapped = []
    for _ in range(2):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False)
        wrapped.append(peft.get_peft_model(case.model(), config).train())
    plain, fast = wrapped
    step = optimize(case, fast, adamw(fast), measure=False)
    assert close(fast_loop(case, step, 3), plain_loop(case, plain, adamw(plain), 3))
    assert step.report["norms"].accepted
    fast.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(case.model(), tmp_path)
    assert list(peft.get_peft_model_state_dict(fast)) == list(peft.get_peft_model_state_dict(plain))
    assert close(loss_of(case, loaded.eval()).item(), loss_of(case, fast.eval()).item())
    merged = fast.merge_and_unload()
    assert close(loss_of(case, merged.eval()).item(), loss_of(case, loaded).item(), 1e-4)


# --- schedulers that existed before -------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.01, total_steps=8),
}


@pytest.mark.parametrize("name", ["gpt2", "rms"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("passed", [True, False])
def test_a_scheduler_made_before_the_call(name, kind, passed):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    optimizers = adamw(plain), adamw(fast)
    schedulers = [SCHEDULERS[kind](optimizer) for optimizer in optimizers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = optimize(case, fast, optimizers[1], scheduler=schedulers[1] if passed else None, measure=False)
        for number in range(5):
            expected = plain_loop(case, plain, optimizers[0], 1)
            schedulers[0].step()
            assert close(step(*arguments(case, 0)).item(), expected[0]), number
            if not passed:
                schedulers[1].step()
            for a, b in zip(optimizers[0].param_groups, optimizers[1].param_groups, strict=True):
                assert a["lr"] == b["lr"] and a["betas"] == b["betas"]
    assert schedulers[0].state_dict().keys() == schedulers[1].state_dict().keys()
    assert schedulers[1].optimizer is optimizers[1]
    assert step.report["optimizer"].status == "kept", step.report["optimizer"].reason


def test_a_scheduler_made_after_the_call_warns_of_nothing():
    case = CASES["rms"]
    model = case.model()
    optimizer = adamw(model)
    step = optimize(case, model, optimizer, measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = SCHEDULERS["onecycle"](optimizer)
        for _ in range(3):
            step(*arguments(case))
            scheduler.step()


# --- groups by isinstance, neighbours, a second call ---------------------------------------------------


@every_case
def test_weight_decay_groups_by_isinstance(name):
    case = CASES[name]
    model = case.model()
    kinds = [type(m) for m in model.modules()]

    def decays():
        norms = tuple({k for k in kinds if "norm" in k.__name__.lower()})
        spared = {id(p) for m in model.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)}
        return [n for n, p in model.named_parameters() if id(p) not in spared]

    before = decays()
    step = optimize(case, model, adamw(model), measure=False)
    assert decays() == before and len(before) < len(list(model.parameters()))
    groups = [{"params": [model.get_parameter(n) for n in before], "weight_decay": 0.1}]
    plain = case.model()
    plain_groups = [{"params": [plain.get_parameter(n) for n in before], "weight_decay": 0.1}]
    step = optimize(case, model, torch.optim.AdamW(groups, lr=1e-3), measure=False)
    expected = plain_loop(case, plain, torch.optim.AdamW(plain_groups, lr=1e-3), 2)
    assert close(fast_loop(case, step, 2), expected)


@every_case
def test_a_second_call_finds_nothing_more_and_says_so(name):
    case = CASES[name]
    model, plain = case.model(), case.model()
    optimizer = adamw(model)
    before = shape_of(model, optimizer)
    optimize(case, model, optimizer, measure=False)
    changed = shape_of(model, optimizer)
    second = optimize(case, model, optimizer, measure=False)
    assert shape_of(model, optimizer) == changed
    assert not any(row.accepted for row in second.plan)
    assert "othing more to do" in str(second.plan) and "othing more to do" in str(second.report)
    assert close(fast_loop(case, second, 2), plain_loop(case, plain, adamw(plain), 2))
    second.undo()
    autofuse.undo(model)
    assert shape_of(model, optimizer) == before


@every_case
def test_a_neighbour_of_the_same_class_is_left_alone(name):
    case = CASES[name]
    model, neighbour, plain = case.model(), case.model(), case.model()
    optimizer, neighbours = adamw(model), adamw(neighbour)
    before = shape_of(neighbour, neighbours)
    step = optimize(case, model, optimizer, measure=False)
    fast_loop(case, step, 2)
    assert shape_of(neighbour, neighbours) == before
    assert plain_loop(case, neighbour, neighbours, 2) == plain_loop(case, plain, adamw(plain), 2)
    assert all(torch.equal(a, b) for a, b in zip(neighbour.parameters(), plain.parameters(), strict=True))


def test_two_models_in_turn_and_undo_of_one():
    case = CASES["gamma-beta"]
    models = [case.model(), case.model(seed=3)]
    steps = [optimize(case, model, adamw(model), measure=False) for model in models]
    for number in range(2):
        for step in steps:
            step(*arguments(case, number))
    swapped = [type(m) for m in models[1].modules()]
    steps[0].undo()
    assert [type(m) for m in models[1].modules()] == swapped
    assert type(models[0].norms[0]) is not type(models[1].norms[0])


# --- fork ---------------------------------------------------------------------------------------

FORK = """
import os, sys, signal, time
sys.path[:0] = [sys.argv[1]]
import torch
torch.set_num_threads(2)
import torch.nn as nn
import autofuse
from legacy import GammaBetaNorm, HandRMSNorm

size, rows = 512, 512
nets = [
    nn.Sequential(nn.Linear(size, size), norm(size), nn.Linear(size, size))
    for norm in (nn.LayerNorm, GammaBetaNorm, HandRMSNorm, nn.RMSNorm)
]
steps = []
for net in nets:
    optimizer = torch.optim.AdamW(net.parameters())
    options = {"compile": False, "measure": False} | ({"precision": "fp32"} if len(sys.argv) < 3 else {})
    steps.append(autofuse.optimize(net, optimizer, loss_fn=nn.functional.mse_loss, **options))
child = os.fork()
if child == 0:
    inputs = torch.full((rows, size), 0.5)
    inputs[:, ::2] = -1
    for step in steps:
        for _ in range(2):
            assert torch.isfinite(step(inputs, inputs * 2))
    os._exit(0)
for _ in range(900):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, signal.SIGKILL)
sys.exit("the child hangs")
"""


@pytest.mark.parametrize("more", [[], ["auto"]])
def test_a_child_forked_after_optimize_trains(more):
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(HERE), *more],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
