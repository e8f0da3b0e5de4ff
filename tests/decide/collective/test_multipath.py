"""Pairs over many paths: delivery, loads and optimum against the flow's own proof, sharing links fairly, refusals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from collective_oracle import assert_delivers, bandwidth_time_s, full_mesh, line
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, strategy
from meshwright.decide.collective.bounds.flow import demands, least_time_flow
from meshwright.decide.collective.multipath.flow import fullest_s, in_units, shares_of
from meshwright.decide.collective.multipath.strategy import Multipath
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import Disconnected, MeshwrightError, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.testing.fabrics import fabrics


def planned(problem: CollectiveProblem, **options: Any) -> CollectivePlan:
    plan = Multipath(**options).plan(problem, rng=np.random.default_rng(0))
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    return plan


def bound_of(plan: CollectivePlan) -> Fraction:
    assert plan.bound is not None
    return Fraction(plan.bound.value)


def time_of(plan: CollectivePlan, problem: CollectiveProblem) -> float:
    return simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize(("op", "peers"), [("all-to-all", ()), ("permute", ()), ("permute", (3, -1, 2, 0, 0))])
def test_every_block_arrives(op: str, peers: tuple[int, ...], unroll: bool) -> None:
    """On a line everything passes through others; one rank keeps its own, one gets nothing, two read the same."""
    problem = CollectiveProblem.on(line(5), op, 5 * 4 * 7, peers=peers)
    for pieces in (1, 3):
        assert_delivers(planned(problem, unroll=unroll, pieces=pieces, units=2).program, np.random.default_rng(1))


@given(fabrics(max_devices=6), st.sampled_from(["all-to-all", "permute"]), st.integers(1, 4000), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_random_fabrics(fabric: Fabric, op: str, words: int, unroll: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = len(fabric.devices)
    peers = tuple(int(x) for x in rng.integers(-1, n, n)) if op == "permute" else ()
    try:
        problem = CollectiveProblem.on(fabric, op, 4 * words, peers=peers)
        plan = planned(problem, unroll=unroll, pieces=int(rng.integers(1, 4)))
    except (Disconnected, UsageError):
        return
    assert_delivers(plan.program, rng)
    # the load that the plan states is that of its messages, whose chunks are whole elements
    whole = CollectiveProblem.on(fabric, op, 4 * n * 5040 * 11, peers=peers)
    again = planned(whole, unroll=unroll, pieces=plan.options["pieces"], units=plan.options["units"])
    words_each = whole.size_bytes // 4 // (n if op == "all-to-all" else 1)
    if words_each % (plan.options["units"] * plan.options["pieces"]) == 0:
        assert float(bandwidth_time_s(again.program, fabric, whole.ranks)) == pytest.approx(again.notes["bandwidth_time_s"], rel=1e-12)
    assert bound_of(again) <= Fraction(time_of(again, whole)) * (1 + Fraction(1, 10**9))


@pytest.mark.parametrize(
    ("name", "op", "above", "over_direct"),
    [
        ("dgx1-v100:1", "permute", 1.01, 5.9), ("dgx1-v100:1", "all-to-all", 1.01, 1.1), ("mi250:1", "permute", 1.01, 1.9),
        ("mi300x:1", "permute", 1.01, 3.9), ("dgx1-v100:2", "permute", 1.05, 3.9), ("dgx-a100:2", "permute", 1.01, 7.8),
    ],
)  # fmt: skip
def test_large_messages_come_near_the_bound(name: str, op: str, above: float, over_direct: float) -> None:
    """Where one path per pair takes up to eight times as long. Two boxes of DGX-1: shares of a hundredth are rounded off."""
    problem = CollectiveProblem.on(load_fabric(name), op, 1 << 30)
    plan = planned(problem)
    assert time_of(plan, problem) < above * float(bound_of(plan))
    one = strategy("direct")().plan(problem, rng=np.random.default_rng(0))
    assert time_of(one, problem) > over_direct * time_of(plan, problem)


def test_the_flow_is_split_as_the_links_are() -> None:
    """Two pairs across a square, each over both sides at once: half of the time of one side."""
    fabric = full_mesh(2)
    links = tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=10**9) for a, b in ((0, 1), (1, 2), (0, 3), (3, 2)))
    fabric = Fabric(name="square", devices=tuple(Device(name=f"d{i}") for i in range(4)), links=links)
    problem = CollectiveProblem.on(fabric, "permute", 8000, peers=(-1, -1, 0, -1))
    graph, wanted = rate_graph(fabric, problem.ranks), demands(problem)
    flow = least_time_flow(graph, wanted)
    assert flow[0] == pytest.approx({(0, 1): 4000.0, (1, 2): 4000.0, (0, 3): 4000.0, (3, 2): 4000.0})
    shares = shares_of(graph, wanted)
    assert sorted(s.path for s in shares[0, 2]) == [(0, 1, 2), (0, 3, 2)] and all(s.part == pytest.approx(0.5) for s in shares[0, 2])
    assert in_units(graph, wanted, shares, 24)[0] == 2
    units, paths = in_units(graph, wanted, shares, 24, units=3)
    assert units == 3 and sorted(n for _, n in paths[0, 2]) == [1, 2] and fullest_s(graph, wanted, paths, 3) == Fraction(16000, 3 * 10**9)
    assert planned(problem).notes["paths"] == 2


def test_devices_outside_pass_on_where_ranks_are_not_connected() -> None:
    fabric = line(3)
    problem = CollectiveProblem(fabric=fabric, op="permute", size_bytes=4000, ranks=("d0", "d2"))
    plan = planned(problem)
    assert plan.options["relay"] is True and plan.notes["hops"] == 1
    with pytest.raises(Disconnected, match="no path"):
        planned(problem, relay=False)
    assert planned(CollectiveProblem.on(fabric, "permute", 4000)).options["relay"] is False


def test_equal_problems_give_equal_plans_and_sizes_share_their_paths() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx1-v100:1"), "all-to-all", 1 << 20)
    first, second = planned(problem), planned(CollectiveProblem.on(load_fabric("dgx1-v100:1"), "all-to-all", 1 << 20))
    assert first.options == second.options and first.program.lanes.repeat.tolist() == second.program.lanes.repeat.tolist()
    chosen = {k: v for k, v in first.options.items() if k != "strategy"}
    assert np.array_equal(planned(problem, **chosen).program.steps.dst_chunk, first.program.steps.dst_chunk)


@pytest.mark.parametrize("option", ["units", "pieces", "depth"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be >= 1"):
        planned(CollectiveProblem.on(line(3), "permute", 400), **{option: 0})


def test_what_it_does_not_do() -> None:
    with pytest.raises(Unsupported, match="does not do broadcast"):
        planned(CollectiveProblem.on(line(3), "broadcast", 400))
    with pytest.raises(Unsupported, match="make too large a flow"):
        planned(CollectiveProblem.on(load_fabric("dgx-h100:8"), "all-to-all", 1 << 20))
    with pytest.raises(Unsupported, match="too large a program"):
        planned(CollectiveProblem.on(load_fabric("dgx-h100:4"), "all-to-all", 1 << 20), units=24)
    assert not shares_of(rate_graph(line(2), ("d0", "d1")), {})  # nobody wants anything
    with pytest.raises(MeshwrightError):  # one-way
        one_way = Fabric(name="one way", devices=(Device(name="a"), Device(name="b")), links=(Link(src="a", dst="b", rate_Bps=10),))
        planned(CollectiveProblem.on(one_way, "all-to-all", 8))
