"""Copies of hot experts in a training plan: which of them pay in every micro-batch, for loads as the routing says.

Cite: `decide.experts.replicas`, which places them beside an exact bound. Left open there: what a row costs in a layer that is planned. Our answer:
the captured work of the layer's experts on the slowest device, and the way there and back on the slowest link. Whether copies shorten the step is
then simulated, beside the same layout without.
Deviations: copies stay for the life of a plan; other loads are another plan.
Invariant: a layer has copies only where they save more than their weights' way. Cost: that of `best_move` per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...cost import Cost
from ...decide.experts.replicas import CITE, best_move
from ...decide.layout.copied import copied_layers
from ...errors import UsageError
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...plan.context import copies_in
from ...plan.copies import ExpertCopies
from ...plan.routing import Routing
from .evaluated import Evaluated

__all__ = ["copies_entry", "copies_of_hot_experts"]


def copies_of_hot_experts(graph: OpGraph, members: int, routing: Routing, spare: int, fabric: Fabric, cost: Cost) -> dict[str, ExpertCopies]:
    """By layer, at most `spare` copies on each of `members`; layers without are left out. `graph`: of one rank, with all experts.

    Raises: Unsupported for a layer that can have none, UsageError for more places than there are other experts."""
    found, size = {}, {f"param:{p.name}": p.size_bytes for p in graph.parameters}
    rate_Bps = int(min((x.rate_Bps for x in fabric.links), default=0))
    for name, (rows, _, mlp, _) in copied_layers(graph).items():
        experts, many, width = mlp.outputs[0].shape[0], int(mlp.args[-1]), mlp.outputs[0].shape[2]
        if spare > (most := experts - experts // members):
            raise UsageError(f"{spare} places for copies of {most} experts that others have", where="--spare", hint=f"--spare {most} at most")
        loads = [round(many * members * x) for x in routing.shares(experts, mlp.module)]
        row_bytes = 2 * width * max(1, _element_bytes(rows.outputs[0].dtype))
        time_s = max(cost.roofline(mlp.forward, d).time_s + cost.roofline(mlp.backward, d).time_s for d in fabric.devices)
        each = sum(size[v] for v in mlp.inputs[2:4]) // experts
        row_s = Fraction(time_s) / max(1, many) + Fraction(2 * row_bytes * (members - 1), max(1, rate_Bps) * members)
        then, _, _ = best_move((), loads, members, spare, row_s=row_s, expert_bytes=0, rate_Bps=max(1, rate_Bps), calls=1, step_bytes=2 * each)
        if then.copies:
            copied = {e for e, _ in then.copies}
            found[name] = ExpertCopies(
                members=members, experts=experts, copies=tuple(sorted(then.copies)), rows=tuple((e, then.rows[e]) for e in sorted(copied)),
                busiest_rows=then.busiest, before_rows=then.before, bound_rows=then.bound,
            )  # fmt: skip
    return found


def copies_entry(spare: int, best: Evaluated, judged: Sequence[Evaluated]) -> dict[str, Any]:
    """Why hot experts have copies, or have none: the same degrees the other way. Rows are of a micro-batch of all members, on the busiest of them."""
    there, degrees = copies_in(best.layout), best.candidate.degrees
    other = replace(degrees, copied=not degrees.copied)
    same = [e for e in judged if e.candidate.degrees == other]
    rival = min((e for e in same if e.timeline is not None), key=lambda e: (e.excess_bytes > 0, e.time_s), default=None)
    way = "without" if there else "with copies"
    why = f"{best.time_s:.4g} s and {best.peak_bytes} bytes per rank; "
    if rival is not None:
        why += f"{way}, {rival.time_s:.4g} s and {rival.peak_bytes} bytes" + (", which is more than there is" if rival.excess_bytes > 0 else "")
    else:
        why += next((e.why for e in same if e.why), "only this way was considered")
    rows = {f"{n}_rows": sum(getattr(x, f"{n}_rows") for x in there.values()) for n in ("busiest", "before", "bound")}
    options = {"spare": spare, "layers": len(there), "copies": sum(len(x.copies) for x in there.values()), **(rows if there else {})}
    return {"strategy": "copies" if there else "none", "options": options, "why": why, "cite": [CITE.key] if there else []}


def _element_bytes(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
