"""Pipeline plans on real processes: figures, given stages, and everything that is refused or goes wrong on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.frame import main
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import plan_pipeline, problem_of_plan
from meshwright.errors import FormatError, Infeasible, RankDied, RankFailed, Unsupported, UsageError
from meshwright.io.plan.plan import write_plan
from meshwright.plan.plan import Plan
from meshwright.run.launch.rehearse import rehearse
from meshwright.run.pipeline.times import paced_times

HERE = Path(__file__).parents[1]
STAGES = f"{HERE / 'pipeline_stages.py'}:"


def planned(name: str = "chimera", devices: int = 2, microbatches: int = 4, **more: Any) -> Plan:
    return plan_pipeline(PipelineProblem.of(devices, microbatches, **{"forward_s": 0.004, "message_bytes": 64, **more}), name)


def test_paced_stages_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", planned("zbv", gradient_bytes=6720, first_input_grad=False))
    assert main(["--json", "pipeline", "run", str(tmp_path / "plan.json"), "--steps", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["strategy"] == "zbv"
    assert said["stages"] == "paced"
    assert len(said["measured_s"]) == 2
    assert min(said["measured_s"]) >= said["planned_s"] > 4 * 3 * 0.004 - 1e-9  # real actions last at least as long as the plan says
    assert said["message_s"] > 0
    assert said["simulated_s"] > said["planned_s"]
    assert said["copies_equal"] is None


def test_given_stages_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", planned("chimera"))
    assert main(["pipeline", "run", str(tmp_path / "plan.json"), "--steps", "1", "--stages", f"{STAGES}make"]) == 0
    said = capsys.readouterr().out
    assert "gradients of the copies of a stage: equal bit by bit" in said
    assert "against a serial run" in said


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankDied, match="rank 1"):
        rehearse(planned("1f1b"), stages=f"{STAGES}slow", steps=3, verify=False)


def test_a_shape_that_changes_inside_is_named() -> None:
    with pytest.raises((RankFailed, Unsupported), match="stage 0 makes"):
        rehearse(planned("1f1b"), stages=f"{STAGES}growing", steps=1, verify=False)


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("uneven", UsageError, "micro-batch 2 has an input of"), ("wrong_number", UsageError, "gives 1 stage modules, the schedule has 2"),
        ("not_four", UsageError, "must return"), ("nested", Unsupported, "messages between stages are one tensor"),
    ],
)  # fmt: skip
def test_stages_that_do_not_fit_are_refused_before_anything_starts(function: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        rehearse(planned("1f1b"), stages=STAGES + function, steps=1)


def test_sharded_schedules_run_paced_and_refuse_given_stages() -> None:
    problem = PipelineProblem.of(2, 2, forward_s=0.002, message_bytes=64, gradient_bytes=6720, weight_bytes=6720, data=2)
    plan = plan_pipeline(problem, "breadth-first", {"sharded": True})
    with pytest.raises(Unsupported, match="gathers weights"):
        rehearse(plan, stages=f"{STAGES}make", steps=1)
    found = rehearse(plan, steps=1)
    assert found.ranks == 4
    assert found.copies_equal is None  # each replica has its part


def test_one_dtype_per_stage() -> None:
    with pytest.raises((RankFailed, Unsupported), match="its parameters have"):
        rehearse(planned("1f1b"), stages=f"{STAGES}mixed_dtypes", steps=1, verify=False)


def test_real_sizes_that_do_not_fit_name_schedules_that_do() -> None:
    plan = planned("gpipe", microbatches=8, activation_bytes=100, memory_cap_bytes=1000)
    tight = plan_pipeline(PipelineProblem.of(2, 8, activation_bytes=100, memory_cap_bytes=300), "1f1b")
    job = {**plan.job, "problem": tight.job["problem"]}
    from dataclasses import replace

    with pytest.raises(Infeasible, match="gpipe needs 800 bytes") as error:
        rehearse(replace(plan, job=job), stages=f"{STAGES}make", steps=1)
    assert "zbv" in error.value.hint


def test_numbers_and_plans_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        rehearse(planned("1f1b"), steps=0)
    with pytest.raises(UsageError, match="positive"):
        rehearse(planned("1f1b"), timeout_s=0)
    from dataclasses import replace

    plan = planned("1f1b")
    with pytest.raises(UsageError, match="not a pipeline plan"):
        problem_of_plan(replace(plan, kind="training"))
    with pytest.raises(FormatError, match="is no problem"):
        problem_of_plan(replace(plan, job={"problem": {"devices": 2}}))


def test_paced_times_are_those_of_the_plan() -> None:
    from meshwright.drive.pipeline.pipelines import schedule_of_plan

    problem = PipelineProblem.of(2, 4, forward_s=1.0, backward_s=3.0, weight_grad_s=1.0, speeds=[1, 2], first_input_grad=False)
    whole = schedule_of_plan(plan_pipeline(problem, "interleaved"))
    split = schedule_of_plan(plan_pipeline(problem, "zbv"))
    assert paced_times(problem, whole, 0, 0) == (0.5, 0.0, 0.5)
    assert paced_times(problem, whole, 0, 2) == (0.5, 1.0, 0.5)
    assert paced_times(problem, whole, 0, 1) == (0.25, 0.5, 0.25)
    assert paced_times(problem, split, 0, 0) == (0.5, 0.0, 0.5)
    assert paced_times(problem, split, 0, 3) == (0.5, 1.0, 0.5)
