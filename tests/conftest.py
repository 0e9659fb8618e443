"""Nothing is downloaded, and each pytest-xdist worker keeps to one thread."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import types

import pytest
import torch
from tuned import Time

import autofuse.clock
import autofuse.proof

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def time(monkeypatch):
    time = Time()
    for module in (autofuse.clock, autofuse.proof):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=time.perf_counter))
    return time
