"""The most bytes of storages of which no two may ever share one: a lower bound of every safe arena, with those storages as the certificate.

"Is finished with before" is a partial order, so this is its heaviest antichain, by Dilworth's theorem: all bytes less the heaviest way to let
storages follow each other, a maximum flow from storages that end to storages that begin. The order has many pairs; its arcs run through the
operators instead: a storage that ends reaches, per stream, the first operator that surely runs after it, and every operator the next on its
stream and the storages it opens. With one stream it is the most bytes alive at once, which a sweep finds.
Cite: Dilworth 1950; Picard and Queyranne 1982 (minimum cut). Left open by SOMAS, which has no bound.
Cost: one flow on 2 nodes a storage and one an operator.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from ....arena import ArenaProblem
from ....kernels.maxflow import MAX_CAPACITY, FlowNetwork
from .order import Lifetimes

__all__ = ["heaviest_antichain"]

I64 = NDArray[np.int64]


def heaviest_antichain(problem: ArenaProblem, life: Lifetimes) -> tuple[int, tuple[int, ...]]:
    """(bytes, the storages) of the heaviest set of which no two may share bytes."""
    if life.opens.shape[1] == 1:
        chosen = _sweep(life)
    else:
        chosen = _cut(problem, life)
    return int(life.size_bytes[chosen].sum()), tuple(int(t) for t in chosen)


def _sweep(life: Lifetimes) -> I64:
    """Storages alive at the fullest moment; at a moment those that end go before those that begin."""
    opens, closes = life.opens[:, 0].astype(np.int64), life.closes[:, 0].astype(np.int64)
    moments = np.unique(opens)
    rise = np.zeros(len(moments) + 1, np.int64)
    np.add.at(rise, np.searchsorted(moments, opens), life.size_bytes)
    np.subtract.at(rise, np.searchsorted(moments, closes), life.size_bytes)
    if not len(moments):
        return np.zeros(0, np.int64)
    at = moments[int(np.cumsum(rise)[:-1].argmax())]
    return np.flatnonzero((opens <= at) & (closes > at) & (life.size_bytes > 0))


def _cut(problem: ArenaProblem, life: Lifetimes) -> I64:
    """Nodes: source, sink, then an end and a begin per storage, then the operators."""
    some = np.flatnonzero(life.size_bytes > 0)
    k, ops = len(some), len(problem.stream)
    weight = life.size_bytes[some]
    unit = 0  # bytes in their common divisor, so that sums stay within the flow's integers
    for w in weight.tolist():
        unit = gcd(unit, w)
    ends, begins, first_op = 2 + np.arange(k), 2 + k + np.arange(k), 2 + 2 * k
    tails, heads = _order_arcs(problem, life, some, ends, begins, first_op)
    free = np.full(len(tails), int(weight.sum()) // max(unit, 1) or 1, np.int64)
    amounts = weight // max(unit, 1)
    network = FlowNetwork.of_arrays(
        2 + 2 * k + ops,
        np.concatenate([np.zeros(k, np.int64), begins, begins, tails]), np.concatenate([ends, np.ones(k, np.int64), ends, heads]),
        np.concatenate([amounts, amounts, np.full(k, free[0] if len(free) else 1), free]),
    )  # fmt: skip
    network.max_flow(0, 1, limit=MAX_CAPACITY)
    # the least cut pays for all storages but those of the heaviest antichain
    near = network.sink_side()
    # A storage outside every saturated arc: its end is on the source's side and its begin on the sink's.
    return some[~near[ends] & near[begins]]


def _order_arcs(problem: ArenaProblem, life: Lifetimes, some: I64, ends: I64, begins: I64, first_op: int) -> tuple[I64, I64]:
    tails: list[I64] = []
    heads: list[I64] = []
    nodes = first_op + np.arange(len(problem.stream))
    for s in range(life.opens.shape[1]):
        mine = np.flatnonzero(problem.stream == s)
        if not len(mine):
            continue
        tails.append(nodes[mine[:-1]])
        heads.append(nodes[mine[1:]])
        # What an operator waits for only grows along its stream, so the first that covers all of a storage's ends is found by bisection.
        first = np.zeros(len(some), np.int64)
        for other in range(life.opens.shape[1]):
            first = np.maximum(first, np.searchsorted(life.done[mine, other], life.closes[some, other], side="left"))
        found = first < len(mine)
        tails.append(ends[found])
        heads.append(nodes[mine[first[found]]])
    begin_of = {int(t): int(b) for t, b in zip(some, begins, strict=True)}
    single = [t for t in some.tolist() if len(problem.sources[t]) == 1 and t not in problem.from_start]
    tails.append(first_op + np.array([problem.sources[t][0] for t in single], np.int64))
    heads.append(np.array([begin_of[t] for t in single], np.int64))
    for t in some.tolist():  # written by several operators: all of them must come after, which no path says
        if len(problem.sources[t]) > 1 and t not in problem.from_start:
            before = np.flatnonzero((life.closes[some] <= life.opens[t]).all(axis=1))
            tails.append(ends[before])
            heads.append(np.full(len(before), begin_of[t], np.int64))
    return np.concatenate(tails).astype(np.int64), np.concatenate(heads).astype(np.int64)
