"""A tree of switches from transfers that ran at once: which sets of nodes sit behind a shared trunk, and at which rate.

Every link of a tree splits the nodes in two; a fabric is its ports (splits of one node) and its trunks. What crosses a split in one trial is a
lower bound of the split's capacity, so a split with the most ever seen crossing it as its capacity is harmless unless it explains something. Splits
are taken in greedily, the one first that explains most of what the tree so far predicts too high; they must fit into one tree. Then members are
exchanged, and splits that explain nothing are dropped.
Cost: O(splits tried x trials); all splits for up to 11 nodes, else those that average linkage and exchanges of single nodes suggest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from ...kernels.effort import Budget
from .fair_share import F64, Bools, Fit, Laid, Trial

__all__ = ["compatible", "fit_tree", "linkage_sets", "tree_paths"]

MAX_NODES_ALL_SPLITS = 11  # up to which all splits are looked at: there are 2^(n-1)
MAX_SPLITS_TRIED = 4000  # fits of a tree: about 15 ms each on 90 trials among 8 hosts, a minute in all
MAX_SPLITS_FITTED = 10  # per round, those that would explain most
MIN_SEEN_SHARE = 0.85  # of a split's capacity that must have crossed it in a trial which it is to explain


def tree_paths(n: int, splits: Sequence[Bools]) -> Bools:
    """Links: n ports up, n ports down, then each split's two directions, out of its set and into it."""
    paths = np.zeros((n, n, 2 * n + 2 * len(splits)), bool)
    every = np.arange(n)
    paths[every, :, every] = True
    paths[:, every, n + every] = True
    for s, inside in enumerate(splits):
        paths[:, :, 2 * n + 2 * s] = inside[:, None] & ~inside[None, :]
        paths[:, :, 2 * n + 2 * s + 1] = ~inside[:, None] & inside[None, :]
    return paths


def compatible(a: Bools, b: Bools) -> bool:
    """Whether two different splits fit into one tree: some corner of the two is empty."""
    corners = [bool((x & y).any()) for x, y in product((a, ~a), (b, ~b))]
    return not all(corners) and not (a == b).all() and not (a == ~b).all()


def linkage_sets(distance: F64) -> list[Bools]:
    """The sets that average linkage forms on the way from single nodes to one, without single nodes and all but one."""
    n = len(distance)
    d = np.maximum(distance, distance.T).astype(np.float64)
    np.fill_diagonal(d, np.inf)
    sets, size, found = np.eye(n, dtype=bool), np.ones(n), []
    for _ in range(n - 2):
        a, b = divmod(int(d.argmin()), n)
        # Average linkage: the nearest two become one, at the mean distance of their members; each joined set is a split that may be real.
        d[a] = d[:, a] = (d[a] * size[a] + d[b] * size[b]) / (size[a] + size[b])
        d[a, a] = np.inf
        d[b] = d[:, b] = np.inf
        size[a] += size[b]
        sets[a] |= sets[b]
        if sets[a].sum() < n - 1:
            found.append(sets[a].copy())
    return found


def canonical(inside: Bools) -> Bools:
    """The side without node 0."""
    return ~inside if inside[0] else inside


