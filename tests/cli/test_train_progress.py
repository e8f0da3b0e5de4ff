"""The line of a run that goes on: what it holds, one on a terminal, one every so many steps elsewhere."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rig import make_plan

from meshwright.cli import train_progress
from meshwright.cli.train_progress import Progress, progress_line
from meshwright.drive.plans import read_fabric
from meshwright.io.fabric.document import fabric_document
from meshwright.plan.plan import Prediction
from meshwright.run.train.utilisation import utilisation_of

LINE = {"step": 3, "loss": 2.5, "step_s": 0.25, "samples_per_s": 32.0, "tokens_per_s": 8000.0, "mfu": 0.1234, "evaluation_loss": 2.75}


def test_a_line_says_what_is_known():
    assert progress_line(LINE, 4, 100, 24.2, "0.2 s on box", "20.0 %") == (
        "step 5/100  loss 2.5000  evaluation 2.7500  8,000 tokens/s  0.25 s (plan: 0.2 s on box)  MFU 12.3 % (plan: 20.0 %)  ETA 0:24"
    )
    images = {"step": 3, "loss": "nan", "step_s": 0.25, "samples_per_s": 32.0}
    assert progress_line(images, 99, 100, 3700.0) == "step 100/100  loss nan  32.0 samples/s  0.25 s  ETA 1:01:40"
    assert progress_line({}, 0, 100, None) == "step 1/100"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Screen, io.StringIO])
def test_a_terminal_has_one_line_and_a_file_some(tmp_path, monkeypatch, kind):
    stderr = kind()
    monkeypatch.setattr(train_progress.sys, "stderr", stderr)
    monkeypatch.setattr(train_progress.time, "monotonic", iter(range(0, 200, 2)).__next__)
    fabric = read_fabric("laptop:1")
    plan = replace(
        make_plan((1, 1, 1)), prediction=Prediction(target_fabric="box", time_s=0.5), target_fabric=fabric_document(fabric),
        placement=(fabric.devices[0].name,),
    )  # fmt: skip
    said = Progress(plan, 20, tmp_path, "cpu", every=5)
    for step in range(20):
        if step:
            (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE | {"step": step - 1}) + "\n")
        said(step)
    said.close()
    first, _, rest = stderr.getvalue().partition("\n")
    share = 100 * utilisation_of(plan, "cpu").mfu(0.5)
    assert first.startswith("MFU: share of 1 x ") and f"(plan: {share:.1f} %)" in rest
    if kind is Screen:
        assert rest.count("\n") == 1 and rest.count("\r") == 20 and "step 20/20" in rest
    else:
        assert [line.split()[1] for line in rest.splitlines()] == ["2/20", "6/20", "11/20", "16/20"]
        assert "ETA 0:30" in rest.splitlines()[1]
