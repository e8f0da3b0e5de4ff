"""`train plan --tp`: what stays whole is said on stderr and in the document, and label smoothing can be Megatron's."""

from __future__ import annotations

import json

from meshwright.cli import main
from meshwright.io.plan.plan import read_plan

MODELS = "tests/run/tensor_models.py"


def test_operators_without_a_split_are_named(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["train", "plan", "--model", f"{MODELS}:scanned", "--loss", "mse", "--fabric", "laptop:2", "--global-batch", "4", "--tp", "2"]
    assert main([*words, "-o", str(out), "--json"]) == 0
    stdout, stderr = capsys.readouterr()
    document = json.loads(stdout)
    assert any("first (linear)" in note and "aten.cumsum" in note for note in document["kept_whole"])
    assert [line for line in stderr.splitlines() if line.startswith("warning: ")] == [f"warning: {n}" for n in document["kept_whole"]]
    assert read_plan(out).layout.notes == tuple(document["kept_whole"])


def test_label_smoothing_is_in_the_plan(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["train", "plan", "--model", f"{MODELS}:smoothed", "--loss", "output", "--fabric", "laptop:2", "--global-batch", "2", "--tp", "2"]
    assert main([*words, "-o", str(out), "--label-smoothing", "megatron"]) == 0
    (loss,) = read_plan(out).layout.losses
    assert loss.smoothing == "megatron"


def test_modules_that_capture_kept_whole_are_named(tmp_path, capsys):
    out = tmp_path / "plan.json"
    model = "tests/capture/eager_models.py:Experts"
    assert main(["train", "plan", "--model", model, "--loss", "mse", "--fabric", "laptop:2", "--global-batch", "4", "--pp", "2", "-o", str(out)]) == 0
    (told,) = read_plan(out).job["captured"]
    assert told.startswith("kept whole as one operator each: 2 (Experts): ") and f"warning: {told}" in capsys.readouterr().err
