"""Of a layout whose layers all run forward again, as many keep their values as memory holds; levels that are asked for; bounds of large searches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.drive.plans import read_fabric
from meshwright.drive.training import context as contexts
from meshwright.drive.training import fewer_layers
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.context import Context
from meshwright.drive.training.decisions import context_of
from meshwright.drive.training.evaluate import Evaluator
from meshwright.drive.training.evaluated import Evaluated
from meshwright.drive.training.fewer_layers import with_fewer_layers
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, TimeLimit
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.job import Training

MODEL = "examples/gpt.py:tiny"
JOB = Training(model=MODEL, global_batch=16)


@cache
def graph() -> OpGraph:
    return captured(MODEL)


def fabric(memory_bytes: int) -> Fabric:
    plain = read_fabric("laptop:2")
    return replace(plain, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in plain.devices))


def judged(memory_bytes: int, recompute: str, pipeline: int = 1) -> tuple[Evaluated, Context]:
    wishes = (LayoutWanted(data=2 // pipeline, tensor=1, pipeline=pipeline, microbatch=4), RecomputeWanted(recompute), CollectivesWanted("ring"))
    asked = context_of(JOB, fabric(memory_bytes), graph=graph(), wishes=wishes)
    candidate = next(c for c in asked.grid().plan(asked.problem) if c.layout is not None)
    name, placement = next(asked.placements(candidate.layout))  # type: ignore[arg-type]
    return asked.judge(candidate, placement, name)[-1], asked


def need(e: Evaluated) -> int:
    from meshwright.check.program.memory import worst_order_peaks

    return max(worst_order_peaks(e.inlined.program))


@pytest.mark.parametrize("pipeline", [1, 2])
def test_as_many_layers_keep_their_values_as_fit(pipeline: int) -> None:
    every, _ = judged(1 << 40, "layers", pipeline)
    none, _ = judged(1 << 40, "none", pipeline)
    assert need(every) < need(none)
    layers = len(every.layout.forward_again or ())
    best, asked = judged((need(every) + need(none)) // 2, "layers", pipeline)
    found = [e for e in with_fewer_layers(best, asked) if e.fits]
    assert found and all(0 < len(e.layout.forward_again or ()) < layers and e.time_s < best.time_s for e in found)
    last = best.layout.stages[-1].index
    groups = [g for g in best.layout.forward_again or () if g[0].startswith(f"s{last}.")]
    assert groups[-1] not in (min(found, key=lambda e: e.time_s).layout.forward_again or ())  # the last are let go first
    full, asked = judged(need(every), "layers", pipeline)
    assert not any(e.fits and e.layout.forward_again != full.layout.forward_again for e in with_fewer_layers(full, asked))
    assert not with_fewer_layers(*judged(0, "layers", pipeline))  # devices do not say what they have


def test_only_what_was_judged_with_all_its_micro_batches_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of many was planned with the program of a few where the clock cut: the check of values refused it."""
    every, none = judged(1 << 40, "layers")[0], judged(1 << 40, "none")[0]
    best, asked = judged((need(every) + need(none)) // 2, "layers")

    def cut(self: Evaluator, found: Evaluated) -> Evaluated:
        raise TimeLimit("fits with few micro-batches and not with all")

    assert any(e.fits for e in with_fewer_layers(best, asked))
    monkeypatch.setattr(Evaluator, "whole", cut)
    assert not any(e.fits for e in with_fewer_layers(best, asked))
    monkeypatch.setattr(fewer_layers, "look", lambda: cut(asked.evaluator, best))
    with pytest.raises(TimeLimit):
        with_fewer_layers(best, asked)


def test_a_plan_that_only_layers_make_fit_keeps_what_it_can() -> None:
    every, none = judged(1 << 40, "layers")[0], judged(1 << 40, "full")[0]
    assert need(every) < need(none)
    wishes = (
        LayoutWanted(data=2, tensor=1, pipeline=1, microbatch=4), CollectivesWanted("ring"), RecomputeWanted("full"),
        ShardingWanted(level=0, overlap=False),
    )  # fmt: skip
    plan = plan_training(JOB, fabric(need(none) - 1), graph=graph(), wishes=wishes)
    assert check_plan(plan).ok and plan.layout is not None
    entry = plan.decisions["recompute"]
    assert entry["strategy"] == "layers" and "does not fit otherwise" in entry["why"]
    assert 0 < len(plan.layout.forward_again or ()) <= len(every.layout.forward_again or ())


def test_a_level_that_is_asked_for_is_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = (LayoutWanted(data=2, tensor=1, pipeline=1), ShardingWanted(level=3), CollectivesWanted("ring"))
    plan = plan_training(JOB, fabric(1 << 40), graph=graph(), wishes=wishes)
    assert plan.layout is not None and plan.layout.zero_level == 3
    made = {m["decision"]: m["evaluations"] for m in plan.decisions["layout"]["made"]}
    assert made["layout"] and not made["sharding"]
    with pytest.raises(Infeasible, match="sharding level 2 divides state among data-parallel replicas, and no layout has any"):
        plan_training(JOB, fabric(1 << 40), graph=graph(), wishes=(LayoutWanted(data=1, tensor=1, pipeline=2), ShardingWanted(level=2)))


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_step_is_shorter_than_its_least(tensor: int) -> None:
    wishes = (LayoutWanted(tensor=tensor), CollectivesWanted("ring"))
    asked = context_of(JOB, fabric(1 << 40), graph=graph(), wishes=wishes)
    for c in asked.grid().plan(asked.problem):
        if c.layout is not None:
            name, placement = next(asked.placements(c.layout))
            assert 0 < c.least_s <= asked.evaluator.evaluate(c, placement, name).time_s


def test_what_is_asked_of_a_large_layout_is_all_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, nobody asked for it: one evaluation, not two."""
    monkeypatch.setattr(contexts, "MAX_SMALL_STEPS", 0)
    made, asked = judged(1 << 40, "full")
    assert made.policy.name == "full" and asked.evaluator.tally["evaluations"] == 1
    monkeypatch.undo()
    made, asked = judged(1 << 40, "full")
    assert made.policy.name == "full" and asked.evaluator.tally["evaluations"] == 2


@pytest.mark.parametrize("name", ["laptop:4", "two-islands", "star:4?link=100Mbit/s"])
def test_no_step_is_shorter_than_the_least_that_its_candidate_takes(name: str) -> None:
    """What leaves large candidates out: were it more than a step takes, the best could be among them."""
    asked = context_of(JOB, read_fabric(name), graph=graph(), wishes=(LayoutWanted(microbatch=2), CollectivesWanted("ring")))
    seen = 0
    for candidate in asked.grid().plan(asked.problem):
        if candidate.layout is None:
            continue
        for called, placement in asked.placements(candidate.layout):
            steps_s = [e.time_s for e in asked.judge(candidate, placement, called) if e.timeline is not None]
            assert all(0 < candidate.least_s <= time_s for time_s in steps_s), (candidate.degrees, called)
            seen += len(steps_s)
    assert seen >= 5
