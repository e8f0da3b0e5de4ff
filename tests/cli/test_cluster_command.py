"""`cluster plan`, `simulate` and `compare`: the page, documents, files, refusals with their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

ON = ["--fabric", "dgx1-v100:2", "--cores", "24", "--memory", "500GB"]
QUEUE = "synthetic:jobs=12,per_hour=20,seed=1"


def told(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


def test_the_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "queues.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, body in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.DOTALL):
        (tmp_path / name).write_text(body, encoding="utf-8")
    shown = [(command, said) for command, said in re.findall(r"^\$ meshwright (.*)\n((?:(?!\$ |```).*\n)*)", page, re.MULTILINE) if said]
    assert len(shown) == 2
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == output, command


def test_plans_and_runs_are_documents(tmp_path, capsys):
    out, jobs, queue = tmp_path / "a.json", tmp_path / "jobs.csv", tmp_path / "q.json"
    plan = told(capsys, "cluster", "plan", QUEUE, *ON, "--bound", "fillings", "--out", str(out))
    assert plan["ratio"] > 0.9 and plan["gpus"] <= 16 and json.loads(out.read_text()) == plan["allocation"]
    run = told(capsys, "cluster", "simulate", QUEUE, *ON, "--count", "2-9", "--export", str(queue), "--jobs-out", str(jobs), "--move", "60s")
    assert run["jobs"] == 8 and run["below_floor"] == 0 and run["unfinished"] == 0 and len(jobs.read_text().splitlines()) == 13
    rows = told(capsys, "cluster", "compare", str(queue), *ON, "--orders", "drf,tetris", "--allocations", "opt,priced", "--failures",
        "100h",
                "--checkpoint", "10min")["rows"]  # fmt: skip
    assert len(rows) == 4 and all(r["unfinished"] == 0 for r in rows)
    assert main(["cluster", "simulate", QUEUE, *ON, "--split", "0,100,0"]) == 0
    assert "below floor" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code", "says"), [
    (["--allocation", "magic"], 2, "no allocation 'magic'"), (["--order", "tune"], 2, "no order 'tune'"), (["--seed", "-1"], 2, "--seed"),
    (["--split", "a,b"], 2, "--split"), (["--split", "1,2"], 2, "split"), (["--count", "5"], 2, "--count"), (["--count", "0-99"], 2, "--count"),
    (["--round", "0s"], 2, "--round"), (["--round", "5"], 2, "--round"), (["--move", "x"], 2, "--move"), (["--failures", "1s"], 2, "--failures"),
    (["--age", "-1"], 2, "--age"), (["--memory", "5"], 2, "--memory"), (["--cores", "0"], 2, "--cores"), (["--cores", "4"], 2,
        "no speed at the proportional"),
    (["--jobs-out", "/nowhere/j.csv"], 2, "/nowhere"), (["--fabric", "laptop:2"], 2, "no GPUs in servers"),
])  # fmt: skip
def test_refusals(capsys, words, code, says):
    assert says in json.dumps(told(capsys, "cluster", "simulate", QUEUE, *ON, *words, code=code))


def queue_of(path, *, cores, speed, gpus=1):
    profile = {"name": "p", "cores": cores, "memory_bytes": [1], "speed": [[x] for x in speed]}
    job = {"name": "one", "gpus": gpus, "profile": "p", "arrival_s": 0, "duration_s": 600}
    path.write_text(json.dumps({"schema": "meshwright.queue", "version": 1, "profiles": [profile], "jobs": [job]}), encoding="utf-8")
    return str(path)


def test_a_profile_without_a_speed_at_the_share_is_refused_by_every_allocation(tmp_path, capsys):
    """Proportional shares are not planned by options: the job had no speed, and the simulation did not end."""
    name = queue_of(tmp_path / "q.json", cores=[4], speed=[1.2])
    for words in (["plan", "--allocation", "proportional"], ["simulate", "--allocation", "proportional"],
                  ["compare", "--allocations", "proportional,priced"]):  # fmt: skip
        said = told(capsys, "cluster", words[0], name, *ON, *words[1:], code=2)
        assert "no speed at the proportional share, 3 cores" in said["message"] and "8 GPUs" in said["where"]
    # 20 cores: a share of eight GPUs is 2.5 each, of a part with fewer 2
    name = queue_of(tmp_path / "q.json", cores=[2.5], speed=[1], gpus=12)
    said = told(capsys, "cluster", "simulate", name, *ON, "--cores", "20", "--allocation", "proportional")
    assert said["unfinished"] == 0
    name = queue_of(tmp_path / "q.json", cores=[2.5], speed=[1], gpus=9)
    said = told(capsys, "cluster", "simulate", name, *ON, "--cores", "20", "--allocation", "proportional", code=2)
    assert "job one has" in said["message"] and "no speed there" in said["message"]


def test_shares_are_worth_what_the_profile_says(tmp_path, capsys):
    """A profile that was measured with less than the share: 0.7 is its speed there, not 1."""
    name = queue_of(tmp_path / "q.json", cores=[1, 2], speed=[0.4, 0.7], gpus=2)
    assert main(["cluster", "plan", name, *ON]) == 0
    assert "GPUs x speed 1.40, 1.000 of the bound 1.40 (speed); proportional shares give 1.4; nobody" in capsys.readouterr().out


def test_a_queue_without_jobs_is_an_empty_round_and_nothing_to_simulate(tmp_path, capsys):
    queue = tmp_path / "q.json"
    queue_of(queue, cores=[1], speed=[1.0])
    document = json.loads(queue.read_text(encoding="utf-8")) | {"jobs": []}  # as `cluster profile --out` writes it
    queue.write_text(json.dumps(document), encoding="utf-8")
    for allocation in ("priced", "tune", "opt", "greedy", "proportional"):
        plan = told(capsys, "cluster", "plan", str(queue), *ON, "--allocation", allocation, "--bound", "fillings")
        assert plan["gpus"] == 0 and plan["allocation"]["given"] == [], allocation
    for command in ("simulate", "compare"):
        assert told(capsys, "cluster", command, str(queue), *ON, code=2)["message"] == "the queue has no jobs"


def test_impossible_gangs_end_with_exit_code_3(tmp_path, capsys):
    queue = tmp_path / "q.json"
    profile = {"name": "p", "cores": [1], "memory_bytes": [1], "speed": [[1]]}
    job = {"name": "big", "gpus": 9, "profile": "p", "arrival_s": 0, "duration_s": 1, "together": True}
    queue.write_text(json.dumps({"schema": "meshwright.queue", "version": 1, "profiles": [profile], "jobs": [job]}), encoding="utf-8")
    for verb in ("plan", "simulate", "compare"):
        said = told(capsys, "cluster", verb, str(queue), *ON, code=3)
        assert said["data"]["fragments"] == {"8": 2} and "big" in said["message"]
