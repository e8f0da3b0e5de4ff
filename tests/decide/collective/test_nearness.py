"""Which ranks are near each other: against widest paths from networkx, whatever the order of the ranks."""

from __future__ import annotations

from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import CollectiveProblem, auto
from meshwright.decide.collective.classic.hierarchical import Hierarchical, groups_of
from meshwright.decide.collective.classic.nearness import islands, near_order
from meshwright.decide.collective.classic.rooted_tree import RootedTree
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

pytestmark = pytest.mark.timeout(280)


def made(devices: int, switches: int, edges: list[tuple[str, str, int, int]], group: bool = False) -> Fabric:
    """Edges: (a, b, rate there, rate back)."""
    links = [x for a, b, there, back in edges for x in (Link(src=a, dst=b, rate_Bps=there), Link(src=b, dst=a, rate_Bps=back))]
    members = tuple(Device(name=f"d{i}", kind="cpu", group="one" if group else "") for i in range(devices))
    return Fabric(name="made", devices=members, switches=tuple(Switch(name=f"s{i}") for i in range(switches)), links=tuple(links))


def two_islands() -> Fabric:
    ports = [(f"d{i}", f"s{i // 4}", 125, 125) for i in range(8)]
    return made(8, 2, [*ports, ("s0", "s1", 25, 25)])


def problem(fabric: Fabric, order: list[int], op: str = "all-reduce", size: int = 1 << 20) -> CollectiveProblem:
    return CollectiveProblem(fabric=fabric, op=op, size_bytes=size, ranks=tuple(f"d{i}" for i in order), element_bytes=1)


def widest(fabric: Fabric, ranks: tuple[str, ...]) -> dict[tuple[int, int], int]:
    """Rate of the widest path between ranks, links as wide as their slower direction: the narrowest edge on the maximum spanning tree's path."""
    graph, rate = nx.Graph(), {(x.src, x.dst): x.rate_Bps for x in fabric.links}
    for (a, b), r in rate.items():
        graph.add_edge(a, b, weight=min(r, rate[b, a]))
    tree = nx.maximum_spanning_tree(graph)
    found = {}
    for i, j in combinations(range(len(ranks)), 2):
        path = nx.shortest_path(tree, ranks[i], ranks[j])
        found[i, j] = min(tree.edges[e]["weight"] for e in pairwise(path))
    return found


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    devices, switches = draw(st.integers(2, 7)), draw(st.integers(0, 3))
    actors = [f"d{i}" for i in range(devices)] + [f"s{i}" for i in range(switches)]
    rates = st.sampled_from([1, 2, 5, 9])
    edges = [(actors[draw(st.integers(0, i - 1))], actors[i], draw(rates), draw(rates)) for i in range(1, len(actors))]
    known = {frozenset(e[:2]) for e in edges}
    for a, b in draw(st.lists(st.tuples(st.sampled_from(actors), st.sampled_from(actors)), max_size=5)):
        if a != b and frozenset((a, b)) not in known:
            known.add(frozenset((a, b)))
            edges.append((a, b, draw(rates), draw(rates)))
    return made(devices, switches, edges)


@settings(max_examples=150, deadline=None)
@given(fabrics(), st.randoms(use_true_random=False))
def test_groups_lie_together_at_every_width(fabric: Fabric, chance: object) -> None:
    order = list(range(len(fabric.devices)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    p = problem(fabric, order)
    width = widest(fabric, p.ranks)
    placed = near_order(p)
    assert sorted(placed) == list(range(len(order)))
    for rate in set(width.values()):
        groups = [{j for j in placed if j == i or width[min(i, j), max(i, j)] >= rate} for i in placed]
        for group in groups:
            at = sorted(placed.index(r) for r in group)
            assert at == list(range(at[0], at[0] + len(at)))
    narrowest = min(width.values())
    parts = islands(p)
    if max(width.values()) == narrowest:
        assert parts == [sorted(placed)]
    else:
        inside = [width[min(i, j), max(i, j)] for part in parts for i, j in combinations(part, 2)]
        across = [w for (i, j), w in width.items() if not any(i in part and j in part for part in parts)]
        assert all(w > narrowest for w in inside) and set(across) == {narrowest}


def test_alike_links_leave_the_order_alone() -> None:
    star = made(5, 1, [(f"d{i}", "s0", 10, 10) for i in range(5)])
    p = problem(star, [3, 1, 4, 0, 2])
    assert near_order(p) == (0, 1, 2, 3, 4) and islands(p) == [[0, 1, 2, 3, 4]]
    slow = made(4, 1, [("d0", "s0", 10, 10), ("d1", "s0", 10, 2), ("d2", "s0", 10, 10), ("d3", "s0", 10, 10)])
    assert near_order(problem(slow, [0, 1, 2, 3])) == (0, 2, 3, 1) and islands(problem(slow, [0, 1, 2, 3])) == [[0, 2, 3], [1]]


@pytest.mark.parametrize("strategy", [RootedTree(), Hierarchical()])
def test_interleaved_ranks_cost_nothing(strategy: RootedTree | Hierarchical) -> None:
    """Two islands: with ranks in turns the tree still crosses the trunk once in each direction."""
    fabric = two_islands()
    straight, turns = (auto(problem(fabric, o), candidates=[strategy])[0] for o in (list(range(8)), [0, 4, 1, 5, 2, 6, 3, 7]))
    by_rank = auto(problem(fabric, [0, 4, 1, 5, 2, 6, 3, 7]), candidates=[RootedTree(order="rank")])[0]
    assert turns.time_s == pytest.approx(straight.time_s) and by_rank.time_s is not None and turns.time_s is not None
    assert by_rank.time_s > 2 * turns.time_s


def test_servers_that_the_fabric_names_come_first() -> None:
    named = load_fabric("dgx2:2", None)
    p = CollectiveProblem(fabric=named, op="all-reduce", size_bytes=1 << 20, ranks=tuple(d.name for d in named.devices), element_bytes=1)
    assert [len(g) for g in groups_of(p)] == [16, 16]
    assert groups_of(problem(two_islands(), [0, 4, 1, 5, 2, 6, 3, 7])) == [[0, 2, 4, 6], [1, 3, 5, 7]]
