"""Pairs of DualPipe on models with experts: exchanges pass beside the other half, and a pair takes no longer than its halves in a row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.cost import assumed_cost
from meshwright.drive.plans import check_plan, read_fabric
from meshwright.drive.training.decisions import begin, context_of
from meshwright.drive.training.fewer_layers import with_fewer_layers
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.explain.breakdown import breakdown, simulated
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training

MODEL = "examples/experts.py:tiny"


def asked(overlap=True, *, rate_Bps=0, memory_bytes=0, expert=2, rule="none"):
    """Two replicas of two devices; the schedule has four stages for two layers with four experts each."""
    fabric = read_fabric("laptop:4")
    if rate_Bps:
        fabric = replace(fabric, links=tuple(replace(x, rate_Bps=rate_Bps) for x in fabric.links))
    if memory_bytes:
        fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices))
    options = {} if overlap else {"overlap": False}
    wishes = (
        LayoutWanted(microbatch=1, data=2, tensor=1, pipeline=2, expert=expert), PipelineWanted(name="dualpipe-v", options=options),
        RecomputeWanted(rule), ShardingWanted(level=0),
    )  # fmt: skip
    return (Training(model=MODEL, global_batch=16), fabric, assumed_cost(fabric)), {"graph": captured(MODEL), "wishes": wishes}


@cache
def planned(overlap=True, **how):
    given, more = asked(overlap, **how)
    return plan_training(*given, **more)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rate_Bps", "rule"), [(3_000_000, "none"), (3_000_000, "layers"), (0, "none"), (300_000, "layers")])
def test_a_pair_takes_no_longer_than_its_halves_in_a_row(rate_Bps, rule):
    woven, row = (planned(overlap=x, rate_Bps=rate_Bps, rule=rule) for x in (True, False))
    assert woven.prediction.time_s <= row.prediction.time_s * (1 + 1e-9)
    if rate_Bps == 3_000_000:  # an exchange takes about as long as the computation before it
        assert woven.prediction.time_s < 0.95 * row.prediction.time_s
        assert woven.prediction.phases_s["experts"] < row.prediction.phases_s["experts"], "what is hidden is not told as in the way"


def test_the_plan_says_its_pairs_and_comes_back():
    plan = planned()
    options = plan.decisions["pipeline"]["options"]
    assert options["pairs"] > 0 and "pairs" not in planned(overlap=False).decisions["pipeline"]["options"]
    again = plan_from_bytes(plan_bytes(plan))
    assert plan_bytes(again) == plan_bytes(plan) and check_plan(again).ok
    assert simulated(again).timeline.makespan_s == pytest.approx(plan.prediction.time_s)
    assert len(breakdown(simulated(again)).stages) == 2


def test_without_exchanges_nothing_is_woven():
    pairs, row = (planned(overlap=x, expert=1) for x in (True, False))
    assert pairs.main.ops.graph == row.main.ops.graph and pairs.main.ops.name == row.main.ops.name
    assert "pairs" not in pairs.decisions["pipeline"]["options"]


def test_layers_of_both_stages_of_a_rank_keep_their_values_where_they_fit():
    given, more = asked(rule="layers", memory_bytes=1 << 30)
    context = context_of(*given, **more)
    best = begin(context).winner
    found = [e for e in with_fewer_layers(best, context) if e.fits]
    assert any(best.candidate.pairs) and found and min(e.time_s for e in found) < best.time_s
    assert all(len(e.layout.forward_again or ()) < len(best.layout.forward_again) for e in found)
    assert not with_fewer_layers(replace(best, candidate=replace(best.candidate, pairs=())), context), "stages share ranks"
