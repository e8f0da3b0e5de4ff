"""The decision on the pipeline schedule: what is asked for is planned and said, auto beats 1F1B, bad input is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from captured import captured
from meshwright.cli import main
from meshwright.cost import assumed_cost
from meshwright.drive.pipeline.pipelines import make_strategy
from meshwright.drive.plans import cost_of, fabric_of, read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.context import SearchBudget
from meshwright.drive.training.evaluate import Evaluator
from meshwright.drive.training.pipeline import PipelineWanted, schedule_asked
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.schedules import layout_problem
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, Infeasible, UsageError
from meshwright.explain.breakdown import breakdown, simulated
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.plan import Plan
from meshwright.report.plan_text import plan_document, plan_text

MODEL = "tests/run/schedule_models.py:net"


@cache
def graph():
    return captured(MODEL)


@cache
def planned(name="1f1b", options=(), *, devices=2, memory_bytes=0, microbatches=4, data=1, pipeline=2, call_s=1.5e-5, recompute="auto"):
    fabric = read_fabric(f"laptop:{devices}")
    if memory_bytes:
        fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices))
    job = Training(model=MODEL, global_batch=data * microbatches)
    return plan_training(
        job, fabric, msgspec.structs.replace(assumed_cost(fabric), per_call_s=call_s), graph=graph(),
        wishes=(
            LayoutWanted(microbatch=1, data=data, tensor=1, pipeline=pipeline), CollectivesWanted("ring"),
            PipelineWanted(name=name, options=dict(options)), RecomputeWanted(recompute),
        ),
    )  # fmt: skip


def test_what_is_asked_for_is_planned_and_said():
    plan = planned("zbv", (("tries", 10),))
    layout = plan.layout
    assert (layout.schedule, layout.placement, layout.split_backward) == ("zbv", ((0, 1, 1, 0),), True)
    assert plan.decisions["pipeline"]["strategy"] == "zbv" and schedule_asked(plan).options == {"tries": 10}
    assert "zbv tries=10, 2 stages per rank, backward in two parts" in " ".join(plan_text(plan).split())
    assert plan_document(plan, path="")["layout"]["stages"] == 4
    assert plan_from_bytes(plan_bytes(plan)).layout == layout
    assert [s.name for s in breakdown(simulated(plan)).stages] == ["stages 0+3", "stages 1+2"]


def test_copies_sum_gradients_during_backward_unless_told_otherwise():
    early, late, chosen = (planned("chimera", x) for x in ((("sync", "eager"),), (("sync", "lazy"),), ()))
    assert (early.layout.overlap, late.layout.overlap) == (True, False) and early.layout.buckets
    assert chosen.prediction.time_s == min(early.prediction.time_s, late.prediction.time_s)
    assert "gradients of 2 copies of the stages summed during backward in" in " ".join(plan_text(early).split())


def test_where_the_search_chose_the_pipeline_the_fastest_schedule_on_it_is_taken():
    shape = {"call_s": 1e-3, "microbatches": 3}
    plain, found, by_hand = planned(**shape), planned("", pipeline=None, **shape), planned("", **shape)
    assert (found.layout.data, found.layout.pipeline) == (plain.layout.data, plain.layout.pipeline) == (1, 2)
    assert found.prediction.time_s < plain.prediction.time_s and found.layout.schedule != plain.layout.schedule == "1f1b"
    assert schedule_asked(found).name == "auto" and "1f1b" in found.decisions["pipeline"]["why"]
    assert plan_bytes(by_hand) == plan_bytes(plain), "a degree given by hand keeps 1F1B"


def test_auto_takes_the_fastest_and_lists_the_others():
    shape = {"devices": 4, "pipeline": 2, "data": 2, "call_s": 1e-3}  # computation, not messages, is what takes time
    plain, auto = planned(**shape), planned("auto", **shape)
    assert auto.prediction.time_s < plain.prediction.time_s
    named = {a.what.rpartition("micro-batch 1, ")[2].partition(",")[0] for a in auto.alternatives if a.time_s is not None}
    assert len(named) >= 4, named
    assert all(a.time_s >= auto.prediction.time_s * (1 - 1e-9) for a in auto.alternatives if a.time_s is not None)
    assert "1f1b" in auto.decisions["pipeline"]["why"]


def test_the_planners_problem_is_the_layouts():
    plan = planned()
    problem = layout_problem(plan.layout, graph_at_one(), fabric_of(plan), cost_of(plan), plan.placement, devices=2)
    works = plan.job["works"]
    assert problem.microbatches == 4 and problem.devices == 2
    for s in range(2):
        assert problem.input_grad_s[s] + problem.weight_grad_s[s] == pytest.approx(problem.backward_s[s], rel=0.2)
    assert problem.input_grad_s[0] < problem.weight_grad_s[0] / 10, "the first stage has next to no gradient of its input"
    assert works["s0.0|F"]["flops"] > 0


def graph_at_one():
    from meshwright.graph.scale import at_batch

    return at_batch(graph(), 1)


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("chimera", {}, {"devices": 3, "pipeline": 3}, "even number of stages"),
        ("chimera", {"pipes": 2}, {}, "do not divide 1"),
        ("chimera", {"mode": "halve"}, {}, "half a micro-batch"),
        ("dualpipe-v", {}, {"microbatches": 3}, "twice as many micro-batches"),
        ("interleaved", {}, {"microbatches": 1}, "at least as many micro-batches"),
        ("interleaved", {"chunks": 400}, {}, "can be cut into at most"),
        ("zbv", {}, {"data": 2, "pipeline": 1}, "no layout has one"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_exist_are_refused(name, options, shape, message):
    with pytest.raises(Infeasible, match=message) as refused:
        planned(name, tuple(options.items()), **shape)
    assert refused.value.hint


def test_one_that_does_not_fit_names_those_that_do():
    """Between what 1F1B and what GPipe need."""
    needs = [max(planned(n, microbatches=16).prediction.memory_worst_bytes) for n in ("1f1b", "gpipe")]
    assert needs[0] < needs[1]
    with pytest.raises(Infeasible, match="does not fit: rank") as refused:
        planned("gpipe", microbatches=16, memory_bytes=sum(needs) // 2, recompute="none")
    assert any("1f1b" in x for x in refused.value.data["fit"]) and "these fit, fastest first" in refused.value.hint


def test_wrong_names_and_options_are_refused(tmp_path, capsys):
    for name, options, message in (("zbx", {}, "no pipeline schedule"), ("zbv", {"chunks": 2}, "no option"), ("auto", {"cap": 2}, "one schedule")):
        with pytest.raises(UsageError, match=message):
            PipelineWanted(name=name, options=options)
    out = ["--fabric", "laptop:2", "--global-batch", "4", "--out", str(tmp_path / "p.json")]
    assert main(["train", "plan", "--model", MODEL, *out, "--pipeline", "zbv", "--pipeline-option", "cap"]) == 2
    assert "is not NAME=VALUE" in capsys.readouterr().err
    made = [("1f1b", {}), ("zbv", {}), ("search", {"placement": "vee"}), ("search", {}), ("interleaved", {"chunks": "3"})]
    assert [make_strategy(*x).settled().traits.stages_per_device for x in made] == [1, 2, 2, 1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": ((0, 1, 1, 7),)}, "pipeline index of 0 to 1"), ({"placement": ((0, 1, 1),)}, "each of the 4 stages"),
        ({"copy_of": (0, 0, 0, 3)}, "one of 1 copies"), ({"copy_of": (0,)}, "each of the 4 micro-batches"),
        ({"placement": (), "stages": ()}, "one per pipeline index"),
    ],
)  # fmt: skip
def test_plan_files_with_impossible_placements_are_refused(changes, message):
    plan = planned("zbv", (("tries", 10),))
    wrong = replace(plan, layout=msgspec.structs.replace(plan.layout, **changes))
    with pytest.raises(FormatError, match=message):
        plan_from_bytes(plan_bytes(wrong))


def chosen_with(budget: SearchBudget | None = None) -> Plan:
    fabric = read_fabric("laptop:4")
    wishes = (LayoutWanted(microbatch=1, data=2, tensor=1, pipeline=2), CollectivesWanted("ring"), PipelineWanted(name="auto"))
    cost = msgspec.structs.replace(assumed_cost(fabric), per_call_s=1e-3)  # computation, not messages, is what takes time
    return plan_training(Training(model=MODEL, global_batch=8), fabric, cost, graph=graph(), wishes=wishes, budget=budget)


def test_schedules_of_large_programs_are_chosen_by_one_rank_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folded = list[bool](), list[bool]()

    def counted(seen: list[bool], name: str) -> None:
        monkeypatch.setattr(Evaluator, name, lambda self, *a, made=getattr(Evaluator, name), **k: (seen.append(True), made(self, *a, **k))[1])

    counted(whole, "_lowered")
    counted(folded, "_scouted")
    plain = chosen_with()
    assert not folded
    asked = len(whole)
    whole.clear()
    monkeypatch.setattr("meshwright.drive.training.evaluate.MAX_SMALL_STEPS", 0)
    scouted = chosen_with()
    assert scouted.decisions["pipeline"]["strategy"] == plain.decisions["pipeline"]["strategy"] != "onefoneb"
    assert scouted.prediction == plain.prediction and scouted.programs.keys() == plain.programs.keys()
    assert len(folded) > 1 and len(whole) < asked


def test_schedules_are_tried_only_within_their_work() -> None:
    plan = chosen_with(SearchBudget(work_s=1e-6))
    left_out = [a for a in plan.alternatives if a.why == "not simulated: the work for schedules is done"]
    assert plan.decisions["pipeline"]["options"]["asked"] == "auto" and len(left_out) > 2
