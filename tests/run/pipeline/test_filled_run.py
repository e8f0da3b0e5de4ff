"""Plans with work in their idle time, walked on real processes; what cannot be run is refused before any starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_stages import make
from rig import grouped, in_threads

from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import KFACCosts, checkpoint_work, kfac_work
from meshwright.drive.pipeline.fill import Filled, fill_plan
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.errors import Unsupported
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.launch.pipeline_rank import make_cycle, worst_difference
from meshwright.run.launch.rehearse import pipeline_orders, rehearse
from meshwright.run.pipeline.second_order import Exchange, StageKFAC, worst_kfac_difference
from meshwright.run.pipeline.stages import Given
from meshwright.run.pipeline.times import fill_seconds
from meshwright.second_order.capture import linear_layers

STAGES = Path(__file__).parents[1] / "pipeline_stages.py"
COSTS = KFACCosts(curvature_s=0.004, inverse_s=0.012, layers=4, sync_s=0.001)


def filled(name: str, devices: int = 2, gradient_bytes: int = 0) -> Filled:
    problem = PipelineProblem.of(devices, 2, forward_s=0.02, activation_bytes=256, gradient_bytes=gradient_bytes)
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
    real = rehearse(found.plan, stages=f"{STAGES}:make", steps=1)
    assert real.kfac_difference is not None and real.kfac_difference < 1e-9 and real.worst_difference is not None and real.worst_difference < 1e-9
    assert real.kfac_done["curvature"] and real.kfac_done["inverse"] and real.precondition_s > 0


@pytest.mark.real
@pytest.mark.timeout(240)
def test_a_filled_step_whose_work_sends_runs() -> None:
    """Chimera's copies: factors are added up over the ranks that hold a stage, and each inverse is made by one of them."""
    found = filled("chimera", 4, gradient_bytes=4096)
    assert any(name.startswith("fillout:") for name in found.plan.main.buffers.name)
    done = rehearse(found.plan, steps=2)
    assert len(done.measured_s) == 2 and done.kfac_done == {}
    real = rehearse(found.plan, stages=f"{STAGES}:make", steps=1)
    assert real.kfac_difference is not None and real.kfac_difference < 1e-9 and real.worst_difference is not None and real.worst_difference < 1e-9
    assert real.copies_equal and real.kfac_done["sync"] and real.shared_s > 0
    with pytest.raises(Unsupported, match="bytes of gradients, the plan sums 0 over"):
        rehearse(filled("chimera", 4).plan, stages=f"{STAGES}:make", steps=1)


def test_what_is_not_run() -> None:
    problem = PipelineProblem.of(2, 2, forward_s=0.02, activation_bytes=256)
    saving = fill_plan(plan_pipeline(problem, "1f1b"), lambda p, s: checkpoint_work(p, s, write_s=0.004))
    with pytest.raises(Unsupported, match="'snapshot' runs paced only"):
        rehearse(saving.plan, stages="x.py:f", steps=1)
    with pytest.raises(Unsupported, match="no real counterpart"):
        StageKFAC({}, 1.0, [], [], Exchange(TaggedTransport(None), 0)).action("fill:write 0")
    twice = {(c, 0): torch.nn.Linear(2, 2) for c in (0, 1)}
    with pytest.raises(Unsupported, match="holds stage 0 twice"):
        StageKFAC(twice, 1.0, [], [], Exchange(TaggedTransport(None), 0))
    assert fill_seconds(plan_pipeline(PipelineProblem.of(2, 2), "1f1b")) == {}


@pytest.mark.sample(3)
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("name", "layers", "devices", "data", "groups"),
    [
        ("1f1b", 3, 2, 1, False), ("zb1p", 1, 2, 1, False), ("interleaved", 8, 2, 1, False), ("chimera", 2, 4, 1, False), ("1f1b", 3, 2, 2, False),
        ("chimera", 3, 4, 2, False), ("1f1b", 3, 2, 2, True), ("chimera", 2, 4, 1, True),
    ],
)  # fmt: skip
def test_kfac_in_idle_time_equals_a_serial_step(name: str, layers: int, devices: int, data: int, groups: bool) -> None:
    """Curvature, sums, averages and inverses at the places of the plan, over all steps of its cycle: the preconditioned gradients of serial K-FAC."""
    problem = PipelineProblem.of(devices, 4, forward_s=0.02, activation_bytes=256, data=data, gradient_bytes=4096)
    found = fill_plan(plan_pipeline(problem, name), lambda p, s: kfac_work(p, s, KFACCosts(curvature_s=0.008, inverse_s=0.02, layers=layers)))
    modules, inputs, targets, loss = make(found.judged.schedule.stages, 4 * data)
    given = Given(modules=tuple(modules), inputs=tuple(inputs), targets=tuple(targets), loss=loss)
    orders, _ = pipeline_orders(found.plan, problem, found.judged.schedule)

    def body(rank: int, group: Any) -> tuple[float, float, dict[str, int], dict[int, list[torch.Tensor]]]:
        transport, sums = (grouped(group), grouped(group, 1)) if groups else (TaggedTransport(group), None)
        walks = make_cycle(found.plan, orders, rank, given, transport, torch.device("cpu"), sums=sums)
        assert len(walks) == found.filling.steps
        kfac = walks[0].work.kfac
        assert kfac is not None
        for _ in range(2):  # the second cycle averages with the first one
            for k, walk in enumerate(walks):
                walk.clear()
                kfac.begin(first=k == 0)
                walk.step()
            kfac.share_inverses()
        plain = worst_difference(given, walks[-1])
        kfac.precondition()
        held = walks[0].stages.modules
        gradients = {s: [p.grad for p in m.parameters() if p.grad is not None] for (_, s), m in held.items()}
        return plain, worst_kfac_difference(given, held), kfac.done, gradients

    ranks = in_threads(devices * data, body)
    assert max(plain for plain, *_ in ranks) < 1e-9
    assert max(second for _, second, *_ in ranks) < 1e-9
    for stage in range(found.judged.schedule.stages):
        first, *others = [gradients[stage] for *_, gradients in ranks if stage in gradients]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    treated = sum(len(linear_layers(m)) for m in modules if any(isinstance(x, torch.nn.Linear) and x.bias.requires_grad for x in m.modules()))
    assert sum(done["inverse"] for _, _, done, _ in ranks) == 2 * 2 * treated
    assert sum(done["curvature"] for _, _, done, _ in ranks) == 2 * 2 * 4 * data * treated
