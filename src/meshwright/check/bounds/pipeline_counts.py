"""The certificate form "counts" of a pipeline bound: no step of `slots` slots exists, because weighted rows contradict what counts can be.

X[action class, t] is the number of its starts in slots 0..t, a start at time u being in slot floor(u / slot_s). In a step that takes less than
(slots + 1)·slot_s, with floor(x) for the whole slots in x, floor(x + y) >= floor(x) + floor(y):
  rise    X[c, t-1] <= X[c, t]
  order   X[c, t] <= X[c before, t - floor(time from its start to the start of c)]: of alike micro-batches, m starts of c need m of the one before;
          before a stage's F the F below it, before its backward that of the stage above (at the top its F), before W its I
  device  starts of a device in slots t - floor(seconds) + 1 .. t, over its classes: at most 1
  memory  bytes x F's begun by t, less those whose last action began by t - floor(its seconds): at most the cap
and X[c, t] is 0 before floor(way in), at most one more per floor(seconds), and short of all of them by no more than still fit before
slots - floor(way out). Multipliers >= 0 of these rows give sum of factor x X <= right-hand side; where even the least that the left side can
be is larger, there is no such step, so every step takes (slots + 1)·slot_s. Whole and rational arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

from ...bound import fraction_of
from .pipeline_ways import Pipeline

__all__ = ["counted_time"]

Class = tuple[int, str, int]  # (copy, kind, stage)
MAX_SLOTS = 1_000_000  # time slots that a stated proof may count, so that a file cannot ask for endless tables


@dataclass(frozen=True)
class _Facts:
    many: int
    device: int
    long: int  # whole slots of one action
    first: int
    last: int
    before: Class | None
    lag: int
    taken: int  # bytes


def counted_time(pipeline: Pipeline, data: Mapping[str, Any]) -> Fraction:
    """Seconds that the multipliers prove. Raises: ValueError when they prove nothing."""
    slot, slots = fraction_of(str(data["slot_s"])), int(data["slots"])
    if slot <= 0 or not 0 <= slots <= MAX_SLOTS:
        raise ValueError("a slot has no length, or there are none or too many")
    table = _table(pipeline, slot, slots)
    # Rows are <= rows: multiplied by weights >= 0 and added they hold for every step that fits, as one row: sum of factor x X <= right.
    factor: dict[tuple[Class, int], int] = {}
    right = 0
    for row in data["multipliers"]:
        family, t, weight = str(row[0]), int(row[1]), int(row[2])
        if weight < 0 or not 0 <= t < slots:
            raise ValueError(f"a multiplier below 0, or outside of the slots: {row}")
        terms, most = _row(table, family, t, row[3:], [int(x) for x in data["cap_bytes"]])
        right += weight * most
        for c, at, x in terms:
            if at >= 0:
                factor[c, at] = factor.get((c, at), 0) + weight * x
    # The least that the left side can be: each X at the end of its range that its factor's sign prefers.
    least = 0
    for (c, t), x in factor.items():
        low, high = _range(table[c], t)
        least += x * (low if x > 0 else high)
    # Farkas: only a left side that is always above the right one shows that no such step exists; so does an empty range.
    if least <= right and not any(low > high for c in table.values() for t in range(slots) for low, high in [_range(c, t)]):
        raise ValueError("the multipliers prove no contradiction")
    return (slots + 1) * slot


def _table(p: Pipeline, slot: Fraction, slots: int) -> dict[Class, _Facts]:
    def whole(x: Fraction) -> int:
        return floor(x / slot)

    found: dict[Class, _Facts] = {}
    for copy, many in enumerate(p.many):
        if not many:
            continue
        way = p.way(copy)
        back = "I" if p.split else "B"
        names: list[Class] = [(copy, "F", s) for s in range(p.stages)] + [(copy, back, s) for s in reversed(range(p.stages))]
        for i, (c, (start, end)) in enumerate(zip(names, way, strict=False)):
            _, kind, s = c
            # From an action's start to the end of the step: the rest of a micro-batch's way, or its own weight gradient if that takes longer.
            rest = way[-1][1] - start
            if p.split and kind == "I":
                rest = max(rest, end - start + p.seconds["W"][copy][s])
            # Times are rounded down to whole slots everywhere, so each row is weaker than the truth and never forbids a step that exists.
            lag = whole(start - way[i - 1][0]) if i else 0
            taken = p.bytes[s] if kind == "F" else -p.bytes[s] if kind == "B" else 0
            before = names[i - 1] if i else None
            found[c] = _Facts(many, p.placement[copy][s], whole(end - start), whole(start), slots - whole(rest), before, lag, taken)
            if kind == "I":
                own = p.seconds["W"][copy][s]
                found[copy, "W", s] = _Facts(
                    many, p.placement[copy][s], whole(own), whole(end), slots - whole(own), c, whole(end - start), -p.bytes[s]
                )  # fmt: skip
    return found


def _row(table: dict[Class, _Facts], family: str, t: int, key: Any, caps: list[int]) -> tuple[list[tuple[Class, int, int]], int]:
    """(class, slot, factor) of the left side, and the right side; slots below 0 count nothing."""
    if family in ("rise", "order"):
        c = (int(key[0]), str(key[1]), int(key[2]))
        f = table[c]
        if family == "rise":
            return [(c, t - 1, 1), (c, t, -1)], 0
        if f.before is None:
            raise ValueError(f"nothing comes before {c}")
        return [(c, t, 1), (f.before, t - f.lag, -1)], 0
    device = int(key[0])
    mine = [(c, f) for c, f in table.items() if f.device == device]
    if family == "device":
        covering = [(c, f) for c, f in mine if f.long]
        return [(c, t, 1) for c, _ in covering] + [(c, t - f.long, -1) for c, f in covering], 1
    if family != "memory" or not caps[device]:
        raise ValueError(f"no row {family!r} of device {device}")
    return [(c, t if f.taken > 0 else t - f.long, f.taken) for c, f in mine if f.taken], caps[device]


def _range(f: _Facts, t: int) -> tuple[int, int]:
    """Least and most starts by slot t."""
    if not f.long:
        return (f.many if t >= f.last else 0), (f.many if t >= f.first else 0)
    most = min(f.many, (t - f.first) // f.long + 1) if t >= f.first else 0
    left = min(f.many, (f.last - t - 1) // f.long + 1) if t < f.last else 0
    return f.many - left, most
