"""`cluster run`, `audit` and `sandbox`: documents, exit codes, taken up runs, refusals."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from meshwright.cli import main
from meshwright.run.engines.sandbox import PATH, PROGRAMS

ON = ["--fabric", "dgx1-v100:1", "--cores", "8", "--memory", "64GB"]


def told(capsys, *words, code=0):
    assert main([*map(str, words), "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


@pytest.fixture
def queue(tmp_path):
    profile = {"name": "any", "cores": [1], "memory_bytes": [1], "speed": [[1]]}
    jobs = [{"name": n, "gpus": g, "profile": "any", "arrival_s": a, "duration_s": 60} for n, g, a in (("a", 2, 0), ("b", 8, 0), ("c", 1, 6))]
    jobs[0]["command"] = ["true"]
    path = tmp_path / "q.json"
    path.write_text(json.dumps({"schema": "meshwright.queue", "version": 1, "name": "q", "profiles": [profile], "jobs": jobs}), encoding="utf-8")
    return path


@pytest.mark.real
def test_a_run_its_audit_and_the_run_again(tmp_path, capsys, queue):
    words = ["cluster", "run", queue, *ON, "--folder", tmp_path / "run", "--command", "sh -c 'echo {name} {gpus} {duration_s}'", "--speed-up", "60",
             "--per", "server"]  # fmt: skip
    dry = told(capsys, *words, "--dry-run")
    assert dry["starts"] == ["a", "c"] and len(dry["commands"]) == 2 and not (tmp_path / "run").exists()
    made = told(capsys, *words)
    assert [j["code"] for j in made["jobs"]] == [0, 0, 0] and made["differences"] == 0 and made["engine"] == "local"
    assert (tmp_path / "run/jobs/000001/out-1-0.txt").read_text() == "b 8 1.000\n"
    again = told(capsys, *words)
    assert [j["attempts"] for j in again["jobs"]] == [1, 1, 1]
    found = told(capsys, "cluster", "audit", tmp_path / "run")
    assert (found["jobs"], found["attempts"], found["differences"], found["unfinished"]) == (3, 3, [], [])
    for path in (tmp_path / "run/jobs/000001").glob("started*"):
        path.write_text(path.read_text().replace('"ranks": [0]', '"ranks": [1]'))
    found = told(capsys, "cluster", "audit", tmp_path / "run", code=4)
    assert "started ranks [1] on box0" in found["message"] and found["data"]["kinds"] == {"ranks": 1}
    assert main(["cluster", "audit", str(tmp_path / "run")]) == 4 and "decided were [0]" in capsys.readouterr().err


@pytest.mark.real
def test_a_run_whose_job_failed_ends_with_1_and_says_its_code(tmp_path, capsys, queue):
    words = ["cluster", "run", queue, *ON, "--folder", tmp_path / "run", "--command", "sh -c 'exit {gpus}'", "--speed-up", "60", "--per", "server"]
    assert main([*map(str, words)]) == 1
    said = capsys.readouterr().out
    assert "1 of 3 jobs ended well" in said and "failed: b, exit code 8" in said and "failed: c, exit code 1" in said


def test_dry_runs_of_other_engines(tmp_path, capsys, queue):
    words = ["cluster", "run", queue, *ON, "--folder", tmp_path / "run", "--command", "x", "--dry-run", "--engine"]
    assert any("--nodelist=box0" in c for c in told(capsys, *words, "slurm")["commands"])
    said = told(capsys, *words, "kubernetes", "--image", "i:1", "--kind", "jobset", "--local-queue", "q")["commands"]
    assert any('"kind": "JobSet"' in c and "queue-name" in c for c in said)


@pytest.mark.parametrize(("words", "code", "says"), [
    (["--command", ""], 2, "job b has no command"), (["--speed-up", "0"], 2, "--speed-up"), (["--cores", "0"], 2, "--fabric"),
    (["--engine", "kubernetes"], 2, "--image"), (["--engine", "slurm", "--sandbox", "none"], 2, "no sandbox is called"), (["--limit", "5"], 2,
        "--limit"),
    (["--order", "tune"], 2, "no order"), (["--most-passed", "-1"], 2, "--most-passed"), (["--fabric", "dgx1-v100:1", "--memory", "1KB", "--engine",
        "local"], 2, ""),
])  # fmt: skip
def test_refusals(tmp_path, capsys, queue, words, code, says):
    base = ["cluster", "run", queue, *ON, "--folder", tmp_path / "run", "--command", "x"]
    assert says in json.dumps(told(capsys, *base, *words, code=code))


def test_dry_runs_need_servers_and_gangs_that_fit(tmp_path, capsys, queue):
    base = ["cluster", "run", queue, "--folder", tmp_path / "run", "--command", "x"]
    assert "--dry-run" in told(capsys, *base, "--dry-run", "--engine", "slurm", code=2)["where"]
    assert told(capsys, *base, "--engine", "local", code=3)["data"]["largest_fragment"] == 1  # this machine is one server with one GPU
    assert "cannot read" in told(capsys, "cluster", "audit", tmp_path / "none", code=2)["message"]


def test_sandbox_words_and_files_for_a_slurm_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_SANDBOX_DIR", str(tmp_path / "boxes"))
    assert told(capsys, "cluster", "sandbox", "list")["sandboxes"] == [] and main(["cluster", "sandbox", "list"]) == 0
    assert capsys.readouterr().out == "no sandbox\n"
    made = told(capsys, "cluster", "sandbox", "files", "slurm", "--fabric", "dgx-a100:2", "--out", tmp_path, "--partition", "gpu")
    assert made["files"] == ["job_submit.lua", "topology.conf"] and "Nodes=" in (tmp_path / "topology.conf").read_text()
    assert '"gpu"' in (tmp_path / "job_submit.lua").read_text()
    for words, says in (
        (["up", "pbs"], "WHAT"), (["up", "ray", "--hold-others"], "holds no jobs"), (["down"], "NAME"), (["down", "none"], "no sandbox is called"),
        (["files", "slurm"], "--out FOLDER"),
    ):
        said = told(capsys, "cluster", "sandbox", *words, code=2)
        assert says in json.dumps(said)


@pytest.mark.real
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(p, path=PATH) for p in PROGRAMS), reason="needs root and Slurm (slurmctld slurmd slurm-client munge)"
)
def test_a_sandbox_goes_up_runs_a_queue_and_comes_down(tmp_path, capsys, queue):
    made = told(capsys, "cluster", "sandbox", "up", "slurm", "--nodes", "2", "--memory", "1GiB", "--hold-others")
    name = made["sandbox"]["name"]
    try:
        assert [s["name"] for s in told(capsys, "cluster", "sandbox", "list")["sandboxes"]].count(name) == 1
        assert main(["cluster", "sandbox", "list"]) == 0 and f"{name}: slurm, 2 nodes of 4 GPUs" in capsys.readouterr().out
        words = ["cluster", "run", queue, "--engine", "slurm", "--sandbox", name, "--folder", tmp_path / "run", "--command", "true", "--speed-up",
            "60"]
        assert [j["code"] for j in told(capsys, *words)["jobs"]] == [0, 0, 0]
        assert main(["cluster", "audit", str(tmp_path / "run")]) == 0 and "picks the GPUs within a server" in capsys.readouterr().out
    finally:
        assert told(capsys, "cluster", "sandbox", "down", name)["name"] == name
