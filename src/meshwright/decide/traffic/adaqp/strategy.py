"""Bits per group of rows, for a trade between variance and time, or within a budget of either.

Cite: Wan et al., Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN Training, MLSys 2023.
Left open by the paper: an exact assignment (it calls a mixed-integer solver and takes what a time limit leaves). Our answer: `frontier` and `choose`.
Deviations: a shorter last group counts with its own rows; the least time of the trade's scale is a round's slowest message at 2 bits, not its
fastest; budgets of variance or time hold over all layers and directions together; gradients of copies go back to their owners (the adjoint of the
exchange), so that any module can be used, and count with score 1.
Invariant: of assignments with these groups none has a smaller objective, or is better within the budget, unless `exact` is False and `gap` says by
how much.
Cost: O(rows log rows) per channel; budgets enumerate what the Lagrangian leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import numpy as np

from ....cite import FOLKLORE, Cite
from ....codec.rows import FULL, WIDTHS, require_width
from ....errors import Infeasible, UsageError
from .choose import Chosen, best_sum, curve, least_within
from .frontier import RoundFrontier, channel_frontier, round_frontier
from .problem import Assignment, Exchange, HaloProblem, Widths

__all__ = ["CITE", "AdaQP", "Uniform", "trade_prices"]

CITE = Cite(
    key="wan2023adaqp", title="Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN Training", year=2023, venue="MLSys",
    authors="B. Wan, J. Zhao, C. Wu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdaQP:
    """`group`: rows that share a width; 1: each for itself. `trade`: lambda, 0 (time alone) to 1 (variance alone). Instead of a trade, a budget over
    all
    exchanges: `max_variance`; `like`: the variance of so many bits everywhere; `max_rounds_s`."""

    name: ClassVar[str] = "adaqp"
    cite: ClassVar[Cite] = CITE
    aliases: ClassVar[tuple[str, ...]] = ()
    group: int = 100
    trade: float = 0.5
    max_variance: float | None = None
    max_rounds_s: float | None = None
    like: int | None = None

    def plan(self, problem: HaloProblem, *, rng: np.random.Generator) -> Assignment:
        """Raises: UsageError; Infeasible where 8 bits everywhere are too noisy, or 2 bits everywhere too slow."""
        self._require()
        rounds = self.frontiers(problem)
        limit = self.max_variance if self.like is None else problem.variance(problem.uniform(self.like))
        if limit is not None:
            chosen = self._within(rounds, limit, "variance", [(r.time_s, r.variance) for r in rounds])
        elif self.max_rounds_s is not None:
            chosen = self._within(rounds, self.max_rounds_s, "rounds_s", [(r.variance, r.time_s) for r in rounds])
        else:
            chosen = self._traded(problem, rounds)
        return self._assignment(problem, rounds, chosen)

    def pareto(self, problem: HaloProblem) -> tuple[list[tuple[float, float]], bool]:
        """(seconds of all rounds, variance) of every assignment that none dominates, by rising seconds; False: of those alone that some price makes
        best."""
        self._require()
        found, whole = curve([(r.time_s, r.variance) for r in self.frontiers(problem)])
        return [(c.value, c.used) for c in found], whole

    def _require(self) -> None:
        if self.group < 1:
            raise UsageError(f"groups of {self.group} rows", where="group", hint="at least 1")
        if not 0 <= self.trade <= 1:
            raise UsageError(f"must be from 0 to 1, got {self.trade}", where="trade", hint="0 counts time alone, 1 variance alone")
        if sum(x is not None for x in (self.max_variance, self.max_rounds_s, self.like)) > 1:
            raise UsageError("a budget of variance and one of time", where="max_rounds_s", hint="give one: the other is minimised")
        if self.like is not None and self.like not in WIDTHS:
            raise UsageError(f"{self.like} bits everywhere", where="like", hint="2, 4 or 8")
        for name, value in (("max_variance", self.max_variance), ("max_rounds_s", self.max_rounds_s)):
            if value is not None and not (isfinite(value) and value >= 0):
                raise UsageError(f"must be a number from 0 on, got {value}", where=name)

    def frontiers(self, problem: HaloProblem) -> list[RoundFrontier]:
        """Of every round of every exchange that has messages, in order."""
        found = []
        for x in problem.exchanges:
            for r in range(1, len(problem.ranks)):
                channels = [c for c in x.channels if problem.round_of(c) == r and len(c.weight)]
                parts = [
                    channel_frontier(c, x.dim, group=self.group, latency_s=problem.costs[c.src, c.dst, 0], per_byte_s=problem.costs[c.src, c.dst, 1])
                    for c in channels
                ]
                if parts:
                    found.append(round_frontier(x.name, channels, parts))
        return found

    def _within(self, rounds: Sequence[RoundFrontier], budget: float, what: str, stages: Sequence[tuple[np.ndarray, np.ndarray]]) -> Chosen:
        chosen = least_within(stages, budget)
        if chosen is None:
            least = sum(float(b.min()) for _, b in stages)
            which = "8 bits everywhere leave" if what == "variance" else "2 bits everywhere take"
            raise Infeasible(
                f"{which} {what} {least:.6g}, more than {budget:.6g}", where=f"max_{what}", hint=f"--max-{what.replace('_', '-')} {least:.6g}",
                data={"least": least, "asked": budget, "per_round": [float(b.min()) for _, b in stages]},
            )  # fmt: skip
        return chosen

    def _traded(self, problem: HaloProblem, rounds: Sequence[RoundFrontier]) -> Chosen:
        """Every exchange for itself, as the paper's programme; both objectives divided by what lies between 2 bits and 8 bits everywhere."""
        points: list[int] = []
        for x in problem.exchanges:
            mine = [r for r in rounds if r.exchange == x.name]
            of_time, of_variance = trade_prices(problem, x, self.trade)
            points += best_sum([(of_time * r.time_s, of_variance * r.variance) for r in mine], 1.0).points
        return Chosen(tuple(points), 0.0, 0.0, 0.0)

    def _assignment(self, problem: HaloProblem, rounds: Sequence[RoundFrontier], chosen: Chosen) -> Assignment:
        widths: Widths = {(x.name, c.src, c.dst): np.zeros(0, np.int64) for x in problem.exchanges for c in x.channels}
        for r, k in zip(rounds, chosen.points, strict=True):
            widths |= r.widths(k)
        gap = chosen.gap
        return Assignment(
            strategy=self.name, widths=widths, rounds_s=problem.rounds_s(widths), variance=problem.variance(widths), exact=gap <= 1e-9, gap=gap
        )


def trade_prices(problem: HaloProblem, x: Exchange, trade: float) -> tuple[float, float]:
    """What a second and a unit of variance of an exchange cost; nothing where 2 and 8 bits give the same."""
    few, many = problem.uniform(2), problem.uniform(8)
    time = problem.rounds_s(many, x.name) - problem.rounds_s(few, x.name)
    variance = problem.variance(few, x.name) - problem.variance(many, x.name)
    return ((1 - trade) / time if time > 0 else 0.0, trade / variance if variance > 0 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """All rows at the same width: 2, 4, 8, or 32, which sends them as they are."""

    name: ClassVar[str] = "uniform"
    cite: ClassVar[Cite] = FOLKLORE
    aliases: ClassVar[tuple[str, ...]] = ()
    bits: int = FULL

    def plan(self, problem: HaloProblem, *, rng: np.random.Generator) -> Assignment:
        """Raises: UsageError for another width."""
        widths = problem.uniform(require_width(self.bits))
        return Assignment(strategy=self.name, widths=widths, rounds_s=problem.rounds_s(widths), variance=problem.variance(widths))
