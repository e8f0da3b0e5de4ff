"""A plan of gradient traffic: its groups, its predicted step and the proof that no other fusion is shorter. Shares nothing with the planner.

The step is replayed from the definition in `meshwright.traffic`, in whole numbers. The proof is a set of states (position, compute, network, chain,
decodes): end of encodes, of exchanges, of decodes if nothing else held them up, and sum of decodes. It is a proof if it holds the empty state and
every state that one more group leads to (a) is no smaller in any component than a state of the set at its position, or (b) cannot end below the
claim. Ends never fall when a component grows, so by induction over groups no fusion ends below the claim. For (b) the least
weighted sums of compute and network work behind a position are computed here again, by their own recursion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bound import Bound
from ..traffic import Curve, TrafficPlan, TrafficProfile
from .verdict import Finding

__all__ = ["check_traffic", "replayed_ns"]

I64 = NDArray[np.int64]
WEIGHT_PARTS = 16  # weights of the compute stream are l / WEIGHT_PARTS for l = 0 .. WEIGHT_PARTS, as in the search that is checked
_MAX_LABEL_NS = 1 << 61  # no time in a stated proof reaches this: sums of three such stay below 2^63
_CHUNK_STATES = 512  # states extended together by numpy, so that memory does not grow with their number


class _Wrong(Exception):
    def __init__(self, message: str, **witness: Any) -> None:
        super().__init__(message)
        self.witness = witness


def check_traffic(plan: TrafficPlan) -> list[Finding]:
    """Findings about groups, predicted step, payload and both bounds; none = right."""
    found = []
    for check, run in (("plan", _plan), ("certificate", _bounds)):
        try:
            run(plan)
        except _Wrong as wrong:
            found.append(Finding(check=check, message=str(wrong), witness=wrong.witness))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            found.append(Finding(check=check, message=f"the plan lacks or mangles {error}"))
    return found


def _plan(plan: TrafficPlan) -> None:
    if plan.leave and not plan.profile.plain_ns:
        raise _Wrong("the plan leaves gradients to DDP, whose step was not measured")
    at = 0
    for i, g in enumerate(plan.groups):
        if g.first != at or g.last <= g.first:
            raise _Wrong(f"group {i} holds tensors {g.first} to {g.last - 1}; the next tensor is {at}", group=i)
        if g.codec not in plan.codecs:
            raise _Wrong(f"group {i} uses {g.codec!r}, which the plan does not choose from", group=i)
        at = g.last
    if at != len(plan.profile.tensors):
        raise _Wrong(f"the groups hold {at} of {len(plan.profile.tensors)} tensors", tensor=at)
    step = replayed_ns(plan.profile, [(g.first, g.last, g.codec) for g in plan.groups])
    if step != plan.step_ns:
        raise _Wrong(f"the step takes {step} ns, the plan says {plan.step_ns}", step_ns=step)
    by_name = {c.codec: c for c in plan.profile.codecs}
    payload = sum(sum(by_name[g.codec].payload_bytes[g.first : g.last]) for g in plan.groups)
    if payload != plan.payload_bytes:
        raise _Wrong(f"a rank sends {payload} bytes, the plan says {plan.payload_bytes}", payload_bytes=payload)


def replayed_ns(profile: TrafficProfile, groups: Sequence[tuple[int, int, str]]) -> int:
    """The step of these groups, walked event by event."""
    by_name = {c.codec: c for c in profile.codecs}
    clock = wire = done = 0
    arrivals = []
    for first, last, codec in groups:
        cost, inside = by_name[codec], profile.tensors[first:last]
        until = profile.compute_ns if last == len(profile.tensors) else inside[-1].ready_ns
        elements = sum(t.elements for t in inside)
        clock = _slowed(clock, wire, until - done + _time(cost.encode, elements), profile.interference_permille)
        done = until
        wire = max(wire, clock) + _time(cost.exchange, sum(cost.payload_bytes[first:last]))
        arrivals.append((wire, _time(cost.decode, elements)))
    for arrival, decode in arrivals:
        clock = max(clock, arrival) + decode
    return clock + profile.finish_ns


def _slowed(start: int, busy_until: int, work: int, permille: int) -> int:
    lost_all_along = work * permille // 1000
    lost_while_busy = max(0, busy_until - start) * permille // (1000 + permille)
    return start + work + min(lost_all_along, lost_while_busy)


def _time(curve: Curve, size: int) -> int:
    return int(_times(curve, np.array([size]))[0])


def _times(curve: Curve, sizes: I64) -> I64:
    """Per knot, the sizes from it to the next; those beyond the last knot stay with the last line."""
    out = np.full(len(sizes), curve.times_ns[0], np.int64)
    for (x0, x1), (t0, t1) in zip(pairwise(curve.sizes), pairwise(curve.times_ns), strict=True):
        here = sizes >= x0
        out[here] = t0 + np.floor((sizes[here] - x0) * ((t1 - t0) / (x1 - x0))).astype(np.int64)
    return out


def _bounds(plan: TrafficPlan) -> None:
    for bound, codecs in ((plan.bound, plan.codecs), (plan.uncompressed, ("none",))):
        claimed = bound.exact * 10**9
        if bound.unit != "s" or bound.certificate.kind != "fusion" or claimed != int(claimed):
            raise _Wrong(f"the bound on {bound.quantity} is not whole nanoseconds with a proof of kind fusion", quantity=bound.quantity)
        if tuple(bound.certificate.data["codecs"]) != codecs:
            raise _Wrong(f"the bound on {bound.quantity} is for other codecs", codecs=list(bound.certificate.data["codecs"]))
        _Proof(plan.profile, codecs, bound).check(int(claimed) - plan.profile.finish_ns)
    if plan.bound.exact > Fraction(plan.step_ns, 10**9):
        raise _Wrong(f"the bound {plan.bound.value} s is above the step", step_ns=plan.step_ns)


class _Proof:
    def __init__(self, profile: TrafficProfile, codecs: Sequence[str], bound: Bound) -> None:
        self.permille, self.quantity, self.n = profile.interference_permille, bound.quantity, len(profile.tensors)
        self.ready = np.array([0, *(t.ready_ns for t in profile.tensors[:-1]), profile.compute_ns], np.int64)
        self.sizes = np.cumsum([0, *(t.elements for t in profile.tensors)], dtype=np.int64)
        by_name = {c.codec: c for c in profile.codecs}
        self.costs = [by_name[c] for c in codecs]
        self.bytes = [np.cumsum([0, *c.payload_bytes], dtype=np.int64) for c in self.costs]
        self.labels = self._labels(bound.certificate.data)
        self.behind = np.zeros((WEIGHT_PARTS + 1, self.n + 1), np.int64)
        self.tail = np.zeros((WEIGHT_PARTS + 1, self.n + 1), np.int64)
        self.decodes = np.zeros(self.n + 1, np.int64)
        for k in range(self.n - 1, -1, -1):
            self._suffix(k)

    def _labels(self, data: Mapping[str, Any]) -> list[I64]:
        rows: list[list[tuple[int, ...]]] = [[] for _ in range(self.n)]
        for row in data["labels"]:
            at, *state = (int(x) for x in row)
            if len(state) != 4 or not 0 <= at < self.n or any(not 0 <= x < _MAX_LABEL_NS for x in state):
                raise _Wrong(f"the proof of {self.quantity} holds {row}, which is no state", quantity=self.quantity)
            rows[at].append(tuple(state))
        return [np.array(r, np.int64).reshape(-1, 4) for r in rows]

    def _groups(self, k: int) -> tuple[I64, I64, I64, I64]:
        """(backward work[i], encode, exchange, decode [codec, i]) of the groups k .. i - 1 for i = k + 1 .. n."""
        sizes = self.sizes[k + 1 :] - self.sizes[k]
        encode = np.array([_times(c.encode, sizes) for c in self.costs])
        exchange = np.array([_times(c.exchange, b[k + 1 :] - b[k]) for c, b in zip(self.costs, self.bytes, strict=True)])
        decode = np.array([_times(c.decode, sizes) for c in self.costs])
        return self.ready[k + 1 :] - self.ready[k], encode, exchange, decode

    def _suffix(self, k: int) -> None:
        work, h, g, d = self._groups(k)
        weight = np.arange(WEIGHT_PARTS + 1)[:, None, None]
        rest = WEIGHT_PARTS - weight
        behind, tail = self.behind[:, None, k + 1 :], self.tail[:, None, k + 1 :]
        final = np.zeros(self.n - k, np.int64)
        final[-1] = 1  # only the last group's decode surely follows its exchange
        wire = rest * (g + final * d)
        compute = weight * (work + h + d)
        self.behind[:, k] = (compute + wire + behind).min(axis=(1, 2))
        later = np.where(final == 1, 0, tail)
        self.tail[:, k] = (compute + rest * (work + h) + np.maximum(wire + behind, later)).min(axis=(1, 2))
        self.decodes[k] = (d + self.decodes[k + 1 :]).min()

    def check(self, least: int) -> None:
        """Raise _Wrong unless the states prove that every fusion takes `least` or more."""
        if not any((row == 0).all() for row in self.labels[0]):
            raise _Wrong(f"the proof of {self.quantity} does not begin with the empty state", quantity=self.quantity)
        for k, states in enumerate(self.labels):
            if len(states):
                groups = self._groups(k)
                for at in range(0, len(states), _CHUNK_STATES):
                    self._extended(k, states[at : at + _CHUNK_STATES], groups, least)

    def _extended(self, k: int, states: I64, groups: tuple[I64, I64, I64, I64], least: int) -> None:
        work, h, g, d = (part[None] for part in groups)
        compute, network, chain, decodes = (states[:, i, None, None] for i in range(4))
        spent = work + h
        lost = np.minimum(spent * self.permille // 1000, np.maximum(network - compute, 0) * self.permille // (1000 + self.permille))
        ready = compute + spent + lost
        sent = np.maximum(network, ready) + g
        last = np.maximum(chain, sent) + d
        total = decodes + d
        low = np.maximum(ready + total, last + self.decodes[k + 1 :]) * WEIGHT_PARTS
        for weight in range(WEIGHT_PARTS + 1):
            rest = WEIGHT_PARTS - weight
            exchange = np.maximum(rest * sent + self.behind[weight, k + 1 :], rest * ready + self.tail[weight, k + 1 :])
            np.maximum(low, weight * (ready + total) + exchange, out=low)
        for s, q, j in np.argwhere(-(-low // WEIGHT_PARTS) < least):
            i = k + 1 + int(j)
            new = np.array([ready[s, q, j], sent[s, q, j], last[s, q, j], total[s, q, j]])
            if i == self.n or not (self.labels[i] <= new).all(axis=1).any():
                raise _Wrong(
                    f"the proof of {self.quantity} does not close: tensors {k} to {i - 1} with {self.costs[q].codec} lead below {least} ns",
                    quantity=self.quantity, first=k, last=i, codec=self.costs[q].codec,
                )  # fmt: skip
