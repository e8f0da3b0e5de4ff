"""A layout found for bf16 runs in it: weights in bfloat16 with float32 masters, losses of plain training of the model cast so."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from meshwright.cli import main
from meshwright.drive.plans import read_plan
from meshwright.job import Training
from meshwright.testing.serial import serial_losses

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:tiny"
pytestmark = [pytest.mark.real, pytest.mark.timeout(590)]


def test_a_layout_found_for_bf16_trains_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "plan.json")
    words = ["layout", "search", "--model", EXAMPLE, "--fabric", "laptop:2", "--global-batch", "4", "--microbatches", "1", "--levels", "0"]
    assert main([*words, "--schedules", "1f1b", "--recompute", "none", "--tensors", "1", "--out", out]) == 0
    assert main(["train", "run", out, "--data", "synthetic", "--steps", "3", "--no-calibration", "--out", str(tmp_path / "run")]) == 0
    assert "one step was compared with the owner's module" in capsys.readouterr().out
    job = msgspec.convert(read_plan(out).job["training"], Training)
    assert job.dtype == "bfloat16"
    losses = json.loads((tmp_path / "run" / "run.json").read_text())["losses"]
    assert losses == pytest.approx(serial_losses(job, data="synthetic", steps=3), rel=0.02), "within bfloat16's rounding"
