"""`pipeline compare`, `plan` and `export`: what they print, write and refuse."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from meshwright.bound import Bound
from meshwright.check import check_plan
from meshwright.check.bounds.certificate import check_bound
from meshwright.cli.frame import main
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.lower import fabric_of
from meshwright.drive.citations import citations
from meshwright.drive.pipeline.pipelines import compare_pipelines, make_strategy, plan_pipeline, schedule_of_plan
from meshwright.drive.plans import read_plan, simulate_plan
from meshwright.errors import FormatError, Infeasible, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.kernels.effort import Cut

SMALL = ["--stages", "4", "--microbatches", "8"]


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    seen = capsys.readouterr()
    return seen.out if code in (0, 3) and seen.out else seen.err


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "pipeline", "compare", *SMALL)
    assert "no schedule takes less than 24 s" in text and "1f1b" in text and "\n* " in text
    document = json.loads(output(capsys, "pipeline", "compare", *SMALL, "--memory-cap-bytes", "5", "--json"))
    rows = {r["name"]: r for r in document["schedules"]}
    assert not rows["gpipe"]["fits"] and rows["1f1b"]["fits"] and rows["1f1b"]["time_s"] == 33
    assert all(r["ratio"] >= 1 - 1e-9 for r in rows.values()) and document["frontier"]
    assert rows["1f1b"]["bubble"] > rows["1f1b"]["span_bubble"] > 0


def test_compare_with_search_shows_what_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--stages", "2", "--microbatches", "4", "--forward-s", "2", "--memory-cap-bytes", "3"]
    text = output(capsys, "pipeline", "compare", *small, "--search", "200")
    assert "there" in text and "these orders are optimal" in text
    document = json.loads(output(capsys, "pipeline", "compare", *small, "--search", "200", "--json"))
    rows = {r["strategy"]: r for r in document["schedules"] if "refused" not in r}
    assert rows["search"]["notes"] and rows["search"]["fits"] and rows["search"]["time_s"] == min(r["time_s"] for r in rows.values() if r["fits"])
    for row in rows.values():
        bound = msgspec.convert(row["kept_bound"], Bound)
        assert row["time_s"] >= float(bound) * (1 - 1e-9) and not check_bound(bound, fabric_of(PipelineProblem.of(2, 4)))


def test_a_searched_plan_says_what_is_proved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--stages", "2", "--microbatches", "4", "--forward-s", "2", "--strategy", "search", "--option", "placement=vee", "--option", "cap=2"]
    text = output(capsys, "pipeline", "plan", *words, "-o", str(tmp_path / "p.json"))
    assert "33 s per step" in text and "these orders are optimal" in text and check_plan(read_plan(str(tmp_path / "p.json"))).ok


def test_compare_says_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "pipeline", "compare", "--stages", "3", "--microbatches", "2", "--input-grad-s", "1,2,1", "--weight-grad-s", "1")
    assert "- chimera" in text and "even number of stages" in text and "- dualpipe-v" in text
    text = output(capsys, "pipeline", "compare", *SMALL, "--memory-cap-bytes", "1", code=3)
    assert "nothing fits" in text and "over the cap" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--forward-s", "1,2"], "2 numbers for 4 stages"), (["--forward-s", "x"], "not a number"), (["--activation-bytes", "1QB"], "not a number"),
        (["--chunks", "1"], "above 1"), (["--search", "-1"], ">= 0"),
    ],
)  # fmt: skip
def test_compare_refuses(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in output(capsys, "pipeline", "compare", *SMALL, *words, code=2)


def test_plan_and_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    text = output(capsys, "pipeline", "plan", *SMALL, "--strategy", "zbv", "--option", "cap=8", "-o", out)
    assert "zbv (cap=8, tries=1000): 25.5 s per step" in text
    plan = read_plan(out)
    assert check_plan(plan).ok and simulate_plan(plan).makespan_s == plan.prediction.time_s == 25.5
    assert plan_bytes(plan_from_bytes(Path(out).read_bytes())) == Path(out).read_bytes()
    assert [c.key for _, c in citations(plan) if "zero" in c.key]
    output(capsys, "pipeline", "export", out, "-o", str(tmp_path / "s.csv"))
    rows = list(csv.reader((tmp_path / "s.csv").open()))
    assert [" ".join(r) for r in rows] == plan.job["schedule"]["orders"]
    output(capsys, "pipeline", "export", out, "--format", "trace", "-o", str(tmp_path / "t.json"))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_plan_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["-o", str(tmp_path / "p.json")]
    assert "no pipeline schedule" in output(capsys, "pipeline", "plan", *SMALL, "--strategy", "x", *out, code=2)
    assert "no option" in output(capsys, "pipeline", "plan", *SMALL, "--strategy", "zbv", "--option", "x=1", *out, code=2)
    assert "no int" in output(capsys, "pipeline", "plan", *SMALL, "--strategy", "zbv", "--option", "cap=x", *out, code=2)
    assert "NAME=VALUE" in output(capsys, "pipeline", "plan", *SMALL, "--strategy", "zbv", "--option", "x", *out, code=2)
    assert "belong to one" in output(capsys, "pipeline", "plan", *SMALL, "--option", "x=1", *out, code=2)
    text = output(capsys, "pipeline", "plan", *SMALL, "--strategy", "gpipe", "--memory-cap-bytes", "5", *out, code=3)
    assert "gpipe needs 8 bytes on device 0, 5 are there" in text and "these fit, fastest first: chimera" in text
    assert "no schedule fits" in output(capsys, "pipeline", "plan", *SMALL, "--memory-cap-bytes", "1", *out, code=3)
    assert not (tmp_path / "p.json").exists()


def test_export_of_copies_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    output(capsys, "pipeline", "plan", *SMALL, "--strategy", "chimera", "--option", "mode=double", "-o", out)
    assert "one rank per stage" in output(capsys, "pipeline", "export", out, "-o", str(tmp_path / "s.csv"), code=2)


def test_a_plan_gives_its_schedule_back() -> None:
    plan = plan_pipeline(PipelineProblem.of(4, 8), "chimera", {"mode": "double", "split": "true"})
    schedule = schedule_of_plan(plan)
    assert [" ".join(map(str, o)) for o in schedule.orders] == plan.job["schedule"]["orders"] and schedule.copies == 2
    with pytest.raises(UsageError, match="not a pipeline plan"):
        schedule_of_plan(replace(plan, kind="training"))
    broken = {**plan.job, "schedule": {**plan.job["schedule"], "orders": plan.job["schedule"]["orders"][:-1] + ["0F0 0F0"]}}
    with pytest.raises(FormatError, match="no schedule"):
        schedule_of_plan(replace(plan, job=broken))


def test_gradients_are_reduced_over_copies_and_replicas() -> None:
    problem = PipelineProblem.of(4, 8, gradient_bytes=4096, weight_bytes=20000, data=2, p2p_rate_Bps=1e6, activation_bytes=100)
    for name, options in (("chimera", {}), ("1f1b", {}), ("breadth-first", {"sharded": True})):
        plan = plan_pipeline(problem, name, options)
        assert len(plan.main.calls) and check_plan(plan).ok and simulate_plan(plan).makespan_s == plan.prediction.time_s


def test_the_time_limit_names_what_was_not_tried() -> None:
    found = compare_pipelines(PipelineProblem.of(4, 8), time_limit_s=0)
    assert found.cut == Cut(0, len(found.rows)) and all("time limit" in r.why for r in found.rows) and not found.fitting
    assert make_strategy("zbv", {"cap": 8}) == make_strategy("zbv", {"cap": "8"})
    with pytest.raises(Infeasible):
        plan_pipeline(PipelineProblem.of(4, 8, memory_cap_bytes=1))
