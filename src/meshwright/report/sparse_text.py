"""The ranking of sparse all-reduces as a document and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..decide.collective.sparse import SparseProblem
    from ..decide.collective.sparse.choice import SparseRanked

__all__ = ["sparse_document", "sparse_text"]


def sparse_document(problem: SparseProblem, ranked: Sequence[SparseRanked], bound_s: float) -> dict[str, Any]:
    rows = [
        {"strategy": r.strategy, "time_s": r.time_s, "mean_s": r.mean_s, "upper_s": r.upper_s, "words": r.words, "kinds_s": r.kinds_s, "why": r.why}
        for r in ranked
    ]
    return {
        "schema": "meshwright.collective-sparse", "version": 1, "fabric": problem.fabric.name, "devices": len(problem.ranks),
        "elements": problem.elements, "k": problem.k, "overlap": problem.overlap, "cost": problem.cost.source if problem.cost else "roofline",
        "bound": {"words": problem.bound_words, "time_s": bound_s},
        "limit_words": problem.limit_words, "best": ranked[0].strategy, "strategies": rows,
    }  # fmt: skip


def sparse_text(problem: SparseProblem, ranked: Sequence[SparseRanked], bound_s: float) -> str:
    density = problem.k / problem.elements
    lines = [
        f"all-reduce of {problem.elements} float32 on {len(problem.ranks)} devices of {problem.fabric.name}, {problem.k} each ({density:.3%})",
        f"{'strategy':<10} {'step':>10} {'mean':>10} {'upper':>10} {'words':>12} {'against dense':>14}",
    ]
    dense_s = next(r.mean_s for r in ranked if r.strategy == "dense")
    for r in ranked:
        if r.mean_s is None or r.time_s is None or r.upper_s is None or dense_s is None:
            lines.append(f"{r.strategy:<10} refused: {r.why}")
            continue
        lines.append(
            f"{r.strategy:<10} {r.time_s:>8.4g} s {r.mean_s:>8.4g} s {r.upper_s:>8.4g} s {r.words or 0:>12.0f} {dense_s / r.mean_s:>13.2f}x"
        )
    lines.append(f"bound: a result of {problem.k} entries brings every rank {problem.bound_words:.0f} words, {bound_s:.4g} s at its links' rate")
    return "\n".join(lines)
