"""Layouts on devices of unlike speed, as part of the search: the same degrees and placement with work divided by speed, then by simulation.

Every placement of a candidate on unlike devices is judged twice: with equal parts, and with stages, samples and tensor shares by the speed of the
devices that get them (`decide.layout.unlike`). Of the winner, micro-batches are then moved one by one from a replica to another while that
shortens the simulated step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .decide.layout import LayoutCandidate, LayoutProblem
from .decide.layout.unlike import divide, moved
from .program import Kind

if TYPE_CHECKING:
    from .drive_evaluated import Evaluated
    from .drive_layouts import LayoutSearch

__all__ = ["by_speed", "refine_division"]

MOVES = 12  # simulations spent on micro-batches of the winner


def by_speed(
    search: LayoutSearch, problem: LayoutProblem, candidate: LayoutCandidate, placement: tuple[str, ...], speed: Mapping[str, float]
) -> LayoutCandidate | None:
    """The candidate with its work divided by the speeds of these devices; None where nothing changes, or cannot."""
    layout = candidate.layout
    assert layout is not None
    division = divide((layout.data, layout.tensor, layout.pipeline), layout.all_microbatches, lambda p, d, t: speed[placement[layout.rank(p, d, t)]])
    return _divided(search, problem, replace(candidate, division=division)) if division != candidate.division else None


def _divided(search: LayoutSearch, problem: LayoutProblem, candidate: LayoutCandidate) -> LayoutCandidate | None:
    made = search.grid().sharded(problem, candidate.degrees, candidate.sharding, candidate.division)
    return made if made.layout is not None else None


def refine_division(search: LayoutSearch, best: Evaluated) -> Evaluated:
    """The winner with micro-batches moved between replicas where the simulated step gets shorter by it."""
    if not best.candidate.division.microbatches or best.candidate.schedule or best.candidate.layout is None:
        return best
    problem = search.problem((None, None, None, None))
    for _ in range(MOVES):
        ends = _replica_ends(best)
        source, target = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
        division = moved(best.candidate.division, source, target)
        made = _divided(search, problem, replace(best.candidate, division=division)) if division is not None else None
        if made is None:
            break
        tried = search.evaluate_with_recomputation(made, best.placement, best.placement_name)[-1]
        if tried.timeline is None or tried.excess_bytes > 0 or tried.time_s >= best.time_s:
            break
        best = tried
    return best


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
