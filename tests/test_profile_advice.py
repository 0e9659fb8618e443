"""What a profile says, and what it refuses: its advice follows the report's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import PAIR, Words, as_calls, in_pieces, mse_step, net, step_of, words_batches

import autofuse
from autofuse.costs import BETWEEN, OPTIMIZER, OTHERS, Cost
from autofuse.profile import Profile


def test_in_a_notebook_nothing_is_shown_twice(monkeypatch: Any) -> None:
    import rich.jupyter

    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *args: shown.append(args))
    step = mse_step(net())
    profile = Profile("cpu", "Net", steps=1, groups={OTHERS: 1.0}, operations=[Cost("gelu", group=OTHERS)])
    for thing in (profile, step.plan, step.report):
        assert str(thing) and "\x1b" not in str(thing)
        assert thing._repr_html_()
    assert "gelu" in str(profile) and "gelu" in profile._repr_html_() and "norms" in str(step.report)
    assert shown == []
