"""Sharing of links by transfers that run at once, and how well given links explain what was measured.

Max-min fair sharing: every transfer crosses some links; rates rise together until a link is full, the transfers on it stop there, the others go on
(progressive filling; Bertsekas and Gallager, Data Networks, 6.5.2). TCP is only roughly fair, most of all where a transfer crosses two full links:
what one loses to another says nothing about the links. What every work-conserving sharing has is this: no link carries more than its rate, and every
transfer crosses a link that is full, with its data or its acknowledgements. A trial is judged by that; how far single transfers are from max-min is
reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "F64", "Fit", "Laid", "Trial", "errors_of", "share"]

F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]
MIN_Bps = 1.0
SINGLE_ERROR_WEIGHT = 0.3  # of the mean error of single transfers in a trial's loss: the sums over hosts count more, as TCP divides links unevenly
MAX_SINGLE_ERROR_SHARE = 10.0  # that one transfer may contribute: one that stalled must not outweigh all others


@dataclass(frozen=True)
class Trial:
    """Transfers that ran at once: (source, destination) and bytes per second of each, in the same order."""

    kind: str
    flows: tuple[tuple[int, int], ...]
    rate_Bps: tuple[float, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{i}->{j}" for i, j in self.flows[:6])
        return f"{self.kind} {shown}" + (f", ... ({len(self.flows)} transfers)" if len(self.flows) > 6 else "")


def share(crossed: Bools, capacity_Bps: F64) -> tuple[F64, NDArray[np.int64]]:
    """(rate of every transfer, the link that holds it back). crossed[f, l]: transfer f crosses link l; every transfer crosses one at least."""
    flows = len(crossed)
    if flows == 1:
        on = np.flatnonzero(crossed[0])
        tight = on[np.argmin(capacity_Bps[on])]
        return np.array([capacity_Bps[tight]]), np.array([tight], np.int64)
    rate, neck = _filled(crossed[None].astype(np.float64), np.ones((1, flows), bool), capacity_Bps)
    return rate[0], neck[0]


def _filled(crossed: F64, there: Bools, capacity_Bps: F64) -> tuple[F64, NDArray[np.int64]]:
    """`share` of several trials at once: crossed[t, f, l] = 1 where transfer f of trial t crosses link l; there[t, f]: the trial has that many."""
    trials, flows, links = crossed.shape
    turn = np.arange(trials)
    left, rate, neck = np.tile(capacity_Bps.astype(np.float64), (trials, 1)), np.zeros((trials, flows)), np.zeros((trials, flows), np.int64)
    count, active = crossed.sum(axis=1), there.copy()
    while active.any():
        # Max-min fairness by filling: all rates rise together until the link with the least capacity per transfer is full;
        # its transfers stay there, and the others rise on in what is left.
        level = np.divide(left, count, out=np.full((trials, links), np.inf), where=count > 0.5)
        link = level.argmin(axis=1)
        least = level[turn, link]
        frozen = active & (crossed[turn, :, link] > 0)
        rate[frozen] = np.broadcast_to(least[:, None], rate.shape)[frozen]
        neck[frozen] = np.broadcast_to(link[:, None], neck.shape)[frozen]
        gone = np.matmul(frozen[:, None].astype(np.float64), crossed)[:, 0]
        left = np.maximum(left - gone * np.where(np.isfinite(least), least, 0.0)[:, None], 0.0)
        count = count - gone
        active &= ~frozen
    return rate, neck


def errors_of(crossed: Bools, either: Bools, capacity_Bps: F64, measured: F64) -> tuple[float, float]:
    """(overload, slack) of a trial: by how much of its rate some link carried too much, and how far from full the links of some transfer were.

    either[f, l]: transfer f or its acknowledgements cross link l. Where acknowledgements queue behind others' data, TCP slows down: with equal
    windows, one transfer against k that fill the link in the other direction gets a k-th of it.
    """
    full = (measured @ crossed) / capacity_Bps
    over = float(full[crossed.any(axis=0)].max()) - 1
    slack = 1 - float(np.where(either, full, 0.0).max(axis=1).min())
    return max(over, 0.0), max(slack, 0.0)


class Laid:
    """Trials as arrays, which fits of other links to them share: all transfers below each other, those of a trial together.

    `first[k]`: where those of trial k begin; `single`, `several`: trials of one transfer and of more; `slots`: the places of the latter's among them.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        sizes = np.array([len(t.flows) for t in trials], np.int64)
        self.sizes, self.trial = sizes, np.repeat(np.arange(len(trials)), sizes)
        self.first = np.cumsum(sizes) - sizes
        self.src, self.dst = (np.array([f[end] for t in trials for f in t.flows], np.int64) for end in (0, 1))
        self.measured_Bps = np.array([r for t in trials for r in t.rate_Bps], np.float64)
        self.single, self.several = np.flatnonzero(sizes == 1), np.flatnonzero(sizes > 1)
        self.alone_at = self.first[self.single]
        self.slots = np.arange(sizes[self.several].max(initial=0)) < sizes[self.several, None]
        self.several_at = np.flatnonzero(sizes[self.trial] > 1)
        self.spans = [(int(k), int(self.first[k]), int(self.first[k] + sizes[k])) for k in self.several]


