"""Plans for devices of unlike speed: never slower than with equal parts, told in the plan, and measured prices at each device's own share."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import msgspec
import pytest

from captured import captured
from meshwright.cost import Cost, Priced, assumed_cost
from meshwright.decide.layout.layer_costs import FULL
from meshwright.drive.layout.search import find_layouts
from meshwright.drive.plans import check_plan
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.found_layout import best_runnable, plan_found
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError
from meshwright.explain.explanation import explain_plan
from meshwright.graph.scale import at_batch
from meshwright.io.costs.table import cost_document, cost_of_document
from meshwright.io.fabric.name import load_fabric
from meshwright.io.model.graph import write_graph
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.report.plan_text import plan_text

MODEL = "examples/gpt.py:tiny"
JOB = Training(model=MODEL, global_batch=16)


@cache
def graph():
    return captured(MODEL)


def unlike(shares, link="10GB/s"):
    net = load_fabric(f"star:{len(shares)}?link={link}&flops=1GFLOP/s")
    return replace(net, devices=tuple(replace(d, cpu_share=s, group=d.name) for d, s in zip(net.devices, shares, strict=True)))


@cache
def planned(shares, **fixed):
    net = unlike(shares)
    return plan_training(JOB, net, graph=graph(), wishes=(LayoutWanted(**fixed), CollectivesWanted("ring")))


def even_time(plan):
    """Of the fastest alternative with equal parts."""
    return min(a.time_s for a in plan.alternatives if a.time_s and "by speed" not in a.what and " + " not in a.what)


@pytest.mark.parametrize(
    ("shares", "fixed", "what"),
    [
        ((1.0, 0.25), {"data": 2}, "microbatches"), ((1.0, 0.25), {"pipeline": 2}, "stages"), ((1.0, 0.25), {"tensor": 2}, "shards"),
        ((0.25, 1.0, 0.5, 1.0), {"data": 2, "pipeline": 2}, "microbatches"),
    ],
)  # fmt: skip
def test_work_goes_where_it_is_done_faster(shares, fixed, what):
    plan = planned(shares, **fixed)
    check_plan(plan)
    layout = plan.layout
    assert plan.prediction.time_s < 0.9 * even_time(plan)
    said = plan.decisions["layout"]["options"]["division"]
    if what == "microbatches":
        assert len(set(layout.replica_microbatches)) > 1 and layout.microbatch_counts in said and layout.microbatch_counts in plan_text(plan)
        assert plan_from_bytes(plan_bytes(plan)).layout == layout
    if what == "stages":
        first, second = (sum(s.forward.flops for s in layout.segments if s.stage == i) for i in (0, 1))
        assert "stages by speed" in said and (first > 2 * second if unlike(shares).device(plan.placement[0]).cpu_share == 1.0 else second > 2 * first)
    if what == "shards":
        assert "tensor ranks by speed" in said and any(s.shares and max(s.shares) >= 2 * min(s.shares) for s in layout.shards)


def test_left_open_it_is_never_slower_than_equal_parts(tmp_path):
    plan = planned((1.0, 0.5, 0.5, 0.25), microbatch=2)  # the degrees are left open
    assert plan.prediction.time_s <= even_time(plan)
    alike = planned((0.5, 0.5), data=2)
    assert "division" not in alike.decisions["layout"]["options"] and not alike.layout.replica_microbatches
    unequal = explain_plan(planned((1.0, 0.25), data=2), quick=True)
    write_graph(tmp_path / "graph.json", graph())
    with_rivals = explain_plan(planned((1.0, 0.25), data=2, microbatch=1), graph_path=tmp_path / "graph.json")
    assert any("micro-batches" in r.what for r in with_rivals.rivals) and with_rivals.rivals[0].ratio > 1, "the plan is not a rival of itself"
    equal = explain_plan(planned((0.5, 0.5), data=2), quick=True)
    assert unequal.flops.hardware == equal.flops.hardware, "the same arithmetic, in other places"


def test_counts_from_a_file_are_checked():
    plan = planned((1.0, 0.25), data=2)
    good = plan_bytes(plan)
    counts = ",".join(map(str, plan.layout.replica_microbatches)).encode()
    assert counts in good.replace(b" ", b"").replace(b"\n", b"")
    document = json.loads(good)
    document["layout"]["replica_microbatches"] = [1, 2, 3]
    with pytest.raises(FormatError, match="must give each of the 2 replicas at least one micro-batch"):
        plan_from_bytes(json.dumps(document).encode())


def test_a_found_layout_of_several_kinds_is_a_plan():
    net = unlike((1.0, 0.25))
    found = find_layouts(
        lambda b: at_batch(graph(), b), net, assumed_cost(net), global_batch=16, precision=FULL, microbatches=(1, 2), levels=(0,),
        recompute=("none",), simulated=20, refine=1, methods=("mixed",),
    )  # fmt: skip
    chosen = best_runnable(found)
    plan = plan_found(found, chosen, JOB, net, assumed_cost(net), graph())
    check_plan(plan)
    assert len({net.device(name).cpu_share for name in plan.placement}) == 2
    assert plan.decisions["layout"]["options"]["division"]


def test_measured_times_hold_for_the_share_they_were_taken_at():
    slow, fast = unlike((0.25, 1.0)).devices
    cost = Cost().with_table({"a|F": Priced(2.0, "measured", 0.5)}, source="here", share=0.25)
    assert cost.price("a|F", None, slow) == Priced(2.0, "measured", 0.5) and cost.price("a|F", None, fast) == Priced(0.5, "measured", 0.5)
    assert Cost(table=cost.table).price("a|F", None, fast).time_s == 2.0, "without a share they hold everywhere"
    assert cost_of_document(cost_document(cost)).table_share == 0.25
    for wrong in (-0.5, 1.5):
        with pytest.raises(FormatError, match="table_share"):
            cost_of_document(cost_document(msgspec.structs.replace(cost, table_share=wrong)))

