"""`train replan` on the command line: the answer, the plan it writes, and what it refuses; `memory plan` names what would fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from captured import captured
from meshwright.cli import main
from meshwright.drive.plans import read_fabric, read_plan, write_plan
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.io.model.graph import write_graph
from meshwright.job import Training

MODEL = "examples/gpt.py:tiny"


@cache
def graph():
    return captured(MODEL)


@cache
def stages():
    job = Training(model=MODEL, global_batch=8)
    return plan_training(job, read_fabric("laptop:2"), graph=graph(), wishes=(LayoutWanted(data=1, tensor=1, pipeline=2), CollectivesWanted("ring")))


@cache
def replicas():
    job = Training(model=MODEL, global_batch=8)
    return plan_training(job, read_fabric("laptop:2"), graph=graph(), wishes=(LayoutWanted(data=2, tensor=1, pipeline=1), CollectivesWanted("ring")))


@pytest.fixture
def files(tmp_path: Path):
    write_graph(tmp_path / "graph.json", graph())
    write_plan(tmp_path / "replicas.json", replicas())
    write_plan(tmp_path / "stages.json", stages())
    return tmp_path


def test_a_replica_is_lost(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = replicas().placement[1]
    words = ["train", "replan", str(files / "replicas.json"), "--without", lost, "--graph", str(files / "graph.json"), "-o", str(files / "new.json")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "restart      0" in text and "reused in place" in text and "no candidate restarts faster" in text
    assert main([*words, "--json", "--steps-left", "100"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.train.replan" and document["candidates"][0]["received_bytes"] == 0
    made = read_plan(files / "new.json")
    assert made.placement == (replicas().placement[0],)
    assert made.decisions["restart"]["options"]["without"] == [lost] and made.decisions["restart"]["options"]["steps_left"] == 100


def test_what_nobody_else_has_ends_with_exit_3(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "replan", str(files / "stages.json"), "--graph", str(files / "graph.json"), "-o", str(files / "new.json")]
    lost = stages().placement[1]
    assert main([*words, "--without", lost]) == 3
    assert f"only rank 1 ({lost}) had them" in capsys.readouterr().err
    assert not (files / "new.json").exists()
    assert main([*words, "--without", lost, "--checkpoint", str(files)]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main([*words, "--without", lost, "--storage-rate", "quick"]) == 2
    assert "--storage-rate" in capsys.readouterr().err
    assert main(words) == 2
    assert "no device is lost" in capsys.readouterr().err


def test_memory_plan_names_what_would_fit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", str(files / "graph.json"), "--strategy", "none", "--json"]
    assert main([*words, "--budget", "900kB"]) == 3
    changes = {c["kind"]: c for c in json.loads(capsys.readouterr().err)["data"]["changes"]}
    assert main([*words, "--budget", f"{changes['budget']['value']}B"]) == 0
    assert main([*words, "--budget", f"{changes['budget']['value'] - 1}B"]) == 3
    capsys.readouterr()
    if "layers" in changes:
        assert main([*words, "--budget", "900kB", "--layers", str(changes["layers"]["value"])]) == 0
    if "micro-batch" in changes:
        assert main([*words, "--budget", "900kB", "--batch", str(changes["micro-batch"]["value"])]) == 0
