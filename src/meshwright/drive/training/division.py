"""The decision on devices of unlike speed: the same degrees and placement with work divided by speed, then by simulation.

Every placement of a candidate on unlike devices is judged twice: with equal parts, and with stages, samples and tensor shares by the speed of the
devices that get them (`decide.layout.unlike_devices`). Of the winner, micro-batches are then moved one by one from a replica to another while that
shortens the simulated step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...decide.layout import LayoutCandidate
from ...decide.layout.unlike_devices import Division as Parts
from ...decide.layout.unlike_devices import divide, moved
from ...program.program import Kind
from .context import Context, Decision, Found
from .evaluated import Evaluated

__all__ = ["Division", "DivisionWanted"]

# Simulations spent on moving micro-batches of the winner between replicas.
MAX_SIMULATIONS = 12


@dataclass(frozen=True)
class DivisionWanted:
    """`by_speed`: also try layers, micro-batches and tensor shares by speed, not in equal parts only."""

    by_speed: bool = True


@dataclass(frozen=True)
class Division(Decision):
    name = "division"

    def variants(self, candidate: LayoutCandidate, placement: tuple[str, ...], context: Context) -> Iterator[LayoutCandidate]:
        """The candidate with its work divided by the speeds of these devices, where that changes anything and can be done."""
        layout, speed = candidate.layout, context.speeds
        if layout is None or layout.context > 1:
            return
        if not context.wish(DivisionWanted).by_speed or len({*speed.values()}) == 1 or context.evaluator.is_folded(layout):
            return
        degrees = (layout.data, layout.tensor, layout.pipeline)
        parts = divide(degrees, layout.all_microbatches, lambda p, d, t: speed[placement[layout.rank(p, d, t)]])
        if parts != candidate.division and (made := _divided(context, candidate, parts)) is not None:
            yield made

    def refine(self, found: Found, context: Context) -> Found:
        """The winner with micro-batches moved between replicas where the simulated step gets shorter by it."""
        best = found.winner
        if not best.candidate.division.microbatches or best.candidate.schedule:
            return found
        for _ in range(MAX_SIMULATIONS):
            ends = _replica_ends(best)
            source, target = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
            parts = moved(best.candidate.division, source, target)
            made = _divided(context, best.candidate, parts) if parts is not None else None
            if made is None:
                break
            tried = context.judge(made, best.placement, best.placement_name)[-1]
            if not tried.fits or tried.time_s >= best.time_s:
                break
            best = tried
        return replace(found, best=best)


def _divided(context: Context, candidate: LayoutCandidate, parts: Parts) -> LayoutCandidate | None:
    made = context.grid().sharded(context.problem, candidate.degrees, candidate.sharding, parts)
    return made if made.layout is not None else None


def _replica_ends(e: Evaluated) -> dict[int, float]:
    """When the last backward of every replica is done."""
    spans, p = e.recorded().spans, e.inlined.program
    compute = (spans.step >= 0) & (p.steps.kind[spans.step] == Kind.COMPUTE)
    ends = dict.fromkeys(range(e.layout.data), 0.0)
    for step, rank, end_s in zip(spans.step[compute], spans.rank[compute], spans.end_s[compute], strict=True):
        if p.ops.name[int(p.steps.op[step])] in ("B", "W"):
            replica = e.layout.coordinates(int(rank))[1]
            ends[replica] = max(ends[replica], float(end_s))
    return ends
