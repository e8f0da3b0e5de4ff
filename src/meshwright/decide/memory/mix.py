"""How many members of each class of layers follow which point of the class's frontier: the integer programme that mixes policies under a budget.

Cite: `selective.CITE`, appendix C (a stage may keep some of its micro-batches whole).
Left open by the paper: more than two policies, and layers of several shapes in one stage. Our answer: counts per class and policy; every member
keeps its policy's bytes, and the workspace is that of the largest policy that anybody follows, because one member's backward runs at a time.
Invariant: the bytes of an integral answer are within the budget in whole numbers, not up to the solver's tolerance.
Cost: one integer programme of two variables per policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Infeasible
from ...kernels.highs import require_optimal, solver, values
from .problem import LayerPolicy

__all__ = ["Members", "fractional_mix", "leanest_bytes", "whole_mix"]

SCALE = 1e4  # bytes and seconds are scaled to about this size, well inside the solver's tolerances


@dataclass(frozen=True, kw_only=True)
class Members:
    """`count` alike layers, each held `copies` times at once, that may follow `policies`."""

    count: int
    policies: tuple[LayerPolicy, ...]
    copies: int = 1


def fractional_mix(classes: Sequence[Members], budget_bytes: int) -> list[list[float]]:
    """The linear relaxation's counts per class and policy: no mix takes less time. Raises: Infeasible."""
    lp, n = _model(classes, budget_bytes, integer=False)
    require_optimal(lp, what="relaxed mix of recomputation policies")
    return _split(classes, values(lp)[:n])


def whole_mix(classes: Sequence[Members], budget_bytes: int) -> list[list[int]]:
    """Counts per class and policy of least time that keep at most `budget_bytes`, workspace included. Raises: Infeasible."""
    limit = budget_bytes
    while True:
        lp, n = _model(classes, limit, integer=True)
        try:
            require_optimal(lp, what="mix of recomputation policies")
        except Infeasible:  # or by the solver's tolerance, where the budget is met to the byte
            return _leanest(classes, budget_bytes)
        counts = [[round(c) for c in mine] for mine in _split(classes, values(lp)[:n])]
        over = _held_bytes(classes, counts) - budget_bytes
        if over <= 0:
            return counts
        limit -= over  # some bytes too many, by the solver's tolerance


def leanest_bytes(classes: Sequence[Members]) -> int:
    """The fewest bytes that any mix keeps, workspace included."""
    return min((_held_bytes(classes, counts) for counts in _uniform(classes)), default=0)


def _leanest(classes: Sequence[Members], budget_bytes: int) -> list[list[int]]:
    fits = [counts for counts in _uniform(classes) if _held_bytes(classes, counts) <= budget_bytes]
    if not fits:
        raise Infeasible("no mix of recomputation policies keeps few enough bytes", data={"limit_bytes": budget_bytes})
    return min(fits, key=lambda counts: sum(c * p.time_s for m, mine in zip(classes, counts, strict=True) for c, p in zip(mine, m.policies)))  # noqa: B905


def _uniform(classes: Sequence[Members]) -> Iterator[list[list[int]]]:
    """One policy per class: for every limit of the workspace, the one that keeps least within it."""
    for limit in sorted({p.workspace_bytes for m in classes for p in m.policies}):
        allowed = [[i for i, p in enumerate(m.policies) if p.workspace_bytes <= limit] for m in classes]
        if all(allowed):
            best = [min(mine, key=lambda i, m=m: m.policies[i].kept_bytes) for m, mine in zip(classes, allowed, strict=True)]  # type: ignore[misc]
            yield [[m.count if i == b else 0 for i in range(len(m.policies))] for m, b in zip(classes, best, strict=True)]


def _held_bytes(classes: Sequence[Members], counts: Sequence[Sequence[int]]) -> int:
    followed = [(m.copies * c, p) for m, mine in zip(classes, counts, strict=True) for c, p in zip(mine, m.policies, strict=True) if c]
    return sum(c * p.kept_bytes for c, p in followed) + max((p.workspace_bytes for _, p in followed), default=0)


def _model(classes: Sequence[Members], budget_bytes: int, *, integer: bool) -> tuple[Any, int]:
    """Columns: per class and policy how many members follow it, then whether any does, then the workspace. Returns how many the first are."""
    import highspy

    lp = solver(mip_rel_gap=0.0, mip_abs_gap=1e-9) if integer else solver()
    columns = [(m, p) for m in classes for p in m.policies]
    n = len(columns)
    time_unit = (sum(m.count * max(p.time_s for p in m.policies) for m in classes) or 1.0) / SCALE
    byte_unit = (sum(m.count * m.copies * max(p.kept_bytes + p.workspace_bytes for p in m.policies) for m in classes) or 1) / SCALE
    for m, p in columns:
        lp.addVar(0.0, float(m.count))
        lp.changeColCost(lp.getNumCol() - 1, p.time_s / time_unit)
    for _ in columns:
        lp.addVar(0.0, 1.0)
    lp.addVar(0.0, float("inf"))
    if integer:
        for column in range(2 * n):
            lp.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    at = 0
    for m in classes:
        k = len(m.policies)
        lp.addRow(m.count, m.count, k, list(range(at, at + k)), [1.0] * k)
        at += k
    for i, (m, p) in enumerate(columns):
        lp.addRow(0.0, float("inf"), 2, [i, n + i], [-1.0, float(m.count)])
        if p.workspace_bytes:
            lp.addRow(0.0, float("inf"), 2, [2 * n, n + i], [1.0, -p.workspace_bytes / byte_unit])
    held = [m.copies * p.kept_bytes / byte_unit for m, p in columns]
    lp.addRow(-float("inf"), budget_bytes / byte_unit, n + 1, [*range(n), 2 * n], [*held, 1.0])
    return lp, n


def _split(classes: Sequence[Members], flat: Sequence[float]) -> list[list[float]]:
    found, at = [], 0
    for m in classes:
        found.append(list(flat[at : at + len(m.policies)]))
        at += len(m.policies)
    return found
