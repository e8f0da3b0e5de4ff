"""Schedules of wirings, replayed: breadth-first ones reach the exact load, expansions what their rules promise."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.check.verdict import Verdict
from meshwright.check.wiring import check_schedule
from meshwright.decide.topology.directconnect.cayley import Group
from meshwright.decide.topology.directconnect.families import base_wirings, complete, complete_bipartite, generalized_kautz, ring, torus
from meshwright.decide.topology.directconnect.loads import gather_cost
from meshwright.decide.topology.directconnect.schedule import Schedule, Transfer, breadth_first, of_copies, of_line_graph, of_power
from meshwright.decide.topology.directconnect.wiring import Wiring
from meshwright.errors import Disconnected, Unsupported


def verdict(schedule: Schedule, steps: int, load: Fraction) -> Verdict:
    transfers = [(t.step, t.source, t.first, t.last, t.sender, t.receiver) for t in schedule.transfers]
    return check_schedule(schedule.wiring.nodes, list(schedule.wiring.links()), schedule.pieces, transfers, steps=steps, load=load)


BASES = {
    "K4": complete(4), "K3,3": complete_bipartite(3), "ring 5": ring(5, paired=True), "one-way ring": ring(4, paired=False),
    "Petersen": base_wirings(10, 3, paired=True)[0], "Cayley": Group(8, 2, 7).wiring((1, 4, 7, 14)), "torus": torus((3, 4)),
    "reversed": Group(8, 1, 1).wiring((5, 7)).transposed(),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_breadth_first_broadcasts_reach_the_exact_load(name: str) -> None:
    cost = gather_cost(BASES[name])
    schedule = breadth_first(BASES[name], cost.load)
    assert (schedule.steps, schedule.load) == (cost.steps, cost.load)
    assert not verdict(schedule, cost.steps, cost.load).findings


@pytest.mark.parametrize("name", ["K4", "K3,3", "one-way ring", "ring 5"])
def test_expansions_deliver_with_the_load_of_their_rules(name: str) -> None:
    wiring = BASES[name]
    base = breadth_first(wiring, gather_cost(wiring).load)
    d, n = wiring.ports, wiring.nodes
    for made, steps, load in (
        (of_line_graph(base), base.steps + 1, d * base.load + 1),
        (of_copies(base, 2), base.steps + 1, base.load + Fraction(1, 2 * d)),
        (of_power(base, 2), 2 * base.steps, base.load / 2 * (n + 1)),
    ):
        exact = name != "one-way ring" or made.wiring.nodes > n  # the line graph of a cycle is that cycle, and its last step is empty
        assert (made.steps, made.load) == (steps, load) if exact else made.steps < steps and made.load < load
        assert not verdict(made, made.steps, made.load).findings
        assert gather_cost(made.wiring).steps <= steps


def test_line_graphs_of_line_graphs_and_cubes() -> None:
    base = breadth_first(complete(3), gather_cost(complete(3)).load)
    twice = of_line_graph(of_line_graph(base))
    assert twice.load == 2 * (2 * base.load + 1) + 1 and not verdict(twice, 3, twice.load).findings
    one = breadth_first(ring(3, paired=False), Fraction(2))
    cube = of_power(one, 3)
    assert cube.load == one.load / 3 * 13 and not verdict(cube, 6, cube.load).findings


def test_damaged_schedules_are_refused() -> None:
    right = breadth_first(complete_bipartite(3), gather_cost(complete_bipartite(3)).load)
    steps, load = right.steps, right.load
    first, late = right.transfers[0], next(t for t in right.transfers if t.step == 1)
    for transfers in (
        right.transfers[1:], (*right.transfers, first), (*right.transfers[1:], replace(first, receiver=first.sender)),
        tuple(replace(t, step=0) if t == late else t for t in right.transfers), (*right.transfers, Transfer(2, 0, 0, 0, 0, 3)),
    ):  # fmt: skip
        assert verdict(replace(right, transfers=transfers), steps, load).status == "wrong"
    assert verdict(right, steps + 1, load).status == verdict(right, steps, load / 2).status == "wrong"


def test_what_has_no_schedule_here() -> None:
    with pytest.raises(Unsupported, match="loops or parallel"):
        breadth_first(generalized_kautz(8, 2), Fraction(1))
    with pytest.raises(Disconnected):
        breadth_first(Wiring.of("two", 4, [(0, 1), (1, 0), (2, 3), (3, 2)]), Fraction(1))
