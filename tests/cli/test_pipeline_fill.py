"""`pipeline fill`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.check import check_plan
from meshwright.cli.frame import main
from meshwright.drive.plans import read_plan
from meshwright.errors import FormatError, UsageError
from meshwright.io.plan.fill import read_fill_work

KFAC = ["--work", "kfac", "--curvature-s", "0.5", "--inverse-s", "1.5", "--layers", "6"]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "p.json")
    assert main(["pipeline", "plan", "--stages", "4", "--microbatches", "4", "--strategy", "1f1b", "-o", path]) == 0
    capsys.readouterr()
    return path


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    seen = capsys.readouterr()
    return seen.err if code else seen.out


def test_fill_and_trace(plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "f.json")
    text = output(capsys, "pipeline", "fill", plan, *KFAC, "--precondition-s", "0.2", "-o", out)
    assert "1f1b: 80 items" in text and "21 s without the work, 21 s with it; then 200 ms of preconditioning" in text and "12 inverse" in text
    document = json.loads(output(capsys, "pipeline", "fill", plan, *KFAC, "-o", out, "--json"))
    assert document["steps"] >= document["bound_steps"] and max(document["makespans_s"]) == document["step_s"] == 21
    assert document["used_after"] > document["used_before"] and len(document["ranks"]) == 4
    filled = read_plan(out)
    assert check_plan(filled).ok
    trace = str(tmp_path / "t.json")
    output(capsys, "pipeline", "export", out, "--format", "trace", "-o", trace)
    assert "fill:inverse" in Path(trace).read_text() or "curvature" in Path(trace).read_text()
    assert "no step 99" in output(capsys, "pipeline", "export", out, "--format", "trace", "--step", "99", "-o", trace, code=2)
    assert "filled already" in output(capsys, "pipeline", "fill", out, *KFAC, "-o", out, code=2)


@pytest.mark.parametrize(
    "words",
    [["--work", "shampoo", "--statistics-s", "0.2", "--roots-s", "0.6"], ["--work", "muon", "--orthogonalise-s", "0.5"],
     ["--work", "checkpoint", "--write-s", "5", "--snapshot-s", "0.1", "--piece-s", "0.5"], ["--work", "evaluate", "--evaluations", "2"],
     [*KFAC, "--work", "evaluate", "--evaluations", "1"]],
)  # fmt: skip
def test_every_kind_of_work(plan: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = output(capsys, "pipeline", "fill", plan, *words, "-o", str(tmp_path / "f.json"))
    assert "written: " in text and {"kfac": "curvature", "checkpoint": "write"}.get(words[1], words[1]) in text


def test_a_file_of_work(plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    work = tmp_path / "work.json"
    item = {"name": "hash", "kind": "checksum", "duration_s": 2.0, "ranks": [0, 3], "actions": [[0, "0B3"]], "piece_s": 0.5}
    work.write_text(json.dumps({"schema": "meshwright.fill-work", "version": 1, "items": [item]}))
    assert "checksum" in output(capsys, "pipeline", "fill", plan, "--work", str(work), "-o", str(tmp_path / "f.json"))
    work.write_text(json.dumps({"schema": "meshwright.fill-work", "version": 1, "items": []}))
    assert "no item" in output(capsys, "pipeline", "fill", plan, "--work", str(work), "-o", str(tmp_path / "f.json"), code=1)
    for bad, says in (({**item, "name": ""}, "not be empty"), ({**item, "keeps_bytes": -1}, "must be >= 0"), ({**item, "x": 1}, "x")):
        work.write_text(json.dumps({"schema": "meshwright.fill-work", "version": 1, "items": [bad]}))
        with pytest.raises(FormatError, match=says):
            read_fill_work(work)
    work.write_text(json.dumps({"schema": "meshwright.fill-work", "version": 1, "items": [item], "exposed_s": [-1.0]}))
    with pytest.raises(FormatError, match="must be >= 0"):
        read_fill_work(work)
    with pytest.raises(UsageError):
        read_fill_work(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--work", "kfac"], "needs --curvature-s", 2), (["--work", "nothing"], "no work 'nothing'", 2), ([*KFAC, "--margin", "-1"], "margin", 2),
        (["--work", "muon", "--orthogonalise-s", "x"], "not a number", 2), (["--work", "muon", "--orthogonalise-s", "500"], "at a stretch", 3),
        ([*KFAC, "--most-steps", "1"], "does not fit within 1 steps", 3),
    ],
)  # fmt: skip
def test_what_is_refused(plan: str, words: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert says in output(capsys, "pipeline", "fill", plan, *words, "-o", str(tmp_path / "f.json"), code=code)
    assert not (tmp_path / "f.json").exists()


def test_a_damaged_problem_is_refused(plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(Path(plan).read_text())
    document["job"]["problem"]["nonsense"] = 1
    Path(plan).write_text(json.dumps(document))
    assert "is no problem" in output(capsys, "pipeline", "fill", plan, *KFAC, "-o", str(tmp_path / "f.json"), code=1)


def test_the_authors_greedy_and_their_profiles(plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """1F1B, F = 1, B = 2: a device idles 9 s in a step of 21 s; the work of a refresh is 3.5 s."""
    out = str(tmp_path / "f.json")
    found = json.loads(output(capsys, "pipeline", "fill", plan, *KFAC, "-o", out, "--compat", "--json"))["published_greedy"]
    assert [g["exposed_s"] for g in found] == [0.0] * 4
    assert all(g["used"] == pytest.approx((12 * g["steps"] + 3.5) / (21 * g["steps"])) for g in found)
    assert "rank 3: " in output(capsys, "pipeline", "fill", plan, *KFAC, "-o", out, "--compat")
    csv = tmp_path / "block.csv"
    csv.write_text(
        "bs,time_f,time_b,time_kron,time_inv,time_prec,mem_param,mem_act,mem_peak_err,mem_save_err,mem_kron\n"
        "32,9.748,16.45,25.547,71.667,6.805,39.1,264.06,145.05,108.0,94.5\n"
    )
    rows = json.loads(output(capsys, "pipeline", "fill", "--profile", str(csv), "--depths", "4", "--json"))["rows"]
    assert [r["refresh_steps"] for r in rows] == [3, 2, 6, 4]
    assert "chimera recompute" in output(capsys, "pipeline", "fill", "--profile", str(csv))
    assert "--depths" in output(capsys, "pipeline", "fill", "--profile", str(csv), "--depths", "1", code=2)
    assert "needs a plan" in output(capsys, "pipeline", "fill", code=2)
