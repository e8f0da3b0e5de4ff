"""`fabric design` and `fabric allocate`: rows, files that other commands take, refusals with their exit codes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.cli import main

JOBS = """schema = "meshwright.board-jobs"
version = 1
[[jobs]]
name = "a"
rows = 2
columns = 2
duration_s = 5
[[jobs]]
name = "b"
rows = 1
columns = 3
arrival_s = 1
duration_s = 2
"""


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


def test_a_wiring_is_designed_written_and_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "pod.toml", tmp_path / "pod.csv", tmp_path / "pod.dot"]
    words = ["--row", "1", "--out", str(files[0]), "--cables", str(files[1]), "--dot", str(files[2])]
    found = told(capsys, "fabric", "design", "--nodes", "8", "--ports", "2", "--evaluations", "200", "--rate", "1GB/s", *words)
    best = found["designs"][0]
    assert (best["steps"], best["factor"], best["factor_bound"]) == (3, "7/8", "7/8") and best["check"]["all-gather"]["status"] == "ok"
    assert all(file.stat().st_size for file in files) and found["files"] == [str(f) for f in files]
    plan = told(
        capsys, "collective", "plan", "all-gather", "--fabric", str(files[0]), "--size", "1MB", "--strategy", "bfb", "--out", str(tmp_path / "p.json")
    )
    assert plan["ratio"] < 1.01
    assert main(["collective", "check", str(tmp_path / "p.json")]) == 0
    assert main(["fabric", "design", "--nodes", "8", "--ports", "2", "--evaluations", "0"]) == 0
    assert "at least 3 steps" in capsys.readouterr().out


def test_networks_are_compared_and_one_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text('schema = "meshwright.network-job"\nversion = 1\nall_to_all_bytes = 1000\n', encoding="utf-8")
    out = tmp_path / "net.json"
    found = told(capsys, "fabric", "design", "--accelerators", "64", "--job", str(job), "--out", str(out))
    assert found["designs"][0]["usd_seconds"] <= found["designs"][-1]["usd_seconds"] and json.loads(out.read_text(encoding="utf-8"))["devices"]
    assert main(["fabric", "design", "--accelerators", "64"]) == 0 and "Hx4Mesh 2x2" in capsys.readouterr().out
    assert told(capsys, "fabric", "design", "--accelerators", "64", "--budget", "5", code=3)["data"]["usd"] > 5


def test_times_are_simulated_or_follow_from_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Networks: never below the least time. Wirings: of a job that only sums up, breadth-first all-reduces as the rows say, simulated alike."""
    rows = told(capsys, "fabric", "design", "--accelerators", "16", "--simulate")["designs"]
    assert all(row["time_s"] <= row["simulated_s"] < 1.25 * row["time_s"] for row in rows)
    assert [row["usd_seconds"] for row in rows] == sorted(row["usd"] * row["simulated_s"] for row in rows)
    job = tmp_path / "job.toml"
    job.write_text('schema = "meshwright.network-job"\nversion = 1\nall_reduce_bytes = 800000000\n', encoding="utf-8")
    words = ["fabric", "design", "--nodes", "8", "--ports", "2", "--evaluations", "20", "--job", str(job), "--latency", "0s"]
    exact, simulated = (told(capsys, *words, *more)["designs"] for more in ([], ["--simulate"]))
    for row, other in zip(exact, simulated, strict=True):
        factors = [Fraction(row["directions"][op]["factor"]) for op in ("all-gather", "reduce-scatter")]
        assert row["time_s"] == pytest.approx(float(sum(factors)) * 0.8e9 / 100e9) and other["time_s"] == pytest.approx(row["time_s"], rel=0.02)
    assert main([*words, "--budget", "1000000"]) == 0 and "$ x s" in capsys.readouterr().out
    assert told(capsys, *words, "--budget", "5", code=3)["data"]["usd"] > 5


def test_jobs_are_placed_moved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "fabric", "allocate", "--boards", "3x3", "--failed", "0.0", "--job", "2x3", "--job", "1x1")
    assert found["jobs"][0]["rows"] == [1, 2] or len(found["jobs"][0]["columns"]) == 2
    refused = told(capsys, "fabric", "allocate", "--boards", "2x2", "--failed", "0.1", "--job", "2x2", code=3)
    assert refused["data"]["nearest"] in ([1, 2], [2, 1])
    assert main(["fabric", "allocate", "--boards", "3x3", "--job", "1x2", "--job", "2x2", "--move"]) == 0
    assert "job2: rows" in capsys.readouterr().out
    mix = tmp_path / "mix.toml"
    mix.write_text(JOBS, encoding="utf-8")
    rows = told(capsys, "fabric", "allocate", "--boards", "3x3", "--mix", str(mix))["policies"]
    assert rows[0]["utilisation"] == max(row["utilisation"] for row in rows) and len(rows[0]["jobs"]) == 2
    assert main(["fabric", "allocate", "--boards", "3x3", "--mix", str(mix)]) == 0


WRONG = [
    "design --nodes 8", "design", "design --nodes 8 --ports 2 --accelerators 8", "design --nodes 4 --ports 4",
    "design --accelerators 5000 --simulate",
    "design --nodes 8 --ports 2 --evaluations 9 --row 99", "design --accelerators 8 --rate fast", "design --accelerators 1",
    "allocate --boards 2y2 --job 1x1", "allocate --boards 2x2", "allocate --boards 2x2 --failed 7 --job 1x1", "allocate --boards 99x2 --job 1x1",
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", *words.split()]) == 2
    said = capsys.readouterr()
    assert "error: " in said.err and "hint: " in said.err and "bug" not in said.err


def test_a_wiring_grows_and_says_what_moves_and_a_rule_becomes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod, moves, rule = (str(tmp_path / name) for name in ("pod.toml", "moves.csv", "rule.json"))
    first = told(capsys, "fabric", "design", "--nodes", "8", "--ports", "2", "--evaluations", "50", "--out", pod, "--schedule", rule, "--size", "1MB")
    assert first["files"] == [pod, rule] and 0 < first["designs"][-1]["all_to_all"] <= 1
    assert main(["collective", "check", rule]) == 0
    capsys.readouterr()
    grown = told(capsys, "fabric", "design", "--nodes", "9", "--ports", "2", "--grow", pod, "--moves", moves, "--evaluations", "20")["designs"][-1]
    rows = Path(moves).read_text(encoding="utf-8").splitlines()
    assert rows[0] == "do,from,to" and grown["unplugged"] == sum(row.startswith("unplug,") for row in rows) == 2 and grown["plugged"] == 4
    assert main(["fabric", "design", "--nodes", "9", "--ports", "2", "--grow", pod, "--evaluations", "5"]) == 0
    assert "   out     in  wiring" in capsys.readouterr().out
    limited = told(capsys, "fabric", "design", "--nodes", "8", "--ports", "4", "--peers", "2", "--evaluations", "50")["designs"][-1]
    assert limited["peers"] == 2 and limited["parallel"] >= 2


def test_options_of_the_other_question_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wired, grown = ("--nodes", "8", "--ports", "2"), ("--nodes", "9", "--ports", "2", "--grow", "x.toml")
    for words, said in (
        ((*wired, "--moves", "m.csv"), "--moves: belongs to --grow"),
        ((*grown, "--peers", "2"), "--peers: belongs to designs without --grow"), ((*wired, "--size", "much"), "--rate, --latency, --size"),
        (("--accelerators", "64", "--grow", "x.toml"), "--grow: belongs to --nodes"),
    ):  # fmt: skip
        assert main(["fabric", "design", *words]) == 2
        assert said in capsys.readouterr().err
