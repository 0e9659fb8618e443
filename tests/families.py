"""Tiny models with random weights, one per transformers family, each with its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

__all__ = ["FAMILIES", "Family"]

VOCABULARY, HIDDEN, LENGTH, ROWS = 96, 32, 10, 2
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A transformers model class, its tiny config and the kind of batch that it takes.

    Args:
        dropouts: the config's attributes that are dropout rates; empty where it has none.
        generates: ``generate`` works on a batch's ``input_ids``.
    """

    name: str
    model_class: str
    config_class: str
    config: dict[str, Any]
    batch_kind: Callable[[torch.Generator], Batch]
    dropouts: tuple[str, ...] = ()
    generates: bool = True

    def model(self, dropout: float = 0.0, seed: int = 0, **config: Any) -> nn.Module:
        """A model in training mode; the same weights for the same seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            rates = dict.fromkeys(self.dropouts, dropout)
            made = getattr(hf, self.config_class)(**{**self.config, **rates, **config})
            model = getattr(hf, self.model_class)(made)
            with torch.no_grad():  # norms start as ones and zeros, which hides a mistaken scale
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.train()

    def batch(self, seed: int = 1) -> Batch:
        return self.batch_kind(torch.Generator().manual_seed(seed))


# --- batches -----------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def causal(generator: torch.Generator) -> Batch:
    """Language modelling: labels are the inputs, some of them ignored."""
    tokens = _tokens(generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def masked(generator: torch.Generator) -> Batch:
    """Masked language modelling on a padded batch: two labels in each row."""
    tokens, labels = _tokens(generator), torch.full((ROWS, LENGTH), -100)
    labels[:, 2], labels[:, 5] = tokens[:, 2], tokens[:, 5]
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def classes(generator: torch.Generator) -> Batch:
    tokens, labels = _tokens(generator), torch.randint(0, 3, (ROWS,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def seq2seq(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 6)}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (ROWS,), generator=generator)}


def sound(generator: torch.Generator) -> Batch:
    features = torch.randn(ROWS, 8, 2 * LENGTH, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, 6)}


# --- families ----------------------------------------------------------------------------------

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 3,
    **SPECIAL,
}
BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    **SPECIAL,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **SPECIAL,
}
WHISPER = {
    **BART,
    "num_mel_bins": 8,
    "max_source_positions": LENGTH,
    "max_target_positions": 32,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "state_size": 4,
    "num_hidden_layers": 2,
    "use_mambapy": False,
    **SPECIAL,
}
VIT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 3,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    **SPECIAL,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
BART_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")

_ALL = [
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2, causal, GPT2_DROPOUTS),
    Family("bert-mlm", "BertForMaskedLM", "BertConfig", ENCODER, masked, BERT_DROPOUTS, False),
    Family("bert-cls", "BertForSequenceClassification", "BertConfig", ENCODER, classes, BERT_DROPOUTS, False),
    Family("roberta", "RobertaForMaskedLM", "RobertaConfig", ENCODER, masked, BERT_DROPOUTS, False),
    Family("t5", "T5ForConditionalGeneration", "T5Config", T5, seq2seq, ("dropout_rate",)),
    Family("bart", "BartForConditionalGeneration", "BartConfig", BART, seq2seq, BART_DROPOUTS),
    Family("llama", "LlamaForCausalLM", "LlamaConfig", DECODER, causal, ("attention_dropout",)),
    Family("mistral", "MistralForCausalLM", "MistralConfig", DECODER, causal, ("attention_dropout",)),
    Family(
        "mixtral", "MixtralForCausalLM", "MixtralConfig", {**DECODER, **MOE}, causal, ("attention_dropout",)
    ),
    Family(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**DECODER, **QWEN_MOE},
        causal,
        ("attention_dropout",),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "head_dim": 8},
        causal,
        ("attention_dropout",),
    ),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", DECODER, causal, ("attention_dropout",)),
    Family(
        "cohere",
        "CohereForCausalLM",
        "CohereConfig",
        {**DECODER, "use_qk_norm": True},
        causal,
        ("attention_dropout",),
    ),
    Family("phi3", "Phi3ForCausalLM", "Phi3Config", DECODER, causal, ("resid_pdrop", "embd_pdrop")),
    Family(
        "falcon", "FalconForCausalLM", "FalconConfig", FALCON, causal, ("hidden_dropout", "attention_dropout")
    ),
    Family("mamba", "MambaForCausalLM", "MambaConfig", MAMBA, causal),
    Family("vit", "ViTForImageClassification", "ViTConfig", VIT, images, BERT_DROPOUTS, False),
    Family(
        "whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, sound, BART_DROPOUTS, False
    ),
]
FAMILIES = {family.name: family for family in _ALL}
