"""Breakdowns and differences of our own run folders: modules and steps by name, sums that add up, a planted slow module first."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.lanes import Kind
from meshwright.cli.frame import main
from meshwright.compare.own_run import plain_steps, run_views
from meshwright.compare.run import compare_run
from meshwright.errors import FormatError, UsageError
from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import Prediction
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.run_folder import read_run, run_plan
from meshwright.run.launch.train_run import train_run
from meshwright.run.recording.recording import RankRecording, plan_identity

sys.path.insert(0, str(Path(__file__).parent.parent / "run"))
from rig import make_plan

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks, eight steps, calibrated; the plan lies beside the run."""
    path = tmp_path_factory.mktemp("own")
    plan = replace(make_plan((2, 1, 1), global_batch=4), prediction=Prediction(time_s=0.01, target_fabric="laptop:2"))
    write_plan(path / "plan.json", plan)
    train_run(plan, RunRequest(out=path / "run", steps=8, data="synthetic"))
    return path, plan


def test_pieces_are_the_recording(folder):
    path, plan = folder
    views, one_clock = run_views(plan, path / "run")
    run = read_run(path / "run", plan)
    chosen = plain_steps(run)
    assert one_clock and chosen == [2, 3, 4, 5, 6, 7]
    for view, recording in zip(views, run.recordings, strict=True):
        host = view.host
        assert (host.start[1:] == host.end[:-1]).all()
        records = [recording.steps[i] for i in chosen]
        assert int(host.start[0]) == round(records[0].start_s * 1e9) and int(host.end[-1]) == round(records[-1].end_s * 1e9)
        length = host.end - host.start
        loading = sum(r.data_end_s - r.start_s for r in records)
        assert int(length[host.kind == Kind.DATA].sum()) == pytest.approx(loading * 1e9, abs=200)
        attention = view.modules.index("blocks.0.attention.qkv")
        assert 0 < int(length[host.module == attention].sum()) < 0.5 * int(length.sum())
        assert len(view.meetings) and set(np.unique(host.meeting)) - {-1}


def test_breakdown_and_diff_of_a_run(folder, capsys):
    path, _ = folder
    run, plan = str(path / "run"), str(path / "plan.json")
    assert main(["trace", "breakdown", run, "--plan", plan, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == 6 and {r["rank"] for r in document["ranks"]} == {0, 1}
    assert all(r["stages"]["backward"]["compute_s"] > 0 and r["clock_shift_s"] == 0 for r in document["ranks"])
    assert main(["trace", "diff", plan, run, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["joined_by"] == "steps"
    assert predicted["delta_s"] == pytest.approx(sum(c["delta_s"] for c in predicted["changes"]))
    assert any("(F s0.0 micro-batch 0)" in c["path"][-1] and c["a_s"] > 0 and c["b_s"] > 0 for c in predicted["changes"])
    assert main(["trace", "diff", run, run, "--plan", plan, "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["delta_s"] == 0 and all(c["delta_s"] == 0 for c in same["changes"])
    assert main(["trace", "breakdown", run, "--json"]) == 0  # by the plan that the folder holds
    assert json.loads(capsys.readouterr().out) == document
    assert main(["trace", "diff", run, run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == same
    assert main(["trace", "breakdown", run, run, "--plan", plan]) == 2
    assert "a folder holds all ranks of its run" in capsys.readouterr().err
    assert main(["trace", "breakdown", run, "--plan", plan, "--modules", plan, "--model", "x:y"]) == 2


def test_a_run_folder_holds_its_plan(folder, tmp_path, capsys):
    path, plan = folder
    assert plan_identity(run_plan(path / "run")) == plan_identity(plan)
    assert (path / "run" / "plan.json").read_bytes() == (path / "plan.json").read_bytes()
    page = tmp_path / "page.html"
    assert main(["report", str(path / "run"), "-o", str(page), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == str(path / "run") and document["plan"] == str(path / "run" / "plan.json")
    thread = read_run(path / "run", plan).cost.thread
    assert thread.waits_in == (f"{plan.layout.segments[-1].key}|F",) and thread.begin_wait_s > 0, "the loss waits for the others' counts"
    comparison, _ = compare_run(plan, path / "run")
    for rank in comparison.measured_phases:  # the phases of the step that the summary names
        assert sum(rank.values()) == pytest.approx(comparison.measured_step_s)
    assert comparison.measured_step_s == pytest.approx(np.median([t.makespan_s for t in comparison.measured.steps[2:]]))
    assert "median step measured on" in page.read_text()
    assert main(["report", str(path / "run"), str(path / "run"), "-o", str(page)]) == 0  # two runs, side by side
    other = rewritten(path, "without", lambda recording: None)
    (other / "plan.json").unlink()
    for words in (["report", str(other), "-o", str(page)], ["trace", "breakdown", str(other)], ["trace", "diff", str(path / "run"), str(other)]):
        assert main(words) == 2
        assert "does not hold the plan" in capsys.readouterr().err
    another = make_plan((1, 1, 2), global_batch=4)
    write_plan(other / "plan.json", another)
    with pytest.raises(FormatError, match="is not the plan that this folder's"):
        run_plan(other)
    document = json.loads((other / "run.json").read_bytes())
    (other / "run.json").write_text(json.dumps({**document, "plan": plan_identity(another)}))
    assert main(["trace", "diff", str(path / "run"), str(other), "--by", "steps"]) == 2
    assert "are of different plans" in capsys.readouterr().err
    with pytest.raises(UsageError, match="not a run folder"):
        run_plan(tmp_path)


def rewritten(path, folder_name, change):
    """A copy of the run whose recordings `change` edits."""
    target = path / folder_name
    target.mkdir(exist_ok=True)
    for file in (path / "run").glob("*.json"):
        data = file.read_bytes()
        if file.name.startswith("rank-"):
            recording = msgspec.json.decode(data, type=RankRecording)
            change(recording)
            data = msgspec.json.encode(recording)
        (target / file.name).write_bytes(data)
    return target


def test_a_module_slower_than_its_siblings_comes_first(folder):
    path, plan = folder
    number = {}

    def slower(recording):
        """blocks.2.mlp.down takes 400 ms more, forward, in every step; everything after it is later."""
        number.setdefault("run", next(i for i, m in enumerate(recording.module_runs) if m.module == "blocks.2.mlp.down" and not m.backward))
        late = 0.0
        for s in recording.steps:
            if number["run"] not in s.marks:
                continue
            at = s.marks_s[s.marks.index(number["run"])]

            def moved(t, at=at, late=late):
                return t + late + (0.4 if t > at else 0.0)

            s.start_s, s.data_end_s = moved(s.start_s), moved(s.data_end_s)
            s.starts_s, s.ends_s, s.marks_s = ([moved(t) for t in column] for column in (s.starts_s, s.ends_s, s.marks_s))
            s.end_s = moved(s.end_s)
            late += 0.4

    views, one_clock = run_views(plan, rewritten(path, "slower", slower))
    first = break_down(views, one_clock=one_clock).causes[0]
    assert (first.kind, first.where) == ("slow module", "module blocks.2.mlp.down")


def test_a_run_without_plain_steps_is_refused(folder):
    path, plan = folder

    def disturbed(recording):
        for s in recording.steps:
            s.profiled = True

    with pytest.raises(UsageError, match="no step that was not slowed"):
        run_views(plan, rewritten(path, "disturbed", disturbed))
