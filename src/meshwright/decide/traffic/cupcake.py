"""Which gradients are sent together, and with which codec, so that the step is as short as it can be.

Cite: Wang, Wu, Xu, Ng, "Cupcake: A Compression Scheduler for Scalable Communication-Efficient Distributed Training", MLSys 2023.
Left open by the paper: a choice of codec per group, times that are not linear in the size, interference of the communication threads, and a
    proof for one given instance. Our answer: the search keeps every state that no other covers (`kernels.fusion`), so any integer
    times are allowed; "no compression" is a codec like the others.
Invariant: no fusion with the problem's codecs has a step shorter than `least_ns`; the states kept prove it, and `check.traffic` goes through them
    again. With one codec and no interference the proof reaches the answer on every instance tried; a choice of codecs contains the partition of
    numbers, so there the proof may stop short, and `least_ns` says where.
Cost: O(n^2 codecs) for the bounds, then per position (kept states before it) * codecs candidates, each compared with the states kept.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...cite import Cite
from ...errors import UsageError
from ...kernels.effort import Budget, time_is_up
from ...kernels.fusion import WEIGHT_PARTS, extend, suffix_bounds
from ...traffic import TrafficGroup
from .problem import Fusion, TrafficProblem, TrafficStrategy, groups_of, timeline

__all__ = ["CITE", "Cupcake"]

CITE = Cite(
    key="wang2023cupcake", title="Cupcake: A Compression Scheduler for Scalable Communication-Efficient Distributed Training", year=2023,
    venue="MLSys", authors="Wang, Wu, Xu, Ng",
)  # fmt: skip

I64 = NDArray[np.int64]
Groups = tuple[TrafficGroup, ...]
Labels = tuple[tuple[int, int, int, int, int], ...]
# States per position that the two beams keep which look for a first good fusion: a quick one, then a wider one below what that found.
_BEAM_STATES = (4, 32)
# Gaps proved on the way to the one that is wanted, as shares of the answer: each is proved sooner than the next, and may lower the answer.
_GAP_SHARES = (0.05, 0.02, 0.01, 0.005, 0.002)


@dataclass(frozen=True, kw_only=True)
class Cupcake(TrafficStrategy):
    """gap: proof wanted, as a share of the answer: 0 = that nothing is shorter.

    states: kept at most over all positions; beyond them the best found is returned with the bound proved so far. time_limit_s: a net, by the clock.
    """

    name: ClassVar[str] = "cupcake"
    cite: ClassVar[Cite] = CITE
    proves: ClassVar[bool] = True

    gap: float = 0.0
    states: int = 20_000
    time_limit_s: float = 60.0

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion:
        """Raises: UsageError for a gap that is no share."""
        if not 0 <= self.gap < 1 or self.states < 1 or not self.time_limit_s > 0:
            raise UsageError(f"gap {self.gap}, states {self.states}, {self.time_limit_s} s", where=self.name, hint="gap from 0 to below 1")
        problem = problem.without_dominated()
        search = _Search(problem)
        search.begin()  # before the clock runs: what is proved must not depend on whether kernels were compiled before
        budget = Budget(1, time_limit_s=self.time_limit_s)
        with budget.net():
            best, groups, least, labels = self._searched(problem, search)
        options = (("gap", self.gap), ("states", self.states), ("time_limit_s", self.time_limit_s))
        finish = problem.finish_ns
        return Fusion(groups=groups, step_ns=best + finish, least_ns=least + finish, labels=labels or ((0, 0, 0, 0, 0),), options=options)

    def _searched(self, problem: TrafficProblem, search: _Search) -> tuple[int, Groups, int, Labels]:
        """(step, groups, least step, the states that prove it)."""
        best, groups = self._near(problem, search)
        least = min(best, search.root_bound())
        labels: Labels = ()
        for gap in (*(g for g in _GAP_SHARES if g > self.gap), self.gap):
            # searched for anything below the cutoff: where nothing is, the cutoff is proved to be a bound, and the states kept are the proof
            cutoff = best - int(gap * best)
            if cutoff <= least:
                continue
            best, groups, kept = search.run(best, groups, cutoff, states=self.states)
            if kept is None:
                break
            least, labels = min(cutoff, best), kept
        return best, groups, least, labels

    def _near(self, problem: TrafficProblem, search: _Search) -> tuple[int, Groups]:
        """What beams find, beginning with the best fusion that one codec for all groups has."""
        if len(problem.codecs) > 1:
            alone = [replace(problem, codecs=(c,)) for c in problem.codecs]
            best, groups = min((self._near(p, _Search(p)) for p in alone), key=lambda found: found[0])
        else:
            groups = groups_of([problem.count], problem.profile.codecs[problem.codecs[0]].codec)
            best = timeline(problem, groups)[0]
        for beam in _BEAM_STATES:
            best, groups, _ = search.run(best, groups, best, beam=beam)
        return best, groups


class _Search:
    def __init__(self, problem: TrafficProblem) -> None:
        self.problem, n = problem, problem.count
        self.network = np.zeros((WEIGHT_PARTS + 1, n + 1), np.int64)
        self.stream = np.zeros((WEIGHT_PARTS + 1, n + 1), np.int64)
        self.decodes = np.zeros(n + 1, np.int64)
        # from the end: what must follow a group that begins at k is bounded by what must follow the groups behind it
        for k in range(n - 1, -1, -1):
            suffix_bounds(k, problem.ready_ns - problem.ready_ns[k], *problem.starting_at(k), self.network, self.stream, self.decodes)

    def begin(self) -> None:
        """The search's first group, for nothing: compiles what the search runs."""
        p, first = self.problem, np.zeros(self.problem.count + 2, np.int64)
        first[1] = 1
        extend(
            1, p.ready_ns[1] - p.ready_ns[:1], *p.ending_at(1), first, np.zeros((1, 4), np.int64), p.profile.interference_permille,
            self.network, self.stream, self.decodes, 0, 1,
        )  # fmt: skip

    def root_bound(self) -> int:
        """What holds for every fusion without any search, rounded up."""
        every: list[int] = [*np.maximum(self.network[:, 0], self.stream[:, 0]).tolist(), int(self.decodes[0]) * WEIGHT_PARTS]
        return -(-max(every) // WEIGHT_PARTS)

    def run(
        self, best: int, groups: Groups, limit: int, *, beam: int = 0, states: int = sys.maxsize
    ) -> tuple[int, Groups, Labels | None]:
        """(step, its groups, the states kept): what was given unless a fusion below `limit` is found; no states when a limit was met first."""
        p, n = self.problem, self.problem.count
        kept = np.zeros((1, 6), np.int64)
        first = np.zeros(n + 2, np.int64)
        first[1] = 1
        for i in range(1, n + 1):
            found = extend(
                i, p.ready_ns[i] - p.ready_ns[:i], *p.ending_at(i), first, np.ascontiguousarray(kept[:, :4]), p.profile.interference_permille,
                self.network, self.stream, self.decodes, limit * WEIGHT_PARTS, beam,
            )  # fmt: skip
            kept = np.concatenate([kept, found])
            first[i + 1] = len(kept)
            if len(kept) > states or time_is_up():
                return best, groups, None
        ends = kept[first[n] :]
        if len(ends):
            # after the last group the step ends with its decoding, on whichever of the threads is later
            steps = np.maximum(ends[:, 0] + ends[:, 3], ends[:, 2])
            groups = self._walk(kept, first, int(first[n] + np.argmin(steps)))
            best = timeline(p, groups)[0]
        at = np.repeat(np.arange(n), np.diff(first[: n + 1]))
        rows = np.concatenate([at[:, None], kept[: first[n], :4]], 1).tolist()
        return best, groups, tuple(map(tuple, rows))

    def _walk(self, kept: I64, first: I64, state: int) -> Groups:
        ends: list[int] = []
        names: list[str] = []
        while state:
            ends.append(int(np.searchsorted(first, state, side="right")) - 1)
            names.append(self.problem.profile.codecs[self.problem.codecs[int(kept[state, 5])]].codec)
            state = int(kept[state, 4])
        return groups_of(ends[::-1], names[::-1])
