"""Direct links between nodes from transfers that ran at once: which pairs have a link of their own, and which go through others.

Starts with a link for every pair and takes away, one by one, the link whose pair is best explained by a detour over others: its rate must be that of
the slowest link there, and what ran beside it must be predicted better. The fabric's own routes (fewest links, then the widest, then the smallest
link numbers) must be those found: rates within noise of each other are made equal, so that noise decides no tie, and links are numbered accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from ...fabric.fabric import Device, Fabric, Link
from ...kernels.effort import Budget
from .fair_share import F64, Fit, Laid, Trial

__all__ = ["MAX_NODES", "DirectFit", "alike", "fit_direct"]

MAX_NODES = 16  # among which detours are looked for: beyond, there are too many to try
MAX_LOSS_FACTOR = 3.0  # detours are tried only where a link for every pair has less than this many times the rival's loss
MAX_NODES_MIXED = 4  # nodes up to which the way back is tried by others than the way there from the start
MAX_DETOURS_TRIED = 8000  # fits with a cable less: about 2 ms each on 37 trials among 5 hosts, a quarter of a minute in all
MAX_BEAM_NODES = 40  # states kept while cables are taken away, over the number of nodes
MAX_RATE_DIFFERENCE_SHARE = 0.06  # up to which measured rates are taken for one rate

Pair = tuple[int, int]


class DirectFit:
    """Cables `pairs` (i < j), and the fit of their two directions: links 2k (i to j) and 2k + 1.

    via: for ordered pairs without a cable, what lies between them on the way.
    """

    def __init__(self, laid: Laid, n: int, pairs: Sequence[Pair], via: Mapping[Pair, tuple[int, ...]], rounds: int = 1) -> None:
        self.n, self.pairs, self.via = n, tuple(pairs), dict(via)
        self.number = {p: k for k, p in enumerate(self.pairs)}
        self.paths = np.zeros((n, n, 2 * len(self.pairs)), bool)
        for i in range(n):
            for j in range(n):
                for a, b in pairwise(self.stops(i, j)) if i != j else ():
                    self.paths[i, j, self.link(a, b)] = True
        self.fit = Fit(laid, self.paths, rounds=rounds)

    def link(self, a: int, b: int) -> int:
        return 2 * self.number[a, b] if a < b else 2 * self.number[b, a] + 1

    def stops(self, i: int, j: int) -> tuple[int, ...]:
        """All on the way from i to j, both ends included."""
        return (i, *self.via.get((i, j), ()), j)

    def detoured(self, laid: Laid, pair: Pair, middle: int, back: int) -> DirectFit | None:
        """The same without the cable of `pair`, which goes by `middle` now, and by `back` back; None where a way would meet itself."""
        via = dict(self.via)
        for (i, k), by in ((pair, middle), (pair[::-1], back)):
            via[i, k] = (*self.stops(i, by)[1:], *self.stops(by, k)[1:-1])
        for ends in via:  # ways over the lost cable take the detour
            whole = (ends[0], *via[ends], ends[1])
            for a, b in (pair, pair[::-1]):
                at = next((x for x in range(len(whole) - 1) if whole[x] == a and whole[x + 1] == b), None)
                if at is not None and ends != (a, b):
                    whole = (*whole[: at + 1], *via[a, b], *whole[at + 1 :])
            if len(set(whole)) < len(whole):
                return None
            via[ends] = whole[1:-1]
        return DirectFit(laid, self.n, [p for p in self.pairs if p != pair], via)


def alike(rates: F64, *, within: float = MAX_RATE_DIFFERENCE_SHARE) -> F64:
    """Rates of a run of near ones are replaced by their median."""
    out = rates.astype(np.float64).copy()
    order = np.argsort(rates)
    start = 0
    for k in range(1, len(order) + 1):
        if k == len(order) or rates[order[k]] > rates[order[start]] * (1 + within):
            out[order[start:k]] = np.median(rates[order[start:k]])
            start = k
    return out


def fabric_of_pairs(names: Sequence[str], pairs: Sequence[Pair], rates: F64) -> Fabric:
    """rates: of links 2k and 2k + 1."""
    links = []
    for k, (i, j) in enumerate(pairs):
        for way, (a, b) in enumerate(((i, j), (j, i))):
            links.append(Link(src=names[a], dst=names[b], rate_Bps=max(1, round(float(rates[2 * k + way])))))
    return Fabric(name="direct", devices=tuple(Device(name=x, group=x) for x in names), links=tuple(links))


def fit_direct(
    trials: Sequence[Trial], n: int, *, tolerance: float, rival: float = float("inf"), budget: Budget | None = None
) -> DirectFit | None:
    """None where a pair was never measured, or for more than 16 nodes (detours are then too many to try).

    rival: loss of another explanation; where it is far below that of a link for every pair, detours are not tried.
    """
    budget, alone = budget or Budget(MAX_DETOURS_TRIED), _alone(trials, n)
    if n > MAX_NODES or (alone[~np.eye(n, dtype=bool)] <= 0).any():
        return None
    laid = Laid(trials)
    best = DirectFit(laid, n, [(i, j) for i in range(n) for j in range(i + 1, n)], {})
    beam, width = [best] if rival > best.fit.loss / MAX_LOSS_FACTOR else [], max(1, MAX_BEAM_NODES // n)
    while beam and best.fit.worst > tolerance and not budget.late:
        grown: dict[frozenset[tuple[Pair, tuple[int, ...]]], DirectFit] = {}
        for state in beam:
            for tried in _detours(laid, state, alone, tolerance, budget):
                grown[frozenset(tried.via.items())] = tried
        beam = sorted(grown.values(), key=lambda x: (x.fit.loss, x.pairs))[:width]
        best = min([best, *beam], key=lambda x: x.fit.loss)
    return _numbered(laid, _one_way(laid, best, tolerance))


def _alone(trials: Sequence[Trial], n: int) -> F64:
    """Rate of each pair by itself; where it never ran by itself, the most it had beside others."""
    alone, beside = np.zeros((n, n)), np.zeros((n, n))
    for trial in trials:
        for (i, j), rate in zip(trial.flows, trial.rate_Bps, strict=True):
            into = alone if len(trial.flows) == 1 else beside
            into[i, j] = max(into[i, j], rate)
    return np.where(alone > 0, alone, beside)


def _detours(laid: Laid, now: DirectFit, alone: F64, tolerance: float, budget: Budget) -> Iterator[DirectFit]:
    """One cable less, where that explains more: its pair's rate must be that of the slowest link of the detour."""
    for i, k in now.pairs:
        there, back = (_middles(now, a, b, alone, tolerance) for a, b in ((i, k), (k, i)))
        for middle, other in product(there, back):
            if (middle != other and now.n > MAX_NODES_MIXED) or not budget.spend():
                continue
            tried = now.detoured(laid, (i, k), middle, other)
            if tried is not None and tried.fit.loss < now.fit.loss - 0.05:
                yield tried


