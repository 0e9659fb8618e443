"""Every causal language model of the installed transformers, small: lazy or not, never wrong.

Run with ``pytest -m slow -n 2 tests/test_loss_architectures.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.hardware import Hardware
from autofuse.lazy import Fate
from autofuse.patch import Context, Patch
from patchers import loss as patcher

transformers = pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

pytestmark = pytest.mark.slow
transformers.logging.set_verbosity_error()

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CLASSES = 1100

# What becomes of an attribute of that name, in any configuration that has it as a number.
SMALL = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "speech_vocab_size"), CLASSES),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(
        ("decoder_attention_heads", "encoder_attention_heads", "num_experts", "n_routed_experts"), 4
    ),
    **dict.fromkeys(("num_local_experts", "moe_num_experts", "rotary_dim", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("qk_nope_head_dim",), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 64
    ),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "d_kv"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

# Tried in turn where the numbers above contradict each other; None: as the configuration has it.
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "num_heads": 8},
    {"attention_types": [[["global", "local"], 1]]},
    {"num_experts_per_tok": 1},
    {"head_dim": 8, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2},
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    {"hidden_size_per_layer_input": 0},
    {"head_dim": None},
    {"v_head_dim": None},
    {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None},
    {"num_hidden_layers": 3, "num_layers": None},
    {"num_hidden_layers": None, "num_layers": None, "num_attention_heads": None},
    {"num_hidden_layers": None, "num_layers": None},
    {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    {"max_position_embeddings": None},
)
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")


def attribute(config: Any, name: str) -> Any:
    """The attribute, or None where there is none, or one for each layer."""
    try:
        return getattr(config, name)
    except Exception:
        return None


def small(cls: type, variant: Mapping[str, Any]) -> Any:
    default, parts = cls(), getattr(cls, "sub_configs", None) or {}
    numbers = {k: v for k, v in SMALL.items() if isinstance(attribute(default, k), int) and k not in variant}
    numbers |= {k: v for k, v in variant.items() if v is not None and hasattr(default, k)}
    nested = {k: small(type(part), variant) for k in parts if (part := attribute(default, k)) is not None}
    config = cls(**numbers, **{k: v.to_dict() for k, v in nested.items()})
    for token in TOKENS:
        if isinstance(attribute(config, token), (int, list)):
            setattr(config, token, 1)
    return config


def build(name: str) -> nn.Module:
    """A small model of that architecture; skips where no variant gives one."""
    errors = []
    for variant in VARIANTS:
        try:
            config = small(CONFIG_MAPPING[name], variant)
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                size = sum(
                    p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()
                )
            if size > 20e6:
                errors.append(f"{size / 1e6:.0f} million parameters")
                continue
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])
    pytest.skip(f"no small configuration: {errors[0]}")


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of one forward in training, with the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def fates(model: nn.Module) -> list[Fate]:
    return [use.last for use in patcher._uses.values() if use.last is not None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    patcher._uses.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


# What reads the logits of the architectures that fall back.
FALLS_BACK: dict[str, str] = {}


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name: str) -> None:
    model = build(name).train()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, CLASSES // 2, (2, 16), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.4, -100)
    batch = {"input_ids": ids, "labels": labels}
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    try:
        run(model, batch)
        expected, gradients = run(model, batch)
    except Exception as error:
        pytest.skip(f"does not train on tokens alone: {type(error).__name__}: {error}"[:200])
    again, _ = run(model, batch)
    if not torch.equal(again, expected) or not expected.isfinite():
        pytest.skip("its loss is not finite, or differs from run to run")
    patch = patcher.find(Context(model, (), Hardware.detect("cpu")))
    assert isinstance(patch, Patch)
    assert patch.accepted, patch.sites
    patch.apply()
    found, others = run(model, batch)
    seen = fates(model)
    patch.undo()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert others.keys() == gradients.keys()
    difference = sum((others[k] - gradients[k]).norm() ** 2 for k in gradients) ** 0.5
    assert difference <= 1e-4 * sum(x.norm() ** 2 for x in gradients.values()) ** 0.5
    assert len(seen) == 1, "the output layer was not called, or more than one was"
    built = seen[0].materialized_by
    fate = "lazy" if seen[0].fused and built is None else f"built by {built}"
    assert fate == FALLS_BACK.get(name, "lazy")


def test_the_share_that_stays_lazy() -> None:
    assert len(FALLS_BACK) < 0.05 * len(NAMES)
