"""`memory plan` on a captured graph: strategies, stages, refusals."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from captured import captured
from meshwright.cli import main
from meshwright.graph.graph import OpGraph
from meshwright.io.model.graph import write_graph

EXAMPLES = Path(__file__).parents[2] / "examples"


@functools.cache
def graph(model: str) -> OpGraph:
    return captured(str(EXAMPLES / model), scalable=model.endswith("tiny"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_graph(tmp_path / "graph.json", graph("gpt.py:tiny"))
    return str(tmp_path / "graph.json")


def test_later_stages_recompute_less(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", path, "--pp", "2", "--microbatches", "8", "--budget", "1.5MB"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.memory.plan" and document["layer"] == "blocks.0" and len(document["cites"]) == 1
    first, last = document["plans"]["optimal"]["stages"]
    assert first["time_s"] > last["time_s"] == 0 and first["time_s"] >= first["bound_s"] > 0
    assert all(s["kept_bytes"] + s["workspace_bytes"] <= 1_500_000 for s in (first, last))
    assert [s["in_flight"] for s in document["stages"]] == [2, 1] and [s["layers"] for s in document["stages"]] == [2, 2]
    assert main(words) == 0
    assert "x policy 0" in capsys.readouterr().out


def test_all_strategies_side_by_side(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", path, "--budget", "1.2MB", "--strategy", "all", "--layers", "4", "--batch", "2"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["plans"]) | set(document["refused"]) == {"none", "selective", "uniform", "block", "optimal"}
    times = {name: max(s["time_s"] for s in plan["stages"]) for name, plan in document["plans"].items()}
    assert times["optimal"] == min(times.values()) and "uniform" in times
    assert main([*words[:4], "900000", *words[5:]]) == 0  # bytes, without a unit
    text = capsys.readouterr().out
    assert "none: stage 0: keeps" in text and "optimal" in text


def test_one_strategy_with_its_option(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", path, "--budget", "8MB,8MB", "--pp", "2", "--strategy", "uniform", "--every", "2", "--layer", "blocks.1"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plans"]["uniform"]["options"] == {"every": 2} and document["plans"]["uniform"]["stages"][0]["counts"] == [1, 1]


def test_refusals(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "plan", path, "--budget", "1kB"]) == 3
    assert "may keep 1000" in capsys.readouterr().err
    write_graph(tmp_path / "net.json", graph("convnet.py:tiny"))
    for words in (
        [path, "--budget", "1MB", "--strategy", "luck"], [path, "--budget", "1MB", "--device", "abacus"], [path, "--budget", "some"],
        [path, "--budget", "1MB,2MB,3MB", "--pp", "2"], [path, "--budget", "1MB", "--layers", "x"], [path, "--budget", "1MB", "--layer", "nowhere"],
        [path, "--budget", "1MB", "--pp", "0"], [path, "--budget", "1MB", "--microbatches", "0"], [str(tmp_path / "none.json"), "--budget", "1MB"],
    ):  # fmt: skip
        assert main(["memory", "plan", *words]) in (1, 2), words
        assert capsys.readouterr().err.startswith("error: ")
