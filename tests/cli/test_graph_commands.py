"""`graph partition`, `plan`, `compare` and `run` as a user calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import main

GRAPH = ["rmat:80,500"]
ON = ["--fabric", "star:2?link=12.5MB/s", "--hidden", "8", "--features", "6", "--method", "own"]


def result(capsys, *words):
    code = main([*words, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out if code == 0 else said.err)


def test_partition(capsys, tmp_path):
    code, found = result(capsys, "graph", "partition", *GRAPH, "--workers", "3", "--method", "own", "--out", str(tmp_path / "of.npz"))
    assert code == 0 and sum(w["nodes"] for w in found["workers"]) == 80 and found["method"] == "own"
    with np.load(tmp_path / "of.npz") as parts:
        assert np.bincount(parts["of"]).tolist() == [w["nodes"] for w in found["workers"]]
    assert main(["graph", "partition", *GRAPH, "--workers", "3", "--method", "own"]) == 0
    assert "cut:" in capsys.readouterr().out


def test_compare_and_the_curve(capsys):
    code, found = result(capsys, "graph", "compare", *GRAPH, *ON, "--group", "10", "--curve")
    assert code == 0 and [r["bits"] for r in found["bits"]] == ["adaqp", "uniform 2", "uniform 4", "uniform 8", "uniform 32"] and found["whole"]
    times, variances = ([p[key] for p in found["curve"]] for key in ("rounds_s", "variance"))
    assert times == sorted(times) and variances == sorted(variances, reverse=True)
    code, found = result(capsys, "graph", "compare", *GRAPH, *ON, "--max-variance", "1e-9")
    assert found["bits"][0]["time_s"] is None and "8 bits everywhere" in found["bits"][0]["why"]


def test_a_budget_that_nothing_fits_ends_with_3_and_the_change_that_helps(capsys):
    code, found = result(capsys, "graph", "plan", *GRAPH, *ON, "--max-variance", "1e-9")
    assert code == 3 and found["data"]["least"] > 0 and "--max-variance" in found["hint"]


@pytest.mark.real
def test_plan_and_run(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    code, found = result(capsys, "graph", "plan", *GRAPH, *ON, "--group", "5", "--reassign", "2", "--like", "4", "--out", path)
    assert code == 0 and found["exact"] and found["bound_s"] <= found["bits"][0]["time_s"]
    code, ran = result(capsys, "graph", "run", path, *GRAPH, "--features", "6", "--epochs", "5")
    assert code == 0 and ran["as_planned"] and ran["reassigned"] == [2, 4] and len(ran["losses"]) == 5 and ran["losses"][-1] < ran["losses"][0]
    code, wrong = result(capsys, "graph", "run", path, "rmat:80,520", "--features", "6", "--epochs", "1")
    assert code == 1 and wrong["code"] == "plan-mismatch"
    assert main(["train", "check", path]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["partition", *GRAPH, "--workers", "81"], "80 nodes on 81 workers"), (["plan", *GRAPH, *ON, "--trade", "2"], "from 0 to 1"),
        (["plan", *GRAPH, *ON, "--bits", "3"], "at 3 bits"), (["plan", "rmat:5", *ON], "whole numbers"),
        (["compare", "absent.npz", *ON], "cannot read"),
    ],
)  # fmt: skip
def test_what_is_refused(capsys, words, text):
    code, found = result(capsys, "graph", *words)
    assert code == 2 and text in found["message"]


@pytest.mark.real
def test_the_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        for part in block.split("$ meshwright ")[1:]:
            command, _, shown = part.partition("\n")
            assert main(command.replace("'", "").replace("--epochs 10", "--epochs 1").split()) == 0
            said = capsys.readouterr().out.strip()
            if command.startswith("graph run"):  # losses and seconds are those of the machine
                assert "every channel as planned" in said and "every channel as planned" in shown
            else:
                assert said == shown.strip()
