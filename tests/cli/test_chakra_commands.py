"""`program export` and `program import`: what they write, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.io.chakra.et import read_chakra_set
from meshwright.io.plan.plan import read_plan


def output(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(w) for w in words]) == code
    seen = capsys.readouterr()
    return seen.out if code == 0 else seen.err


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    words = ("--stages", 2, "--microbatches", 2, "--data", 2, "--message-bytes", 1000, "--gradient-bytes", 4000, "--strategy", "1f1b")
    output(capsys, "pipeline", "plan", *words, "-o", path)
    return path


def test_out_and_in(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    folder = tmp_path / "et" / "step"
    document = json.loads(output(capsys, "program", "export", plan, "-o", folder, "--json"))
    assert document["files"] == [f"plan.{r}.et" for r in range(4)] + ["plan.comm_group.json"] == sorted(p.name for p in folder.iterdir())
    assert document["nodes"]["COMM_COLL"] == 4 and document["groups"] == {"1": [0, 1], "2": [2, 3]}
    assert "4 COMM_COLL" in output(capsys, "program", "import", folder)
    text = output(capsys, "program", "import", folder / "plan", "--fabric", "laptop:4", "-o", tmp_path / "back.json", "--collective", "ring")
    assert "simulated; checked: form, deadlock, races" in text and text.endswith(f"plan written to {tmp_path / 'back.json'}\n")
    again = read_plan(tmp_path / "back.json")
    assert again.kind == "imported" and again.main.requires == ("calls",)
    document = json.loads(output(capsys, "program", "import", folder, "--fabric", "laptop:4", "--json", "--trace", tmp_path / "t.json"))
    assert document["time_s"] > 0 and document["per_rank"][0]["collective_bytes"] == {"ALL_REDUCE": 4000} and (tmp_path / "t.json").exists()


def test_inlined_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    text = output(capsys, "program", "export", plan, "-o", tmp_path / "et", "--inline", "--name", "step")
    assert "COLL" not in text and "step.0.et ... step.3.et" in text
    assert not read_chakra_set(tmp_path / "et" / "step").groups
    once = {p.name: p.read_bytes() for p in (tmp_path / "et").iterdir()}
    output(capsys, "program", "export", plan, "-o", tmp_path / "et", "--inline", "--name", "step")
    assert once == {p.name: p.read_bytes() for p in (tmp_path / "et").iterdir()}


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    assert "is no file name" in output(capsys, "program", "export", plan, "-o", tmp_path, "--name", "a/b", code=2)
    assert "cannot make the folder" in output(capsys, "program", "export", plan, "-o", plan / "x", code=2)
    assert "no file PREFIX.0.et" in output(capsys, "program", "import", tmp_path / "none", code=2)
    assert "a plan needs a fabric" in output(capsys, "program", "import", tmp_path, "-o", tmp_path / "x.json", code=2)
    (tmp_path / "bad.0.et").write_bytes(b"\x0a\x03")
    assert "bad.0.et: message 0: says 10 bytes, 1 are left" in output(capsys, "program", "import", tmp_path / "bad", code=1)
    output(capsys, "program", "export", plan, "-o", tmp_path / "et")
    assert "4 traces, but fabric 'laptop:2' has 2 devices" in output(capsys, "program", "import", tmp_path / "et", "--fabric", "laptop:2", code=2)
