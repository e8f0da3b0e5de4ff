"""Quicker trees by simulated annealing: trees swap the arcs by which devices are entered, or take spare ones, while every load keeps to its limit.

Local exchange of one arc at a time (`treepack_lower`) sticks where a server must be entered exactly once per tree: another way in also turns
the arcs inside it. So a move swaps the entries of one, two or three devices between two trees, the second device being where the first is
entered from; or two entries that pass one switch swap senders. It is undone unless the trees still span. Rows beyond the trees are spare
entries: they need not span anything. An entry is a first half, from the sender to a switch (or all of a direct link), and a second half.
A device that data reaches after t costs 2^(t / unit), so the latest count most.
Source: ours; annealing after S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing" (Science 220, 1983).
Invariant: the multisets of first and second halves over all rows, and with them every load and what is spare; every tree spans from its root.
Cost: proposals times devices, less where a move closes a circle. Randomness from a seeded generator of its own, so equal inputs give equal trees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, helper
from .effort import count_work, remembered
from .tree_order import breadth_first

__all__ = ["anneal_parents"]

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
START_HEAT = 200.0  # in energy, which is 2^(t / unit) summed over devices: at first almost everything is accepted
END_HEAT = 0.05  # in the end almost nothing that is worse
PROPOSAL_WORK_S = 4e-9  # work of a proposal per device: about the seconds of a quiet core
MAX_REMEMBERED_ENTRIES = 4096  # rows times devices of what is kept, about 60 bytes each
MAX_EXPONENT = 60.0  # powers of two beyond this are not told apart: one such term outweighs all others of a sum in float64


@helper
def _draw(state, below):  # type: ignore[no-untyped-def]
    """A number from 0 to below - 1: xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % below


@allocating
def _energy(parent, cost, unit, after, order, child, beside):  # type: ignore[no-untyped-def]
    """Sum of 2^(t / unit) over the devices of one tree, `after` their t; -1 where the tree does not span."""
    found = breadth_first(parent, order, child, beside)
    after[order[0]], total = 0.0, 1.0
    for i in range(1, found):
        v = order[i]
        after[v] = after[parent[v]] + cost[v]
        total += 2.0 ** min(after[v] / unit, MAX_EXPONENT)
    return total if found == len(parent) else -1.0


@helper
def _rooted(parent, v):  # type: ignore[no-untyped-def]
    """Whether the way up from v ends, at a device without a parent: else it runs into a circle."""
    for _ in range(len(parent)):
        v = parent[v]
        if v < 0:
            return True
    return False


@helper
def _swap(parent, cost, first, second, i, j, v):  # type: ignore[no-untyped-def]
    """Rows i and j swap the entries of v."""
    parent[i, v], parent[j, v] = parent[j, v], parent[i, v]
    cost[i, v], cost[j, v] = cost[j, v], cost[i, v]
    first[i, v], first[j, v] = first[j, v], first[i, v]
    second[i, v], second[j, v] = second[j, v], second[i, v]


