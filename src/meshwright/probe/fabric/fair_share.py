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

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "F64", "Fit", "Trial", "errors_of", "share"]

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


@dataclass
class Fit:
    """Capacities of given links, fitted to trials. `paths[i, j, l]`: what goes from i to j crosses link l.

    A link carries at least the most that was ever seen on it; where links are what holds transfers back, the median of what they let through is
    their capacity. `capacity_Bps`: per link; `tight`: links that held something back in a trial (the capacity of the others is a lower bound).
    """

    trials: Sequence[Trial]
    paths: Bools
    rounds: int = 4
    capacity_Bps: F64 = field(init=False)
    predicted: list[F64] = field(init=False)
    error: F64 = field(init=False)
    loss: float = field(init=False)
    tight: Bools = field(init=False)

    def __post_init__(self) -> None:
        self._crossed = [self.paths[[i for i, _ in t.flows], [j for _, j in t.flows]] for t in self.trials]
        self._either = [c | self.paths[[j for _, j in t.flows], [i for i, _ in t.flows]] for c, t in zip(self._crossed, self.trials, strict=True)]
        self._measured = [np.array(t.rate_Bps) for t in self.trials]
        self._seen = np.array([m @ c for m, c in zip(self._measured, self._crossed, strict=True)])
        # All transfers below each other: the trial of every one, and the first of every trial.
        self._either_all = np.concatenate(self._either)
        self._trial = np.repeat(np.arange(len(self.trials)), [len(m) for m in self._measured])
        self._first = np.searchsorted(self._trial, np.arange(len(self.trials)))
        self._used = np.array([c.any(axis=0) for c in self._crossed])
        # Trials of several transfers, filled together; `_slots`: the places of their transfers among them.
        self._several = [k for k, t in enumerate(self.trials) if len(t.flows) > 1]
        sizes = np.array([len(self.trials[k].flows) for k in self._several], np.int64)
        self._slots = np.arange(sizes.max(initial=0)) < sizes[:, None]
        self._together = np.zeros((*self._slots.shape, self.paths.shape[2]))
        for row, k in zip(self._together, self._several, strict=True):
            row[: len(self._crossed[k])] = self._crossed[k]
        self._single = np.array([k for k, t in enumerate(self.trials) if len(t.flows) == 1], np.int64)
        self._alone = np.array([self._crossed[k][0] for k in self._single], bool).reshape(len(self._single), self.paths.shape[2])
        capacity = np.maximum(self._seen.max(axis=0), MIN_Bps)
        best: tuple[float, F64] | None = None
        for _ in range(self.rounds):
            # The median of measured over predicted, where a link holds back, scales it; others then hold back, hence the rounds. Not every round is
            # better, so the best one counts.
            ratios = self._evaluate(capacity)
            if best is None or self.loss < best[0]:
                best = (self.loss, capacity)
            capacity = np.array([c * float(np.median(r)) if r else c for c, r in zip(capacity, ratios, strict=True)])
            capacity = np.maximum(capacity, MIN_Bps)
        assert best is not None
        if best[1] is not self.capacity_Bps:
            self._evaluate(best[1])

    def _evaluate(self, capacity: F64) -> list[list[float]]:
        """Predict all trials; returns, per link, measured over predicted in every trial where it is the one that holds back."""
        ratios: list[list[float]] = [[] for _ in capacity]
        self.capacity_Bps = capacity
        self.tight = np.zeros(len(capacity), bool)
        limits = np.where(self._alone, capacity, np.inf)
        alone: dict[int, int] = dict(zip(self._single.tolist(), limits.argmin(axis=1).tolist(), strict=True)) if len(limits) else {}
        # `errors_of` for all trials at once.
        full = self._seen / capacity
        over = np.where(self._used, full, -np.inf).max(axis=1) - 1
        slack = 1 - np.minimum.reduceat(np.where(self._either_all, full[self._trial], 0.0).max(axis=1), self._first)
        self.error = np.maximum(np.maximum(over, 0.0), np.maximum(slack, 0.0))
        rates, holding = [capacity[[alone.get(k, 0)]] for k in range(len(self.trials))], [[alone.get(k, 0)] for k in range(len(self.trials))]
        for k, slots, rate, neck in zip(self._several, self._slots, *_filled(self._together, self._slots, capacity), strict=True):
            rates[k], holding[k] = rate[slots], list(set(neck[slots].tolist()))
        self.predicted = rates
        off = np.abs(np.concatenate(rates) / np.maximum(np.concatenate(self._measured), MIN_Bps) - 1).clip(0, MAX_SINGLE_ERROR_SHARE)
        ends = [*self._first[1:].tolist(), len(off)]
        single = np.array([off[i] if j - i == 1 else off[i:j].mean() for i, j in zip(self._first.tolist(), ends, strict=True)])
        # log1p: one trial that nothing explains counts little more than a bad one, so the others decide.
        self.loss = sum(np.log1p(self.error + SINGLE_ERROR_WEIGHT * single).tolist())
        for k, links in enumerate(holding):
            for link in links:
                self.tight[link] = True
                ratios[link].append(float(full[k, link]))
        return ratios

    @property
    def worst(self) -> float:
        return float(self.error.max()) if len(self.error) else 0.0
