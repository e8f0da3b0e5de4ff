"""Copies of hot experts: bound and placement beside every placement there is, flows beside networkx, and whether moving pays."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import networkx as nx
import numpy as np
import pytest

from effort import few
from meshwright.decide.experts.replicas import Replicas, busiest_bound, least_busiest, moving_pays, place_replicas
from meshwright.errors import UsageError


def flow_value(loads, holders, ranks, most):
    g = nx.DiGraph()
    for e, (load, held) in enumerate(zip(loads, holders, strict=True)):
        g.add_edge("s", ("e", e), capacity=load)
        for r in held:
            g.add_edge(("e", e), ("r", r))
    for r in range(ranks):
        g.add_edge(("r", r), "t", capacity=most)
    return nx.maximum_flow_value(g, "s", "t")


def best_of_all(loads, ranks, spare):
    """Every set of copies that fits in the spare places."""
    own = len(loads) // ranks
    of_rank = [[c for n in range(spare + 1) for c in combinations([e for e in range(len(loads)) if e // own != r], n)] for r in range(ranks)]
    best = sum(loads)
    for chosen in product(*of_rank):
        holders = [[e // own, *(r for r in range(ranks) if e in chosen[r])] for e in range(len(loads))]
        best = min(best, least_busiest(loads, holders, ranks)[0])
    return best


@pytest.mark.parametrize("seed", range(few(12)))
def test_flows_are_the_best_and_whole(seed):
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(2, 5)), int(rng.integers(2, 9))
    loads = rng.integers(0, 40, experts).tolist()
    holders = [sorted(rng.choice(ranks, int(rng.integers(1, ranks + 1)), replace=False).tolist()) for _ in loads]
    most, rows = least_busiest(loads, holders, ranks)
    assert [sum(of.values()) for of in rows] == loads and all(set(of) <= set(h) for of, h in zip(rows, holders, strict=True))
    assert max(sum(of.get(r, 0) for of in rows) for r in range(ranks)) <= most
    assert flow_value(loads, holders, ranks, most) == sum(loads)
    assert most == 0 or flow_value(loads, holders, ranks, most - 1) < sum(loads)


@pytest.mark.parametrize("seed", range(few(12)))
def test_no_placement_beats_the_bound_and_ours_is_near_the_best(seed):
    rng = np.random.default_rng(seed)
    ranks, spare = 3, int(rng.integers(1, 3))
    loads = (200 * rng.dirichlet(np.full(6, 0.4))).astype(int).tolist()
    best, made = best_of_all(loads, ranks, spare), place_replicas(loads, ranks, spare)
    assert made.bound == busiest_bound(loads, ranks, spare) <= best <= made.busiest <= made.before
    assert made.busiest <= best * 1.25 + 1
    held = {r: sum(x == r for _, x in made.copies) for r in range(ranks)}
    assert max(held.values()) <= spare and [sum(n for _, n in of) for of in made.rows] == loads
    assert all(r == e // 2 or (e, r) in made.copies for e, of in enumerate(made.rows) for r, _ in of)


def test_a_hot_expert_is_shared_by_all():
    made = place_replicas([96, 1, 1, 1, 1, 0, 0, 0], 4, 1)
    assert made.before == 97 and made.busiest == made.bound == 25 and {r for r, _ in made.rows[0]} == {0, 1, 2, 3}


def test_without_spare_places_or_tokens_nothing_moves():
    assert place_replicas([5, 0, 1, 0], 2, 0) == Replicas(copies=(), rows=(((0, 5),), (), ((1, 1),), ()), busiest=5, before=5, bound=5)
    assert place_replicas([0, 0], 2, 1).busiest == 0


def test_moving_must_pay():
    none, two = place_replicas([96, 0, 0, 0], 2, 0), place_replicas([96, 0, 0, 0], 2, 1)
    given = {"row_s": Fraction(1, 1000), "expert_bytes": 1000, "rate_Bps": 1000}
    assert moving_pays(none, two, steps=21, **given) == (True, Fraction(48 * 21, 1000), Fraction(1))
    assert moving_pays(none, two, steps=20, **given)[0] is False
    assert moving_pays(two, two, steps=99, **given) == (False, 0, 0)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="do not divide"):
        place_replicas([1, 2, 3], 2, 1)
    with pytest.raises(UsageError, match="0 or more"):
        place_replicas([1, -2], 2, 1)
    with pytest.raises(UsageError, match="rate above 0"):
        moving_pays(place_replicas([1, 2], 2, 1), place_replicas([1, 2], 2, 1), row_s=Fraction(1), expert_bytes=1, rate_Bps=0, steps=1)
