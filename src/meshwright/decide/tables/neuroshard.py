"""NeuroShard: beam search over splits around a greedy grid, then moves and swaps of pieces, every classic plan among the starts.

Cite: Zha et al., NeuroShard, MLSys 2023, sections 3.3 and 3.4.
Left open by the paper: rows that are too many for any device. Our answer: pieces are halved by rows where columns cannot be halved further.
Deviations: candidates of a level are looked at together; pieces of a table that meet on a device are put together again; best moves and swaps
(`refine`) follow, which the paper lacks.
Invariant: no plan is dearer, by the costs it is given, than that of any classic rule.
Cost: O(levels · beam · candidates · grid) greedy runs of n pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...cost_models.lookups import CITE
from ...errors import Infeasible, Unsupported
from ...kernels.effort import time_is_up
from .classic import CLASSIC
from .greedy import greedy
from .problem import Piece, TablePlan, TableProblem, TableStrategy, fitting, halves
from .refine import refine

__all__ = ["NeuroShard"]

MOST_COLUMNS = 1.5  # the largest grid value, times the mean sum of columns


@dataclass(frozen=True, kw_only=True)
class NeuroShard(TableStrategy):
    """Options, the paper's. grid: values between 1 and 1.5; beam: lists kept per level; levels: splits at most; candidates: largest and costliest
    pieces that are halved at a level; rounds: of moves and swaps at most, 0 for none; starts: plans that are refined."""

    name: ClassVar[str] = "neuroshard"
    cite: ClassVar[Cite] = CITE

    grid: int = 11
    beam: int = 3
    levels: int = 10
    candidates: int = 10
    rounds: int = 200
    starts: int = 4

    def plan(self, problem: TableProblem, *, rng: np.random.Generator) -> TablePlan:
        """Raises: Infeasible where no list of pieces fits."""
        limits = np.linspace(1.0, MOST_COLUMNS, self.grid).tolist() if self.grid > 1 else [MOST_COLUMNS]
        found: list[tuple[float, tuple[Piece, ...], tuple[int, ...]]] = []
        beam: list[tuple[Piece, ...]] = [tuple(fitting(problem))]
        looked, least_left, least = 0, float("inf"), len(beam[0])
        for level in range(self.levels + 1):
            lists = beam if level == 0 else self._halved(problem, beam)
            if not lists or (level and time_is_up()):
                break
            result = greedy(problem, lists, [*limits, np.inf])
            tried = len(limits) + 1
            looked += len(lists) * tried
            total = np.where(result.left_bytes > 0, np.inf, result.phases.total_s).reshape(len(lists), tried)
            least_left = min(least_left, float(result.left_bytes.min()))
            # Where nothing fits yet, lists that leave less out are better: they may fit once they are halved further.
            rank = np.lexsort((result.left_bytes.reshape(len(lists), tried).min(1), total.min(1)))
            for i in rank[: self.beam].tolist():
                if np.isfinite(total[i].min()):
                    row = i * tried + int(total[i].argmin())
                    found.append((float(total[i].min()), lists[i], tuple(result.on[row].tolist())))
            beam = [lists[i] for i in rank[: self.beam].tolist()]
        for rule in CLASSIC:
            try:
                pieces, on = rule().place(problem, rng=rng)
            except (Infeasible, Unsupported):
                continue
            found.append((float(problem.phases(*problem.sums(pieces, np.array(on))).total_s), tuple(pieces), tuple(on)))
        if not found:
            raise Infeasible(
                f"no list of pieces that was tried fits: {least_left:.0f} bytes are left over", where=problem.fabric.name,
                hint=f"a device with {least_left:.0f} bytes more, or --strategy size-greedy", data={"left_bytes": least_left},
            )  # fmt: skip
        plans: list[tuple[tuple[Piece, ...], tuple[int, ...]]] = []
        for _, parts, places in sorted(found, key=lambda f: f[0])[: max(1, self.starts)]:
            done, where, seen = refine(problem, parts, places, rounds=self.rounds)
            looked += seen
            plans.append((done, where))
        whole = refine(problem, *next((f[1:] for f in found if len(f[1]) == least), found[0][1:]), rounds=self.rounds)[:2]
        ranked, others = list[TablePlan](), list[TablePlan]()
        last: Unsupported | Infeasible | None = None
        byprice = [f[1:] for f in sorted(found, key=lambda f: f[0])]
        for n, (parts, places) in enumerate([*plans, *byprice, whole]):
            try:
                (ranked if n <= len(plans) else others).append(problem.judged(self, parts, places, evaluations=looked, notes={"pieces": len(parts)}))
            except (Unsupported, Infeasible) as refused:
                last = refused
        if not ranked:
            assert last is not None
            raise last
        best = min(ranked, key=lambda p: p.cost_s)
        return replace(best, others=tuple(sorted((p for p in [*ranked, *others] if p is not best), key=lambda p: p.cost_s)))

    def _halved(self, problem: TableProblem, beam: Sequence[tuple[Piece, ...]]) -> list[tuple[Piece, ...]]:
        found: dict[tuple[tuple[int, int, int], ...], tuple[Piece, ...]] = {}
        for pieces in beam:
            size = problem.bytes_of(pieces)
            alone = problem.compute_s(np.moveaxis(problem.embed(pieces), 0, 1)).mean(1)
            largest, costliest = (np.argsort(-x, kind="stable")[: self.candidates].tolist() for x in (size, alone))
            chosen = dict.fromkeys([*largest, *costliest])
            for i in chosen:
                parts = halves(pieces[i])
                if parts is not None:
                    new = (*pieces[:i], *parts, *pieces[i + 1 :])
                    found.setdefault(tuple(sorted(p.kind for p in new)), new)
        return list(found.values())
