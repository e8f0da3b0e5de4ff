"""Copies of hot experts: bound and placement beside every placement there is, flows beside networkx, and whether moving pays."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import networkx as nx
import numpy as np
import pytest

from effort import few
from meshwright.decide.experts.replicas import Replicas, best_move, busiest_bound, least_busiest, moving_pays, place_replicas, with_copies
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
    given = {"ranks": 2, "row_s": Fraction(1, 1000), "expert_bytes": 1000, "rate_Bps": 1000}
    assert moving_pays(none, two, steps=21, **given) == (True, Fraction(48 * 21, 1000), Fraction(1))
    assert moving_pays(none, two, steps=20, **given)[0] is False
    assert moving_pays(two, two, steps=99, **given) == (False, 0, 0)
    # in training every step costs weights and gradients: 48 rows save 48 ms, and 50 bytes take 50 ms
    assert moving_pays(none, two, steps=99, step_bytes=50, **given) == (False, Fraction(-2 * 99, 1000), Fraction(1))
    assert moving_pays(two, none, steps=99, step_bytes=50, **given) == (True, Fraction(2 * 99, 1000), Fraction(0))


@pytest.mark.parametrize("seed", range(few(8)))
def test_the_best_move_is_the_best_of_all_prefixes(seed):
    """Beside a plain search over the copies that `place_replicas` makes, with costs written out anew."""
    rng = np.random.default_rng(seed)
    ranks, loads = 4, (400 * rng.dirichlet(np.full(8, 0.3))).astype(int).tolist()
    size, rate, calls = int(rng.integers(1, 50)), 10, int(rng.integers(1, 4))
    each = int(rng.choice([0, 2])) * size
    most = place_replicas(loads, ranks, 2)
    before = most.copies[:1] if seed % 2 else ()

    def busiest(copies):
        return least_busiest(loads, [[e // 2, *(r for x, r in copies if x == e)] for e in range(8)], ranks)[0]

    def held(copies):
        return max([sum(r == x for _, r in copies) for x in range(ranks)] + [sum(e // 2 == x for e, _ in copies) for x in range(ranks)])

    def cost(copies):
        fresh = [c for c in copies if c not in before]
        return busiest(copies) * Fraction(1, 7) + Fraction(calls * held(copies) * each, rate) + Fraction(held(fresh) * size, rate)

    found, saved, moved = best_move(before, loads, ranks, 2, row_s=Fraction(1, 7), expert_bytes=size, rate_Bps=rate, calls=calls, step_bytes=each)
    stay = cost(before)
    assert cost(found.copies) == min([stay, *(cost(most.copies[:n]) for n in range(len(most.copies) + 1))])
    assert saved - moved == stay - cost(found.copies) and found.busiest == busiest(found.copies)


def test_copies_that_cannot_be_are_refused():
    for copies in ([(0, 0)], [(0, 1), (0, 1)], [(4, 1)], [(0, 2)]):
        with pytest.raises(UsageError, match="no copy of expert"):
            with_copies([1, 2, 3, 4], copies, 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="do not divide"):
        place_replicas([1, 2, 3], 2, 1)
    with pytest.raises(UsageError, match="0 or more"):
        place_replicas([1, -2], 2, 1)
    with pytest.raises(UsageError, match="rate above 0"):
        moving_pays(place_replicas([1, 2], 2, 1), place_replicas([1, 2], 2, 1), ranks=2, row_s=Fraction(1), expert_bytes=1, rate_Bps=0, steps=1)
