"""Annealed trees span from their roots, and together use exactly the halves of entries that were there."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.treepack_anneal import _annealed, anneal_parents

HUBS = 2


def random_rows(rng: np.random.Generator, trees: int, spare: int, n: int):  # type: ignore[no-untyped-def]
    """Trees with random parents; spare entries anywhere; an entry is direct or passes one of HUBS switches."""
    parent = np.full((trees + spare, n), -1, np.int32)
    for t in range(trees):
        order = rng.permutation(n)
        for i in range(1, n):
            parent[t, order[i]] = order[int(rng.integers(i))]
    for t in range(trees, trees + spare):
        for v in range(n):
            u = int(rng.integers(n))
            parent[t, v] = u if u != v else -1
    hub = np.where(parent >= 0, rng.integers(-1, HUBS, parent.shape), -1).astype(np.int32)
    halves = rng.integers(1, 9, (4, *parent.shape)).astype(float) * (parent >= 0)
    halves[2:, hub < 0] = 0.0
    return parent, hub, halves


def time_of(parent: np.ndarray, cost: np.ndarray, v: int) -> float:
    at = 0.0
    for _ in range(len(parent)):
        if parent[v] < 0:
            return at
        at, v = at + cost[v], int(parent[v])
    raise AssertionError("a circle")


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 2), st.integers(2, 6), st.booleans())
def test_halves_are_kept_and_trees_span(seed: int, trees: int, spare: int, n: int, unlike: bool) -> None:
    rng = np.random.default_rng(seed)
    parent, hub, halves = random_rows(rng, trees, spare, n)
    units = np.array([1 + (unlike and t % 2) for t in range(trees)] + [1] * spare, np.int32)
    found, first, second, after = anneal_parents(parent, hub, halves, units, trees, proposals=2000, seed=seed % 7 + 1)
    used: Counter[tuple[str, int, int]] = Counter()
    for t in range(trees):
        root = int(np.flatnonzero(parent[t] < 0)[0])
        cost = np.zeros(n)
        for v in range(n):
            a, b = divmod(int(first[t, v]), n)
            c = int(second[t, v])
            if v == root:
                assert found[t, v] == -1
                continue
            assert found[t, v] == parent[a, b]  # the sender of the first half
            assert ((hub[a, b], b) == (-1, v) and a == c) or hub[a, b] == hub[c, v] >= 0  # which ends where the second begins
            assert units[a] == units[c] == units[t]
            cost[v] = halves[0, a, b] + halves[2, c, v] + max(halves[1, a, b], halves[3, c, v])
            used["first", a, b] += 1
            used["second", c, v] += 1
        for v in range(n):
            assert after[t, v] == time_of(found[t], cost, v)
    assert not used or max(used.values()) == 1  # no half is used twice
    again = _annealed(parent, hub, halves, units, trees, 2000, seed % 7 + 1)  # what is remembered is what is found afresh
    assert all(np.array_equal(x, y) for x, y in zip((found, first, second, after), again, strict=True))


def test_two_devices_at_once_turn_a_server_around() -> None:
    """Devices 1 and 2 are one server: each tree enters it once, from 0 or from 3. Tree 0 comes late by 3, tree 1, of root 3, late by 0."""
    parent = np.array([[-1, 2, 3, 0], [3, 0, 1, -1]], np.int32)  # 0 -> 3 -> 2 -> 1 and 3 -> 0 -> 1 -> 2
    hub = np.full((2, 4), -1, np.int32)
    halves = np.zeros((4, 2, 4))
    halves[0] = parent >= 0
    found, _, _, after = anneal_parents(parent, hub, halves, np.ones(2, np.int32), 2, proposals=4000)
    assert found.tolist() == [[-1, 0, 1, 0], [3, 2, 3, -1]]
    assert after.max() == 2.0


def test_senders_are_swapped_through_a_switch() -> None:
    """0 -> 1 -> 2 over one switch, while 0's way to the switch to spare belongs to an entry of 1: then both are entered from 0."""
    parent = np.array([[-1, 0, 1], [-1, 0, -1]], np.int32)
    hub = np.array([[-1, 7, 7], [-1, 7, -1]], np.int32)
    halves = np.zeros((4, 2, 3))
    halves[0] = parent >= 0
    found, _, _, after = anneal_parents(parent, hub, halves, np.ones(2, np.int32), 1, proposals=4000)
    assert found.tolist() == [[-1, 0, 0]] and after.max() == 1.0
