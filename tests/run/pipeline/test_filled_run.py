"""Plans with work in their idle time, walked on real processes; what cannot be run is refused before any starts."""

from __future__ import annotations

import pytest

from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import KFACCosts, kfac_work
from meshwright.drive_fill import Filled, fill_plan
from meshwright.drive_pipelines import plan_pipeline
from meshwright.errors import Unsupported, UsageError
from meshwright.run.pipeline.rehearse import rehearse
from meshwright.run.pipeline.times import fill_seconds

COSTS = KFACCosts(curvature_s=0.004, inverse_s=0.012, layers=4, sync_s=0.001)


def filled(name: str, devices: int = 2) -> Filled:
    problem = PipelineProblem.of(devices, 2, forward_s=0.02, activation_bytes=256)
    return fill_plan(plan_pipeline(problem, name), lambda p, s: kfac_work(p, s, COSTS), margin=0.05)


@pytest.mark.real
@pytest.mark.timeout(240)
def test_a_filled_step_runs() -> None:
    found = filled("1f1b")
    done = rehearse(found.plan, steps=3)
    assert len(done.measured_s) == 3 and done.planned_s == pytest.approx(found.filling.idle.step_s)
    work = fill_seconds(found.plan)
    assert sum(work.values()) == pytest.approx(sum(p.end_s - p.start_s for p in found.filling.placements))
    f = found.filling
    busiest = max(f.idle.busy_s[r] + sum(p.end_s - p.start_s for p in f.placements if p.rank == r and p.step == 0) for r in (0, 1))
    assert min(done.measured_s) >= busiest  # the work was really done


def test_what_is_not_run() -> None:
    found = filled("chimera", 4)
    with pytest.raises(Unsupported, match="sends messages"):
        rehearse(found.plan, steps=1)
    plain = filled("1f1b").plan
    with pytest.raises(UsageError, match="runs paced"):
        rehearse(plain, stages="x.py:f", steps=1)
    assert fill_seconds(plan_pipeline(PipelineProblem.of(2, 2), "1f1b")) == {}
