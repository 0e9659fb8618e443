"""The patcher `loss`: which layers it finds, what it leaves alone, and that training stays the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autofuse.hardware import Hardware
from autofuse.lazy import Fate, LazyLogits, is_built
from autofuse.patch import Context, Patch
from patchers import loss as patcher


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


class LM(nn.Module):
    """A small language model, its head named, tied or neither."""

    def __init__(self, classes: int = 1200, named: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(classes, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        if named:
            self.get_output_embeddings = lambda: self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


IDS = torch.randint(1200, (2, 10), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch.manual_seed(0)
    patcher._uses.clear()
    yield


def applied(model: nn.Module) -> Patch:
    patch = patcher.find(Context(model, (), Hardware.detect("cpu")))
    assert isinstance(patch, Patch)
    patch.apply()
    return patch


def train(model: nn.Module, ids: Tensor = IDS) -> list[Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def last(model: nn.Module) -> Fate:
    use = patcher._uses[model.head]
    assert use.last is not None
    return use.last


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_found_with_and_without_a_name(named: bool, tied: bool) -> None:
    model = LM(named=named, tied=tied)
    expected = train(model)
    patch = applied(model)
    assert [(s.path, s.operation, s.provider) for s in patch.sites] == [
        ("head", "linear_cross_entropy", "torch")
    ]
    assert_same(train(model), expected)
    assert last(model).fused and isinstance(model.head, nn.Linear)
    again = patcher.find(Context(model, (), Hardware.detect("cpu")))
    assert isinstance(again, Patch) and not again.accepted and "nothing more to do" in again.reason
    patch.undo()
    assert type(model.head) is nn.Linear and type(model(IDS)) is Tensor


def test_outside_training_it_is_what_it_was() -> None:
    model = LM()
    model.eval()
    expected = model(IDS)
    applied(model)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            out = model(IDS)
            assert type(out) is Tensor and torch.equal(out, expected)
    model.train()
    with torch.no_grad():
        assert type(model(IDS)) is Tensor
    assert isinstance(model(IDS), LazyLogits)


def test_pickles_as_the_original_and_copies_as_itself() -> None:
    model = LM(named=False)
    applied(model)
    assert type(pickle.loads(pickle.dumps(model)).head) is nn.Linear
    twin = copy.deepcopy(model)
    assert_same(train(twin), train(model))
    assert last(twin).fused and twin.state_dict().keys() == model.state_dict().keys()


def custom_forward(model: LM) -> None:
    model.head.forward = model.head.forward


REFUSED: dict[str, tuple[Callable[[LM], Any], str]] = {
    "a hook": (lambda m: m.head.register_forward_hook(lambda *a: None), "hooks"),
    "its own forward": (custom_forward, "forward was replaced"),
    "weight norm": (lambda m: nn.utils.weight_norm(m.head), "not a parameter of its own"),
    "a parametrization": (
        lambda m: nn.utils.parametrizations.weight_norm(m.head),
        "more than a linear layer",
    ),
    "an adapter": (lambda m: setattr(m.head, "adapter", nn.Linear(16, 4)), "more than a linear layer"),
    "a special weight": (lambda m: setattr(m.head, "weight", Special(torch.ones(1200, 16))), "Special"),
}


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("name", REFUSED)
def test_left_alone(name: str) -> None:
    change, reason = REFUSED[name]
    model = LM()
    change(model)
    patch = patcher.find(Context(model, (), Hardware.detect("cpu")))
    assert isinstance(patch, Patch) and not patch.accepted
    assert reason in patch.sites[0].reason and patch.reason == patch.sites[0].reason


def test_few_classes_do_not_pay() -> None:
    patch = patcher.find(Context(LM(classes=100), (), Hardware.detect("cpu")))
    assert isinstance(patch, Patch) and "100 classes" in patch.reason
    nothing = patcher.find(Context(nn.Linear(4, 4), (), Hardware.detect("cpu")))
    assert isinstance(nothing, Patch) and nothing.reason == "no output layer was found"


def test_a_hook_that_comes_later_sees_real_logits_and_gradients() -> None:
    model = LM()
    expected = train(model)
    applied(model)
    seen: list[Any] = []
    model.head.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    assert_same(train(model), expected)
    assert seen[0].shape == (2, 10, 1200) and seen[0].abs().sum() > 0


def test_a_layer_whose_output_is_always_read_gets_its_class_back() -> None:
    model = nn.Sequential(nn.Linear(8, 2000), nn.GELU(), nn.Linear(2000, 8))
    patch = applied(model)
    assert [s.path for s in patch.accepted] == ["0"]
    for _ in range(patcher.PATIENCE + 1):
        model(torch.randn(2, 8)).sum().backward()
    assert type(model[0]) is nn.Linear and not patch.accepted
    assert "gelu" in patch.sites[0].reason and patch.reason == patch.sites[0].reason
    patch.undo()


class ScaledHead(nn.Linear):
    """A head of its own, with a scale that learns (as one architecture of transformers has)."""

    def __init__(self) -> None:
        super().__init__(16, 1200, bias=False)
        self.scale = nn.Parameter(torch.rand(1200))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float() * self.scale


def test_a_head_with_a_forward_of_its_own() -> None:
    model = LM()
    model.head = ScaledHead()
    expected = train(model)
    applied(model)
    assert_same(train(model), expected)
    assert last(model).fused and last(model).materialized_by is None


def test_gradient_checkpointing_and_functional_calls() -> None:
    model = LM()
    applied(model)

    def loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden).flatten(0, 1), IDS.flatten())

    results = []
    for run in (
        loss,
        lambda x: checkpoint(loss, x, use_reentrant=False),
        lambda x: checkpoint(loss, x, use_reentrant=True),
    ):
        model.zero_grad()
        run(model.embed(IDS)).backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    parameters = dict(model.named_parameters())
    by_function = torch.func.grad(
        lambda p: F.cross_entropy(torch.func.functional_call(model, p, (IDS,)).flatten(0, 1), IDS.flatten())
    )(parameters)
    model.zero_grad()
    F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
    assert_same([*by_function.values()], [p.grad for p in parameters.values()])


def test_compiled_losses_and_models() -> None:
    torch._dynamo.reset()
    model = LM(named=False)
    expected = train(model)
    applied(model)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(train(whole), expected)
    loss = torch.compile(
        lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()), backend="aot_eager"
    )
    model.zero_grad()
    out = model(IDS)
    loss(out, IDS).backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected[1:])
    torch._dynamo.reset()


class Largest(TorchDispatchMode):
    """The size of the largest tensor with storage that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, LazyLogits) and x.device.type != "meta":
                self.numel = max(self.numel, x.numel())
        return out


