"""Wirings without switches: expansions against networkx, costs against linear programs, published figures, frontiers that are checked, refusals."""

from __future__ import annotations

import json
import runpy
from fractions import Fraction
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from effort import few
from meshwright.check.wiring import check_wiring
from meshwright.decide.collective.bfb.strategy import Steps
from meshwright.decide.topology import DirectConnect, TopologyProblem, strategy
from meshwright.decide.topology.directconnect import table
from meshwright.decide.topology.directconnect.cayley import Group, cayley_cost, groups, search
from meshwright.decide.topology.directconnect.families import base_wirings, complete_bipartite, generalized_kautz, torus
from meshwright.decide.topology.directconnect.loads import gather_cost
from meshwright.decide.topology.directconnect.table import TABLE, shipped_graphs
from meshwright.decide.topology.directconnect.wiring import Wiring, copies, line_graph, product
from meshwright.decide.topology.problem import nondominated, steps_bound
from meshwright.drive.wiring import design_wiring
from meshwright.errors import CheckFailed, Disconnected, FormatError, Infeasible, UnknownName, UsageError
from meshwright.kernels.highs import solve, solver


def random_wiring(rng: np.random.Generator, nodes: int, ports: int) -> Wiring:
    """Permutations laid over each other: loops and parallel arcs happen."""
    while True:
        arcs = [(a, int(b)) for _ in range(ports) for a, b in enumerate(rng.permutation(nodes))]
        if nx.is_strongly_connected(nx.DiGraph([*arcs, *((a, a) for a in range(nodes))])):
            return Wiring.of("random", nodes, arcs)


def factor(wiring: Wiring) -> Fraction:
    return gather_cost(wiring).load * wiring.ports / wiring.nodes


def least_load(hops: dict[int, dict[int, int]], links: dict[tuple[int, int], int], u: int, step: int) -> float:
    """The linear program of one node and step: shares of shards over links, the busiest of which is least."""
    shards = [v for v in hops if hops[v][u] == step]
    ways = [(v, w) for v in shards for (w, to) in links if to == u and hops[v][w] == step - 1]
    if not shards:
        return 0.0
    lp = solver()
    lp.addVars(len(ways) + 1, [0.0] * (len(ways) + 1), [1e9] * (len(ways) + 1))
    lp.changeColCost(len(ways), 1.0)
    for v in shards:
        own = [i for i, way in enumerate(ways) if way[0] == v]
        lp.addRow(1.0, 1.0, len(own), own, [1.0] * len(own))
    for w in {w for _, w in ways}:
        own = [i for i, way in enumerate(ways) if way[1] == w]
        lp.addRow(-1e9, 0.0, len(own) + 1, [*own, len(ways)], [1.0] * len(own) + [-float(links[w, u])])
    solve(lp, what="the division of one step")
    return float(lp.getInfo().objective_function_value)


