"""A pipeline step as counts: how many micro-batches each stage has begun by each slot of time. A linear programme; with whole counts, exact search.

Micro-batches are alike, so which one runs does not matter, only how many have: X[class, t] = starts of a class (copy, kind, stage) in slots 0..t.
  order    X never falls; a class stands behind the class it needs by the time of one action and its message (its first m starts need m of those)
  device   at most one action of a device covers a slot
  memory   bytes x (forwards begun - backwards complete) of a device are within its cap
  ends     before the way in of a class X is 0, and so late that the way out of the rest no longer fits, X is all of them
Times are cut down to whole slots, which only makes the problem easier: starts t become floor(t / slot), and floor(x + y) >= floor(x) + floor(y).
So when no counts fit into n slots, no schedule takes less than n + 1 of them. Where all times are whole slots the counts are schedules themselves.
The linear relaxation is strong (on the V placement with a cap it often gives the optimum), and a proof that it has no solution is a list of
multipliers, which `check.pipeline_counts` works out again: the certificate form "counts".
Cite: J. P. Sousa, L. A. Wolsey, "A time indexed formulation of non-preemptive single machine scheduling problems", Mathematical Programming 1992.
Cost: classes x slots variables, three times as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import floor, gcd
from typing import Any

__all__ = ["Class", "Grid", "Row", "grid_of", "limits", "rows", "slot_for"]

Row = tuple[str, tuple[int, int], list[tuple[int, int, int]], int]  # (family, (index, slot), [(class, slot, factor)], at most)

# By this factor slots are shortened where floats are not exactly whole slots, so that rounding cuts none off; twice, a time counts as reached.
ROUNDING_FACTOR = 1 - Fraction(1, 10**8)


@dataclass(frozen=True)
class Class:
    """`seconds` of one action; `head_s` before its first start; `tail_s` from a start to the end of the step, at least."""

    copy: int
    kind: str
    stage: int
    device: int
    many: int
    seconds: Fraction
    head_s: Fraction
    tail_s: Fraction
    needs: int  # number of the class before it, -1: none
    lag_s: Fraction  # from a start there to a start here
    bytes: int  # taken (F), given back at the end (< 0), or 0


@dataclass(frozen=True)
class Grid:
    """Classes, the slot, and per device the cap in bytes (0: none)."""

    classes: tuple[Class, ...]
    slot_s: Fraction
    caps: tuple[int, ...]

    def slots(self, time_s: Fraction) -> int:
        return floor(time_s / self.slot_s)


def grid_of(facts: Mapping[str, Any], caps: tuple[int, ...], slot_s: Fraction) -> Grid:
    """From the facts of a certificate (`bound.facts_of`)."""
    split = bool(facts["split"])
    back = "I" if split else "B"
    found: list[Class] = []
    for copy, many in enumerate(facts["microbatches"]):
        if not many:
            continue
        s_of = {k: [Fraction(x) for x in facts["seconds"][k][copy]] for k in (("F", "I", "W") if split else ("F", "B"))}
        up, down = ([Fraction(x) for x in facts[k][copy]] for k in ("up_s", "down_s"))
        stages = len(s_of["F"])
        place = [int(d) for d in facts["placement"][copy]]
        way: list[tuple[str, int]] = [("F", s) for s in range(stages)] + [(back, s) for s in reversed(range(stages))]
        # lags[i]: least time from a start of the way's class i - 1 to the start of class i for one micro-batch: its compute and its message
        lags = [Fraction(0)]
        for kind, s in way[:-1]:
            message = (up[s] if kind == "F" else down[s - 1]) if (s < stages - 1 if kind == "F" else s) else Fraction(0)
            lags.append(s_of[kind][s] + message)
        last_s = s_of[back][0] + (s_of["W"][0] if split else 0)
        first = len(found)
        head = Fraction(0)
        for i, (kind, s) in enumerate(way):
            head += lags[i]
            # after a start here the rest of the way up and down follows, and the last backward with its W
            tail = sum(lags[i + 1 :], Fraction(0)) + last_s
            if split and kind == "I":
                tail = max(tail, s_of["I"][s] + s_of["W"][s])
            size = int(facts["activation_bytes"][s])
            held = size if kind == "F" else -size if kind == "B" else 0
            found.append(Class(copy, kind, s, place[s], many, s_of[kind][s], head, tail, first + i - 1 if i else -1, lags[i], held))
        if split:
            for s in range(stages):
                need = first + 2 * stages - 1 - s
                head = found[need].head_s + s_of["I"][s]
                size = int(facts["activation_bytes"][s])
                found.append(Class(copy, "W", s, place[s], many, s_of["W"][s], head, s_of["W"][s], need, s_of["I"][s], -size))
    return Grid(tuple(found), slot_s, caps)


def slot_for(facts: Mapping[str, Any], most: int, span_s: Fraction) -> Fraction | None:
    """The exact slot if `span_s` has at most `most` of it, else one that cuts off little; None when nothing takes time.

    Given times are floats: what lies within a billionth of whole slots counts as whole, so the slot is made a little shorter, which any slot may be.
    """
    given = {x for c in grid_of(facts, (), Fraction(1)).classes for x in (c.seconds, c.lag_s) if x}
    if not given:
        return None
    near = {x: x.limit_denominator(10**9) for x in given}
    lengths = sorted(set(near.values()) - {Fraction(0)}) or [Fraction(1, 10**9)]
    whole = reduce(lambda a, b: Fraction(gcd(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator), lengths)
    if span_s / whole <= most:
        return whole if all(x == y for x, y in near.items()) else whole * ROUNDING_FACTOR
    # a time is cut down least at a slot that divides one of the times, so only such slots are tried; of equally good ones the longest is cheapest
    tried = {x / k for x in lengths for k in range(1, most + 1) if span_s * k / x <= most} or {span_s / most}
    return max(tried, key=lambda s: (sum((floor(x / s) * s / x for x in lengths), Fraction(0)), s)) * ROUNDING_FACTOR


def limits(grid: Grid, number: int, slots: int) -> list[tuple[int, int]]:
    """Least and most of a class's starts by each slot 0..slots-1, when the step takes `slots` and less than one more."""
    c = grid.classes[number]
    first, last, long = grid.slots(c.head_s), slots - grid.slots(c.tail_s), grid.slots(c.seconds)
    found = []
    for t in range(slots):
        # a class runs on one device, so its starts are `long` slots apart: at most so many from the first possible to t, and from t to the last
        most = 0 if t < first else c.many if not long else min(c.many, (t - first) // long + 1)
        left = 0 if t >= last else c.many if not long else min(c.many, (last - t - 1) // long + 1)
        found.append((c.many - left, most))
    return found


def rows(grid: Grid, slots: int) -> Iterator[Row]:
    """Every row: sum of factor x X[class, slot] <= the last number; X before slot 0 is 0 and left out."""
    for i, c in enumerate(grid.classes):
        lag = grid.slots(c.lag_s)
        for t in range(slots):
            if t:
                yield "rise", (i, t), [(i, t - 1, 1), (i, t, -1)], 0
            if c.needs >= 0 and t >= lag:
                yield "order", (i, t), [(i, t, 1), (c.needs, t - lag, -1)], 0
    for d in sorted({c.device for c in grid.classes}):
        mine = [(i, c, grid.slots(c.seconds)) for i, c in enumerate(grid.classes) if c.device == d]
        for t in range(slots):
            # X[t] - X[t - long] starts still run in slot t; what takes less than a slot covers none
            cover = [(i, t, 1) for i, _, long in mine if long] + [(i, t - long, -1) for i, _, long in mine if 0 < long <= t]
            yield "device", (d, t), cover, 1
            if d < len(grid.caps) and grid.caps[d]:
                held = [(i, t, c.bytes) for i, c, _ in mine if c.bytes > 0]
                # given back `long` slots after the start, which is no later than the true end: never more is held here than really is
                held += [(i, t - long, c.bytes) for i, c, long in mine if c.bytes < 0 and t >= long]
                yield "memory", (d, t), held, grid.caps[d]
