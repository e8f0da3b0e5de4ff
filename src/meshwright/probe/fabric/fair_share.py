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
    used = np.flatnonzero(crossed.any(axis=0))
    part = crossed[:, used].astype(np.float64)
    left, rate, neck = capacity_Bps[used].astype(np.float64), np.zeros(flows), np.zeros(flows, np.int64)
    count, active = part.sum(axis=0), np.ones(flows, bool)
    while active.any():
        # Max-min fairness by filling: all rates rise together until the link with the least capacity per transfer is full;
        # its transfers stay there, and the others rise on in what is left.
        level = np.divide(left, count, out=np.full(len(used), np.inf), where=count > 0.5)
        link = int(level.argmin())
        frozen = active & (part[:, link] > 0)
        rate[frozen], neck[frozen] = level[link], used[link]
        gone = part[frozen].sum(axis=0)
        left = np.maximum(left - gone * level[link], 0.0)
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
        self.capacity_Bps, self.error = capacity, np.zeros(len(self.trials))
        self.predicted, self.loss = [np.zeros(0)] * len(self.trials), 0.0
        self.tight = np.zeros(len(capacity), bool)
        limits = np.where(self._alone, capacity, np.inf)
        alone: dict[int, int] = dict(zip(self._single.tolist(), limits.argmin(axis=1).tolist(), strict=True)) if len(limits) else {}
        for k, (crossed, measured) in enumerate(zip(self._crossed, self._measured, strict=True)):
            link = alone.get(k)
            if link is None:
                rate, neck = share(crossed, capacity)
                full = set(neck.tolist())
            else:
                rate, full = capacity[[link]], {link}
            self.predicted[k] = rate
            error = max(errors_of(crossed, self._either[k], capacity, measured))
            single = float(np.abs(rate / np.maximum(measured, MIN_Bps) - 1).clip(0, MAX_SINGLE_ERROR_SHARE).mean())
            self.error[k] = error
            # log1p: one trial that nothing explains counts little more than a bad one, so the others decide.
            self.loss += float(np.log1p(error + SINGLE_ERROR_WEIGHT * single))
            for link in full:
                self.tight[link] = True
                ratios[link].append(float(self._seen[k, link]) / float(capacity[link]))
        return ratios

    @property
    def worst(self) -> float:
        return float(self.error.max()) if len(self.error) else 0.0
