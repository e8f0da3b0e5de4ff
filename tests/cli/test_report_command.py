"""`meshwright report`: what it writes, says and refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bottleneck"))
from cuda_traces import Settings, write_ranks

from meshwright.cli.frame import main
from meshwright.compare.diff import kind_of
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.program.hash import program_hash


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_pipeline(PipelineProblem.of(2, 4), "gpipe")


@pytest.fixture
def file(tmp_path: Path, plan: Plan) -> Path:
    write_plan(tmp_path / "plan.json", plan)
    return tmp_path / "plan.json"


def test_it_writes_a_page_and_says_so(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "page.html"
    out.write_text("older")
    assert main(["report", str(file), "-o", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    html = out.read_text()
    assert html.startswith("<!DOCTYPE html>") and "not checked" not in html
    assert main(["report", str(file), "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"], document["kind"], document["checked"]) == ("meshwright.report", 1, "pipeline", True)
    assert document["bytes"] == len(out.read_bytes()) and document["spans"] == document["spans_shown"] > 0 and document["messages"] == 8
    assert out.read_text() == html  # equal plans give equal pages
    assert [p.name for p in file.parent.iterdir() if p.name.startswith(".")] == []


def test_it_refuses_what_it_cannot_show(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(*words: str, code: int = 2) -> str:
        assert main(["report", *words]) == code
        return capsys.readouterr().err

    out = str(tmp_path / "page.html")
    assert "no directory" in refused(str(file), "-o", str(tmp_path / "none" / "page.html"))
    assert "is a folder" in refused(str(file), "-o", str(tmp_path))
    assert "cycle of 1" in refused(str(file), "--step", "1", "-o", out)
    assert "cannot read" in refused(str(tmp_path / "none.json"), "-o", out)
    assert "not a run folder" in refused(str(file), str(tmp_path), "-o", out)
    (tmp_path / "other.json").write_text('{"schema": "meshwright.run", "version": 1}')
    assert "expected 'meshwright.plan'" in refused(str(tmp_path / "other.json"), "-o", out, code=1)
    assert not Path(out).exists()


def test_a_wrong_plan_is_refused_unless_asked_for(file: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    program = plan.main
    steps = replace(program.steps, after_lag=program.steps.after_lag.copy(), after_step=np.zeros_like(program.steps.after_step))
    lost = replace(
        program, steps=replace(steps, after_ptr=np.zeros_like(steps.after_ptr), after_step=steps.after_step[:0], after_lag=steps.after_lag[:0])
    )
    key = program_hash(lost)
    write_plan(file, replace(plan, programs={key: lost}, cycle=(CycleEntry(program=key),)))
    out = file.parent / "page.html"
    assert main(["report", str(file), "-o", str(out)]) == 4
    capsys.readouterr()
    assert not out.exists()
    assert main(["report", str(file), "-o", str(out), "--no-check"]) == 0
    assert "This plan was not checked" in out.read_text()


def test_a_cycle_shows_the_program_that_is_asked_for(file: Path, plan: Plan) -> None:
    longer = plan_pipeline(PipelineProblem.of(2, 5), "gpipe")
    both = replace(plan, programs={**plan.programs, **longer.programs}, cycle=(*plan.cycle, *longer.cycle))
    write_plan(file, both)
    out = file.parent / "page.html"
    assert main(["report", str(file), "-o", str(out), "--step", "1", "--no-check"]) == 0
    assert "number 2 of the plan" in out.read_text() and "micro-batch 4" not in out.read_text()  # names are packed


def test_a_trace_and_two_of_them_have_a_page_without_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    one, _ = write_ranks(tmp_path / "before", Settings())
    write_ranks(tmp_path / "after", Settings())
    out = tmp_path / "page.html"
    assert main(["report", str(one), "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["plan"], document["against"], document["checked"]) == ("measured", None, None, False)
    html = out.read_text()
    assert "What to do: " in html and "Modules and bottlenecks" in html and "What changed" not in html and 'id="data-run"' in html
    assert main(["report", str(tmp_path / "before"), str(tmp_path / "after"), "-o", str(out)]) == 0
    html = out.read_text()
    assert "What changed most" in html and html.count('scope="row">rank 1<') == 2 and 'id="modules1"' in html
    again = out.read_bytes()
    assert main(["report", str(tmp_path / "before"), str(tmp_path / "after"), "-o", str(out)]) == 0
    assert out.read_bytes() == again


def test_a_plan_is_known_as_one_gzipped_or_not(tmp_path: Path, plan: Plan) -> None:
    for name in ("plan.json", "plan.json.gz"):
        write_plan(tmp_path / name, plan)
        assert kind_of(tmp_path / name) == "plan"
    (tmp_path / "damaged.json.gz").write_bytes(b"\x1f\x8b" + b"x" * 40)
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    assert kind_of(tmp_path / "damaged.json.gz") == kind_of(tmp_path / "trace.json") == "trace"
    assert kind_of(Path("-")) == "plan" and kind_of(tmp_path) == "traces"
