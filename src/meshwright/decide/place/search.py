"""Search: the best list schedule, made shorter by moves of critical tasks, then by annealing over devices and order together.

Cite: no publication of its own; moves of single tasks as in GiPH (MLSys 2023), annealing after Kirkpatrick et al. (Science 1983).
Left open: temperatures. Our answer: from half of the start's makespan down to 0.1 %, constants of the code and not the user's.
Deviations: GiPH places and lets each device run what comes first; here the order is part of what is sought, so that a device may wait for the task
that matters. Starts are HEFT with either mean of messages, and CPOP. Messages share links where the fabric's routes do: it is searched with messages
that share none and with messages that take turns, and the simulator, where they share fairly, has the last word.
With the objective energy or cost it seeks the cheapest mapping (`sums`), and then its order as HEFT's.
Invariant: never longer than HEFT or CPOP, or never dearer than they, in the simulation (`links` shared) or as published (own); equal inputs and seed
give equal schedules, whatever the machine's load.
Cost: O(evaluations · (tasks + edges · links of a route)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...cite import FOLKLORE, Cite
from ...errors import UsageError
from ...kernels.effort import time_is_up
from ...kernels.tasks import anneal, descend, timed
from .judge import simulated_s
from .lists import Cpop, Heft, in_order_of, listed, started, upward_ranks
from .problem import NO_ROUTES, Placement, PlaceProblem, Routes
from .sums import cheapest, reweighted, sums_of

__all__ = ["Search"]

EVALUATIONS_PER_TASK = 5_000
MIN_EVALUATIONS = 200_000  # of small graphs: some 0.1 s for 20 tasks
MAX_VISITS = 200_000_000  # of tasks and edges over all schedules, unless evaluations are given: some 5 s of one core
HOT, COLD = 0.5, 1e-3  # temperatures at the beginning and at the end, shares of the makespan: of 20 random graphs none stayed above the best known


@dataclass(frozen=True, kw_only=True)
class Search:
    """evaluations: schedules looked at, 0: 5,000 for every task, fewer on large graphs; rounds: annealings from the best so far, each followed by
    moves of critical tasks, that share them; links: shared (messages share links as in the simulator), or own (they share none, as published)."""

    name: ClassVar[str] = "search"
    cite: ClassVar[Cite] = FOLKLORE
    aliases: ClassVar[tuple[str, ...]] = ()

    evaluations: int = 0
    rounds: int = 6
    links: str = "shared"

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        """Raises: UsageError for options that are none."""
        if self.evaluations < 0 or self.rounds < 1 or self.links not in ("shared", "own"):
            raise UsageError("evaluations must be >= 0, rounds >= 1, links shared or own", where="search")
        tasks, visits = len(problem.graph.tasks), len(problem.graph.tasks) + len(problem.graph.edges)
        budget = self.evaluations or max(1, min(max(MIN_EVALUATIONS, EVALUATIONS_PER_TASK * tasks), MAX_VISITS // visits))
        starts = [kind.plan(problem, rng=rng) for kind in (Heft(), Heft(pairs="all"), Cpop())]
        if (given := started(problem)) is not None:
            starts.append(given)
        if problem.objective != "makespan":
            return self._by_sum(problem, starts, rng)
        models = (NO_ROUTES,) if self.links == "own" else (NO_ROUTES, problem.routes)
        finalists, looked = list(starts), len(starts)
        for model in models:
            seq, on, more = self._searched(problem, model, starts, max(1, (budget - len(starts)) // len(models)), rng)
            looked += more
            finalists.append(problem.placement(self, seq, on, evaluations=0))
        judged = [(p.makespan_s if self.links == "own" else simulated_s(problem, p), n) for n, p in enumerate(finalists)]
        best = min(judged)[1]
        notes = {"start_s": min(s for s, _ in judged[: len(starts)])}
        return problem.placement(self, finalists[best].sequence, finalists[best].on, evaluations=looked, notes=notes)

    def _by_sum(self, problem: PlaceProblem, starts: Sequence[Placement], rng: np.random.Generator) -> Placement:
        sums = sums_of(problem)
        begins = [np.array(s.on, np.int64) for s in starts]
        on, looked = cheapest(sums, [*begins, reweighted(sums, problem.graph.order).on], self.evaluations, rng)
        made = problem.placement(self, *listed(problem, in_order_of(problem, upward_ranks(problem)[0]), on), evaluations=looked)
        finalists = [made, *(s for s in starts if sums.total(np.array(s.on)) <= sums.total(on))]  # equally cheap, perhaps shorter
        best = min(finalists, key=lambda p: (sums.total(np.array(p.on)), simulated_s(problem, p)))
        return problem.placement(self, best.sequence, best.on, evaluations=looked, notes={"start": min(sums.total(b) for b in begins)})

    def _searched(
        self, problem: PlaceProblem, model: Routes, starts: Sequence[Placement], budget: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """(sequence, devices, schedules looked at), from the best start under the model."""
        graph = (*problem.arrays, *model, *problem.children)
        n, edges = len(problem.graph.tasks), len(problem.graph.edges)
        best, seq, on = np.inf, np.empty(0, np.int64), np.empty(0, np.int64)
        for start in starts:
            order, where = np.array(start.sequence, np.int64), np.array(start.on, np.int64)
            found = timed(order, where, *problem.arrays, *model, np.empty(n), np.empty(n), np.empty(edges))
            if found < best:
                best, seq, on = found, order, where
        best, looked = descend(seq, on, *graph, budget)
        left = self.rounds
        while looked < budget and not time_is_up():
            share = max(1, (budget - looked) // (2 * left) if left > 1 else budget - looked)
            found = anneal(seq, on, *graph, share, HOT * best or 1e-9, COLD * best or 1e-12, int(rng.integers(1, 2**62)))
            looked += share
            best, more = descend(seq, on, *graph, max(1, min(share, budget - looked)))
            looked += more
            best, left = min(best, found), max(1, left - 1)
        return seq, on, looked