class _Candidates:
    """Splits that could explain trials which the present tree predicts too high."""

    def __init__(self, trials: Sequence[Trial], n: int, hints: Iterable[Bools]) -> None:
        self.n, self.hints = n, [canonical(h) for h in hints]
        self.at = [k for k, t in enumerate(trials) if len(t.flows) > 1]
        self.trials = [trials[k] for k in self.at]
        self.measured = self._matrices([np.array(t.rate_Bps) for t in self.trials])
        self.alone = self._matrices([np.array(t.rate_Bps) for t in trials if len(t.flows) == 1], [t for t in trials if len(t.flows) == 1])

    def _matrices(self, rates: Sequence[F64], trials: Sequence[Trial] | None = None) -> F64:
        trials = self.trials if trials is None else trials
        out = np.zeros((len(trials), self.n, self.n))
        for matrix, trial, rate in zip(out, trials, rates, strict=True):
            np.add.at(matrix, ([i for i, _ in trial.flows], [j for _, j in trial.flows]), rate)
        return out

    def best(self, fit: Fit, taken: Sequence[Bools]) -> list[Bools]:
        expected = self._matrices([fit.predicted(k) for k in self.at])
        if self.n <= MAX_NODES_ALL_SPLITS:
            # Every subset without node 0: its complement is the same split.
            numbers = np.arange(2 ** (self.n - 1))[:, None]
            pool = np.hstack([np.zeros((len(numbers), 1), bool), (numbers >> np.arange(self.n - 1)) & 1 > 0])
        else:
            pool = np.array(self._suggested(expected))
        pool, score = self._scored(pool, expected, taken)
        if self.n > MAX_NODES_ALL_SPLITS:
            pool, score = self._climbed(pool, score, expected, taken)
        order = sorted(range(len(pool)), key=lambda k: (-score[k], int(pool[k].sum()), pool[k].tolist()))
        return [pool[k] for k in order[:MAX_SPLITS_FITTED] if score[k] > 0]

    def _scored(self, pool: Bools, expected: F64, taken: Sequence[Bools]) -> tuple[Bools, F64]:
        size = pool.sum(axis=1)
        fits = np.array([1 < k < self.n - 1 and all(compatible(p, t) for t in taken) for p, k in zip(pool, size, strict=True)], bool)
        pool = pool[fits]
        score = np.zeros(len(pool))
        for inside in (pool, ~pool):
            seen, hoped = (self._crossing(inside, m) for m in (self.measured, expected))
            # The most that ever crossed the split is the least that its trunk can carry.
            most = np.maximum(seen.max(axis=1, initial=0.0), self._crossing(inside, self.alone).max(axis=1, initial=1.0))[:, None]
            # Only trials that filled it count: where less crossed than ever did elsewhere, something other was the limit.
            explained = np.where(seen >= MIN_SEEN_SHARE * most, np.clip(hoped / most - 1, 0, 1), 0)
            score += explained.sum(axis=1)
        return pool, score

    @staticmethod
    def _crossing(inside: Bools, matrices: F64) -> F64:
        sent = np.einsum("kn,enm->kem", inside.astype(np.float64), matrices, optimize=True)
        return np.asarray(np.einsum("kem,km->ke", sent, (~inside).astype(np.float64), optimize=True))

    def _suggested(self, expected: F64) -> list[Bools]:
        """Sets by linkage: of what pairs lose against the prediction, of their rates, and the hints."""
        lost, times = np.zeros((self.n, self.n)), np.zeros((self.n, self.n))
        rate = self.measured.max(axis=0)
        on = expected > 0
        ratio = np.divide(self.measured, expected, out=np.ones_like(expected), where=on)
        lost = np.where(on, 1 - np.clip(ratio, 0, 1), 0).sum(axis=0)
        times = on.sum(axis=0)
        both, seen = lost + lost.T, times + times.T
        mean = np.divide(both, seen, out=np.full_like(both, float(both.sum() / max(1, seen.sum()))), where=seen > 0)
        slow = 1 / np.maximum(np.maximum(rate, rate.T), 1.0)
        found = [*self.hints, *linkage_sets(mean), *linkage_sets(slow)]
        return [canonical(x) for x in found] or [np.zeros(self.n, bool)]

    def _climbed(self, pool: Bools, score: F64, expected: F64, taken: Sequence[Bools]) -> tuple[Bools, F64]:
        """From the best few, exchange single nodes while that explains more."""
        for k in np.argsort(-score)[:4]:
            here, value = pool[k], score[k]
            for _ in range(self.n):
                near = np.array([canonical(here ^ (np.arange(self.n) == v)) for v in range(self.n)])
                near, scores = self._scored(near, expected, taken)
                if not len(near) or scores.max() <= value * (1 + 1e-9):
                    break
                here, value = near[int(scores.argmax())], float(scores.max())
            pool, score = np.vstack([pool, here]), np.append(score, value)
        _, first = np.unique(pool, axis=0, return_index=True)
        return pool[np.sort(first)], score[np.sort(first)]


def fit_tree(
    trials: Sequence[Trial], n: int, *, tolerance: float, hints: Iterable[Bools] = (), budget: Budget | None = None
) -> tuple[Fit, list[Bools]]:
    """The tree that explains the trials, and its trunks' splits (sets without node 0). `budget`: of splits tried."""
    budget = budget or Budget(MAX_SPLITS_TRIED)
    splits: list[Bools] = []
    laid = Laid(trials)
    fit = Fit(laid, tree_paths(n, splits))
    candidates = _Candidates(trials, n, hints)
    while fit.worst > tolerance / 2 and len(splits) < 2 * n and not budget.late:
        tried = [(Fit(laid, tree_paths(n, [*splits, c]), rounds=2), c) for c in candidates.best(fit, splits) if budget.spend()]
        if not tried:
            break
        best, chosen = min(tried, key=lambda x: x[0].loss)
        if not _better(best, fit, tolerance):
            break
        splits.append(chosen)
        splits, fit = _exchanged(laid, n, splits, budget)
    for inside in list(splits):
        fewer = [s for s in splits if s is not inside]
        without = Fit(laid, tree_paths(n, fewer))
        if not _better(fit, without, tolerance):
            splits, fit = fewer, without
    return fit, splits


def _better(more: Fit, fewer: Fit, tolerance: float) -> bool:
    """Whether a split more explains more than noise would, or the last trials that nothing else explained."""
    if fewer.worst > tolerance >= more.worst:
        return more.loss < fewer.loss
    return more.loss < fewer.loss - (0.1 + 0.002 * len(fewer.laid.sizes) + 0.06 * fewer.loss)


def _exchanged(laid: Laid, n: int, splits: list[Bools], budget: Budget) -> tuple[list[Bools], Fit]:
    """Single nodes change sides of the newest split while that explains more."""
    fit = Fit(laid, tree_paths(n, splits))
    improved = fit.worst > 0.02
    while improved:
        improved = False
        for v in range(n):
            moved = canonical(splits[-1] ^ (np.arange(n) == v))
            if not 1 < moved.sum() < n - 1 or not all(compatible(moved, s) for s in splits[:-1]):
                continue
            if not budget.spend():
                return splits, fit
            other = Fit(laid, tree_paths(n, [*splits[:-1], moved]), rounds=2)
            if other.loss < fit.loss - 0.02:
                splits = [*splits[:-1], moved]
                fit, improved = Fit(laid, tree_paths(n, splits)), True
    return splits, fit
