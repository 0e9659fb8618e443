"""The patcher `attention`: whose attention it finds, its numbers, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_calls import ADDED, LOWER, qkv
from cases import CASES, tensors
from families import FAMILIES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autofuse
from autofuse.hardware import Hardware
from autofuse.patch import Context, Patch, Rejected
from patchers import attention as patcher

BF16 = torch.bfloat16
WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Fused projections; ``**options`` go to ``F.scaled_dot_product_attention``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.options, self.tokens = options, 16

    def forward(self, x: Tensor) -> Tensor:
        self.tokens = x.shape[-2]  # an attribute that is set, as many models do
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(**options), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(Block(**options) for _ in range(2)), None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            reentrant = self.checkpointed
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x


def inputs(tokens: int = 16, rows: int = 2) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def find(model: nn.Module, precision: str = "bf16", machine: str = "cpu") -> Patch | Rejected:
    return patcher.find(Context(model, (), Hardware.named(machine), precision))


def applied(model: nn.Module) -> Patch:
    patch = find(model)
    assert isinstance(patch, Patch)
    patch.apply()
    return patch


def train(model: nn.Module, x: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    """The output and all gradients under autocast."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = model(x.requires_grad_())
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def accepted(patch: Any) -> list[str]:
    return [site.path for site in patch.sites if site.accepted]


def reasons(patch: Any) -> dict[str, str]:
    return {site.path: site.reason for site in patch.sites if not site.accepted}


ATTENTIONS = ["blocks.0.attention", "blocks.1.attention"]


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.5}, {"attn_mask": ADDED[:, :, :, :12]}]
)
def test_a_net_is_as_exact_as_before(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Net(**options), inputs(12)
    exact = train(copy.deepcopy(model), x, torch.float32)
    before = train(model, x)
    applied(model)
    after = train(model, x)
    assert not all(map(torch.equal, before, after))

    def error(found: list[Tensor]) -> float:
        return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))

    assert error(after) <= 1.25 * error(before)


# --- what is found, and what is left alone -------------------------------------------------------


def test_the_first_step_shows_which_modules_attend() -> None:
    model = Net()
    patch = applied(model)
    assert accepted(patch) == [f"blocks.{n}.{name}" for n in (0, 1) for name in ("attention", "mlp")]
    assert patch.idle is not None and patch.idle()
    train(model, inputs())
    assert accepted(patch) == ATTENTIONS and not patch.idle()
    assert set(reasons(patch).values()) == {patcher.NOT_CALLED}
    assert type(model.blocks[0].mlp) is MLP and type(model) is Net
    patch.undo()
    patch.apply()
    assert type(model.blocks[0].mlp) is MLP and isinstance(model.blocks[0].attention, Attention)
    assert type(model.blocks[0].attention) is not Attention and not patch.idle()


def test_long_sequences_are_left_alone_until_a_short_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofuse.functional.attention.SHORT", 16)
    torch.manual_seed(0)
    model = Net()
    before = [train(model, inputs(n)) for n in (17, 16)]
    patch = applied(model)
    assert all(map(torch.equal, train(model, inputs(17)), before[0]))
    assert accepted(patch) == ATTENTIONS and patch.idle is not None and patch.idle()
    assert not all(map(torch.equal, train(model, inputs(16)), before[1])) and not patch.idle()


def test_dropout_drops_the_same_whatever_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofuse.functional.attention.SHORT", 4)
    model = Net(dropout_p=0.3)
    torch.manual_seed(3)
    before, state = train(model, inputs()), torch.get_rng_state()
    patch = applied(model)
    torch.manual_seed(3)
    for a, b in zip(train(model, inputs()), before, strict=True):
        assert not torch.equal(a, b) and (a - b).norm() < 1e-2 * b.norm()
    assert torch.equal(torch.get_rng_state(), state) and accepted(patch) == ATTENTIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_left_alone(dtype: torch.dtype) -> None:
    model = Net()
    before = train(model, inputs(), dtype)
    patch = applied(model)
    assert all(map(torch.equal, train(model, inputs(), dtype), before))
    assert reasons(patch)[ATTENTIONS[0]] == f"its attention computes in {str(dtype)[6:]}"
    assert type(model.blocks[0].attention) is Attention and patch.reason and not patch.accepted


