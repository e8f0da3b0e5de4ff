"""Plans that recompute: chosen where memory demands it, priced, explained, exported, and said when even that is not enough."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.drive import plans as drive
from meshwright.drive.citations import citations
from meshwright.drive.training.evaluated import Policy
from meshwright.drive.training.recompute import RecomputeWanted, with_recomputation
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, UsageError
from meshwright.explain.explanation import explain_plan
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.io.export.layout import export_layout
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.plan import Plan
from meshwright.report.explain_text import explain_text
from meshwright.report.plan_text import plan_text

MODEL = str(Path(__file__).parents[3] / "examples" / "gpt.py:tiny")
JOB = Training(model=MODEL, global_batch=32)


@functools.cache
def graph() -> OpGraph:
    return captured(MODEL)


def fabric(memory_bytes: int) -> Fabric:
    plain = drive.read_fabric("laptop:2")
    return replace(plain, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in plain.devices))


@functools.cache
def plan(recompute: str, memory_bytes: int = 0) -> Plan:
    degrees = {"data": 1, "tensor": 1, "pipeline": 2, "microbatch": 8}
    return plan_training(JOB, fabric(memory_bytes), graph=graph(), wishes=(LayoutWanted(**degrees), RecomputeWanted(recompute)))


@pytest.mark.parametrize(("slack", "rounds"), [(0, 1), (30, 3), (10**9, 6)])
def test_more_is_asked_for_until_it_fits(slack: int, rounds: int) -> None:
    """Ten bytes too many, but a plan changes only when `slack` more than that are asked for: in the last round all there are. A leap is halved."""
    asked, tried = list[int](), list[int]()

    class Stages:
        name = "steps"

        def saving(self, need: dict[int, int]) -> dict[int, int]:
            asked.append(need[0])
            return {0: 1 if need[0] <= 10 + slack else 2} if slack else {0: 2}

        def apply(self, chosen: dict[int, int]) -> int:
            return chosen[0]

    def evaluate(choice: int, policy: Policy) -> SimpleNamespace:
        tried.append(choice)
        over, time_s = 10 if choice == 1 else 0, float(asked[-1])
        return SimpleNamespace(timeline=1, refused=False, policy=policy, excess_bytes=over, over_bytes=(over,), layout=layout, time_s=time_s)

    layout = SimpleNamespace(coordinates=lambda rank: (0, 0, 0), hosted=lambda pipeline: ((0, 0),))
    first = SimpleNamespace(timeline=1, refused=False, policy=Policy(), excess_bytes=10, over_bytes=(10,), layout=layout)
    found = with_recomputation("auto", first, Stages(), evaluate)  # type: ignore[arg-type]
    first_fit = next(i for i, need in enumerate(asked) if need > 10 + slack or not slack)
    assert found[-1].excess_bytes == 0 and first_fit == rounds - 1 and (asked[first_fit] > 10**10) == (slack > 1000)
    assert tried[:2] == ([1, 2] if slack else [2]) and found[-1].time_s == (float(min(x for x in asked if x > 10 + slack)) if slack else 10)
    assert len(asked) == rounds + (4 if slack else 0)


def needs(made: Plan) -> int:
    assert made.prediction is not None
    return max(made.prediction.memory_worst_bytes)


def time_s(made: Plan) -> float:
    assert made.prediction is not None
    return made.prediction.time_s


def test_rules_cost_time_and_save_memory() -> None:
    none, selective, full = plan("none"), plan("selective"), plan("full")
    assert needs(full) < needs(selective) < needs(none)
    assert time_s(none) < time_s(selective) < time_s(full)
    assert plan("auto").decisions["recompute"]["strategy"] == "none"  # it fits
    assert "recompute " not in plan_text(none) and "recompute    full: stage 0" in plan_text(full)
    assert plan_from_bytes(plan_bytes(full)).layout == full.layout


def test_as_little_as_fits() -> None:
    """A layout that did not fit wins now; the less memory there is, the more is recomputed, and never more than in full."""
    none, full = plan("none"), plan("full")
    before = time_s(none)
    for share in (0.8, 0.3):
        limit = int(needs(full) + share * (needs(none) - needs(full)))
        made = plan("auto", limit)
        assert check_plan(made).status == "ok" and needs(made) <= limit
        assert before < time_s(made) <= time_s(full)
        before = time_s(made)
        decision = made.decisions["recompute"]
        assert decision["strategy"] == "optimal" and decision["options"]["stages"]
        assert all(s["bound_s"] <= s["time_s"] for s in decision["options"]["stages"])
        assert any("bytes more than rank" in a.why for a in made.alternatives)  # the same without recomputing
    assert any(c.key == "korthikanti2023reducing" for name, c in citations(made) if name == "recompute")


def test_what_does_not_fit_says_what_recomputing_gives() -> None:
    none, full = plan("none"), plan("full")
    middle = (needs(none) + needs(full)) // 2
    with pytest.raises(Infeasible, match="does not fit") as caught:
        plan("none", middle)
    assert caught.value.data["recomputing"]["fits"] and "--recompute auto needs" in caught.value.message
    with pytest.raises(Infeasible):
        plan("auto", int(0.5 * needs(full)))
    with pytest.raises(UsageError, match="no recomputation policy 'most'"):
        plan("most")


def test_it_is_explained_and_exported() -> None:
    made = plan("full")
    found = explain_plan(made, quick=True)
    assert all(0 < s.recompute_s < s.seconds["backward"] for s in found.breakdown.stages)
    assert "recomputation, of backward: stage 0" in explain_text(made, found, limit=3)
    assert all(s.recompute_s == 0 for s in explain_plan(plan("none"), quick=True).breakdown.stages)
    megatron = export_layout(made, "megatron").text
    assert "--recompute-granularity full" in megatron and "--recompute-method uniform" in megatron
    assert "--recompute-granularity selective" in export_layout(plan("selective"), "megatron").text
    assert 'mode = "full"' in export_layout(made, "torchtitan-toml").text
    assert any("run again" in x for x in export_layout(made, "deepspeed").not_expressed)
    assert "recompute" not in export_layout(plan("none"), "megatron").text


def test_nothing_more_is_recomputed_of_what_is_too_slow_already() -> None:
    tried = list[int]()

    class Stages:
        name = "optimal"

        def saving(self, need: dict[int, int]) -> dict[int, int]:
            return {0: need[0]}

        def apply(self, chosen: dict[int, int]) -> int:
            return chosen[0]

    def evaluate(choice: int, policy: Policy) -> SimpleNamespace:
        tried.append(choice)
        over, time_s = max(0, 25 - choice), float(choice)
        return SimpleNamespace(timeline=1, refused=False, policy=policy, excess_bytes=over, over_bytes=(over,), layout=layout, time_s=time_s)

    layout = SimpleNamespace(coordinates=lambda rank: (0, 0, 0), hosted=lambda pipeline: ((0, 0),))
    first = SimpleNamespace(timeline=1, refused=False, policy=Policy(), excess_bytes=10, over_bytes=(10,), layout=layout)
    for limit_s, asked in ((float("inf"), [10, 25]), (11.0, [10, 25]), (10.0, [10])):
        tried.clear()
        found = with_recomputation("auto", first, Stages(), evaluate, limit_s)  # type: ignore[arg-type]
        assert tried == asked and (found[-1].excess_bytes == 0) == (len(asked) > 1)
