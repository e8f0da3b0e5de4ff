"""Predictions of walks: never below what links need, flows counted, the choice sorted, sizes scaled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import Transport
from meshwright.decide.collective import NAMES, CollectiveProblem, Ring, collective_bound
from meshwright.decide.collective.bfb.strategy import BFB
from meshwright.errors import Infeasible, PlanMismatch
from meshwright.fabric.edit import sustained
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.choose import builtin, executed
from meshwright.run.group.plans import size_class
from meshwright.run.group.predict import (
    WALKS,
    at_size,
    executor_transport,
    flows_on_links,
    late_time_s,
    on_the_wire,
    predicted_time_s,
    quickest_walk,
    slowed_by_flows,
    slowly_answered,
    walk_program,
    walked,
)
from meshwright.run.group.rank_code import form_of
from meshwright.simulate import simulate_program

TRANSPORT = Transport(per_message_s=2e-5)


def problem(fabric: str = "two-islands", op: str = "all-reduce", size: int = 1 << 20) -> CollectiveProblem:
    return CollectiveProblem.on(load_fabric(fabric), op, size, transport=TRANSPORT, element_bytes=1)


@pytest.mark.parametrize("name", ["ring", "forestcoll", "joint", "blueconnect", "hierarchical", "direct", "double-tree"])
def test_walks_move_the_same_bytes_and_beat_no_bound(name: str) -> None:
    p = problem()
    program = NAMES[name]().plan(p, rng=np.random.default_rng(0)).program
    form = form_of(program)
    walk = walk_program(form)
    lanes = simulate_program(form.unrolled, p.fabric, p.ranks, record=False)
    walked = simulate_program(walk, p.fabric, p.ranks, record=False)
    assert walked.link_busy_s == pytest.approx(lanes.link_busy_s)
    assert predicted_time_s(form, p.fabric, p.ranks, TRANSPORT) >= float(collective_bound(p)) * (1 - 1e-9)
    half = simulate_program(at_size(walk, p.size_bytes // 2), p.fabric, p.ranks, record=False)
    assert sum(half.link_busy_s.values()) == pytest.approx(sum(walked.link_busy_s.values()) / 2, rel=0.01)


def test_flows_are_pairs_of_ranks() -> None:
    p = problem("star:5")
    program = NAMES["direct"]().plan(p, rng=np.random.default_rng(0)).program
    assert set(flows_on_links(program, p.fabric, p.ranks).tolist()) == {4}, "everybody talks to four others"
    slowed = slowed_by_flows(p.fabric, flows_on_links(program, p.fabric, p.ranks))
    assert all(a.rate_Bps < b.rate_Bps for a, b in zip(slowed.links, p.fabric.links, strict=True))
    ring = Ring(rings=1).plan(p, rng=np.random.default_rng(0)).program
    assert slowed_by_flows(p.fabric, flows_on_links(ring, p.fabric, p.ranks)) == p.fabric, "one flow per link loses nothing"


def test_the_choice_is_sorted_and_as_good_as_any_single_strategy() -> None:
    p = replace(problem(), effort_s=20.0)
    names = ("ring", "forestcoll", "hierarchical", "halving-doubling")
    found = executed(p, [NAMES[n]() for n in names])
    assert [e.time_s for e in found] == sorted(e.time_s for e in found) and {e.strategy for e in found} == set(names)
    for name in names:
        form = form_of(NAMES[name]().plan(p, rng=np.random.default_rng(0)).program)
        assert found[0].time_s <= predicted_time_s(form, p.fabric, p.ranks, TRANSPORT) * (1 + 1e-9)


def test_ranks_that_share_cores_are_judged_by_late_messages_too() -> None:
    """Islands behind a trunk, four ranks per core: the more messages, the more is lost where some of them lie there for a while."""
    p = CollectiveProblem.on(load_fabric("two-islands:4"), "all-reduce", 1 << 24, transport=executor_transport(load_fabric("two-islands:4"), 4.0))
    assert p.transport is not None
    found = {}
    for pieces in (64, 256):
        program = NAMES["rooted-tree"](pieces=pieces).plan(p, rng=np.random.default_rng(0)).program
        alone, shared = (quickest_walk(program, p.fabric, p.ranks, p.transport, shared=x) for x in (False, True))
        late = {w: late_time_s(walked(program, p.fabric, p.ranks, w), p.fabric, p.ranks, p.transport) for w in WALKS}
        assert alone.judged_s == alone.time_s and shared.judged_s == min(late.values()) == late[shared.walk] > shared.time_s
        found[pieces] = shared.judged_s / shared.time_s
    assert found[256] > 1.1 * found[64]
    chosen = executed(replace(problem(), effort_s=20.0), [NAMES["ring"](), NAMES["direct"]()], shared=True)
    assert [e.judged_s for e in chosen] == sorted(e.judged_s for e in chosen) and all(e.judged_s > e.time_s for e in chosen)


def test_programs_too_long_to_walk_are_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.group.choose.MAX_SIMULATED_STEPS", 1)
    with pytest.raises(Infeasible, match="executed"):
        executed(problem(), [Ring()])


def test_gloos_ring_keeps_the_order_of_ranks() -> None:
    p = problem("two-islands:4")
    turned = replace(p, ranks=tuple(p.ranks[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)))
    straight, crossing = builtin(p), builtin(turned)
    assert straight is not None and crossing is not None and crossing.time_s > 2 * straight.time_s
    assert all(builtin(problem(op=op)) for op in ("broadcast", "all-to-all", "gather", "reduce"))


def test_planners_see_sustained_rates_only() -> None:
    fabric = load_fabric("star:3")
    bursty = replace(fabric, links=tuple(replace(x, burst_bytes=1 << 16) for x in fabric.links))
    assert sustained(fabric) is fabric and sustained(bursty) is sustained(bursty) and sustained(bursty).links == fabric.links
    p = CollectiveProblem.on(bursty, "all-gather", 1 << 20)
    assert p.fabric.links == fabric.links


def test_shared_cores_cost_more() -> None:
    fabric = load_fabric("laptop:4")
    alone, shared = executor_transport(fabric), executor_transport(fabric, 4.0)
    assert shared.per_message_s == 4 * alone.per_message_s and executor_transport(fabric, 0.5) == alone


@pytest.mark.parametrize(("size", "nearest"), [(1, 1), (3, 4), (1000, 1024), (1448, 1024), (1449, 2048), (1 << 30, 1 << 30)])
def test_size_classes(size: int, nearest: int) -> None:
    assert size_class(size) == nearest


def test_a_plan_mismatch_names_the_rank() -> None:
    error = PlanMismatch("rank 2 has other plans", data={"rank": 2})
    assert error.code == "plan-mismatch" and error.data["rank"] == 2


def test_options_that_do_not_go_with_other_pieces_end_the_search_and_not_the_choice() -> None:
    """A lead of 8 pieces divides 16 of them, and not 4."""
    found = executed(problem(op="reduce-scatter"), [NAMES["forestcoll"](pieces=8, lead=8)])
    assert found[0].ranked.plan is not None and found[0].ranked.plan.options["lead"] == 8


def k44(rate_Bps: int = 2_500_000, latency_s: float = 5e-3) -> Fabric:
    sides = [(a, b) for a in range(4) for b in range(4, 8)]
    links = tuple(Link(src=f"n{x}", dst=f"n{y}", rate_Bps=rate_Bps, latency_s=latency_s) for a, b in sides for x, y in ((a, b), (b, a)))
    return Fabric(name="k44", devices=tuple(Device(name=f"n{i}", kind="cpu") for i in range(8)), links=links)


def test_a_first_message_takes_its_way_twice_and_the_others_once() -> None:
    """gloo sends once the receiver has answered. Receives are posted as the call begins: the first hop alone waits; over short links none does."""
    fabric = k44(rate_Bps=10**12)
    for strategy, hops in ((BFB(), 3), (Ring(rings=1), 8)):
        order = tuple(f"n{i}" for i in (0, 4, 1, 5, 2, 6, 3, 7))
        p = CollectiveProblem(fabric=fabric, op="all-gather", size_bytes=64, ranks=order, element_bytes=1)
        form = form_of(strategy.plan(p, rng=np.random.default_rng(0)).program)
        assert predicted_time_s(form, fabric, order, Transport()) == pytest.approx(5e-3 * hops, rel=1e-3)
        assert len(slowly_answered(form.unrolled, fabric, order)) == len(form.unrolled.channels)
        near = k44(latency_s=1e-6)
        assert not slowly_answered(form.unrolled, near, order)
        assert len(on_the_wire(form, near, order).steps) == len(walk_program(form).steps)