def test_what_attended_in_bf16_computes_as_before_while_it_does_not() -> None:
    """A change of precision is tried and taken back, more than once."""
    model = Net()
    before = train(model, inputs(), torch.float32)
    patch = applied(model)
    train(model, inputs())
    assert accepted(patch) == ATTENTIONS and patch.idle is not None and not patch.idle()
    assert all(map(torch.equal, train(model, inputs(), torch.float32), before))
    assert accepted(patch) == ATTENTIONS
    assert type(model.blocks[0].attention) is not Attention


def test_a_trained_mask_and_other_shapes_are_left_alone() -> None:
    q, k, v = qkv()
    trained = ADDED.clone().requires_grad_()
    others = (
        [q, k, v, trained],
        [q[0], k[0], v[0]],
        [q, k, torch.cat([v, v], -1)],
        [q.detach(), k.detach(), v.detach()],
    )
    for given in others:
        expected = F.scaled_dot_product_attention(*given)
        with patcher._ByProducts() as seen:
            found = F.scaled_dot_product_attention(*given)
        assert torch.equal(found, expected) and seen.attends and not seen.faster


def test_mixed_dtypes_are_refused_as_before() -> None:
    q, k, v = qkv()
    with patcher._ByProducts(), pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(q, k.float(), v)
    with patcher._ByProducts(), pytest.raises(RuntimeError, match="attn_mask"):
        F.scaled_dot_product_attention(q, k, v, LOWER.long())


def test_pytorchs_own_attention_module_says_why_not() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True))
    patch = find(model)
    assert isinstance(patch, Patch) and reasons(patch) == {"0.self_attn": patcher.HIDDEN}

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.up, self.down = nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            i = self.inner
            weights = i.in_proj_weight, i.in_proj_bias, None, None, False, 0.0, i.out_proj.weight, None
            return F.multi_head_attention_forward(self.up(x), x, x, 8, 2, *weights)[0]

    module = Functional()
    with patcher._ByProducts() as seen:
        module(torch.ones(3, 2, 8))
    assert seen.why_not == patcher.HIDDEN


def test_adapters_and_wrapped_projections_are_projections() -> None:
    model = Net()
    for block in model.blocks:
        block.attention.out = nn.Sequential(block.attention.out, nn.Dropout(0.0))
    patch = applied(model)
    train(model, inputs())
    assert accepted(patch) == ATTENTIONS
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["qkv", "out", "up"], r=2)
    model = peft.get_peft_model(Net(), config)
    patch = applied(model)
    train(model, inputs())
    assert accepted(patch) == [f"base_model.model.{path}" for path in ATTENTIONS]


def test_what_cannot_be_changed_says_why() -> None:
    root = find(Attention())
    assert isinstance(root, Patch) and root.sites[0].reason == "the model itself keeps its class"
    model = Net()
    attention = model.blocks[0].attention
    attention.forward = attention.forward
    assert "replaced on the instance" in reasons(find(model))[ATTENTIONS[0]]


def test_a_plan_that_it_cannot_help_rejects_it() -> None:
    for machine, precision, why in (
        ("H100", "bf16", "H100 is not one"),
        ("cpu-amx", "fp32", "does not compute in bf16"),
        ("cpu-avx2", "auto", "does not compute in bf16"),
    ):
        answer = find(Net(), precision, machine)
        assert isinstance(answer, Rejected) and why in answer.reason
    for precision, model in (("auto", Net()), ("bf16", Net()), ("fp32", Net().bfloat16())):
        assert isinstance(find(model, precision, "cpu-amx"), Patch)
    nothing = find(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert isinstance(nothing, Rejected) and "two matrices" in nothing.reason
    model = Net()
    applied(model)
    again = find(model)
    assert isinstance(again, Rejected) and "nothing more to do" in again.reason


# --- the promises --------------------------------------------------------------------------------


def test_outside_training_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()

    def outside() -> list[Tensor]:
        with torch.autocast("cpu", BF16):
            with torch.no_grad():
                found = [model(x)]
            found.append(model.eval()(x))
        model.train()
        return found

    before = outside()
    patch = applied(model)
    assert all(map(torch.equal, outside(), before)) and len(patch.accepted) == 4
    with FlopCounterMode(display=False):  # who counts operations counts the model's own
        train(model, x)
    assert len(patch.accepted) == 4


def test_same_objects_and_undo() -> None:
    model = Net()
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    patch = applied(model)
    train(model, inputs())
    assert list(model.state_dict()) == names
    assert type(model.blocks[0].attention).__name__ == "FusedAttention"
    patch.undo()
    assert [type(m) for m in model.modules()] == kinds


def test_copies_compute_as_it_does_and_pickles_as_the_original() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    applied(model)
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, train(copied, x), train(model, x)))
    assert type(copied.blocks[0].mlp) is MLP and type(copied.blocks[0].attention) is not Attention
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert type(loaded.blocks[0].attention) is Attention
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = train(model, inputs())
    applied(model)
    expected = train(model, inputs())
    model.checkpointed = reentrant
    found = train(model, inputs())
    if reentrant:  # its forward runs without gradients: the original's
        assert torch.equal(found[0], plain[0])
        expected[0] = plain[0]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3)
        assert reentrant or torch.equal(a, b)


