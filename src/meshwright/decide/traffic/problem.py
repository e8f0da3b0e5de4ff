"""Types of the traffic decision: the problem with its integer cost tables, and the timeline of a fusion.

`meshwright.traffic` says what a step is. A fusion is a list of groups that cover the tensors in ready order; the tables give, for every pair of
positions k < i and every codec, the time to encode, exchange and decode the group of tensors k .. i - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import Infeasible, UsageError
from ...kernels.fusion import advance
from ...traffic import Curve, TrafficGroup, TrafficProfile, TrafficTime
from ..strategies import Listed

__all__ = ["Fusion", "TrafficProblem", "TrafficStrategy", "curve_at", "group_times", "groups_of", "timeline", "walked"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Groups, the step they take, and the least step that any fusion with the problem's codecs can take (`least_ns`, when it was searched for).

    `labels`: the states that prove `least_ns`, rows of (position, compute, network, chain, decodes); () where nothing is claimed.
    """

    groups: tuple[TrafficGroup, ...]
    step_ns: int
    least_ns: int = 0
    labels: tuple[tuple[int, int, int, int, int], ...] = ()
    options: tuple[tuple[str, str | int | float | bool], ...] = ()


class TrafficStrategy(Listed, Protocol):
    """A frozen dataclass of options. proves: its fusion says how short a step can be (`Fusion.least_ns`), so that the others are compared with it."""

    proves: ClassVar[bool] = False

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion: ...


