"""``autofuse bench`` and the GPU script, as their users call them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys

from autofuse import cli
from autofuse.bench.once import problem
from autofuse.bench.own import Own, resolve
from benchmarks import gpu, kernels

MODULE = """
import toys

def small():
    return toys.classifier()
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes of the candidates


def test_a_users_own_function_is_raced_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)  # as the command has it, whose path is not the current directory
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["bench", "mine:small", "--candidates", "eager,fused", "--steps", "2"]
    status = cli.main([*arguments, "--json", "out.json", "--plot", "out.png"])
    shown = capsys.readouterr().out
    assert status == 0, shown  # only the losses are promised without autofuse
    assert "mine:small: eager starts" in shown and "mine:small: fused starts" in shown
    assert "mine:small took" in shown and "fused *" in shown and "difference of an fp32 loss" in shown
    found = json.loads((tmp_path / "out.json").read_text())
    rows = found["models"]["mine:small"]["candidates"]
    assert [row["name"] for row in rows] == ["eager", "fused"]
    assert all(len(row["seconds"]) == 2 for row in rows)
    assert found["goals"][0]["met"] and found["models"]["mine:small"]["floor"]["flops"] > 0
    assert (tmp_path / "out.png").stat().st_size > 0


def test_a_goal_that_is_missed_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autofuse.bench.figures.SAME_LOSS", -1.0)
    monkeypatch.setattr("autofuse.bench.race.Process", toys.InThread)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # which a thread sets: restored afterwards
    assert cli.main(["bench", "toys:classifier", "--candidates", "eager,fused", "--steps", "1"]) == 1
    assert "NOT MET" in capsys.readouterr().out


def test_an_optimizer_of_the_users_own_is_the_one_that_steps() -> None:
    workload = resolve("toys:with_optimizer")
    assert isinstance(workload, Own)
    model, optimizer, batches = workload.make(3)
    assert isinstance(optimizer, torch.optim.SGD) and len(batches) == 2
    tuned = workload.tuned(optimizer).param_groups[0]
    assert (tuned["fused"], tuned["lr"], tuned["momentum"]) == (True, 0.5, 0.9)
    assert tuned["params"] == list(model.parameters())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt3", "there is no workload 'gpt3': expected one of gpt2, "),
        ("toys:no_such_function", "toys:no_such_function: cannot be found"),
        ("toys:broken", r"must return \(model, batches\) or \(model, optimizer, batches\), not Classifier"),
    ],
)
def test_what_is_no_workload_says_what_was_expected(model: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        resolve(model).make(1)


def test_the_command_says_why_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gpt3"]) == 1
    assert "autofuse bench: there is no workload 'gpt3'" in capsys.readouterr().err
    assert cli.main(["bench", "toys:broken", "--candidates", "eager", "--steps", "1"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("autofuse bench: toys:broken must return") and not shown.out


def test_what_is_wrong_in_a_users_own_code_is_said_once_with_its_place() -> None:
    assert problem(resolve("toys:classifier")) is None
    assert problem(resolve("toys:typo")) == ("toys:typo: cannot be found: there is no function typo in toys")
    place = rf"\(in forward, {re.escape(toys.__file__)}, line \d+\)"
    reason = problem(resolve("toys:wrong_shapes"))
    assert reason and re.fullmatch(rf"toys:wrong_shapes: RuntimeError: .+ {place}", reason)
    reason = problem(resolve("toys:without_loss"))
    assert reason and "Linear" in reason and "bench needs model(**batch).loss" in reason
    assert "loss_fn" not in reason


def test_an_import_that_fails_in_a_users_own_module_is_said_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "importing.py").write_text("\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = problem(resolve("importing:small"))
    assert reason == (
        "importing:small: ModuleNotFoundError: No module named 'no_such_package' "
        f"(in <module>, {tmp_path / 'importing.py'}, line 2)"
    )


@pytest.mark.parametrize(
    ("option", "file", "reason"),
    [
        ("--json", "no/x.json", "there is no folder no"),
        ("--plot", "no/x.png", "there is no folder no"),
        ("--plot", "x.txt", "its name must end in .png"),
        ("--json", ".", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_race(
    option: str, file: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "gpt2", option, file]) == 2
    assert reason in capsys.readouterr().err


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(cli, "run", full)
    assert cli.main(["bench", "gpt2"]) == 1
    assert capsys.readouterr().err == "autofuse bench: no space left\n"


def test_the_help_says_what_a_function_must_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "must return a loss" in shown and "mappings of tensors" in shown and "the same each time" in shown


def test_the_gpu_script_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "sees no CUDA device" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_gpu_script_at_toy_sizes(tmp_path: Path) -> None:
    """In a process of its own, which hides GPUs from all that it starts."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--minutes", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failures"] == {}, done.stdout + done.stderr
    assert set(found["parts"]) == {"checks", "timings", *gpu.MODELS}
    checks = found["parts"]["checks"]
    assert {row["provider"] for row in checks} == {"torch", "native"}
    assert all(row["right"] for row in checks)
    assert done.returncode == 0
    assert all(row["ms"] > 0 for row in found["parts"]["timings"])
    for name in gpu.MODELS:
        assert all(row["median_s"] > 0 for row in found["parts"][name]["candidates"])
    text = (tmp_path / "results.md").read_text()
    assert "no figures" in text and "| Adam, decay l2, fp32 | torch | yes |" in text


def test_a_part_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu, "check", fail)
    monkeypatch.setattr(gpu, "measure", lambda run: [{"operation": "x", "provider": "torch", "ms": 1.0}])
    assert gpu.main(["--smoke", "--out", str(tmp_path), "--only", "checks,timings"]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failures"] == {"checks": "RuntimeError: no such kernel"}
    assert found["parts"]["timings"][0]["ms"] == 1.0
    assert "- checks: RuntimeError: no such kernel" in (tmp_path / "results.md").read_text()
    assert "checks failed" in capsys.readouterr().out


def test_parts_without_time_are_skipped_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--smoke", "--out", str(tmp_path), "--minutes", "0.01"]
    assert gpu.main(arguments) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    skipped = {name: reason for name, reason in found["failures"].items() if name != "providers"}
    assert skipped == dict.fromkeys(("checks", "timings", *gpu.MODELS), "skipped: no time was left")


def test_wrong_numbers_are_found() -> None:
    operation = kernels.operations("toy")[0]

    def wrong(provider: str, leaves: object) -> torch.Tensor:
        return operation.run(provider, leaves) * (1 if provider == kernels.EAGER else 1.001)  # type: ignore[arg-type]

    good = kernels._check_one(operation, "torch", "cpu")
    bad = kernels._check_one(replace(operation, run=wrong), "torch", "cpu")
    assert good["right"] and not bad["right"] and bad["error"] > 5e-4
