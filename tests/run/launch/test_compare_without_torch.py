"""`train compare` reads and simulates; where the run's files are all there is, no torch is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rig import make_plan

import one_interpreter
from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import Prediction
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from warm_interpreters import real_interpreters

pytestmark = pytest.mark.real

NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""
HAS_NONE = """
assert not any(m == "torch" or m.startswith("torch.") for m in sys.modules)
"""


def without_torch(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Of each its exit code and both streams."""
    program = NO_TORCH + one_interpreter.PROGRAM + HAS_NONE + one_interpreter.SAYS
    with real_interpreters():
        done = subprocess.run([sys.executable, "-c", program, json.dumps(commands)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(said) for said in json.loads(done.stdout)]


def test_compare_needs_no_torch(tmp_path):
    bare = make_plan((1, 1, 1))
    plan = replace(bare, prediction=Prediction(target_fabric="laptop:2", time_s=0.1))
    train_run(plan, RunRequest(out=tmp_path / "run", steps=3, calibrate=False))
    write_plan(tmp_path / "plan.json", plan)
    write_plan(tmp_path / "bare.json", bare)
    pair = replace(make_plan((2, 1, 1)), prediction=plan.prediction)
    train_run(pair, RunRequest(out=tmp_path / "pair", steps=1, calibrate=False))
    write_plan(tmp_path / "pair.json", pair)
    compared, unpredicted, uncalibrated, refused = without_torch(
        ["train", "compare", str(tmp_path / "plan.json"), str(tmp_path / "run"), "--json"],
        ["train", "compare", str(tmp_path / "bare.json"), str(tmp_path / "run")],
        ["train", "compare", str(tmp_path / "pair.json"), str(tmp_path / "pair")],
        ["train", "run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "again")],
    )
    code, out, err = compared
    assert code == 0, err[-3000:]
    assert json.loads(out)["schema"] == "meshwright.train.compare" and (tmp_path / "run" / "trace.json.gz").is_file()
    code, _, err = unpredicted
    assert code == 2 and "plan.prediction: the plan carries no prediction" in err
    code, _, err = uncalibrated
    assert code == 2 and "the run measured no costs" in err and "--no-calibration" in err
    # The child really has no torch: what needs it says so.
    code, _, err = refused
    assert code != 0 and "torch" in err and not (tmp_path / "again").exists()
