"""What is trained: models with random weights from fixed seeds, and their batches.

A step of each takes roughly 0.3 to 3 seconds in eager float32 on two CPU cores.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autofuse.batch import loss_from
from autofuse.bench.legacy import HandAdam, HandWritten

__all__ = [
    "BIG_VOCABULARY",
    "WORKLOADS",
    "Batch",
    "Legacy",
    "Made",
    "Transformers",
    "Workload",
    "fused",
]

Batch = dict[str, Tensor]
LEARNING_RATE = 1e-4


class Made(NamedTuple):
    """A workload's parts, fresh: the model in training mode, its optimizer, its batches."""

    model: nn.Module
    optimizer: Optimizer
    batches: list[Batch]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its optimizer and its batches, the same each time; it is pickled into other processes.

    Args:
        title: what tables call it.
        needs: packages that it imports.
        random: it draws random numbers (dropout), so that two ways to compute it differ.
        floor_goal: the least share of the floor that autofuse shall reach, if anything is promised.
    """

    title: str
    needs: tuple[str, ...] = ()
    random: bool = False
    floor_goal: float | None = None

    @property
    def missing(self) -> list[str]:
        """What of ``needs`` is not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def make(self, count: int) -> Made:
        """The parts, with ``count`` batches (a user's own workload may have another number)."""
        if self.missing:
            names = " and ".join(self.missing)
            raise RuntimeError(
                f"{self.title} needs {names}, not installed here: pip install 'autofuse[hf]' scikit-learn"
            )
        model = self.build().train()
        return Made(model, self.optimizer(model), self.batches(count))

    def build(self) -> nn.Module:
        raise NotImplementedError

    def batches(self, count: int) -> list[Batch]:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer:
        """As a plain loop has it."""
        return AdamW(model.parameters(), lr=LEARNING_RATE)

    def tuned(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that somebody who tunes by hand takes instead."""
        return fused(optimizer)

    @property
    def forward(self) -> Callable[[nn.Module, Batch], Tensor] | None:
        """``forward(model, batch) -> loss``; None: the loss is in ``model(**batch)``."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_from(model(**batch), model) if self.forward is None else self.forward(model, batch)


def fused(optimizer: Optimizer) -> Optimizer:
    """A new optimizer like it with ``fused=True``; itself where torch has no fused one of its class.

    >>> made = fused(SGD([nn.Parameter(torch.zeros(2))], lr=0.5, momentum=0.9))
    >>> [made.param_groups[0][name] for name in ("fused", "lr", "momentum")]
    [True, 0.5, 0.9]
    """
    if type(optimizer) not in (AdamW, Adam, SGD, Adagrad):
        return optimizer
    groups = [{k: v for k, v in g.items() if k not in ("fused", "foreach")} for g in optimizer.param_groups]
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups, fused=True)
    return made