def test_no_whole_logits_of_a_large_vocabulary() -> None:
    classes, ids = 128_256, torch.randint(128_256, (2, 400))
    model = LM(classes, tied=True)
    applied(model)
    with Largest() as largest:
        train(model, ids)
    assert last(model).fused
    assert largest.numel < ids.numel() * classes / 2


def test_transformers_and_accumulation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=1200
    )
    model = transformers.LlamaForCausalLM(config)
    labels = IDS.clone()
    labels[0, :7] = -100
    full = model(input_ids=IDS, labels=labels)
    full.loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    applied(model)
    model.zero_grad()
    count = int((labels[:, 1:] != -100).sum())
    for i in (0, 1):
        out = model(input_ids=IDS[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count)
        out.loss.backward()
        assert list(out.keys())[:2] == ["loss", "logits"] and out[1] is out.logits
        assert not is_built(out.logits)
    assert_same([p.grad for p in model.parameters()], expected)


def test_peft() -> None:
    peft = pytest.importorskip("peft")
    base = {"target_modules": ["body"], "r": 2}
    cases = {"base_model.model.head": base, "modules_to_save": {**base, "modules_to_save": ["head"]}}
    for path, options in cases.items():
        model = peft.get_peft_model(LM(), peft.LoraConfig(**options))
        expected = train(model)
        patch = applied(model)
        assert [path in site.path and site.accepted for site in patch.sites] == [True]
        assert_same(train(model), expected)
    adapted = peft.get_peft_model(LM(), peft.LoraConfig(r=2, target_modules=["head"]))
    patch = patcher.find(Context(adapted, (), Hardware.detect("cpu")))
    assert isinstance(patch, Patch) and "adapter" in patch.reason


def test_a_dropped_model_is_freed() -> None:
    model = LM()
    applied(model)
    train(model)
    gone = weakref.ref(model.head)
    del model
    gc.collect()
    assert gone() is None and not len(patcher._uses)
