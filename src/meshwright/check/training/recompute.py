"""Recomputation in a layout: what backward asks for is kept or made again, and what runs again reads only what is there.

Per region, by induction over its calls in order: a call may run again in backward if each tensor that it takes is a parameter, buffer or
input, a value that crosses the segment's border and that the region says it reads (that it is still there is for `check_training` to show:
B must read its buffer), a kept result, or the result of an earlier call of the same region that runs again. Everything backward asks for is one
of the last two.
What each call takes is in the plan (`job.graph_outline`); without it the second half cannot be shown, and the answer is unknown.
What is trusted: the list of results that backward asks for, which follows from PyTorch's formulas. A call left out of both lists costs memory, not
values: the executor keeps what it is not told to make again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...plan.plan import Recompute, Segment, TrainingLayout
from ..verdict import Finding

__all__ = ["check_recompute", "operands_of"]

Operands = Mapping[str, tuple[str, ...]]


def operands_of(outline: Iterable[str]) -> Operands:
    """Call -> names of the tensors it takes, from lines `name = target(operand, operand)`; other lines are passed over."""
    found: dict[str, tuple[str, ...]] = {}
    for line in outline:
        name, equals, call = line.partition(" = ")
        if equals and call.endswith(")") and "(" in call:
            inside = call[call.index("(") + 1 : -1]
            found[name] = tuple(inside.split(", ")) if inside else ()
    return found


def check_recompute(layout: TrainingLayout, operands: Operands | None) -> list[Finding]:
    """`operands`: None where the plan does not say what its calls take."""
    found: list[Finding] = []
    for s in layout.segments:
        if not s.recompute:
            continue
        found += _positions(s)
        if not found:
            found += [f for r in s.recompute for start in r.starts for f in _region(s, r, start, operands)]
    if not found and operands is None and any(s.recompute for s in layout.segments):
        found.append(Finding(check="values", message="the plan does not say what its calls take: recomputation cannot be followed", status="unknown"))
    return found


def _wrong(s: Segment, text: str, **facts: Any) -> Finding:
    return Finding(check="values", message=f"segment {s.key} recomputes: {text}", witness={"segment": s.key, "stage": s.stage, **facts})


def _positions(s: Segment) -> list[Finding]:
    """Positions exist; calls run again in order, each in one region, and are not kept as well."""
    taken: dict[int, int] = {}
    for r in s.recompute:
        for start in r.starts:
            for k in (*r.again, *r.needed, *r.kept):
                if not 0 <= start + k < len(s.nodes):
                    return [_wrong(s, f"position {start + k} of {len(s.nodes)} calls", position=start + k)]
            if list(r.again) != sorted(set(r.again)) or not r.again:
                return [_wrong(s, f"the calls of the region at {start} are not in order", position=start)]
            for k in r.again:
                if taken.setdefault(start + k, start) != start:
                    return [_wrong(s, f"{s.nodes[start + k]} runs again in two regions", call=s.nodes[start + k])]
        if not r.starts:
            return [_wrong(s, "a record has no region")]
    for r in s.recompute:
        for start in r.starts:
            both = [k for k in r.kept if start + k in taken]
            if both:
                return [_wrong(s, f"{s.nodes[start + both[0]]} is said to be kept, and runs again", call=s.nodes[start + both[0]])]
            foreign = [v for v in r.reads if v not in s.reads and v not in s.writes]
            if foreign:
                return [_wrong(s, f"reads {foreign[0]!r}, which does not cross its border", value=foreign[0])]
    return []


def _region(s: Segment, r: Recompute, start: int, operands: Operands | None) -> list[Finding]:
    kept = {s.nodes[start + k] for k in r.kept}
    again = [s.nodes[start + k] for k in r.again]
    for k in r.needed:
        name = s.nodes[start + k]
        if name not in kept and name not in again:
            return [_wrong(s, f"backward asks for the result of {name}, which is neither kept nor made again", call=name)]
    if operands is None:
        return []
    # By induction in order: each call may use what is kept, what crosses the border, and what ran again before it.
    there = kept | {*r.reads}
    for name in again:
        if name not in operands:
            return [_wrong(s, f"{name} is no call of the model", call=name)]
        for v in operands[name]:
            if ":" not in v and v not in there:
                return [_wrong(s, f"{name} would run again on {v}, which is neither kept nor made again before it", call=name, value=v)]
        there.add(name)
    return []
