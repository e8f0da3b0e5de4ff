"""What the search finds becomes a plan where it can be run; where not, the property in the way is named. Large grids ask the layer table first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from captured import captured
from meshwright.cost import assumed_cost
from meshwright.decide.layout.layer_costs import FULL
from meshwright.decide.layout.mixed.search import Judged
from meshwright.decide.layout.problem import Degrees
from meshwright.drive.layout.search import LayoutFindings, find_layouts
from meshwright.drive.plans import check_plan
from meshwright.drive.training.context import SearchBudget
from meshwright.drive.training.found_layout import best_runnable, not_runnable, plan_found
from meshwright.drive.training.order import by_layer_table
from meshwright.drive.training.program_sizes import MAX_PROGRAM_STEPS, predicted_steps, steps_of
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, TimeLimit, Unsupported, UsageError
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric
from meshwright.job import Training
from meshwright.profile.layer_table import LayerChoice
from meshwright.profile.network import ProfiledLayout, ProfiledSchedule

MODEL = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:tiny"
NET = load_fabric("laptop:4")
JOB = Training(model=MODEL, global_batch=8)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return captured(MODEL)


def found_for(graph: OpGraph, **kwargs: object) -> LayoutFindings:
    options = {"global_batch": 8, "precision": FULL, "microbatches": (1, 2), "simulated": 12, "refine": 1, "schedules": ("1f1b",)} | kwargs
    return find_layouts(lambda b: at_batch(graph, b), NET, assumed_cost(NET), **options)  # type: ignore[arg-type]


def test_a_found_layout_is_a_checked_plan_with_its_degrees_and_borders(graph: OpGraph) -> None:
    found = found_for(graph, levels=(0,), recompute=("none",))
    chosen = next(j for j in found.found.ranked if len(j.candidate.layout.stages) == 2 and not not_runnable(found, j))
    plan = plan_found(found, chosen, JOB, NET, assumed_cost(NET), graph)
    check_plan(plan)
    layout, mine = plan.layout, chosen.candidate.layout
    assert layout is not None
    assert (layout.data, layout.tensor, layout.pipeline) == (mine.data, mine.stages[0].replicas[0].tensor, 2)
    assert (layout.microbatch_size, layout.microbatches) == (mine.microbatch, mine.microbatches[0])
    head = found.problem.table.heads[mine.stages[0].layers]
    second = [n for s in layout.segments if s.stage == 1 for n in s.nodes]
    first = [n for s in layout.segments if s.stage == 0 for n in s.nodes]
    assert head in second and head not in first
    moved = replace(chosen, candidate=replace(chosen.candidate, layout=_with_layers(mine, (1, found.problem.table.layers - 1))))
    other = plan_found(found, moved, JOB, NET, assumed_cost(NET), graph).layout
    assert other is not None and len(other.segments[0].nodes) < len(first)


def _with_layers(layout: ProfiledLayout, layers: tuple[int, ...]) -> ProfiledLayout:
    stages = tuple(msgspec.structs.replace(s, layers=n) for s, n in zip(layout.stages, layers, strict=True))
    return msgspec.structs.replace(layout, stages=stages)


def test_properties_that_cannot_be_run_are_named(graph: OpGraph) -> None:
    found = found_for(graph, levels=(0,), recompute=("none",))
    good = best_runnable(found)
    layers, layout = found.problem.table.layers, good.candidate.layout

    def named(layout: ProfiledLayout, choice: LayerChoice = LayerChoice()) -> str:
        return "; ".join(not_runnable(found, Judged(replace(good.candidate, layout=layout, choices=(choice,) * layers), good.estimate)))

    assert named(layout) == ""
    even = ProfiledLayout.uniform((layers,), device=layout.stages[0].replicas[0].device, data=4, microbatches=2)
    assert named(even, LayerChoice("none", 2)) == named(even, LayerChoice("full")) == ""
    several = (LayerChoice("none", 1), *(LayerChoice("none", 3),) * (layers - 1))
    different = Judged(replace(good.candidate, layout=even, choices=several), good.estimate)
    assert not_runnable(found, different) == ("layers have different sharding levels (1, 3)",)
    assert "tensor degrees differ (1, 2)" in named(even, LayerChoice("none", 0, 2))
    assert "its 7 micro-batches do not divide by 4 pipelines" in named(msgspec.structs.replace(even, microbatches=(1, 3, 1, 2)))
    one = ProfiledLayout.uniform((layers,), device="other", data=2)
    assert "uses 2 of 4 devices" in named(one)
    many = ProfiledLayout.uniform((layers,), device=layout.stages[0].replicas[0].device, data=512, microbatches=32)
    turns, both = (ProfiledSchedule(name=name, layers=(1, layers - 1), stage_of=(0, 0)) for name in ("interleaved chunks=2", "chimera"))
    for choice, change in ((LayerChoice(), {}), (LayerChoice("none", 2), {}), (LayerChoice(), {"schedule": turns}), (LayerChoice(), {"context": 2})):
        assert "written out" not in named(msgspec.structs.replace(many, **change), choice)
    copies = "copies of the stages (schedule chimera) would be written out for every rank, more than 1,146,880 steps (at most 300,000)"
    assert copies in named(msgspec.structs.replace(many, schedule=both))
    bad = replace(good, candidate=different.candidate)
    with pytest.raises(Unsupported, match="cannot be run: layers have different sharding levels"):
        plan_found(found, bad, JOB, NET, assumed_cost(NET), graph)
    with pytest.raises(Unsupported, match="none of the 1 simulated layouts can be run"):
        best_runnable(replace(found, found=replace(found.found, ranked=(bad,))))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("level", "rule"), [(3, "none"), (1, "selective"), (2, "full"), (0, "mixed")])
def test_levels_and_recomputation_that_were_found_are_in_the_plan(graph: OpGraph, level: int, rule: str) -> None:
    found = found_for(graph, levels=(level,), recompute=("none", "selective", "full"))
    two = next(j for j in found.found.ranked if j.candidate.layout.data == 2 and len(j.candidate.layout.stages) == 2)
    layers = found.problem.table.layers
    choices = tuple(LayerChoice(rule if rule != "mixed" else ("full" if i % 2 else "none"), level) for i in range(layers))
    chosen = replace(two, candidate=replace(two.candidate, choices=choices))
    assert not not_runnable(found, chosen)
    plan = plan_found(found, chosen, JOB, NET, assumed_cost(NET), graph)
    check_plan(plan)
    assert plan.layout is not None and plan.layout.zero_level == level
    again = [x for s in plan.layout.segments for x in s.recompute]
    assert bool(again) == (rule in ("selective", "full")), "nothing runs again where it fits without, unless it was found so"
    assert plan.decisions["recompute"]["options"]["policy"] == (rule if rule in ("selective", "full") else "auto")


def test_borders_that_cannot_be_cut_are_refused(graph: OpGraph) -> None:
    def borders(*names: str) -> None:
        plan_training(JOB, NET, graph=graph, wishes=(LayoutWanted(data=2, tensor=1, pipeline=2, microbatch=2, borders=names),))

    with pytest.raises(Infeasible, match="cannot begin with 'nothing'"):
        borders("nothing")
    with pytest.raises(Infeasible, match="2 borders for 2 stages"):
        borders(graph.nodes[10].name, graph.nodes[-1].name)


def test_recomputation_allowed(graph: OpGraph) -> None:
    with pytest.raises(UsageError, match="recomputation is one of"):
        found_for(graph, recompute=("some",))
    assert {c.recompute for j in found_for(graph, recompute=("full",)).found.ranked for c in j.candidate.choices} == {"full"}


# ---- large grids -------------------------------------------------------------------------------------------------------
def test_predicted_steps_are_those_of_the_built_layout(graph: OpGraph) -> None:
    """Before anything is built, from the graph's regions."""
    for data, tensor, pipeline in ((4, 1, 1), (2, 2, 1), (1, 2, 2)):
        plan = plan_training(JOB, NET, graph=graph, wishes=(LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=2),))
        layout = plan.layout
        assert layout is not None
        sums = sum(len(s.sum_writes) + len(s.sum_grads) for s in layout.segments)
        built = predicted_steps(data, tensor, pipeline, layout.microbatches, len(layout.segments), sums)
        assert steps_of(graph, 8)(Degrees(data, tensor, pipeline, 2)) == pytest.approx(built, rel=0.3)


