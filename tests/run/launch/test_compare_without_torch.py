"""`train compare` reads and simulates; where the run's files are all there is, no torch is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rig import make_plan

from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import Prediction
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from warm_interpreters import real_interpreters

pytestmark = pytest.mark.real

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
from meshwright.cli.frame import main
code = main(sys.argv[1:])
assert not any(m == "torch" or m.startswith("torch.") for m in sys.modules)
sys.exit(code)
"""


def _without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    with real_interpreters():
        return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, timeout=120)


def test_compare_needs_no_torch(tmp_path):
    bare = make_plan((1, 1, 1))
    plan = replace(bare, prediction=Prediction(target_fabric="laptop:2", time_s=0.1))
    train_run(plan, RunRequest(out=tmp_path / "run", steps=3, calibrate=False))
    write_plan(tmp_path / "plan.json", plan)
    done = _without_torch("train", "compare", str(tmp_path / "plan.json"), str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["schema"] == "meshwright.train.compare" and (tmp_path / "run" / "trace.json.gz").is_file()
    write_plan(tmp_path / "bare.json", bare)
    done = _without_torch("train", "compare", str(tmp_path / "bare.json"), str(tmp_path / "run"))
    assert done.returncode == 2 and "plan.prediction: the plan carries no prediction" in done.stderr
    pair = replace(make_plan((2, 1, 1)), prediction=plan.prediction)
    train_run(pair, RunRequest(out=tmp_path / "pair", steps=1, calibrate=False))
    write_plan(tmp_path / "pair.json", pair)
    done = _without_torch("train", "compare", str(tmp_path / "pair.json"), str(tmp_path / "pair"))
    assert done.returncode == 2 and "the run measured no costs" in done.stderr and "--no-calibration" in done.stderr
    # The child really has no torch: what needs it says so.
    refused = _without_torch("train", "run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "again"))
    assert refused.returncode != 0 and "torch" in refused.stderr and not (tmp_path / "again").exists()