@helper
def _swap_senders(parent, cost, first, second, halves, i, v, j, w):  # type: ignore[no-untyped-def]
    """Device v of row i and device w of row j swap the first halves of their entries."""
    parent[i, v], parent[j, w] = parent[j, w], parent[i, v]
    first[i, v], first[j, w] = first[j, w], first[i, v]
    n = parent.shape[1]
    for row, x in ((i, v), (j, w)):
        a, b = first[row, x], second[row, x]
        cost[row, x] = halves[0, a // n, a % n] + halves[2, b, x] + max(halves[1, a // n, a % n], halves[3, b, x])


@allocating
def _anneal(parent, cost, first, second, hub, halves, units, trees, proposals, unit, energy, seed):  # type: ignore[no-untyped-def]
    rows, n = parent.shape
    state = np.array([seed], np.uint64)
    order, child, beside = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    after = np.zeros(n)
    for t in range(trees):
        energy[t] = _energy(parent[t], cost[t], unit, after, order, child, beside)
    moved = np.zeros(3, np.int64)
    for step in range(proposals):
        i, j, v, kind = _draw(state, trees), _draw(state, rows), _draw(state, n), _draw(state, 5)
        # Only trees of equal multiplicity swap, so the load of every arc stays what it was.
        if units[i] != units[j] or parent[i, v] < 0:
            continue
        moved[0], count = v, 1
        # Senders swap: two entries through the same switch exchange their ways into it.
        if kind == 4:
            w = _draw(state, n)
            if parent[j, w] < 0 or parent[i, v] == parent[j, w] or hub[second[i, v], v] < 0 or hub[second[i, v], v] != hub[second[j, w], w]:
                continue
            moved[1], count = w, 2  # v of row i and w of row j
            _swap_senders(parent, cost, first, second, halves, i, v, j, w)
        else:
            if i == j or parent[j, v] < 0:
                continue
            # A single swap often closes a circle: swapping the parent's entry too, or that of any other device, may keep both spanning.
            if kind > 0:
                w = parent[i, v] if kind == 1 else parent[j, v] if kind == 2 else _draw(state, n)
                if w == v or parent[i, w] < 0 or parent[j, w] < 0:
                    continue
                moved[1], count = w, 2
                if _draw(state, 3) == 0:
                    x = _draw(state, n)
                    if x in (v, w) or parent[i, x] < 0 or parent[j, x] < 0:
                        continue
                    moved[2], count = x, 3
            elif parent[i, v] == parent[j, v] and cost[i, v] == cost[j, v]:
                continue
            for m in range(count):
                _swap(parent, cost, first, second, i, j, moved[m])
        # A circle that was not there passes an entry that moved. Trees with one are turned down; rows from `trees` on are spare and may have any.
        spans, both = True, j < trees and j != i
        for m in range(count):
            spans = spans and _rooted(parent[i], moved[m]) and (not both or _rooted(parent[j], moved[m]))
        accepted, mine, theirs = False, 0.0, 0.0
        if spans:
            mine = _energy(parent[i], cost[i], unit, after, order, child, beside)
            if both:
                theirs = _energy(parent[j], cost[j], unit, after, order, child, beside)
            worse = mine + theirs - energy[i] - (energy[j] if j != i else 0.0)
            accepted = worse <= 0.0
            if not accepted:
                # The temperature falls geometrically from START_HEAT to END_HEAT.
                heat = START_HEAT * (END_HEAT / START_HEAT) ** (step / proposals)
                accepted = _draw(state, 1 << 30) < np.exp(-worse / heat) * (1 << 30)
        if accepted:
            energy[i] = mine
            if j != i:
                energy[j] = theirs
        elif kind == 4:
            _swap_senders(parent, cost, first, second, halves, i, v, j, moved[1])
        else:
            for m in range(count):
                _swap(parent, cost, first, second, i, j, moved[m])


def anneal_parents(parent: I32, hub: I32, halves: F64, units: I32, trees: int, *, proposals: int, seed: int = 1) -> tuple[I32, I32, I32, F64]:
    """Trees with entries out of the same halves, quicker to reach all devices as a rule: the caller compares.

    Args: rows 0..trees-1 of `parent[row, device]` are trees (-1 at the root), the others spare entries (-1: none); `hub[row, device]`: the switch
        where the entry's halves meet, -1 for a direct link, which is a first half; `halves[:, row, device]`: what data takes over the first half on
        the wire and in the library, and over the second: an entry takes both wires and the larger of what the libraries add, in all more than 0;
        `units[row]`: only rows of equal multiplicity swap.
    Returns: parents of the trees; `first[t, v]` = row · devices + device whose entry's first half tree t's entry of v has now, and `second[t, v]` the
        row of v's entry whose second half it has; when data reaches v in tree t.
    """
    if parent.size > MAX_REMEMBERED_ENTRIES:
        return _annealed(parent, hub, halves, units, trees, proposals, seed)
    links, meets, costs, counts = parent.astype(np.int32).tobytes(), hub.astype(np.int32).tobytes(), halves.astype(float).tobytes(), units.tobytes()
    return _again(len(units), links, meets, costs, counts, trees, proposals, seed)


@remembered
def _again(rows: int, parent: bytes, hub: bytes, halves: bytes, units: bytes, trees: int, proposals: int, seed: int) -> tuple[I32, I32, I32, F64]:
    """As `_annealed`, which attempts that go on after a hurried one, and plans on an equal fabric, ask for again: nobody writes to what is found."""
    links, meets = (np.frombuffer(x, np.int32).reshape(rows, -1).copy() for x in (parent, hub))
    costs, counts = np.frombuffer(halves, np.float64).reshape(4, rows, -1).copy(), np.frombuffer(units, np.int32).copy()
    found = _annealed(links, meets, costs, counts, trees, proposals, seed)
    for x in found:
        x.setflags(write=False)
    return found


def _annealed(parent: I32, hub: I32, halves: F64, units: I32, trees: int, proposals: int, seed: int) -> tuple[I32, I32, I32, F64]:
    parent = parent.astype(np.int32, copy=True)
    rows, n = parent.shape
    cost = halves[0] + halves[2] + np.maximum(halves[1], halves[3])
    first = np.arange(rows * n, dtype=np.int32).reshape(rows, n)
    second = np.repeat(np.arange(rows, dtype=np.int32)[:, None], n, axis=1)
    unit = float(cost[:trees][parent[:trees] >= 0].min())
    count_work(PROPOSAL_WORK_S * proposals * n)
    _anneal(parent, cost, first, second, hub, halves, units, trees, proposals, unit, np.zeros(rows), np.uint64(seed))
    after = np.zeros((trees, n))
    work = tuple(np.zeros(n, np.int64) for _ in range(3))
    for t in range(trees):
        _energy(parent[t], cost[t], unit, after[t], *work)
    return parent[:trees], first[:trees], second[:trees], after
