"""`place plan` and `place compare`: a table with the bound, a plan that other commands take, refusals with their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

FABRIC = """schema = "meshwright.fabric"
version = 1
name = "edge"
[[devices]]
name = "cam"
kind = "cpu"
runs = { camera = "1G" }
[[devices]]
name = "box"
kind = "cpu"
flops = { fp32 = "4GFLOP/s" }
runs = { codec = 1000000000 }
[[links]]
src = "cam"
dst = "box"
rate = "10MB/s"
[[links]]
src = "box"
dst = "cam"
rate = "10MB/s"
"""
TASKS = {
    "schema": "meshwright.tasks", "version": 1, "name": "frames",
    "tasks": [{"name": "shoot", "work": 1e7, "kind": "camera"}, {"name": "pack", "work": 5e6, "kind": "codec"}, {"name": "look", "work": 8e7}],
    "edges": [{"src": "shoot", "dst": "pack", "size_bytes": 100000}, {"src": "shoot", "dst": "look", "size_bytes": 50000}],
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    fabric, tasks = tmp_path / "edge.toml", tmp_path / "frames.json"
    fabric.write_text(FABRIC.replace('"1G"', "1000000000"), encoding="utf-8")
    tasks.write_text(json.dumps(TASKS), encoding="utf-8")
    return str(tasks), str(fabric), str(tmp_path / "plan.json")


def told(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


def test_a_placement_is_planned_checked_and_compared(files, capsys):
    tasks, fabric, out = files
    found = told(capsys, "place", "plan", tasks, "--fabric", fabric, "--evaluations", "200", "--out", out)
    assert found["orders"]["cam"] == ["shoot"] and sorted(found["orders"]["box"]) == ["look", "pack"]
    assert found["strategies"][0]["time_s"] >= found["bound_s"] > 0 and found["plan"] == out
    assert main(["train", "check", out]) == 0 and "placement plan among 2 ranks: ok" in capsys.readouterr().out
    assert main(["cite", out]) == 0
    capsys.readouterr()
    rows = told(capsys, "place", "compare", tasks, "--fabric", fabric, "--evaluations", "200")["strategies"]
    assert {r["strategy"] for r in rows} == {"heft", "cpop", "random-eft", "search", "exact", "giph"} and rows[0]["over_bound"] >= 1
    assert main(["place", "plan", tasks, "--fabric", fabric, "--strategy", "heft"]) == 0
    assert "no schedule is shorter than" in capsys.readouterr().out


def test_the_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, body in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.DOTALL):
        (tmp_path / name).write_text(body, encoding="utf-8")
    compare, plan, fit, moved = re.findall(r"^\$ meshwright (place (?!run).*)$", page, re.MULTILINE)
    shown = page[page.index(plan) + len(plan) + 1 :].partition("```")[0]
    assert main(compare.split()) == 0
    capsys.readouterr()
    assert main(plan.split()) == 0 and capsys.readouterr().out == shown
    pytest.importorskip("torch")
    assert main([*fit.split(), "--updates", "1", "--devices", "3"]) == 0 and main(moved.split()) == 0


def test_a_net_is_trained_and_moves_tasks(files, capsys, tmp_path):
    pytest.importorskip("torch")
    tasks, fabric, out = files
    net = str(tmp_path / "net")
    found = told(capsys, "place", "fit", tasks, "--fabric", fabric, "--updates", "1", "--devices", "3", "--out", net)
    assert found["trained"]["episodes"] == 16 and [c["update"] for c in found["curve"]] == [0, 1]
    moved = told(capsys, "place", "plan", tasks, "--fabric", fabric, "--strategy", "giph", "--net", net, "--evaluations", "30", "--out", out)
    assert moved["strategies"][0]["notes"]["net"] == found["net"] and moved["strategies"][0]["evaluations"] <= 34
    assert main(["train", "check", out]) == 0
    capsys.readouterr()
    rows = told(capsys, "place", "compare", tasks, "--fabric", fabric, "--net", net, "--evaluations", "30")["strategies"]
    assert "needs a trained net" not in str(rows)


def test_a_placement_goes_on_where_it_is(files, capsys):
    tasks, fabric, out = files
    told(capsys, "place", "plan", tasks, "--fabric", fabric, "--evaluations", "200", "--out", out)
    again = told(capsys, "place", "plan", tasks, "--fabric", fabric, "--evaluations", "200", "--from", out, "--done", "shoot")
    assert again["task_count"] == 3 and again["bound_s"] < 0.1 and again["orders"]["cam"] == ["shoot"]
    assert told(capsys, "place", "plan", tasks, "--fabric", fabric, "--from", out, "--evaluations", "200")["task_count"] == 3


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--strategy", "magic"], 2, "there is no strategy 'magic'"), (["--evaluations", "-1"], 2, "--evaluations"), (["--seed", "-1"], 2, "--seed"),
        (["--strategy", "heft", "--evaluations", "5"], 2, "heft looks at no number of schedules"),
        (["--strategy", "giph"], 2, "needs a trained net"), (["--done", "shoot"], 2, "--done"), (["--net", "none"], 2, "cannot read"),
        (["--devices", "cam"], 3, "no device of edge[0] can run task pack"), (["--out", "/nowhere/p.json"], 2, "/nowhere"),
    ],
)  # fmt: skip
def test_refusals(files, capsys, words, code, says):
    tasks, fabric, _ = files
    said = json.dumps(told(capsys, "place", "plan", tasks, "--fabric", fabric, *words, code=code))
    assert says in said