@dataclass
class Fit:
    """Capacities of given links, fitted to trials. `paths[i, j, l]`: what goes from i to j crosses link l.

    A link carries at least the most that was ever seen on it; where links are what holds transfers back, the median of what they let through is
    their capacity. `capacity_Bps`: per link; `tight`: links that held something back in a trial (the capacity of the others is a lower bound).
    """

    laid: Laid
    paths: Bools
    rounds: int = 4
    capacity_Bps: F64 = field(init=False)
    error: F64 = field(init=False)
    loss: float = field(init=False)
    tight: Bools = field(init=False)

    def __post_init__(self) -> None:
        laid = self.laid
        crossed = self.paths[laid.src, laid.dst]
        self._either = crossed | self.paths[laid.dst, laid.src]
        self._alone = crossed[laid.alone_at]
        self._used = np.logical_or.reduceat(crossed, laid.first, axis=0)
        self._seen = np.empty((len(laid.sizes), crossed.shape[1]))
        self._seen[laid.single] = laid.measured_Bps[laid.alone_at, None] * self._alone
        for k, begin, end in laid.spans:
            self._seen[k] = laid.measured_Bps[begin:end] @ crossed[begin:end]
        self._together = np.zeros((*laid.slots.shape, crossed.shape[1]))  # trials of several transfers, filled together
        self._together[laid.slots] = crossed[laid.several_at]
        capacity = np.maximum(self._seen.max(axis=0), MIN_Bps)
        best: tuple[float, F64] | None = None
        for last in (*[False] * (self.rounds - 1), True):
            # The median of measured over predicted, where a link holds back, scales it; others then hold back, hence the rounds. Not every round is
            # better, so the best one counts.
            trials, links = self._evaluate(capacity)
            if best is None or self.loss < best[0]:
                best = (self.loss, capacity)
            scaled = capacity if last else np.maximum(capacity * self._medians(trials, links), MIN_Bps)
            if (scaled == capacity).all():  # so it would stay
                break
            capacity = scaled
        assert best is not None
        if best[1] is not self.capacity_Bps:
            self._evaluate(best[1])

    def _medians(self, trials: NDArray[np.int64], links: NDArray[np.int64]) -> F64:
        """Per link, of measured over predicted in the trials where it is the one that holds back; 1 where there is none."""
        order = np.argsort(links, kind="stable")
        ratios = self._full[trials[order], links[order]]
        ends = np.cumsum(np.bincount(links, minlength=len(self.capacity_Bps))).tolist()
        return np.array([median(ratios[i:j].tolist()) if j > i else 1.0 for i, j in zip([0, *ends], ends, strict=False)])

    def _evaluate(self, capacity: F64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Predict all trials; returns (trials, links): the link holds something back in the trial."""
        laid, self.capacity_Bps = self.laid, capacity
        tightest = np.where(self._alone, capacity, np.inf).argmin(axis=1)
        # `errors_of` for all trials at once.
        full = self._full = self._seen / capacity
        over = np.where(self._used, full, -np.inf).max(axis=1) - 1
        slack = 1 - np.minimum.reduceat(np.where(self._either, full[laid.trial], 0.0).max(axis=1), laid.first)
        self.error = np.maximum(np.maximum(over, 0.0), np.maximum(slack, 0.0))
        rate, neck = _filled(self._together, laid.slots, capacity)
        self._rate_Bps = np.empty(len(laid.trial))
        self._rate_Bps[laid.alone_at], self._rate_Bps[laid.several_at] = capacity[tightest], rate[laid.slots]
        holds = np.zeros((len(laid.several), len(capacity)), bool)
        holds[np.nonzero(laid.slots)[0], neck[laid.slots]] = True
        row, link = np.nonzero(holds)
        trials, links = np.concatenate([laid.single, laid.several[row]]), np.concatenate([tightest, link])
        self.tight = np.zeros(len(capacity), bool)
        self.tight[links] = True
        off = np.abs(self._rate_Bps / np.maximum(laid.measured_Bps, MIN_Bps) - 1).clip(0, MAX_SINGLE_ERROR_SHARE)
        single = off[laid.first]
        for k, begin, end in laid.spans:
            single[k] = np.add.reduce(off[begin:end]) / (end - begin)
        # log1p: one trial that nothing explains counts little more than a bad one, so the others decide.
        self.loss = sum(np.log1p(self.error + SINGLE_ERROR_WEIGHT * single).tolist())
        return trials, links

    def predicted(self, trial: int) -> F64:
        """Rates of its transfers."""
        begin = int(self.laid.first[trial])
        return self._rate_Bps[begin : begin + int(self.laid.sizes[trial])]

    @property
    def worst(self) -> float:
        return float(self.error.max()) if len(self.error) else 0.0
