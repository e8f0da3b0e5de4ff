"""Disconnected fabrics: refused where data cannot get where it must, by a cut that no link leaves; against networkx."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import OPERATIONS, CollectiveProblem, ForestColl, Ring, auto, collective_bound
from meshwright.decide.collective.bounds.latency import needs
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.taccl.strategy import Taccl
from meshwright.errors import Disconnected, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link


def fabric_of(n: int, arcs: list[tuple[int, int]]) -> Fabric:
    devices = tuple(Device(name=f"d{i}", kind="gpu", group=f"h{i}", memory_bytes=1, memory_bandwidth_Bps=0, flops={}) for i in range(n))
    links = tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=100, latency_s=0.0, kind="NET") for a, b in arcs)
    return Fabric(name="f", devices=devices, switches=(), links=links)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 6), st.data())
def test_refused_exactly_where_needed_data_cannot_pass(n: int, data: st.DataObject) -> None:
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    arcs = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * n))
    op, root = data.draw(st.sampled_from(OPERATIONS)), data.draw(st.integers(0, n - 1))
    peers = tuple(data.draw(st.lists(st.integers(-1, n - 1), min_size=n, max_size=n))) if op == "permute" else ()
    problem = CollectiveProblem.on(fabric_of(n, arcs), op, 4 * n, root=root, peers=peers)
    graph = nx.DiGraph(arcs)
    graph.add_nodes_from(range(n))
    possible = all(nx.has_path(graph, source, target) for source, targets in needs(problem) for target in targets)
    if possible:
        assert collective_bound(problem).exact > 0 or not any(targets for _, targets in needs(problem))
        return
    with pytest.raises(Disconnected) as caught:
        collective_bound(problem)
    here, there = ({int(name[1:]) for name in caught.value.data[side]} for side in ("from", "to"))
    assert here and there and here | there == set(range(n)) and not any(a in here and b in there for a, b in arcs)
    words = caught.value.message.split()
    source, target = int(words[3][1:]), int(words[5].rstrip(":")[1:])
    assert source in here and target in there and not nx.has_path(graph, source, target)


def test_large_sides_are_counted() -> None:
    ring = [(i, (i + 1) % 6) for i in range(6)]
    problem = CollectiveProblem.on(fabric_of(8, [*ring, (6, 0), (7, 6)]), "all-gather", 64)
    with pytest.raises(Disconnected, match="from d0 to d6: no link leads from d0, d1, d2, d3 and 2 more to the other 2"):
        collective_bound(problem)
    assert collective_bound(replace(problem, op="broadcast", root=7)).exact > 0


@pytest.mark.parametrize(("op", "root"), [("broadcast", 0), ("scatter", 0), ("reduce", 3), ("gather", 3)])
def test_one_way_links_that_suffice_for_the_operation_get_a_plan(op: str, root: int) -> None:
    fabric = fabric_of(4, [(0, 1), (1, 0), (1, 2), (2, 3), (3, 2)])
    problem = CollectiveProblem.on(fabric, op, 4096, root=root)
    ranked = auto(problem)
    assert ranked[0].plan is not None and ranked[0].time_s is not None and ranked[0].time_s >= float(collective_bound(problem)) * (1 - 1e-9)
    check_program(ranked[0].plan.program).raise_if_wrong()
    with pytest.raises(Disconnected):
        auto(replace(problem, op="all-gather"))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.data())
def test_pairs_are_sent_along_one_way_links_through_whoever_lies_between(n: int, data: st.DataObject) -> None:
    """On a line of one-way links, and some more: nobody needs a way back."""
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    arcs = [(i, i + 1) for i in range(n - 1)] + data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2))
    peers = tuple(data.draw(st.integers(-1, i)) for i in range(n))
    problem = CollectiveProblem.on(fabric_of(n, list(dict.fromkeys(arcs))), "permute", 4096, peers=peers)
    plan = auto(problem, candidates=[Direct(), Taccl()])[0].plan
    assert plan is not None
    check_program(plan.program).raise_if_wrong()


def test_when_nobody_has_a_plan_the_reason_is_not_that_some_strategy_lacks_the_operation() -> None:
    problem = CollectiveProblem.on(fabric_of(3, [(0, 1), (1, 0), (1, 2), (2, 1)]), "scatter", 4096, shard_bytes=(4096, 0, 0))
    with pytest.raises(Unsupported, match="owns everything"):
        auto(problem, candidates=[Ring(), ForestColl()])