# --- transformers' models ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Transformers(Workload):
    """A transformers model, built from its configuration, and batches of random tokens.

    Args:
        model, config, options: the class, the class of its configuration, and what that is made with.
        rows, length: the shape of a batch.
        targets: the length of a decoder's labels, for encoder-decoders.
        labels: the share of the tokens that have one; None for one class per row.
        real: the least and the largest number of tokens in a row that are no padding; None: all are.
        digits: the side in pixels to which scikit-learn's digits are enlarged: the batch is ``rows``
            images, not tokens.
    """

    needs: tuple[str, ...] = ("transformers",)
    model: str
    config: str
    options: Mapping[str, Any] = field(hash=False)
    rows: int
    length: int = 0
    targets: int | None = None
    labels: float | None = 1.0
    real: tuple[int, int] | None = None
    digits: int | None = None

    def build(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        make = self._text if self.digits is None else self._images
        return [make(generator) for _ in range(count)]

    def _text(self, generator: torch.Generator) -> Batch:
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
        elif self.targets is not None:
            goal = self.rows, self.targets
            batch["labels"] = torch.randint(5, self.options["vocab_size"], goal, generator=generator)
        else:
            labeled = torch.rand(shape, generator=generator) < self.labels
            batch["labels"] = tokens.where(labeled, -100)
        return batch

    def _images(self, generator: torch.Generator) -> Batch:
        from sklearn.datasets import load_digits

        found = load_digits()
        chosen = torch.randint(0, len(found.target), (self.rows,), generator=generator)
        pixels = torch.tensor(found.images, dtype=torch.float32)[chosen] / 8 - 1  # (rows, 8, 8) in [-1, 1]
        size = self.digits, self.digits
        pixels = nn.functional.interpolate(pixels[:, None].expand(-1, 3, -1, -1), size)  # type: ignore[arg-type]
        return {"pixel_values": pixels, "labels": torch.tensor(found.target)[chosen]}


# --- others ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Legacy(Workload):
    """A net with hand-written parts and a hand-written Adam, as repositories of the last ten years have.

    Args:
        options: the arguments of `HandWritten`.
    """

    options: Mapping[str, int] = field(hash=False)
    rows: int
    length: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return HandWritten(**self.options, length=self.length)

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        shape = self.rows, self.length + 1
        made = [
            torch.randint(0, self.options["vocabulary"], shape, generator=generator) for _ in range(count)
        ]
        return [{"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()} for tokens in made]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return HandAdam(model.parameters(), lr=LEARNING_RATE)

    def tuned(self, optimizer: Optimizer) -> Optimizer:
        return Adam([{"params": g["params"]} for g in optimizer.param_groups], lr=LEARNING_RATE, fused=True)

    @property
    def forward(self) -> Callable[[nn.Module, Batch], Tensor]:
        return _next_token


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


# --- the table ---------------------------------------------------------------------------------

_NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}

_GPT2 = Transformers(
    title="GPT-2",
    model="GPT2LMHeadModel",
    config="GPT2Config",
    options={
        "vocab_size": 50_257,
        "n_positions": 256,
        "n_embd": 768,
        "n_layer": 6,
        "n_head": 12,
        **_NO_DROPOUT,
    },
    rows=4,
    length=256,
    floor_goal=0.85,
)

_LLAMA = Transformers(
    title="Llama",
    model="LlamaForCausalLM",
    config="LlamaConfig",
    options={
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    },
    rows=4,
    length=256,
    floor_goal=0.85,
)

_BERT = Transformers(
    title="BERT masked-LM, 15% of labels",
    model="BertForMaskedLM",
    config="BertConfig",
    options={
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
)

_T5 = Transformers(
    title="T5, 128 tokens to 64",
    model="T5ForConditionalGeneration",
    config="T5Config",
    options={
        "vocab_size": 32_128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    rows=8,
    length=128,
    targets=64,
)

_VIT = Transformers(
    title="ViT on digits of 64x64",
    needs=("transformers", "sklearn"),
    model="ViTForImageClassification",
    config="ViTConfig",
    options={
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "image_size": 64,
        "patch_size": 8,
        "num_labels": 10,
    },
    rows=64,
    digits=64,
)

_MIXTRAL = Transformers(
    title="Mixtral, 8 experts",
    model="MixtralForCausalLM",
    config="MixtralConfig",
    options={
        "vocab_size": 16_000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    rows=4,
    length=128,
)

WORKLOADS: Mapping[str, Workload] = {
    "gpt2": _GPT2,
    "gpt2-dropout": replace(
        _GPT2,
        title="GPT-2, dropout 0.1",
        options={**_GPT2.options, **dict.fromkeys(_NO_DROPOUT, 0.1)},
        random=True,
        floor_goal=None,
    ),
    "gpt2-15": replace(_GPT2, title="GPT-2, 15% of labels", labels=0.15, floor_goal=None),
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
    ),
    "t5": _T5,
    "vit": _VIT,
    "mixtral": _MIXTRAL,
    "legacy": Legacy(
        title="Hand-written GPT and Adam",
        options={"vocabulary": 8_000, "width": 512, "layers": 6, "heads": 8},
        rows=4,
        length=256,
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
)
