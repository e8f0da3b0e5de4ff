"""Ctrl-C in the searches of tables, tasks, experts, graphs, clusters and wirings: the best so far, which is said, and exit code 130."""

from __future__ import annotations

import importlib
import json
import os
import signal

import pytest

from meshwright.cli import main

TASKS = {
    "schema": "meshwright.tasks", "version": 1, "name": "t", "tasks": [{"name": "a", "work": 1e6}, {"name": "b", "work": 1e6}],
    "edges": [{"src": "a", "dst": "b", "size_bytes": 8}],
}  # fmt: skip
TABLES = {"schema": "meshwright.tables", "version": 1, "name": "t", "batch": 64, "tables": [{"name": "u", "rows": 100, "dim": 16}]}
SERVERS = ("--fabric", "dgx1-v100:1", "--cores", "24", "--memory", "500GB")
GRAPH, WORKERS = ("rmat:200,800", "--method", "own"), ("--fabric", "laptop:2")
VMS = "vms:hosts=4,days=2,before_days=1,warm_days=1,load=0.5,owners=9,seed=1"


def rows(field):
    return lambda document: len(document[field])


# What the key ends, where in it the key is pressed (module, name), how many results there are then.
CASES = {
    "place compare": (["tasks.json", "--fabric", "two-islands:1"], "drive.place", "simulated_s", rows("strategies"), 1),
    "place plan": (["tasks.json", "--fabric", "two-islands:1", "--strategy", "search"], "decide.place.search", "timed", rows("strategies"), 1),
    "tables compare": (["tables.json", "--fabric", "laptop:2"], "decide.tables.neuroshard", "greedy", rows("strategies"), 1),
    "experts compare": (
        ["--fabric", "laptop:2", "--experts", "2", "--model-dim", "8", "--inner", "8", "--capacities", "8", "--degrees", "1"],
        "drive.experts.plan", "_time_s", lambda document: len(document["capacities"][0]), 1,
    ),
    "cluster compare": (["synthetic:jobs=2,per_hour=9,seed=1", *SERVERS, "--orders", "fifo,srtf", "--allocations", "proportional"],
                        "drive.cluster", "measures", rows("rows"), 1),
    "cluster compare, machines": ([VMS, "--warm-up", "1d", "--strategies", "first-fit,best-fit"], "drive.vms", "simulate_vms", rows("rows"), 1),
    "graph plan, parts": ([*GRAPH, *WORKERS], "decide.traffic.adaqp.partition", "_coarser", rows("bits"), 1),
    "graph plan, bits": ([*GRAPH, *WORKERS], "drive.halo", "_simulated_s", rows("bits"), 1),
    "graph compare": ([*GRAPH, *WORKERS], "drive.halo", "_simulated_s", rows("bits"), 1),
    "graph partition": ([*GRAPH, "--workers", "2"], "decide.traffic.adaqp.partition", "_first", rows("workers"), 2),
    "fabric design": (["--nodes", "9", "--ports", "4"], "decide.topology.directconnect.cayley", "groups", rows("designs"), 1),
}  # fmt: skip


@pytest.fixture
def pressed(monkeypatch):
    """At the first call of a function the key is pressed; the call then goes on."""

    def press(module: str, name: str) -> None:
        owner = importlib.import_module(f"meshwright.{module}")
        real, times = getattr(owner, name), []

        def wrapped(*args, **options):
            if not times:
                times.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    return press


@pytest.mark.parametrize("case", CASES)
def test_the_best_so_far_is_given(case, pressed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.json").write_text(json.dumps(TASKS))
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    words, module, name, count, expected = CASES[case]
    pressed(module, name)
    assert main([*case.partition(",")[0].split(), *words, "--json"]) == 130
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert count(document) == expected and document["cut"]["interrupted"] is True and "this is the best so far" in said.err


def test_a_queue_that_is_interrupted_says_how_far_it_was(pressed, capsys):
    pressed("drive.cluster", "ranking")
    assert main(["cluster", "simulate", "synthetic:jobs=2,per_hour=1,seed=1", *SERVERS]) == 130
    assert "of 2 jobs had ended" in capsys.readouterr().err


def test_training_that_is_interrupted_keeps_the_best_net(pressed, tmp_path, capsys):
    pytest.importorskip("torch", reason="training needs torch")
    pressed("decide.place.giph.train", "_learn")
    out = tmp_path / "net.safetensors"
    assert main(["place", "fit", "--updates", "50", "--devices", "3", "--out", str(out), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["trained"]["updates"] == 1 and out.stat().st_size > 0
