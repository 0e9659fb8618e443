"""The compile patcher: few graphs, the same numbers, and eager whenever anything is out of the ordinary."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import patchers.compile as compiler
from autofuse import compiled
from autofuse.compiled import is_compile_error
from autofuse.patch import Context, Patch, Rejected
from autofuse.regions import find_kinds, find_stacks


class Block(nn.Module):
    def __init__(self, width: int = 8, index: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, memory: Any = None) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth: int = 4, block: Callable[..., nn.Module] = Block, **kwargs: Any) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(block(index=i, **kwargs) for i in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).relu()  # not a view: the first block's input is like the others'
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Counter:
    """A backend that counts the graphs, and fails if told so."""

    def __init__(self) -> None:
        self.graphs = 0
        self.error: BaseException | None = None  # raised while compiling
        self.late: BaseException | None = None  # raised by the compiled code

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        if self.error is not None:
            raise self.error
        compiled = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            if self.late is not None:
                torch.rand(3)  # it fails half-way, with some random numbers drawn
                raise self.late
            return compiled(*args)

        return run


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    inductor = compiled._compile_arguments

    def arguments(device: torch.device) -> dict[str, Any]:
        chosen = inductor(device)
        del chosen["options"]
        return {**chosen, "backend": counter}

    monkeypatch.setattr(compiled, "_compile_arguments", arguments)
    return counter


def context(model: nn.Module, compile: bool | str = True, **kwargs: Any) -> Context:
    hardware: Any = SimpleNamespace(providers=kwargs.pop("providers", {}))
    return Context(model, (), hardware, compile=compile, **kwargs)


def found(model: nn.Module, **kwargs: Any) -> Patch:
    patch = compiler.find(context(model), **kwargs)
    assert isinstance(patch, Patch)
    return patch


def refused(model: nn.Module, **kwargs: Any) -> str:
    rejected = compiler.find(context(model, **kwargs))
    assert isinstance(rejected, Rejected)
    return rejected.reason


def step(model: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, all gradients, and the state of the random numbers afterwards."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(*args, **kwargs)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads), torch.get_rng_state()


def assert_same_step(
    model: nn.Module, reference: nn.Module, *args: Any, seed: int = 0, **kwargs: Any
) -> None:
    loss, grads, random = step(model, *args, seed=seed, **kwargs)
    expected, expected_grads, expected_random = step(reference, *args, seed=seed, **kwargs)
    assert abs(loss - expected) <= 1e-5 * abs(expected)
    assert (grads - expected_grads).norm() <= 1e-4 * expected_grads.norm()
    assert torch.equal(random, expected_random)


def batch(size: int = 3, length: int = 5) -> Tensor:
    return torch.randn(size, length, 4)


def language_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=6, n_embd=16, n_head=2, n_positions=64, **common)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=6, hidden_size=16, intermediate_size=32, num_attention_heads=2, **common
    )
    return transformers.LlamaForCausalLM(config)


def test_a_stack_is_like_blocks_side_by_side() -> None:
    net = Net(3)
    net.blocks.append(Block(width=16))
    assert [stack.paths for stack in find_stacks(net)] == [("blocks.0", "blocks.1", "blocks.2")]
    assert [kind.paths for kind in find_kinds(net, "body")] == [("",)]
    assert [site.path for site in found(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).sites] == [""]


def test_encoder_and_decoder_are_two_kinds_and_two_bodies() -> None:
    model = nn.ModuleDict({"encoder": Net(2), "decoder": Net(3)})
    assert [len(kind.paths) for kind in find_kinds(model)] == [2, 3]
    assert [kind.paths for kind in find_kinds(model, "body")] == [("decoder",), ("encoder",)]


def test_blocks_inside_blocks_and_wrappers() -> None:
    class Experts(Block):
        def __init__(self, index: int = 0) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(2))

    paths = [site.path for site in found(nn.Sequential(Net(2, Experts))).sites]
    assert paths == ["0.blocks.0", "0.blocks.1"]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(Net(), compile=False) == "compile=False was asked for"
    assert "no C++ compiler" in refused(Net(), providers={"inductor": "no C++ compiler"})
    assert "DataParallel" in refused(nn.DataParallel(Net()))
    assert "meta" in refused(Net().to("meta"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert "TORCHDYNAMO_DISABLE" in refused(Net())


def test_already_compiled() -> None:
    assert refused(torch.compile(Net())) == "already compiled"  # type: ignore[arg-type]
    net = Net()
    net.blocks[0].compile()
    assert refused(net) == "already compiled"
    net = Net()
    found(net).apply()
    assert refused(net) == "already compiled"


def test_pays() -> None:
    patch = compiler.find(context(Net(), "auto", steps=10))
    assert isinstance(patch, Patch) and patch.pays is not None
    verdict = patch.pays(0.1)
    assert (
        isinstance(verdict, Rejected) and "would not pay" in verdict.reason and "10 steps" in verdict.reason
    )
    assert patch.pays(1000.0) is None
    assumed = compiler.find(context(Net(), "auto"))
    assert isinstance(assumed, Patch) and assumed.pays is not None
    verdict = assumed.pays(0.001)
    assert isinstance(verdict, Rejected) and "assumed" in verdict.reason
    assert found(Net()).pays is None  # compile=True


def test_a_hook_that_is_there_leaves_its_block_alone(graphs: Counter) -> None:
    net = Net()
    seen: list[int] = []
    net.blocks[1].norm.register_forward_hook(lambda *_: seen.append(1))
    patch = found(net)
    assert [site.path for site in patch.sites if not site.accepted] == ["blocks.1"]
    assert "hook" in next(site.reason for site in patch.sites if not site.accepted)
    patch.apply()
    step(net, batch())
    assert seen == [1] and graphs.graphs == 1


def test_undo_is_exact_and_nothing_shows(graphs: Counter) -> None:
    net = Net()
    before = {name: (type(m), dict(vars(m))) for name, m in net.named_modules()}
    keys = list(net.state_dict())
    patch = found(net)
    patch.apply()
    step(net, batch())
    assert list(net.state_dict()) == keys
    assert list(vars(pickle.loads(pickle.dumps(net)).blocks[0])) == list(before["blocks.0"][1])
    patch.undo()
    assert {name: (type(m), dict(vars(m))) for name, m in net.named_modules()} == before
    patch.apply()
    step(net, batch())
    assert graphs.graphs == 1  # applied again, compiled once


def test_a_copy_runs_eagerly_on_its_own_weights(graphs: Counter) -> None:
    net = Net(dropout=0.0)
    found(net).apply()
    step(net, batch())
    other = copy.deepcopy(net)
    assert "_compiled_call_impl" not in vars(other.blocks[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(batch()) == 0 and net(batch()) != 0 and graphs.graphs == 1


def test_outside_training_bits_are_equal(graphs: Counter) -> None:
    net, x = Net(), batch()
    reference = copy.deepcopy(net)
    found(net).apply()
    step(net, x)
    step(reference, x)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(net.eval()(x), reference.eval()(x))
    with torch.no_grad():
        torch.manual_seed(1)
        first = net.train()(x)
        torch.manual_seed(1)
        assert torch.equal(first, reference.train()(x))
    assert graphs.graphs == 1


@pytest.mark.parametrize("strategy", ["regions", "body", "model"])
def test_the_step_is_the_same(graphs: Counter, strategy: Any) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    found(net, strategy=strategy).apply()
    for seed in range(3):
        assert_same_step(net, reference, batch(), seed=seed)
    assert graphs.graphs == 1


def test_inductor_draws_the_dropout_of_eager() -> None:
    net = Net(2, dropout=0.5)
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    for seed in range(2):
        assert_same_step(net, reference, batch(), seed=seed)
    assert len(patch.accepted) == 2
    assert not multiprocessing.active_children() and not torch._inductor.async_compile._pool_set


def test_tied_and_frozen_weights_and_autocast(graphs: Counter) -> None:
    net = Net(3)
    net.blocks[2].up.weight = net.blocks[1].up.weight
    net.inp.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    net.blocks[1].down.weight.requires_grad_(False)
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    assert_same_step(net, reference, batch())
    assert len(patch.accepted) == 3
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads, _ = step(net, batch())
        expected, expected_grads, _ = step(reference, batch())
    assert abs(loss - expected) <= 2e-2 * abs(expected)
    assert len(grads) == len(expected_grads)


def test_twenty_lengths_and_a_last_batch_make_at_most_three_graphs(graphs: Counter) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    for length in range(5, 25):
        assert_same_step(net, reference, batch(4, length))
    assert_same_step(net, reference, batch(3, 11))
    assert graphs.graphs <= 3 and len(patch.accepted) == 4


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_language_model_with_its_cache_makes_one_graph(graphs: Counter, kind: str) -> None:
    model = language_model(kind)
    reference = copy.deepcopy(model)
    patch = found(model)
    patch.apply()
    for size, length in ((2, 8), (2, 9), (2, 12), (3, 7)):
        ids = torch.randint(50, (size, length))
        assert_same_step(model.train(), reference.train(), input_ids=ids, labels=ids)
    assert len(patch.accepted) == 6 and graphs.graphs <= 3
    torch.manual_seed(1)
    cache = model(input_ids=ids).past_key_values
    torch.manual_seed(1)
    expected = reference(input_ids=ids).past_key_values
    assert type(cache) is type(expected) and cache.get_seq_length() == 7
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


def test_a_cache_that_is_not_empty_is_left_to_eager(graphs: Counter) -> None:
    model = language_model("gpt2").train()
    reference = copy.deepcopy(model)
    patch = found(model)
    patch.apply()
    ids = torch.randint(50, (2, 8))
    outputs = []
    for each in (model, reference):
        torch.manual_seed(0)
        past = each(input_ids=ids).past_key_values
        outputs.append(each(input_ids=ids, past_key_values=past).logits)
    torch.testing.assert_close(*outputs)
    assert not patch.accepted


def test_a_hook_registered_later_runs(graphs: Counter) -> None:
    net = Net()
    patch = found(net)
    patch.apply()
    step(net, batch())
    seen: list[int] = []
    net.blocks[2].up.register_full_backward_hook(lambda *_: seen.append(1))
    step(net, batch())
    assert seen == [1]
    assert [site.path for site in patch.sites if not site.accepted] == ["blocks.2"]


@pytest.mark.parametrize("moment", ["error", "late"])
def test_a_failure_in_the_middle_of_training_falls_back(graphs: Counter, moment: str) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    assert_same_step(net, reference, batch())
    setattr(graphs, moment, RuntimeError("the compiler is broken"))
    assert_same_step(net, reference, batch(2, 3))  # a new shape: it compiles again
    assert not patch.accepted and "the compiler is broken" in patch.reason
    made = graphs.graphs
    assert_same_step(net, reference, batch(2, 7))
    assert graphs.graphs == made  # for good


def test_a_graph_break_falls_back(graphs: Counter) -> None:
    class Printing(Block):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    net = Net(2, Printing)
    patch = found(net)
    patch.apply()
    assert_same_step(net, copy.deepcopy(net), batch())
    assert not patch.accepted and patch.reason


def test_errors_of_the_user_come_out_as_they_are(graphs: Counter) -> None:
    class Picky(Block):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            if x.shape[0] == 1:
                raise ValueError("never one")
            return super().forward(x)

    net = Net(2, Picky)
    patch = found(net)
    patch.apply()
    step(net, batch())
    with pytest.raises(ValueError, match="never one") as info:
        net(batch(1))
    assert info.value.__context__ is None
    step(net, batch())
    assert len(patch.accepted) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_passes_through(graphs: Counter, error: BaseException) -> None:
    net = Net(2)
    patch = found(net)
    patch.apply()
    graphs.late = error
    with pytest.raises(type(error)):
        net(batch())
    assert len(patch.accepted) == 2 and not is_compile_error(error)


def test_double_backward_is_a_compile_error(graphs: Counter) -> None:
    net = Net(2)
    found(net).apply()
    x = batch().requires_grad_()
    (grad,) = torch.autograd.grad(net(x), x, create_graph=True)
    with pytest.raises(RuntimeError) as info:
        grad.square().sum().backward()
    assert is_compile_error(info.value)


def test_other_worlds_run_eagerly(graphs: Counter) -> None:
    net = Net(2, dropout=0.0)
    x, reference = batch(), copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    weights = {name: p.detach() * 2 for name, p in net.named_parameters()}
    call = torch.func.functional_call
    torch.testing.assert_close(call(net, weights, (x,)), call(reference, weights, (x,)))
    torch.testing.assert_close(torch.func.vmap(net)(x), torch.func.vmap(reference)(x))
    grads = torch.func.grad(lambda w: call(net, w, (x,)))(weights)
    expected = torch.func.grad(lambda w: call(reference, w, (x,)))(weights)
    torch.testing.assert_close(grads, expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert net(torch.randn(2, 3, 4)).shape == ()
    assert torch.jit.trace(net, (x,), check_trace=False)(x) == reference(x)
    assert len(patch.accepted) == 2


def test_inside_somebody_elses_compile(graphs: Counter) -> None:
    net = Net(2)
    reference = copy.deepcopy(net)
    found(net).apply()
    outer = Counter()
    assert_same_step(torch.compile(net, backend=outer), reference, batch())  # type: ignore[arg-type]
    assert graphs.graphs == 0 and outer.graphs == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_region(graphs: Counter, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x).square().mean()

    net = Checkpointed(3)
    reference = copy.deepcopy(net)
    patch = found(net)
    patch.apply()
    for seed in range(2):
        assert_same_step(net, reference, batch(), seed=seed)
    assert len(patch.accepted) == 3


def test_checkpointing_inside_the_region() -> None:
    model = language_model("gpt2").train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    reference = copy.deepcopy(model)
    found(model).apply()
    ids = torch.randint(50, (2, 8))
    for seed in range(2):
        assert_same_step(model, reference, input_ids=ids, labels=ids, seed=seed)


def test_no_setting_of_the_process_is_changed(graphs: Counter) -> None:
    before = torch._dynamo.config.save_config_portable(), torch.compiler.config.dynamic_sources
    net = Net(2)
    found(net).apply()
    step(net, batch())
    assert (torch._dynamo.config.save_config_portable(), torch.compiler.config.dynamic_sources) == before