def curve_at(curve: Curve, sizes: I64) -> I64:
    """Times at `sizes`, in whole nanoseconds, rounded down."""
    xs, ts = curve.sizes, np.asarray(curve.times_ns, np.int64)
    if len(xs) == 1:
        return np.full(sizes.shape, ts[0])
    slopes = np.array([(b - a) / (y - x) for (x, y), (a, b) in zip(pairwise(xs), pairwise(curve.times_ns), strict=True)])
    at = np.clip(np.searchsorted(np.asarray(xs), sizes, side="right") - 1, 0, len(slopes) - 1)
    beyond = np.maximum(sizes - np.asarray(xs)[at], 0)
    return np.asarray(ts[at] + (beyond * slopes[at]).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class TrafficProblem:
    """A profile and the codecs that may be used (positions in the profile's list)."""

    profile: TrafficProfile
    codecs: tuple[int, ...]

    @staticmethod
    def of(profile: TrafficProfile, codecs: Iterable[str] | None = None) -> TrafficProblem:
        """With all of the profile's codecs, or those named. Raises: UsageError for a codec without costs, or none at all."""
        chosen = tuple(range(len(profile.codecs))) if codecs is None else tuple(dict.fromkeys(profile.position(c) for c in codecs))
        if not chosen:
            raise UsageError("no codec to choose from", where="codecs", hint="`none` is one")
        return TrafficProblem(profile=profile, codecs=chosen)

    @property
    def count(self) -> int:
        return len(self.profile.tensors)

    @property
    def finish_ns(self) -> int:
        return self.profile.finish_ns

    @cached_property
    def ready_ns(self) -> I64:
        """Compute time until tensor i - 1 is ready, [0] = 0; after the last: to the end of the backward."""
        ready = [0, *(t.ready_ns for t in self.profile.tensors)]
        ready[-1] = self.profile.compute_ns
        return np.asarray(ready, np.int64)

    @cached_property
    def elements(self) -> I64:
        return np.cumsum([0, *(t.elements for t in self.profile.tensors)], dtype=np.int64)

    @cached_property
    def payloads(self) -> I64:
        """[codec, position]: bytes of all tensors before it."""
        return np.stack([np.cumsum([0, *self.profile.codecs[c].payload_bytes], dtype=np.int64) for c in self.codecs])

    def _times(self, first: I64 | int, last: I64 | int) -> tuple[I64, I64, I64]:
        elements = np.asarray(self.elements[last] - self.elements[first])
        encode, exchange, decode = [], [], []
        for row, c in enumerate(self.codecs):
            cost = self.profile.codecs[c]
            encode.append(curve_at(cost.encode, elements))
            exchange.append(curve_at(cost.exchange, np.asarray(self.payloads[row][last] - self.payloads[row][first])))
            decode.append(curve_at(cost.decode, elements))
        return np.stack(encode), np.stack(exchange), np.stack(decode)

    def ending_at(self, position: int) -> tuple[I64, I64, I64]:
        """(encode, exchange, decode)[codec, k]: of the group of tensors k .. position - 1, k < position."""
        return self._times(np.arange(position), position)

    def starting_at(self, position: int) -> tuple[I64, I64, I64]:
        """(encode, exchange, decode)[codec, i]: of the group of tensors position .. i - 1; columns up to `position` are 0."""
        found = self._times(position, np.arange(position, self.count + 1))
        return tuple(np.concatenate([np.zeros((len(self.codecs), position), np.int64), part], 1) for part in found)  # type: ignore[return-value]

    def without_dominated(self) -> TrafficProblem:
        """Without codecs that another beats or equals in encode, exchange and decode of every group: no fusion is shorter with them."""
        n = len(self.codecs)
        beaten = ~np.eye(n, dtype=bool)  # [c, d]: d is never slower than c
        faster = np.zeros((n, n), bool)
        for k in range(self.count if n > 1 else 0):
            for part in self.starting_at(k):
                beaten &= (part[None, :, k + 1 :] <= part[:, None, k + 1 :]).all(axis=2)
                faster |= (part[None, :, k + 1 :] < part[:, None, k + 1 :]).any(axis=2)
        first = np.tri(n, k=-1, dtype=bool)  # of equals the first stays
        kept = ~(beaten & (faster | first)).any(axis=1)
        return replace(self, codecs=tuple(c for c, keep in zip(self.codecs, kept.tolist(), strict=True) if keep))

    def times_of(self, group: TrafficGroup) -> tuple[int, int, int]:
        row = self.codecs.index(self.profile.position(group.codec))
        cost = self.profile.codecs[self.codecs[row]]
        elements = self.elements[group.last] - self.elements[group.first]
        payload = self.payloads[row][group.last] - self.payloads[row][group.first]
        sizes = ((cost.encode, elements), (cost.exchange, payload), (cost.decode, elements))
        return tuple(int(curve_at(curve, np.array([size]))[0]) for curve, size in sizes)  # type: ignore[return-value]


def group_times(problem: TrafficProblem, groups: Sequence[TrafficGroup]) -> list[tuple[int, int, int, int]]:
    """(compute until its last tensor is ready, encode, exchange, decode) of every group.

    Raises: UsageError when the groups do not cover the tensors in order.
    """
    edges = [0, *(g.last for g in groups)]
    if [g.first for g in groups] != edges[:-1] or edges[-1] != problem.count or any(a >= b for a, b in pairwise(edges)):
        raise UsageError("groups must cover the tensors in ready order, each once", where="groups")
    return [(int(problem.ready_ns[g.last] - problem.ready_ns[g.first]), *problem.times_of(g)) for g in groups]


def timeline(problem: TrafficProblem, groups: Sequence[TrafficGroup]) -> tuple[int, tuple[TrafficTime, ...]]:
    """(end of the last decode, times of every group). Raises: UsageError when the groups do not cover the tensors in order."""
    return walked(group_times(problem, groups), problem.profile.interference_permille)


def walked(times: Sequence[tuple[int, int, int, int]], permille: int) -> tuple[int, tuple[TrafficTime, ...]]:
    """The timeline of groups with these times (`group_times`)."""
    compute = network = 0
    sent: list[tuple[int, int, int, int, int]] = []
    for work, encode, exchange, decode in times:
        start = advance(compute, network, work, permille)
        compute = advance(compute, network, work + encode, permille)
        begin = max(network, compute)
        network = begin + exchange
        sent.append((start, compute, begin, network, decode))
    rows, end = [], compute
    for start, encoded, begin, arrived, decode in sent:
        at = max(end, arrived)
        end = at + decode
        rows.append(
            TrafficTime(
                encode_start_ns=start, encode_end_ns=encoded, exchange_start_ns=begin, exchange_end_ns=arrived, decode_start_ns=at, decode_end_ns=end,
            )
        )  # fmt: skip
    return end, tuple(rows)


def groups_of(ends: Sequence[int], codecs: Sequence[str] | str) -> tuple[TrafficGroup, ...]:
    """Groups that end before the tensors `ends`, with one codec or one each."""
    names = [codecs] * len(ends) if isinstance(codecs, str) else list(codecs)
    return tuple(TrafficGroup(first=a, last=b, codec=c) for (a, b), c in zip(pairwise([0, *ends]), names, strict=True))


def best_of(problem: TrafficProblem, candidates: Iterable[tuple[TrafficGroup, ...]]) -> tuple[TrafficGroup, ...]:
    """The candidate with the shortest step, the first of equals. Raises: Infeasible when there is none."""
    found = min(((timeline(problem, g)[0], i, g) for i, g in enumerate(candidates)), key=lambda row: row[:2], default=None)
    if found is None:
        raise Infeasible("the tensors cannot be grouped", hint="give at least one codec")
    return found[2]
