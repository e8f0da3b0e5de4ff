"""The first micro-batches of a lowered step: what is left is the step of so many, and two of them tell how long all take."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from test_folded import both, planned

from meshwright.cost import assumed_cost
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.drive.training.collectives import CollectivePlanner
from meshwright.drive.training.folded import RankOrderRings, steady_of, with_microbatches
from meshwright.errors import Unsupported
from meshwright.explain.explanation import explain_plan
from meshwright.lower.training import lower_training
from meshwright.plan.sizes import training_works
from meshwright.program.first_microbatches import first_microbatches
from meshwright.program.flat import flatten
from meshwright.simulate import simulate_stored

CASES = [("gpt.py:tiny", 2, 2, 2, 1, True), ("gpt.py:tiny_tied", 2, 2, 2, 1, False), ("gpt.py:tiny", 1, 1, 4, 1, False)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folded", [False, True])
def test_it_is_the_step_of_so_many(case, folded):
    """Simulated to the last bit as what lowering makes of so many: time, memory of every rank, bytes of every link; and no step is left over."""
    x = both(*case)
    if folded and case[1] * case[2] == 1:
        pytest.skip("nothing to fold")
    cost = assumed_cost(x.fabric)
    rings = RankOrderRings(CollectivePlanner(fabric=x.fabric, transport=cost.transport), x.places)
    works = training_works(x.graph, x.layout)
    for count in (1, 3):
        whole, callees = lower_training(x.graph, with_microbatches(x.layout, count), one_f_one_b_order, rings, folded=folded)
        fewer = first_microbatches(x.folded if folded else x.plain, count)
        assert len(fewer.steps) == len(whole.steps) and len(fewer.buffers) == len(whole.buffers) and len(fewer.ops) == len(whole.ops)
        made = [simulate_stored(flatten(p, {**x.callees, **callees}).program, x.fabric, x.places, cost, works=works) for p in (fewer, whole)]
        assert made[0].makespan_s == made[1].makespan_s and made[0].memory_peak_bytes == made[1].memory_peak_bytes
        assert made[0].link_busy_s == made[1].link_busy_s


def test_a_step_follows_from_two_shorter_ones():
    """At rates other than those it was planned for, too; a program that is written out whole is simulated whole."""
    x = both("gpt.py:tiny", 1, 2, 2, 1, False, 96)
    cost, works = assumed_cost(x.fabric), training_works(x.graph, x.layout)
    steady, whole = (steady_of(p, x.callees, x.layout) for p in (x.folded, x.plain))
    assert [count for count, _ in steady.programs] == [6, 10] and [count for count, _ in whole.programs] == [96]
    for slower in (1.0, 0.25):
        links = tuple(replace(x_, rate_Bps=int(x_.rate_Bps * slower)) for x_ in x.fabric.links)
        fabric = replace(x.fabric, links=links)
        changed = msgspec.structs.replace(cost, per_call_s=cost.per_call_s / slower)
        assert steady.time_s(fabric, x.places, changed, works) == pytest.approx(whole.time_s(fabric, x.places, changed, works), rel=0.01)
        phases, all_phases = (s.mean_phases_s(fabric, x.places, changed, works) for s in (steady, whole))
        step_s = whole.time_s(fabric, x.places, changed, works)
        assert all(abs(phases[name] - all_phases[name]) < 0.01 * step_s for name in all_phases)
        assert sum(all_phases.values()) == pytest.approx(step_s)


def test_what_has_no_micro_batches_is_refused():
    x = both("gpt.py:tiny", 1, 2, 2, 1, False)
    unnamed = replace(x.plain, buffers=replace(x.plain.buffers, name=()))
    with pytest.raises(Unsupported, match="cannot be told apart"):
        first_microbatches(unnamed, 1)


def test_a_folded_plan_is_explained_by_what_lies_beside_it(monkeypatch):
    """Rates are changed in programs of few micro-batches; the neighbours are built, and they and the plan are all that is tried on other fabrics."""
    plan = planned(monkeypatch, data=2, tensor=2, pipeline=2, microbatch=1)
    assert plan.main.fold is not None
    counted = []
    real = steady_of.__globals__["flatten"]

    def counting(p, programs):
        made = real(p, programs)
        counted.append(len(made.program.steps))
        return made

    monkeypatch.setattr("meshwright.drive.training.folded.flatten", counting)
    found = explain_plan(plan, time_limit_s=600)
    assert counted and max(counted) < len(flatten(plan.main, plan.programs).program.steps)
    assert found.rivals and all(r.what != "" for r in found.rivals) and any("nothing planned anew" in n for n in found.notes)
    assert found.low_s < found.breakdown.time_s < found.high_s
    assert all(a.low_s <= found.breakdown.time_s * (1 + 1e-9) and a.high_s >= found.breakdown.time_s * (1 - 1e-9) for a in found.assumptions)
    assert len(found.what_ifs) == 3
    best = min((r.time_s for r in found.rivals if r.fits), default=float("inf"))
    for w in found.what_ifs:
        assert w.time_s is None or w.time_s <= max(found.breakdown.time_s, best) * (1 + 1e-9)