def _middles(now: DirectFit, i: int, k: int, alone: F64, tolerance: float) -> list[int]:
    """By whom the way from i to k could go: its slowest link has the pair's rate."""
    found = []
    for middle in range(now.n):
        if middle not in (i, k):
            way = (*now.stops(i, middle), *now.stops(middle, k)[1:])
            slowest = min(float(alone[x, y]) for x, y in pairwise(way))
            if abs(slowest / float(alone[i, k]) - 1) <= 2 * tolerance:
                found.append(middle)
    return found


def _one_way(laid: Laid, now: DirectFit, tolerance: float) -> DirectFit:
    """Where ways are equally long, the way back may be another: each is tried by itself."""
    now = DirectFit(laid, now.n, now.pairs, now.via, rounds=4)
    for i, k in sorted(now.via) if now.fit.worst > tolerance / 2 else ():
        for middle in range(now.n):
            way = (*now.stops(i, middle)[1:], *now.stops(middle, k)[1:-1]) if middle not in (i, k) else ()
            if not way or len(way) != len(now.via[i, k]) or len({i, *way, k}) < len(way) + 2:
                continue
            other = DirectFit(laid, now.n, now.pairs, {**now.via, (i, k): way}, rounds=4)
            if other.fit.loss < now.fit.loss - 0.05:
                now = other
    return now


def _numbered(laid: Laid, now: DirectFit) -> DirectFit:
    """Ties between routes go to the links with the smallest numbers: cables are put in an order in which the fabric's routes are those found."""

    def wrong(pairs: Sequence[Pair]) -> int:
        rates = alike(np.array([now.fit.capacity_Bps[now.link(a, b)] for i, j in pairs for a, b in ((i, j), (j, i))]))
        fabric = fabric_of_pairs([f"n{i}" for i in range(now.n)], pairs, rates)
        ends = fabric.link_ends
        return sum(
            tuple(ends[x][1] for x in fabric.route(i, j)) != now.stops(i, j)[1:] for i in range(now.n) for j in range(now.n) if i != j
        )

    order, left = list(now.pairs), wrong(now.pairs)
    improved = left > 0
    while improved:
        improved = False
        for pair in now.pairs:
            for moved in ([pair, *(p for p in order if p != pair)], [*(p for p in order if p != pair), pair]):
                fewer = wrong(moved)
                if fewer < left:
                    order, left, improved = moved, fewer, fewer > 0
    return DirectFit(laid, now.n, order, now.via, rounds=4)
