"""Exact lower bound for collectives that only move data between pairs (all-to-all, permute): concurrent multi-commodity flow.

Every algorithm moves demand(s, t) bytes from s to t along paths, so for any lengths >= 0 of the links
    time >= sum over pairs of demand · (shortest path under the lengths) / sum over links of rate · length.
The best lengths are the dual of the linear program that routes all demands at once in the least time, and reach its optimum (Shahrokhi
and Matula 1990). Certificate `metric`: the lengths, as whole numbers; anyone can add up both sums again. A cut is the special case of
lengths 1 on the links that leave it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ....bound import Bound, Certificate
from ....errors import Infeasible, TimeLimit, Unsupported
from ....kernels import highs
from ....kernels.effort import Deadline
from ..problem import CollectiveProblem
from ..rates import RateGraph

__all__ = ["MAX_COLUMNS", "Arc", "Wanted", "demands", "flow_bound", "least_time_flow"]

MAX_COLUMNS = 20_000  # sources · arcs of the linear program; larger fabrics are left to cuts
MAX_LENGTH = 1 << 24  # the largest whole-number length of a link in a certificate: finer roundings prove hardly more
MAX_FLOW_WORK_S = 20.0  # counted work of the linear program, seconds of a quiet core: 16,000 columns take 4
MAX_TIME_SHARE_OVER_LEAST = 1e-7  # share of the least time by which the flow of fewest hops may exceed it: the solver's own tolerance
Arc = tuple[int, int]
Wanted = Mapping[int, Mapping[int, Fraction]]  # bytes by source and destination


def demands(problem: CollectiveProblem) -> dict[int, dict[int, Fraction]]:
    """Bytes that each rank must get to each other."""
    n, size = len(problem.ranks), Fraction(problem.size_bytes)
    if problem.op == "all-to-all":
        each = size / n
        return {s: {t: each for t in range(n) if t != s} for s in range(n)}
    out: dict[int, dict[int, Fraction]] = {}
    for t, s in enumerate(problem.peers):
        if s >= 0 and s != t:
            out.setdefault(s, {})[t] = size
    return out


def flow_bound(problem: CollectiveProblem, graph: RateGraph) -> Bound | None:
    """The optimum's bound, or None where the program is too large, does not end in time or proves nothing.

    `graph`: all links of the fabric (`rate_graph` with relays). Cost: one linear program of ranks · arcs columns.
    """
    if problem.op == "all-to-all" and len(problem.ranks) * len(graph.arcs) > MAX_COLUMNS:
        return None  # before all pairs are listed: 67 million of 8,192 ranks
    wanted = demands(problem)
    if not wanted or len(wanted) * len(graph.arcs) > MAX_COLUMNS:
        return None
    try:
        lengths = _dual_lengths(graph, wanted)
    except (TimeLimit, Infeasible, Unsupported):  # a bound is a help, not a must: cuts remain
        return None
    best: tuple[Fraction, dict[Arc, int]] | None = None
    top = max(lengths.values(), default=0.0)
    # Lengths from the solver are only proposals: whatever whole numbers they are rounded to prove a bound, and the better one is kept.
    for sharpness in (64, MAX_LENGTH) if top > 0 else ():
        whole = {arc: n for arc, x in lengths.items() if (n := round(max(x, 0.0) / top * sharpness))}
        value = _proved(graph, wanted, whole)
        if best is None or value > best[0]:
            best = value, whole
    if best is None or best[0] <= 0:
        return None
    return Bound(
        quantity=f"{problem.op} time",
        value=str(best[0]),
        unit="s",
        certificate=Certificate(
            kind="metric",
            data={
                "lengths": [[graph.names[u], graph.names[v], n] for (u, v), n in best[1].items()], "demand": problem.op,
                "ranks": graph.ranks, "devices": list(problem.ranks), "size_bytes": problem.size_bytes,
                **({"peers": [problem.ranks[p] if p >= 0 else "" for p in problem.peers]} if problem.peers else {}),
            },
        ),
    )  # fmt: skip


def least_time_flow(graph: RateGraph, wanted: Wanted) -> dict[int, dict[Arc, float]]:
    """Bytes of every source on every arc that pass all links in the least time, on the fewest hops.

    A pair that has no link at all is left out. Raises: Infeasible (a pair has no path), Unsupported (a program of more than MAX_COLUMNS).
    """
    if len(wanted) * len(graph.arcs) > MAX_COLUMNS:
        raise Unsupported(f"{len(wanted)} sources on {len(graph.arcs)} links make too large a flow", hint="fewer devices, or a folded strategy")
    if not wanted or not graph.arcs:
        return {s: {} for s in wanted}
    lp, scale = _program(graph, wanted)
    columns = len(wanted) * len(graph.arcs)
    highs.require_optimal(lp, what="the flow of all pairs")
    # Second aim: the time stays at its optimum, and now every byte on a link costs one, so that flows take no detours or loops.
    lp.changeColBounds(0, 0.0, highs.values(lp)[0] * (1 + MAX_TIME_SHARE_OVER_LEAST))
    for column in range(columns + 1):
        lp.changeColCost(column, float(column > 0))
    highs.require_optimal(lp, what="the flow of fewest hops")
    x = highs.values(lp)[1:]
    arcs, size = list(graph.arcs), len(graph.arcs)
    return {s: {arc: x[i * size + k] * scale for k, arc in enumerate(arcs)} for i, s in enumerate(sorted(wanted))}


def _dual_lengths(graph: RateGraph, wanted: Wanted) -> dict[Arc, float]:
    """Duals of the capacity rows."""
    lp, _ = _program(graph, wanted)
    highs.require_optimal(lp, what="the flow of all pairs", deadline=Deadline.after(MAX_FLOW_WORK_S))
    duals = highs.row_duals(lp)
    return {arc: abs(duals[k]) for k, arc in enumerate(graph.arcs)}


def _program(graph: RateGraph, wanted: Wanted) -> tuple[Any, float]:
    """(min T, flows of every source on every arc, conservation, sum of flows <= T · rate; bytes of a unit of flow).

    Columns: T, then per source (ascending) the arcs; rows: capacities first.
    """
    arcs = list(graph.arcs)
    scale = float(max(d for row in wanted.values() for d in row.values()))
    widest = max(graph.arcs.values())
    into: dict[int, list[int]] = {}
    out: dict[int, list[int]] = {}
    for k, (u, v) in enumerate(arcs):
        out.setdefault(u, []).append(k)
        into.setdefault(v, []).append(k)
    lp = highs.solver()
    infinity = lp.inf
    lp.addVar(0.0, infinity)
    lp.changeColCost(0, 1.0)
    sources = sorted(wanted)
    for _ in range(len(sources) * len(arcs)):
        lp.addVar(0.0, infinity)
    for k, arc in enumerate(arcs):
        columns = [0, *(1 + i * len(arcs) + k for i in range(len(sources)))]
        lp.addRow(-infinity, 0.0, len(columns), columns, [-graph.arcs[arc] / widest, *[1.0] * len(sources)])
    for i, s in enumerate(sources):
        for v in range(graph.nodes):
            need = float(wanted[s].get(v, 0)) / scale
            gained, lost = into.get(v, []), out.get(v, [])
            if v == s or not (gained or lost):
                continue
            columns = [1 + i * len(arcs) + k for k in (*gained, *lost)]
            lp.addRow(need, need, len(columns), columns, [1.0] * len(gained) + [-1.0] * len(lost))
    return lp, scale


def _proved(graph: RateGraph, wanted: Wanted, lengths: Mapping[Arc, int]) -> Fraction:
    """What the lengths prove, exactly: seconds."""
    total = sum(graph.arcs[arc] * n for arc, n in lengths.items()) * graph.unit_Bps
    if not total:
        return Fraction(0)
    near: dict[int, list[tuple[int, int]]] = {}
    for u, v in graph.arcs:
        near.setdefault(u, []).append((v, lengths.get((u, v), 0)))
    need = Fraction(0)
    for s, row in wanted.items():
        reach = _reach(near, s)
        need += sum((d * reach[t] for t, d in row.items() if t in reach), Fraction(0))
    return need / total


def _reach(near: Mapping[int, list[tuple[int, int]]], source: int) -> dict[int, int]:
    reach, heap, settled = {source: 0}, [(0, source)], set()
    while heap:
        d, u = heapq.heappop(heap)
        if u in settled:
            continue
        settled.add(u)
        for v, length in near.get(u, ()):
            if d + length < reach.get(v, d + length + 1):
                reach[v] = d + length
                heapq.heappush(heap, (d + length, v))
    return reach
