"""What `train_step` trains: models with random weights and batches of random tokens, from fixed seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BIG_VOCABULARY", "WORKLOADS", "Workload"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """A transformers model, built from its configuration, and the kind of batch that it is trained on.

    Args:
        model, config, options: the class, the class of its configuration, and what that is made with.
        rows, length: the shape of a batch.
        labels: the share of the tokens that have one; None for one class per row.
        real: the least and the largest number of tokens in a row that are no padding; None: all are.
        goal: the largest time of a step that autofuse may take, relative to the best hand-tuned.
    """

    title: str
    model: str
    config: str
    options: Mapping[str, Any]
    rows: int
    length: int
    labels: float | None = 1.0
    real: tuple[int, int] | None = None
    goal: float = 1.03

    def build(self) -> nn.Module:
        """The model in training mode; the same weights each time."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def batches(self, count: int) -> list[Batch]:
        """The same batches each time."""
        generator = torch.Generator().manual_seed(1)
        return [self._batch(generator) for _ in range(count)]

    def _batch(self, generator: torch.Generator) -> Batch:
        shape = self.rows, self.length
        tokens = torch.randint(5, self.options["vocab_size"], shape, generator=generator)
        batch = {"input_ids": tokens}
        if self.real is not None:
            least, most = self.real
            lengths = torch.randint(least, most + 1, (self.rows, 1), generator=generator)
            batch["attention_mask"] = (torch.arange(self.length) < lengths).long()
            batch["input_ids"] = tokens * batch["attention_mask"]  # token 0 is the padding
        if self.labels is None:
            batch["labels"] = torch.randint(0, 2, (self.rows,), generator=generator)
        else:
            labeled = torch.rand(shape, generator=generator) < self.labels
            batch["labels"] = tokens.where(labeled, -100)
        return batch


_GPT2 = Workload(
    "GPT-2, all labels",
    "GPT2LMHeadModel",
    "GPT2Config",
    {
        "vocab_size": 50_257,
        "n_positions": 256,
        "n_embd": 768,
        "n_layer": 6,
        "n_head": 12,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    rows=4,
    length=256,
)

_LLAMA = Workload(
    "Llama, all labels",
    "LlamaForCausalLM",
    "LlamaConfig",
    {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    },
    rows=4,
    length=256,
)

_BERT = Workload(
    "BERT masked-LM, 15% of labels",
    "BertForMaskedLM",
    "BertConfig",
    {
        "vocab_size": 30_522,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    rows=8,
    length=128,
    labels=0.15,
    goal=0.70,
)

WORKLOADS = {
    "gpt2": _GPT2,
    "gpt2-15": replace(_GPT2, title="GPT-2, 15% of labels", labels=0.15, goal=0.70),
    "llama": _LLAMA,
    "bert-mlm": _BERT,
    "bert-padded": replace(
        _BERT,
        title="BERT classification, rows of 20 to 120 tokens padded to 256",
        model="BertForSequenceClassification",
        rows=16,
        length=256,
        labels=None,
        real=(20, 120),
        goal=0.50,
    ),
}

# For memory: Llama 3's vocabulary on a model that is small beside it, with one table for both ends.
BIG_VOCABULARY = replace(
    _LLAMA,
    title="Llama, 128,256 vocabulary, 2x512 tokens, 2 layers",
    options={
        "vocab_size": 128_256,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    rows=2,
    length=512,
    goal=1 / 3,
)
