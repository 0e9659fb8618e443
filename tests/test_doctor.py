"""``autofuse doctor``: what it prints, as tables and as JSON, and its exit codes."""

import json
import subprocess
import sys

import pytest
import torch

from autofuse.cli import doctor, main
from autofuse.hardware import Hardware
from autofuse.providers import PROVIDERS


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["version"] == torch.__version__
    assert found["hardware"]["kind"] == "cpu" and isinstance(found["hardware"]["instruction_sets"], list)
    assert set(found["hardware"]["providers"]) == set(PROVIDERS)
    assert found["rates"]["source"] == "measured" and found["rates"]["unit"] == "GFLOP/s"
    assert found["rates"]["matmul"]["fp32"] > 1 and found["rates"]["matmul"]["bf16"] > 0
    fast = found["rates"]["matmul"]["bf16"] >= 1.3 * found["rates"]["matmul"]["fp32"]
    assert found["choices"]["autocast"]["dtype"] == ("bf16" if fast else None)
    assert "GFLOP/s" in found["choices"]["autocast"]["reason"]
    assert found["choices"]["tf32"]["use"] is False and found["will_not_pay"] is None


def test_tables(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    cpu = Hardware.detect("cpu")
    for text in (cpu.name, *cpu.instruction_sets, torch.__version__, "measured here", "TF32", *PROVIDERS):
        assert text in out
    for reason in filter(None, cpu.providers.values()):
        assert reason in out
    assert "\x1b[" not in out, "no terminal, no colours"


@pytest.mark.parametrize(
    ("name", "architecture", "autocast", "tf32"),
    [
        ("P100", "Pascal", None, False),
        ("V100", "Volta", "fp16", False),
        ("T4", "Turing", "fp16", False),
        ("A100", "Ampere", "bf16", True),
        ("L4", "Ada", "bf16", True),
        ("H100", "Hopper", "bf16", True),
        ("B200", "Blackwell", "bf16", True),
    ],
)
def test_named_hardware(name, architecture, autocast, tf32, capsys):
    found = doctor(Hardware.named(name))
    assert found["hardware"]["architecture"] == architecture
    assert found["choices"]["autocast"]["dtype"] == autocast and found["choices"]["tf32"]["use"] is tf32
    assert found["rates"]["source"] == "published" and not found["notes"]
    assert main(["doctor", "--hardware", name]) == 0
    out = capsys.readouterr().out
    assert "published" in out and architecture in out and ("will not pay" in out) == (name == "P100")


def test_a_reason_with_brackets_is_printed_as_it_is(monkeypatch, capsys):
    named = Hardware.named
    monkeypatch.setattr(Hardware, "named", lambda name: named(name, providers={"apex": "broken [bold]x[/y]"}))
    assert main(["doctor", "--hardware", "T4"]) == 0
    assert "broken [bold]x[/y]" in capsys.readouterr().out


def test_exit_codes(capsys, monkeypatch):
    assert main(["doctor", "--help"]) == 0
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["doctor", "--device", "cpu", "--hardware", "T4"]) == 2
    assert "doctor" in capsys.readouterr().err
    assert main(["doctor", "--hardware", "V1OO"]) == 1
    error = capsys.readouterr()
    assert "did you mean V100" in error.err and not error.out
    assert main(["doctor", "--device", "nonsense"]) == 1


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m autofuse.cli doctor --json --device cpu | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n" and not done.stderr