def test_the_layer_table_orders_degrees_and_leaves_the_rest_out(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Degrees(4, 1, 1, 2), Degrees(1, 1, 4, 1), Degrees(2, 1, 2, 1)]
    seconds, found = by_layer_table(lambda b: at_batch(graph, b), NET, assumed_cost(NET), 8, wanted)
    assert set(seconds) <= set(wanted) and found is not None and min(seconds.values()) > 0
    assert by_layer_table(lambda b: at_batch(graph, b), NET, assumed_cost(NET), 8, []) == ({}, None)
    asked: list[list[Degrees]] = []

    def recorded(*args: object, **_: object) -> tuple[dict[Degrees, float], None]:
        asked.append(list(args[-1]))  # type: ignore[call-overload]
        return {d: float(i) for i, d in enumerate(asked[-1])}, None

    monkeypatch.setattr("meshwright.drive.training.order.MAX_BUILT_OPERATORS", 0)
    monkeypatch.setattr("meshwright.drive.training.order.MAX_BUILT_DEGREES", 2)
    monkeypatch.setattr("meshwright.drive.training.order.by_layer_table", recorded)
    plan = plan_training(JOB, NET, graph=graph)
    assert len(asked) == 1 and len(asked[0]) > 2
    variants = [2 if d.tensor > 1 else 1 for d in asked[0][2:]]  # with and without sequence parallelism
    assert sum("not among the 2 best by the layer table" in a.why for a in plan.alternatives) == sum(variants)


def test_programs_that_are_too_large_end_with_the_best_so_far(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PROGRAM_STEPS > 1000
    monkeypatch.setattr("meshwright.drive.training.order.MAX_PROGRAM_STEPS", 10)
    monkeypatch.setattr("meshwright.drive.training.order.MAX_FOLDED_STEPS", 10)
    with pytest.raises(TimeLimit, match="programs have") as caught:
        plan_training(JOB, NET, graph=graph)
    assert caught.value.exit_code == 5 and caught.value.data["program_steps"] > 10


def test_a_limit_that_has_passed_ends_with_it(graph: OpGraph) -> None:
    with pytest.raises(TimeLimit, match="was built that fits: time limit: the search was cut short"):
        plan_training(JOB, NET, graph=graph, budget=SearchBudget(time_limit_s=-1.0))


def test_the_command_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cli import main

    out = tmp_path / "plan.json"
    code = main([
        "layout", "search", "--model", MODEL, "--fabric", "laptop:4", "--global-batch", "8", "--microbatches", "1,2", "--levels", "0",
        "--recompute", "none", "--precision", "fp32", "--out", str(out), "--json",
    ])  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and out.exists() and document["plan"]["file"] == str(out) and document["plan"]["time_s"] > 0
    assert main(["program", "show", str(out)]) == 0
