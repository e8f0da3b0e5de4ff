"""`train gate`, and the gate before `train run`: what it prints, what it refuses, what stands in the run's document."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from gate_rig import plan_of

from meshwright.cli import main
from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import Plan


def written(plan: Plan, folder: Path) -> str:
    write_plan(folder / "plan.json", plan)
    return str(folder / "plan.json")


def test_a_step_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(plan_of("language", (2, 1, 1), loss="ignoring"), tmp_path)
    assert main(["train", "gate", plan, "--data", "synthetic"]) == 0
    assert "one step is the owner's (the whole batch at once, 8 samples, float64)" in capsys.readouterr().out
    assert main(["train", "gate", plan, "--data", "synthetic", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compared"][0] == "loss" and document["largest_error"] < 1e-9 and not document["why_not"]


def test_a_plan_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = ["train", "plan", "--fabric", "laptop:2", "--dp", "2", "--microbatch", "2", "--collective", "ring", "--global-batch", "8", "--gate"]
    assert main([*words, "--model", "tests/run/gate_models.py:attending", "--out", str(out)]) == 0
    assert "one step is the owner's (the whole batch at" in capsys.readouterr().out
    assert json.loads(out.read_text())["job"]["gate"]["compared"][0] == "loss"
    assert main(["train", "explain", str(out)]) == 0
    out.unlink()
    assert main([*words, "--model", "tests/run/gate_models.py:batch_norm", "--loss", "mse", "--out", str(out)]) == 4
    assert "batch_norm of module 'norm'" in capsys.readouterr().err and not out.exists()


def test_a_difference_ends_a_run_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(plan_of("batch_norm", (2, 1, 1)), tmp_path)
    out = tmp_path / "run"
    assert main(["train", "run", plan, "--data", "synthetic", "--out", str(out)]) == 4
    error = capsys.readouterr().err
    assert "trains something else" in error and "batch_norm of module 'norm'" in error and "--batch-statistics local" in error
    assert not out.exists()
    assert main(["train", "gate", plan, "--data", "synthetic", "--batch-statistics", "local"]) == 0
    assert "stated: batch statistics local" in capsys.readouterr().out


def test_a_run_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(plan_of("mlp", (1, 1, 1)), tmp_path)
    words = ["train", "run", plan, "--data", "synthetic", "--steps", "1", "--no-calibration"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert "one step was compared with the owner's module, the whole batch at once: equal within" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "run.json").read_text())["gate"]["compared"]
    assert main([*words, "--out", str(tmp_path / "b"), "--no-gate"]) == 0
    assert json.loads((tmp_path / "b" / "run.json").read_text())["gate"] == {"why_not": "--no-gate"}


def test_other_plans_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "c.json")
    assert main(["collective", "plan", "all-reduce", "--fabric", "laptop:2", "--size", "1KiB", "--out", plan]) == 0
    assert main(["train", "gate", plan]) == 2
    assert "not a training plan" in capsys.readouterr().err
