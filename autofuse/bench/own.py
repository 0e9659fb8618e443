"""What a user brings to the benchmark: a function, or a folder with a configuration."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autofuse.batch import loss_from
from autofuse.bench.workloads import WORKLOADS, Batch, Made, Workload

__all__ = ["FromConfig", "Own", "resolve"]

MOST_OWN_BATCHES = 16


def resolve(text: str) -> Workload:
    """The workload that ``text`` names: one of `WORKLOADS`, ``package.module:function``, or a folder
    with a transformers ``config.json``. Modules are found in the current directory too.

    >>> resolve("legacy").title
    'Hand-written GPT and Adam'
    >>> resolve("gpt3")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: there is no workload 'gpt3': expected one of gpt2, ...
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    if (Path(text) / "config.json").is_file():
        return FromConfig(title=Path(text).resolve().name, folder=str(Path(text).resolve()))
    module, colon, function = text.partition(":")
    if colon and module and function.isidentifier():
        if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` has it; children inherit it
            sys.path.insert(0, os.getcwd())
        return Own(title=text, function=text)
    raise ValueError(
        f"there is no workload {text!r}: expected one of {', '.join(WORKLOADS)}, or package.module:function, "
        "or a folder with a transformers config.json"
    )


@dataclass(frozen=True, kw_only=True)
class Own(Workload):
    """A user's own: ``package.module:function`` returns (model, batches) or (model, optimizer, batches).

    The function must make the same each time it is called. Batches are mappings of tensors with which
    ``model(**batch)`` gives a loss; the first 16 are used, again and again.
    """

    function: str

    def make(self, count: int) -> Made:
        module, _, name = self.function.partition(":")
        torch.manual_seed(0)
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # another one that it imports
                raise
            raise ValueError(f"{self.function}: cannot be found: {error}") from error
        function = getattr(found, name, None)
        if not callable(function):
            raise ValueError(f"{self.function}: cannot be found: there is no function {name} in {module}")
        parts = function()
        if not isinstance(parts, tuple) or len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
            raise ValueError(
                f"{self.function} must return (model, batches) or (model, optimizer, batches), "
                f"not {_kind(parts)}"
            )
        model, batches = parts[0].train(), list(islice(parts[-1], MOST_OWN_BATCHES))
        if not batches or not all(_is_batch(batch) for batch in batches):
            raise ValueError(
                f"{self.function}: batches must be mappings of tensors for model(**batch), one at least"
            )
        optimizer = parts[1] if len(parts) == 3 else self.optimizer(model)
        return Made(model, optimizer, [dict(batch) for batch in batches])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(**batch)
        try:
            return loss_from(outputs, model)
        except ValueError as error:
            why = str(error).partition(": give the batch")[0]  # there is no loss_fn= to give here
            raise ValueError(
                f'{why}; bench needs model(**batch).loss, or a mapping with "loss": a scalar tensor that '
                "forward computes from the labels in the batch"
            ) from None


def _is_batch(batch: Any) -> bool:
    return isinstance(batch, Mapping) and all(isinstance(value, Tensor) for value in batch.values())


def _kind(parts: Any) -> str:
    if not isinstance(parts, tuple):
        return type(parts).__name__
    return f"({', '.join(type(part).__name__ for part in parts)})"


@dataclass(frozen=True, kw_only=True)
class FromConfig(Workload):
    """A causal language model from a folder with a transformers ``config.json``, on random tokens."""

    needs: tuple[str, ...] = ("transformers",)
    folder: str
    rows: int = 4
    length: int = 256

    def build(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(self._config())
        return model

    def batches(self, count: int) -> list[Batch]:
        config, generator = self._config().get_text_config(), torch.Generator().manual_seed(1)
        length = min(self.length, getattr(config, "max_position_embeddings", None) or self.length)
        made = [
            torch.randint(0, config.vocab_size, (self.rows, length), generator=generator)
            for _ in range(count)
        ]
        return [{"input_ids": tokens, "labels": tokens.clone()} for tokens in made]

    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)
