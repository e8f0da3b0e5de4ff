"""`meshwright experts plan`, `compare` and `bench` as a user calls them, and what a run tells of its experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.frame import main

LAYER = ["--fabric", "two-islands", "--experts", "2", "--model-dim", "16", "--inner", "32", "--chunks", "1,2"]


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experts.json.gz"
    assert main(["experts", "plan", *LAYER, "--capacities", "30,300", "--out", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"], found["degrees"]) == ("meshwright.experts.plan", 1, [0, 1, 2])
    assert [c["capacity"] for c in found["choices"]] == [32, 300] and sorted(found["table"])[0] == "backward:128"
    assert all(c["ratio"] >= 1 and c["bound"]["follows_from"] for c in found["choices"])
    assert main(["train", "check", str(path)]) == 0
    assert main(["cite", str(path)]) == 0
    assert "Tutel" in capsys.readouterr().out


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experts", "compare", *LAYER, "--tokens", "100", "--k", "1", "--gated", "--inference", "--degrees", "0,2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rows,) = found["capacities"]
    assert {(r["degree"], r["chunks"], r["algorithm"]) for r in rows} == {(0, 1, "linear"), (0, 1, "2dh"), *((2, d, a) for d in (1, 2)
                                                                           for a in ("linear", "2dh"))}  # fmt: skip
    assert [r["time_s"] for r in rows] == sorted(r["time_s"] for r in rows) and all(r["backward_s"] is None for r in rows)
    assert found["fixed"]["best_fixed_s"] == found["fixed"]["adaptive_s"]
    assert main(words) == 0
    assert "with the best fixed one" in capsys.readouterr().out
    words = ["experts", "compare", "--fabric", "star:4", "--experts", "4", "--model-dim", "1024", "--inner", "65536", "--capacities", "4096"]
    assert main([*words, "--chunks", "1", "--degrees", "1"]) == 0  # a star is one server: seconds with their unit, and who was refused
    said = capsys.readouterr().out
    assert re.search(r"^4096 +r=1 d=1 linear +[\d.]+ s ", said, re.MULTILINE) and "refused: 2dh: two steps need" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "one of --capacities and --tokens"), (["--capacities", "0"], "at least 1"), (["--capacities", "8", "--degrees", "3"], "no degree 3"),
        (["--tokens", "9", "--k", "3"], "there are 2 experts"), (["--tokens", "9", "--capacity-factor", "0"], "follow the demand"),
        (["--tokens", "9", "--capacity-factor", "0.01"], "rounds to a capacity of zero"), (["--capacities", "x"], "whole numbers separated"),
        (["--capacities", "8", "--chunks", "0"], "must be"), (["--capacities", "8", "--algorithms", "spiral"], "spiral"),
        (["--capacities", "8", "--experts", "3"], "cannot be divided evenly"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "plan", *LAYER, *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.real
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand, in order: each reads what the one before has written."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "experts.md").read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ meshwright (.*)$", page, re.MULTILINE)
    assert [c.split()[:2] for c in commands] == [
        ["experts", "compare"], ["experts", "plan"], ["train", "check"], ["experts", "bench"], ["experts", "compare"], ["train", "plan"],
        ["train", "check"], ["train", "run"], ["report", "run"], ["experts", "compare"],
    ]  # fmt: skip
    layers = {"blocks.0.experts": [700, *range(10, 160, 10)], "blocks.1.experts": [90] * 16}
    (tmp_path / "loads.json").write_text(json.dumps({"schema": "meshwright.expert-loads", "version": 1, "layers": layers}))
    for command in commands:
        assert main(command.split()) == 0, command
    said = capsys.readouterr().out
    assert "experts over 2" in said and said.count(": ok") >= 2 and "bound" in said
    assert "capacity 64: the choice predicted best took" in said and all(f"r={r} d=1 linear" in said for r in (0, 1, 2))
    # 8 samples of 8 tokens choose 2 experts each, in two layers and four steps, however many ranks there are
    loads = json.loads((tmp_path / "run" / "expert-loads.json").read_text())["layers"]
    recorded = [json.loads((tmp_path / "run" / f"rank-00{r}.json").read_text())["expert_rows"] for r in (0, 1)]
    assert set(loads) == {"blocks.0.experts", "blocks.1.experts"} == set(recorded[0])
    for layer, rows in loads.items():
        steps = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*(r[layer] for r in recorded), strict=True)]
        assert [sum(x) for x in steps] == [128] * 4 and rows == [round(sum(x) / 4) for x in zip(*steps, strict=True)]
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="map"') == 2 and "What a micro-batch sends for its experts" in page and "with a copy a rank" in page


def test_compare_places_copies_of_hot_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text('{"schema": "meshwright.expert-loads", "version": 1, "layers": {"a": [9000, 10, 10, 10], "b": [100, 100, 100, 100]}}')
    words = ["experts", "compare", "--fabric", "two-islands", "--experts", "4", "--model-dim", "512", "--inner", "1024", "--capacities", "64",
             "--degrees", "1", "--chunks", "1", "--algorithms", "linear", "--loads", str(loads)]  # fmt: skip
    assert main([*words, "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)["replicas"]
    assert a["before_rows"] == 9000 and a["bound_rows"] <= a["busiest_rows"] < 2400 and a["saved_s"] > 0 and len(a["copies"]) == 3
    assert b["copies"] == [] and not b["pays"] and b["busiest_rows"] == b["bound_rows"] == 100
    assert main([*words, "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "a |@...|" in text and "does not pay" in text
    assert main([*words[:5], "2", *words[6:]]) and "are shared already" in capsys.readouterr().err
