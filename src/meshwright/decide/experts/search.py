"""Which choice a step runs by: measured per range of capacities while training goes on, decided alike on all ranks.

Cite: Tutel (arXiv 2206.03382), section 3.3, "dictionary of optimal parallelism and pipelining".
Left open by the paper: what happens when the machine changes. Our answer: times are smoothed, and a range whose time leaves its band is tried anew.
Deviations: the order of trials is a prediction's where there is one; r is searched by thirds along its convex cost, then chunks and algorithms of the
best degrees; choices that are near each other are tried again.
Invariant: equal recorded times give equal choices, so ranks that agree on the time of a step (the slowest rank's) agree on everything.
Cost: O(log S) + chunks · algorithms trials of each near degree per range of capacities; then a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import UsageError
from .problem import Choice

__all__ = ["BAND", "SMOOTHING", "DictionarySearch", "TableSearch", "bucket_of"]

SMOOTHING = 0.3  # of the newest time in the running mean
BAND = 0.15  # a running mean that leaves this share around the time at which the choice was made starts the trials again
TRIALS = 2  # times that a candidate is tried; the least counts: interruptions only ever add
CLOSE = 0.1  # choices within this share of the best are tried again before one is taken, and their degrees with all chunks: as much as steps vary
RUN_OFF = 4  # times that those are tried in all; their second least times decide: one step may be lucky (full token buckets)
PATIENCE = 3  # steps outside the band before it counts as drift: one slow step is none


def bucket_of(capacity: int, window: int) -> int:
    """Number of the range of capacities: (n - 1) · window < C <= n · window."""
    return -(-capacity // window)


@dataclass
class _Range:
    """One range of capacities. Times in s. `best`: None while candidates are tried."""

    times: dict[Choice, list[float]] = field(default_factory=dict)
    best: Choice | None = None
    settled_s: float = 0.0
    mean_s: float = 0.0
    outside: int = 0
    explorations: int = 0


class DictionarySearch:
    """`choose(capacity)`, run the step, `record(capacity, choice, time_s)`; times must be those of the slowest rank, the same on all.

    candidates: what the layer may run, most promising first. window: capacities that share a choice.
    Raises: UsageError without candidates.
    """

    def __init__(self, candidates: Sequence[Choice], *, window: int = 128) -> None:
        if not candidates or window < 1:
            raise UsageError(f"needs candidates and a window of at least 1, got {len(candidates)} and {window}", where="search")
        self.candidates, self.window = tuple(dict.fromkeys(candidates)), window
        self.ranges: dict[int, _Range] = {}

    def choose(self, capacity: int) -> Choice:
        """The choice for a step: the best known, or the next trial."""
        found = self.ranges.setdefault(bucket_of(capacity, self.window), _Range())
        if found.best is not None:
            return found.best
        tried = self._next(found.times)
        if tried is not None:
            return tried
        self._settle(found)
        assert found.best is not None
        return found.best

    def record(self, capacity: int, choice: Choice, time_s: float) -> None:
        """What a step took."""
        found = self.ranges.setdefault(bucket_of(capacity, self.window), _Range())
        if found.best is None:
            found.times.setdefault(choice, []).append(time_s)
            return
        if choice != found.best:
            return
        found.mean_s += SMOOTHING * (time_s - found.mean_s)
        found.outside = found.outside + 1 if abs(found.mean_s / found.settled_s - 1) > BAND else 0
        if found.outside >= PATIENCE:
            self.ranges[bucket_of(capacity, self.window)] = _Range(explorations=found.explorations)

    @property
    def settled(self) -> Mapping[int, Choice]:
        """Ranges whose trials are over, and their choice."""
        return {bucket: x.best for bucket, x in self.ranges.items() if x.best is not None}

    def _settle(self, found: _Range) -> None:
        taken = {c: sorted(x)[1] if len(x) >= RUN_OFF else min(x) for c, x in found.times.items()}
        found.best = min(taken, key=lambda c: (taken[c], self.candidates.index(c)))
        found.settled_s = found.mean_s = taken[found.best]
        found.outside, found.explorations = 0, found.explorations + 1

    def _next(self, times: Mapping[Choice, Sequence[float]]) -> Choice | None:
        """The trial that is due: degrees first, by thirds, at the first candidate's chunks and algorithm; then these at the best degree."""

        def asked(choice: Choice) -> float:
            taken = times.get(choice, ())
            if len(taken) < TRIALS:
                raise _Due(choice)
            return min(taken)

        try:
            first = self.candidates[0]
            plain = next((c for c in self.candidates if c.degree), first)
            degrees = sorted({c.degree for c in self.candidates if c.degree})
            best = [_least(degrees, lambda r: asked(self._like(r, plain)))] if degrees else []
            best += [0] if any(not c.degree for c in self.candidates) else []
            least = min(asked(self._like(r, plain)) for r in best)
            near = [r for r in best if asked(self._like(r, plain)) <= least * (1 + CLOSE)]
            for choice in self.candidates:
                if choice.degree in near:
                    asked(choice)
            least = min(map(min, times.values()))
            close = [c for c in self.candidates if c in times and min(times[c]) <= least * (1 + CLOSE)]
            for choice in close if len(close) > 1 else ():
                if len(times[choice]) < RUN_OFF:
                    raise _Due(choice)
        except _Due as due:
            return due.choice
        return None

    def _like(self, degree: int, like: Choice) -> Choice:
        """The candidate of that degree that is most like another."""
        same = [c for c in self.candidates if c.degree == degree]
        return min(same, key=lambda c: (c.algorithm != like.algorithm, abs(c.chunks - like.chunks), self.candidates.index(c)))


class TableSearch:
    """The choices of a plan's table: those of the range that a capacity lies in, or of the nearest one. `record` changes nothing."""

    def __init__(self, table: Mapping[int, Choice], *, window: int) -> None:
        """table: by number of the range (`bucket_of`). Raises: UsageError for an empty one."""
        if not table:
            raise UsageError("the table holds no choice", where="plan")
        self.table, self.window = dict(table), window

    def choose(self, capacity: int) -> Choice:
        wanted = bucket_of(capacity, self.window)
        return self.table[min(self.table, key=lambda bucket: (abs(bucket - wanted), bucket))]

    def record(self, capacity: int, choice: Choice, time_s: float) -> None:
        """Nothing is learned."""

    @property
    def settled(self) -> Mapping[int, Choice]:
        return self.table


class _Due(Exception):
    """A candidate's time is needed and not known."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.text)
        self.choice = choice


def _least(values: Sequence[int], cost: Callable[[int], float]) -> int:
    """Where a convex cost is least, by thirds; costs are asked for one by one."""
    low, high = 0, len(values) - 1
    while high - low > 2:
        third = (high - low) // 3
        if cost(values[low + third]) <= cost(values[high - third]):
            high -= third
        else:
            low += third
    return min(values[low : high + 1], key=cost)