@pytest.mark.parametrize("seed", range(few(20)))
def test_the_cost_is_that_of_linear_programs_and_of_the_checker(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ports = int(rng.integers(1, 4))
    wiring = random_wiring(rng, int(rng.integers(3, 10)), ports)
    hops = dict(nx.all_pairs_shortest_path_length(nx.DiGraph(wiring.links().keys())))
    cost = gather_cost(wiring)
    each = [max(least_load(hops, wiring.links(), u, t) for u in hops) for t in range(1, cost.steps + 1)]
    assert cost.steps == max(max(row.values()) for row in hops.values())
    assert float(cost.load) == pytest.approx(sum(each), rel=1e-6)
    assert cost.hops == Fraction(sum(sum(row.values()) for row in hops.values()), wiring.nodes * (wiring.nodes - 1))
    assert [t.shards / t.links for t in cost.tight] == pytest.approx(each)
    verdict = check_wiring(wiring.nodes, ports, [(a, b) for a, b in wiring.arcs.tolist()], steps=cost.steps, load=cost.load)
    assert verdict.ok, verdict.findings


@pytest.mark.parametrize("ports", [4, 14])
def test_the_cost_is_that_of_divisions_by_cuts(ports: int) -> None:
    """14 ports: more than are counted by sets."""
    wiring = random_wiring(np.random.default_rng(1), 40, ports)
    senders: list[dict[int, int]] = [{} for _ in range(40)]
    for (a, b), count in wiring.links().items():
        senders[b][a] = count
    steps = Steps.of(list(senders), tuple(map(str, range(40))))
    assert gather_cost(wiring).load == steps.time() and gather_cost(wiring).steps == len(steps.tight)


# (wiring, steps, T_B): published, or recomputed by a program that shares nothing with ours
FIGURES = {
    "K4,4": (complete_bipartite(4), 2, "7/8"), "line of K4,4": (line_graph(complete_bipartite(4)), 3, "1"), "torus": (torus((4, 4)), 4, "15/16"),
    "Kautz 16": (generalized_kautz(16, 4), 2, "5/4"), "Kautz 1024": (generalized_kautz(1024, 4), 5, "341/256"),
    "circulant": (Group(16, 1, 1).wiring((3, 4, 12, 13)), 3, "15/16"),
    "diamond": (Group(8, 1, 1).wiring((5, 7)), 3, "7/8"), "Petersen": (base_wirings(10, 3, paired=True)[0], 2, "9/10"),
    "Cayley 256": (Group(32, 8, 11).wiring((90, 151, 177, 205)), 5, "255/256"),
    "Cayley 64 on 1024": (Group(64, 16, 59).wiring((191, 425, 692, 734)), 7, "1023/1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_published_figures(name: str) -> None:
    wiring, steps, least = FIGURES[name]
    assert gather_cost(wiring).steps == steps and factor(wiring) == Fraction(least)


def test_three_line_graphs_of_the_cayley_digraph_of_16() -> None:
    wiring = Group(8, 2, 7).wiring((1, 4, 7, 14))
    for _ in range(3):
        wiring = line_graph(wiring)
    assert wiring.name.startswith("L3(") and wiring.nodes == 1024
    assert (gather_cost(wiring).steps, factor(wiring)) == (5, Fraction(277, 256))
    assert factor(wiring.transposed()) == Fraction(277, 256)


@pytest.mark.parametrize("seed", range(few(8)))
def test_expansions_are_the_graphs_that_networkx_makes_and_cost_no_more_than_their_rules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base, other = random_wiring(rng, int(rng.integers(3, 7)), 2), random_wiring(rng, int(rng.integers(3, 5)), 1)
    graph, second = nx.MultiDiGraph(base.arcs.tolist()), nx.MultiDiGraph(other.arcs.tolist())
    lines, cost = line_graph(base), gather_cost(base)
    assert nx.is_isomorphic(nx.MultiDiGraph(lines.arcs.tolist()), nx.line_graph(graph))
    assert gather_cost(lines).steps <= cost.steps + 1 and gather_cost(lines).load <= 2 * cost.load + 1
    twice = copies(base, 2)
    assert twice.ports == 4 and nx.is_isomorphic(
        nx.DiGraph(twice.arcs.tolist()), nx.tensor_product(nx.DiGraph(graph), nx.DiGraph([(0, 0), (0, 1), (1, 0), (1, 1)]))
    )
    both = product(base, other)
    assert nx.is_isomorphic(nx.MultiDiGraph(both.arcs.tolist()), nx.cartesian_product(graph, second))
    assert gather_cost(both).steps == cost.steps + gather_cost(other).steps
    for made in (lines, twice, both):
        assert made.transposed().ports == made.ports


def test_groups_are_groups_and_one_node_stands_for_all() -> None:
    for group in groups(12):
        table = np.stack([group.times(g) for g in range(12)], 1)
        assert all(sorted(row) == list(range(12)) for row in table.tolist())
        assert all(table[table[a, b], c] == table[a, table[b, c]] for a in range(12) for b in range(12) for c in range(12))
        assert all(table[g, group.inverse(g)] == 0 for g in range(12))
        wiring = group.wiring((1, 5))
        found = cayley_cost(group, (1, 5), most_steps=20)
        if found is None:
            with pytest.raises(Disconnected, match="no way from node") as caught:
                gather_cost(Wiring.of("one by one", 12, wiring.arcs))
            assert caught.value.data["to"]
        else:
            cost = gather_cost(Wiring.of("one by one", 12, wiring.arcs))  # not told that it is transitive: every node is looked at
            assert found == (cost.steps, cost.load)


def test_a_search_finds_the_known_best_and_repeats_itself() -> None:
    found = search(8, 2, paired=False, evaluations=200, rng=np.random.default_rng(0), most_steps=9)
    assert (found[0][0], found[0][1]) == (3, Fraction(7, 2))
    again = search(8, 2, paired=False, evaluations=200, rng=np.random.default_rng(0), most_steps=9)
    assert [w.name for *_, w in found] == [w.name for *_, w in again]
    assert all(w.paired for *_, w in search(12, 3, paired=True, evaluations=100, rng=np.random.default_rng(0), most_steps=9))
    assert search(4, 9, paired=False, evaluations=10, rng=np.random.default_rng(0), most_steps=9) == []


def test_the_shipped_base_graphs_are_candidates_like_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each row has its group's order, ports and kind of cable; without a search they alone make the frontier; a damaged table is said."""
    graphs = shipped_graphs()
    assert len(graphs) > 150 and (1024, 4, True) in graphs
    for (nodes, ports, paired), rows in list(graphs.items())[::17]:
        for row in rows:
            wiring = Group(row.m, row.n, row.k).wiring(row.generators)
            assert (wiring.nodes, wiring.ports, pow(row.k, row.n, row.m)) == (nodes, ports, 1 % row.m) and wiring.paired >= paired
    problem, rng = TopologyProblem(nodes=16, ports=4), np.random.default_rng(0)
    shipped, none = (DirectConnect(evaluations=0, table=taken).plan(problem, rng=rng) for taken in (True, False))
    assert [(d.steps, d.factor) for d in shipped] == [(2, Fraction(1)), (3, Fraction(15, 16))] and none[0].factor == Fraction(5, 4)
    (tmp_path / TABLE).write_bytes(b"{")
    monkeypatch.setattr(table, "files", lambda _: tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        shipped_graphs.__wrapped__()
    (tmp_path / TABLE).write_text('{"schema":"other","version":1,"evaluations":0,"seed":0,"graphs":[]}')
    with pytest.raises(FormatError, match=r"not 'meshwright\.base-graphs' 1"):
        shipped_graphs.__wrapped__()


def test_the_table_is_made_again_by_its_command() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "base_graphs.py"))
    head = json.loads((Path(table.__file__).parent / TABLE).read_text())
    for nodes, ports, paired in ((9, 2, False), (12, 3, True)):
        rows = tool["rows_of"](nodes, ports, paired, head["evaluations"], head["seed"])
        assert rows == [row for row in head["graphs"] if row[:3] == [nodes, ports, paired]]


@pytest.mark.parametrize(("nodes", "ports", "paired"), [(16, 4, False), (12, 3, True), (9, 2, False), (10, 3, True), (5, 1, False)])
def test_a_frontier_is_checked_and_above_the_bounds(nodes: int, ports: int, paired: bool) -> None:
    problem = TopologyProblem(nodes=nodes, ports=ports, bidirectional=paired)
    rows = design_wiring(problem, options={"evaluations": 2000 if nodes == 16 else 300})
    points = [(row.design.steps, row.design.factor) for row in rows]
    assert nondominated(points) == list(range(len(points)))
    for row in rows:
        d = row.design
        assert row.gather is not None and row.gather.ok and row.scatter is not None and row.scatter.ok
        assert d.steps >= d.steps_bound and d.factor >= row.forest_factor >= d.factor_bound == Fraction(nodes - 1, nodes)
        assert d.factor == max(factor(d.wiring), factor(d.wiring.transposed())) and d.wiring.paired >= paired
        fabric = d.fabric(problem)
        fabric.require_connected()
        assert sum(x.rate_Bps for x in fabric.links) == problem.rate_Bps * int((d.wiring.arcs[:, 0] != d.wiring.arcs[:, 1]).sum())
    if (nodes, ports) == (16, 4):
        assert points == [(2, Fraction(1)), (3, Fraction(15, 16))]


def test_larger_designs_are_costed_by_rules_that_hold() -> None:
    """What `exact` leaves out is an upper bound of what it would find."""
    for row in DirectConnect(evaluations=50, exact=20).plan(TopologyProblem(nodes=48, ports=3), rng=np.random.default_rng(0)):
        assert row.exact or row.factor >= factor(row.wiring)
        assert row.steps >= gather_cost(row.wiring).steps


def test_the_checker_refuses_what_is_not_so() -> None:
    wiring = complete_bipartite(3)
    arcs = [(a, b) for a, b in wiring.arcs.tolist()]
    cost = gather_cost(wiring)
    right = {"steps": cost.steps, "load": cost.load, "paired": True}
    assert check_wiring(6, 3, arcs, **right).ok
    assert check_wiring(6, 3, arcs, **(right | {"steps": 3})).status == "wrong"
    assert check_wiring(6, 3, arcs, **(right | {"load": cost.load - Fraction(1, 9)})).status == "wrong"
    assert check_wiring(6, 3, arcs, **(right | {"load": cost.load + 1})).status == "wrong"
    assert check_wiring(6, 3, arcs[1:], **right).status == "wrong"
    one_way = [(a, (a + 1) % 3) for a in range(3)]
    assert check_wiring(3, 1, one_way, steps=2, load=Fraction(2)).ok and not check_wiring(3, 1, one_way, steps=2, load=Fraction(2), paired=True).ok
    with pytest.raises(CheckFailed, match="never reach"):
        check_wiring(4, 1, [(0, 1), (1, 0), (2, 3), (3, 2)], steps=1, load=Fraction(1)).raise_if_wrong()
    wide = random_wiring(np.random.default_rng(0), 14, 11)
    cost = gather_cost(wide)
    tight = [(t.node, t.senders) for t in cost.tight]
    wide_arcs = [(a, b) for a, b in wide.arcs.tolist()]
    assert check_wiring(14, 11, wide_arcs, steps=cost.steps, load=cost.load, tight=tight).status == "unknown"
    assert check_wiring(14, 11, wide_arcs, steps=cost.steps, load=cost.load - 1, tight=tight).status == "wrong"


def test_what_cannot_be_is_refused() -> None:
    for change in ({"nodes": 1}, {"ports": 0}, {"ports": 4}, {"nodes": 10**6}, {"rate_Bps": 0}, {"latency_s": float("nan")}):
        with pytest.raises(UsageError):
            TopologyProblem(**({"nodes": 4, "ports": 2} | change))
    rng = np.random.default_rng(0)
    with pytest.raises(UsageError, match="join pairs"):
        steps_bound(3, 1, bidirectional=True)
    with pytest.raises(UsageError, match="evaluations"):
        DirectConnect(evaluations=-1).plan(TopologyProblem(nodes=4, ports=2), rng=rng)
    with pytest.raises(Infeasible, match="15 accelerators with 3 ports"):
        DirectConnect(evaluations=20).plan(TopologyProblem(nodes=15, ports=3, bidirectional=True), rng=rng)
    with pytest.raises(ValueError, match="unlike numbers"):
        Wiring.of("broken", 3, [(0, 1), (1, 2), (1, 0)])
    with pytest.raises(UnknownName):
        strategy("nothing", "wiring")
    with pytest.raises(UsageError, match="options"):
        design_wiring(TopologyProblem(nodes=4, ports=2), options={"nothing": 1})