# --- in a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, attends", [("bert-mlm", "attention.self"), ("gpt2", "attn"), ("llama", "self_attn")]
)
def test_transformers(name: str, attends: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    kinds = [type(m) for m in model.modules()]
    step = autofuse.optimize(
        model, None, precision="bf16", compile=False, measure=False, only=["precision", "attention"]
    )
    assert step(batch).isfinite()
    row = step.report["attention"]
    assert row.status == "kept" and len(accepted(row)) == 2
    assert all(path.endswith(attends) for path in accepted(row))
    assert set(reasons(row).values()) == {patcher.NOT_CALLED}
    step.undo()
    assert [type(m) for m in model.modules()] == kinds
    model.eval()
    fresh = family.model().eval()
    with torch.no_grad():
        for a, b in zip(tensors(model(**batch)).values(), tensors(fresh(**batch)).values(), strict=True):
            assert torch.equal(a, b)


def test_all_patches_together_and_compiled() -> None:
    step_of: dict[str, Any] = {"loss_fn": F.mse_loss, "precision": "bf16", "measure": False}
    losses = []
    for options in ({"compile": False, "skip": ["attention"]}, {"compile": True}):
        torch.manual_seed(0)
        model, x = Net(), inputs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = autofuse.optimize(model, optimizer, **step_of, **options)
        losses.append([step(x, x.flip(1)).item() for _ in range(3)])
    assert step.report["compile"].status == step.report["attention"].status == "kept", str(step.report)
    assert accepted(step.report["attention"]) == ATTENTIONS
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    calls: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(node.target for node in graph.graph.nodes)
        return graph

    block = torch.compile(model.blocks[0], backend=backend, fullgraph=True)
    with torch.autocast("cpu", BF16):
        block(inputs())
    assert calls and F.scaled_dot_product_attention not in calls


def test_a_model_in_bf16_and_an_autocast_of_ones_own() -> None:
    for model, context in ((Net().bfloat16(), False), (Net(), True)):
        patch = applied(model)
        x = inputs().to(next(model.parameters()).dtype)
        with torch.autocast("cpu", BF16, enabled=context):
            model(x)
        assert accepted(patch) == ATTENTIONS and patch.idle is not None and not patch.idle()


def test_where_nothing_attends_the_row_says_so() -> None:
    model = CASES["mamba"].model()
    step = autofuse.optimize(
        model, None, precision="bf16", compile=False, measure=False, only=["precision", "attention"]
    )
    step(CASES["mamba"].batch())
    row = step.report["attention"]
    assert row.status == "rejected" and (row.reason == patcher.NOT_CALLED or "two matrices" in row.reason)


def test_padding_is_proved_in_float32_beside_it() -> None:
    """A proof in float32 is no sign that the steps are."""
    model = FAMILIES["bert-mlm"].model()
    ids = torch.randint(3, 96, (4, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 20:] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    step = autofuse.optimize(
        model,
        None,
        precision="bf16",
        compile=False,
        measure=False,
        only=["precision", "attention", "padding"],
    )
    step(batch)
    assert [step.report[name].status for name in ("attention", "padding")] == ["kept", "kept"]
    state = step.state_dict()
    again = FAMILIES["bert-mlm"].model()
    resumed = autofuse.optimize(
        again, None, precision="bf16", compile=False, only=["precision", "attention", "padding"]
    )
    resumed.load_state_dict(state)
    resumed(batch)
    assert len(accepted(resumed.report["attention"])) == 2
