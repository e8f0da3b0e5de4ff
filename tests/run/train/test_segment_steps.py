"""Stages run as planned steps: gradients bit-equal to autograd's, bytes kept and the measured peak those of the plan, refusals."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from levels_rig import same_as_serial, serial, train
from rig import TINY, fabric_of, forward_of, make_plan, whole_model
from tensor_rig import compare, plan_case, run_case, serial_step

from meshwright.check.training.segment_step import check_segment_steps
from meshwright.cost import Cost
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.training.stage_steps import SegmentGraph, StageSteps, with_step
from meshwright.errors import Unsupported
from meshwright.graph.step_graph import replacement
from meshwright.job import Training
from meshwright.plan.plan import SegmentStep
from meshwright.probe.steps.costs import StepCosts
from meshwright.probe.steps.stages import StageSource
from meshwright.run.steps.storage_peak import peak_of
from meshwright.run.train.segments import build_rank_module

ROWS = 2
PICTURES = "tests/run/convolution_models.py:"


KINDS = {  # model, degrees (data, tensor, pipeline), other choices
    "data": ("even", (2, 1, 2), {}),
    "sequence": ("odd_tied", (1, 2, 1), {"options": TensorOptions(sequence=True), "step": 1}),
    "split": ("odd_tied", (1, 2, 2), {"schedule": ("zb1p", {}), "step": 1}),
}


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_bytes_on_processes(pool, kind):
    name, degrees, options = KINDS[kind]
    whole = plan_case(name, degrees, **options)
    plain = pool.run(run_case, whole.layout.ranks, whole)
    case = plan_case(name, degrees, recompute="steps", **options)
    outcomes = pool.run(run_case, case.layout.ranks, case)
    compare(case, outcomes, serial_step(case, name))
    for a, b in zip(plain, outcomes, strict=True):
        assert a.loss == b.loss and all(torch.equal(g, b.gradients[n]) for n, g in a.gradients.items())
    kept = {key: size for o in outcomes for key, size in o.saved_bytes.items()}
    planned = [s for s in case.layout.segments if s.step is not None]
    assert planned and (degrees[1] > 1 or len(planned) == len(case.layout.segments))
    assert all(kept[s.key] == s.saved_bytes for s in planned)
    assert sum(s.saved_bytes for s in case.layout.segments) < sum(s.saved_bytes for s in whole.layout.segments)


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "degrees", "options"),
    [
        ("odd_tied", (2, 2, 1), {"sharding": DataSharding(3, True, 1500)}),
        ("odd_tied", (2, 1, 2), {"sharding": DataSharding(2, True, 1500), "schedule": ("zb1p", {})}),
    ],
)
def test_sharded_state(pool, name, degrees, options):
    """Whole weights are gathered for each pass alone: plans hold references to them."""
    case = plan_case(name, degrees, microbatch=1, global_batch=2 * degrees[0], recompute="steps", **options)
    assert any(s.step is not None for s in case.layout.segments)
    same_as_serial(case, pool.run(train, case.layout.ranks, case, 2, "adamw"), serial(case, name, 2, "adamw"))


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("schedule", [None, ("zb1p", {})], ids=["whole", "split"])
def test_measured_stages_choose_their_workspaces(pool, schedule, costs):
    """Convolutions in pieces and pooling with small places, chosen from what was measured here: bits of the plain operators."""
    options = {"microbatch": 8, "global_batch": 16, "models": PICTURES, "schedule": schedule, "costs": costs}
    whole = plan_case("pictures", (1, 1, 2), **options)
    plain = pool.run(run_case, whole.layout.ranks, whole)
    case = plan_case("pictures", (1, 1, 2), recompute="steps", **options)
    planned = [s.step for s in case.layout.segments if s.step is not None]
    assert any(a.alternative >= 0 or replacement(step.graph.nodes[a.node].target) for step in planned for a in step.plan.actions)
    outcomes = pool.run(run_case, case.layout.ranks, case)
    compare(case, outcomes, serial_step(case, "pictures"))
    for a, b in zip(plain, outcomes, strict=True):
        assert a.loss == b.loss and all(torch.equal(g, b.gradients[n]) for n, g in a.gradients.items())


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """As measured here; what runs in pieces or with small places takes half as long, so that it is worth choosing on any processor at any moment."""
    file = tmp_path_factory.mktemp("measured") / "costs.json"
    plan_case("pictures", (1, 1, 2), microbatch=8, global_batch=16, models=PICTURES, recompute="steps", costs=file)
    measured = StepCosts(file)
    for key, cost in measured.costs.items():
        if key.startswith(("images ", "channels ", "offsets|")):
            measured.costs[key] = msgspec.structs.replace(cost, time_s=cost.time_s / 2)
    measured.save()
    return file


def test_a_stage_fits_by_small_workspaces_alone_and_peaks_as_planned(costs):
    """The peak of two micro-batches in flight is the plan's, in bytes beyond what is always there."""
    layout = plan_case("pictures", (1, 1, 2), microbatch=8, global_batch=16, models=PICTURES).layout
    source = StageSource(job=Training(model=PICTURES + "pictures", global_batch=16), device=fabric_of(2).devices[0], cost=Cost(), costs=costs)
    stages = StageSteps(layout, source, effort=500_000)
    (key,) = layout.stages[0].segments
    found = stages.graphs[key]
    least = stages.fastest(found.graph, None)
    chosen = stages.saving({0: 1})
    step = stages.steps[key]
    assert step.plan.peak_bytes < found.keep_peak_bytes() and key in {k for k, _ in chosen[0].again}
    plain = msgspec.structs.replace(found.plain, in_flight=found.graph.in_flight)
    lean, full = stages.fastest(plain, None).peak_bytes, found.keep_peak_bytes()
    assert least.peak_bytes <= lean
    pairs = [(stages.fastest(found.graph, b).time_s, stages.fastest(plain, b).time_s) for b in (lean + k * (full - lean) // 4 for k in range(4))]
    assert all(a <= b * 1.02 for a, b in pairs) and any(a < b * 0.99 for a, b in pairs)
    assert not check_segment_steps(stages.apply(chosen))
    for plan in (step.plan, least):
        made = msgspec.structs.replace(step, plan=plan)
        segments = tuple(with_step(s, made) if s.key == key else s for s in layout.segments)
        model = PICTURES + "pictures"
        _, parameters, buffers = whole_model(model)
        module = build_rank_module(
            forward_of(model, 8), msgspec.structs.replace(layout, segments=segments), 0, parameters, buffers, device=torch.device("cpu"),
            gradient_bytes={},
        )  # fmt: skip
        segment = module.segments[key]
        (images,) = (torch.randn(forward_of(model, 8).inputs[i].shape) for i in segment.inputs)
        gradient = torch.randn(next(v.shape for v in layout.values if v.name == segment.writes[0]))

        def two(segment=segment, images=images, gradient=gradient) -> None:
            segment.forward(0, [], [images])
            segment.forward(1, [], [images])
            segment.backward(0, [gradient])
            segment.backward(1, [gradient])

        two()
        assert peak_of(two, []) == pytest.approx(plan.peak_bytes - found.graph.fixed_bytes(), rel=0.02)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A tiny GPT on two stages, four micro-batches, its step graphs measured here."""
    layout = make_plan((1, 1, 2), microbatch=ROWS).layout
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    source = StageSource(job=Training(model=TINY, global_batch=8), device=fabric_of(2).devices[0], cost=Cost(), costs=costs)
    return StageSteps(layout, source, effort=500_000)


def rank_module(layout, rank):
    _, parameters, buffers = whole_model(TINY)
    return build_rank_module(forward_of(TINY, ROWS), layout, rank, parameters, buffers, device=torch.device("cpu"), gradient_bytes={})


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_the_measured_peak_of_two_micro_batches_in_flight_is_the_plan_s(stages, share):
    """Stage 0: one passes forward, another forward and backward, as 1F1B does; in bytes beyond what is always there."""
    (key,) = stages.layout.stages[0].segments
    graph = stages.graphs[key].graph
    assert graph.in_flight == 2
    full = StageSteps.fastest(stages, graph, 1 << 60)
    plan = StageSteps.fastest(stages, graph, int(graph.fixed_bytes() + share * (full.peak_bytes - graph.fixed_bytes())))
    assert plan.peak_bytes < full.peak_bytes
    g = stages.graphs[key]
    step = SegmentStep(
        graph=graph, plan=plan, reads=g.reads, writes=g.writes, gradients=g.gradients, handed=g.handed,
        kept=(),
    )  # fmt: skip
    segments = tuple(with_step(s, step) if s.key == key else s for s in stages.layout.segments)
    module = rank_module(msgspec.structs.replace(stages.layout, segments=segments), 0)
    segment = module.segments[key]
    tokens = [torch.randint(100, forward_of(TINY, ROWS).inputs[i].shape) for i in segment.inputs]
    gradient = torch.randn(next(v.shape for v in stages.layout.values if v.name == segment.writes[0]))

    def two() -> None:
        segment.forward(0, [], tokens)
        segment.forward(1, [], tokens)
        segment.backward(0, [gradient])
        segment.backward(1, [gradient])

    two()
    measured = peak_of(two, [])
    assert measured == pytest.approx(plan.peak_bytes - graph.fixed_bytes(), rel=0.02)


def test_a_model_that_changed_is_refused(stages):
    (key,) = stages.layout.stages[0].segments
    found = stages.graphs[key]
    nodes = list(found.graph.nodes)
    nodes[-1] = msgspec.structs.replace(nodes[-1], target="aten.other.default")
    odd = SegmentGraph(**{**vars(found), "graph": msgspec.structs.replace(found.graph, nodes=tuple(nodes))})
    other = dataclasses.replace(stages, source=lambda layout, k: odd if k == key else stages.graphs[k])
    layout = other.apply(other.saving({0: 1 << 60}))
    with pytest.raises(Unsupported, match="that were planned"):
        rank_module(layout, 0)


def test_a_plan_with_whole_backwards_does_not_run_half_of_one(stages):
    module = rank_module(stages.apply(stages.saving({0: 1 << 60})), 0)
    with pytest.raises(Unsupported, match="planned with whole backward passes"):
        next(iter(module.segments.values())).backward_input(0, [])


def test_what_a_split_backward_leaves_is_checked():
    name, degrees, options = KINDS["split"]
    layout = plan_case(name, degrees, recompute="steps", **options).layout
    left = [s for s in layout.segments if s.step is not None and s.step.weights >= 0 and s.left_bytes]
    assert left and not check_segment_steps(layout)
    for segment in left:
        room = segment.backward_workspace_bytes + 1  # for what is then not counted as left
        less = msgspec.structs.replace(segment, left_bytes=segment.left_bytes - 1, backward_workspace_bytes=room)
        found = check_segment_steps(msgspec.structs.replace(layout, segments=tuple(less if s is segment else s for s in layout.segments)))
        assert found and "left_bytes are" in found[0].message and found[0].witness["bytes"] == segment.left_bytes


def test_steps_of_a_split_backward_with_gathered_values_are_refused(stages):
    layout = msgspec.structs.replace(stages.layout, split_backward=True, sequence=True)
    with pytest.raises(Unsupported, match="run a whole backward, and this schedule splits it"):
        StageSteps(layout, stages.source)


def test_two_micro_batches_may_be_abandoned(stages):
    module = rank_module(stages.apply(stages.saving({0: 1 << 60})), 0)
    (segment,) = module.segments.values()
    segment.forward(0, [], [torch.zeros(forward_of(TINY, ROWS).inputs[i].shape, dtype=torch.int64) for i in segment.inputs])
    assert segment._held
    segment.forget()
    assert not segment._held
