"""What is kept, computed again, and by which implementation every operator runs, at once, as an integer programme with a proof.

Cite: Shah et al., MONeT: Memory Optimization for Deep Networks, ICLR 2021.
Left open by the paper: networks beyond the solver's reach, and where it stops. Our answer: above `exact_operators` merged operators, a knapsack over
what is held at a few moments (`closure`) chooses implementations and is the floor, and a search (`searching`) finds the schedule with them, which may
compute anything again any number of times.
Invariant: the plan's peak, counted in whole bytes over its runs, is within the budget; `optimal` and `least_bytes` are claims about schedules that
run forward nodes and backward nodes each in the graph's order, and forward nodes again, in order, before backward nodes that may read them.
Cost: one integer programme of O(n^2) binaries for n operators; beyond, up to three of O(n), and a search in rounds (`searching`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from ....cite import Cite
from ....errors import Infeasible, Unsupported
from ....graph.step_graph import StepGraph, StepPlan
from ..problem import StepStrategy
from ..step import finished
from .closure import ROUNDED_DOWN, floor_bytes
from .merging import Merged, merged
from .model import Limits
from .schedule import Decisions, runs_of
from .searching import begun, searched
from .solving import fastest, infeasible, leanest, least_bytes

__all__ = ["CITE", "DEVIATIONS", "Monet"]

CITE = Cite(
    key="shah2021memory",
    title="Memory Optimization for Deep Networks",
    year=2021,
    venue="ICLR, arXiv:2010.14501",
    authors="Shah, Wu, Mohan, Chidambaram, Krahenbuhl",
)
DEVIATIONS = (
    "values are storages: an operator may make several, and views cost nothing",
    "an operand of a backward node may go right after it, and a result is held exactly as long as something of its stage or a later one wants it",
    "any operator may have several implementations, in the forward pass too",
    "an implementation that writes over something of another size is not considered",
    "large networks: a knapsack for the implementations and a search for the schedule instead of one joint integer programme",
)


@dataclass(frozen=True, kw_only=True)
class Monet(StepStrategy):
    """Options. implementations: other implementations may be chosen, `lossy` ones among them;
    exact_operators: up to so many merged forward operators in one programme;
    solver_nodes: branch-and-bound nodes after which the solver stops with a gap; effort: runs of every node
    simulated in ten glances of the search, or in the one that an exact programme begins at."""

    name: ClassVar[str] = "monet"
    cite: ClassVar[Cite] = CITE
    chooses_ways: ClassVar[bool] = True

    implementations: bool = True
    lossy: bool = True
    exact_operators: int = 44
    solver_nodes: int = 20000
    effort: int = 40_000

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible (`data["least_bytes"]`, `data["proved"]`), TimeLimit; Unsupported for several micro-batches in flight."""
        if graph.in_flight > 1:
            raise Unsupported(f"monet plans one micro-batch, {graph.in_flight} are in flight", where=graph.name, hint="plan with fusionaware")
        m = merged(graph, alternatives=self.implementations, lossy=self.lossy)
        seed = int(rng.integers(2**31 - 1))
        if len(m.operators) <= self.exact_operators:
            return self._exact(m, budget_bytes, seed)
        if not m.has_ways:
            return self._searched(m, budget_bytes, seed)
        return self._better(m, budget_bytes, seed, rng)

    def _searched(self, m: Merged, budget_bytes: int | None, seed: int, others: Sequence[Merged] = ()) -> StepPlan:
        return searched(m, budget_bytes, others=others, nodes=self.solver_nodes, effort=self.effort, seed=seed, options=asdict(self))

    def _better(self, m: Merged, budget_bytes: int | None, seed: int, rng: np.random.Generator) -> StepPlan:
        """The best of the joint plan and one without other implementations, where that is within the exact programme's reach."""
        others = [merged(m.graph, alternatives=False)]
        if self.lossy and any(not a.lossless for n in m.graph.nodes for a in n.alternatives):
            others.append(merged(m.graph, lossy=False))
        plain = replace(self, implementations=False)
        tries = [partial(self._searched, m, budget_bytes, seed, others)]
        if len(others[0].operators) <= self.exact_operators:
            tries.append(partial(plain.plan, m.graph, budget_bytes, rng=rng))
        found: list[StepPlan] = []
        refused: list[Infeasible] = []
        floors: list[float | None] = []  # the first allows most, so its floor holds for all
        for attempt in tries:
            try:
                found.append(attempt())
                floors.append(found[-1].floor_s)
            except Infeasible as error:
                refused.append(error)
                floors.append(error.data.get("floor_s"))
        if not found:
            least = min(refused, key=lambda e: int(e.data["least_bytes"]))
            least.data["proved"] = False  # what is proved for the plain operators only says nothing here
            raise least
        best = min(found, key=lambda p: p.peak_bytes if budget_bytes is None else p.time_s)
        return msgspec.structs.replace(best, floor_s=floors[0], least_bytes=floor_bytes(m), optimal=False, options=asdict(self))

    def _exact(self, m: Merged, budget_bytes: int | None, seed: int) -> StepPlan:
        free = fastest(m, Limits(), nodes=self.solver_nodes, seed=seed)
        plan = self._plan(m, free.decisions, budget_bytes=budget_bytes, optimal=free.optimal, floor_s=free.floor)
        if budget_bytes is not None and plan.peak_bytes <= budget_bytes:
            return plan
        least, begin = floor_bytes(m), None if budget_bytes is None else begun(m, budget_bytes, effort=self.effort)
        if begin is None:
            lean = leanest(m, nodes=self.solver_nodes, seed=seed)
            tight = self._plan(m, lean.decisions)
            least, begin = least_bytes(m, lean, tight.peak_bytes), (lean.decisions, tight)
            if budget_bytes is not None and tight.peak_bytes > budget_bytes:
                raise infeasible(m, budget_bytes, tight.peak_bytes, proved=least == tight.peak_bytes)
            budget_bytes = tight.peak_bytes if budget_bytes is None else budget_bytes
        assert budget_bytes is not None
        start, first = begin
        limit, floor = budget_bytes, free.floor
        while True:
            try:
                answer = fastest(m, Limits(peak_bytes=limit), nodes=self.solver_nodes, seed=seed, start=start)
            except Infeasible:  # the plan to begin with fits, but only within the solver's tolerance
                return msgspec.structs.replace(
                    first, options=asdict(self), budget_bytes=budget_bytes, least_bytes=least, floor_s=floor * ROUNDED_DOWN
                )
            floor = answer.floor if limit == budget_bytes else floor
            optimal = answer.optimal and limit == budget_bytes
            plan = self._plan(m, answer.decisions, budget_bytes=budget_bytes, optimal=optimal, floor_s=floor, least_bytes=least)
            if plan.peak_bytes <= budget_bytes:
                return plan
            limit -= plan.peak_bytes - budget_bytes  # some bytes too many, by the solver's tolerance

    def _plan(self, m: Merged, decisions: Decisions, **fields: Any) -> StepPlan:
        runs, boundary = runs_of(m, decisions)
        if "floor_s" in fields:
            fields["floor_s"] *= ROUNDED_DOWN
        return finished(m.graph, runs, boundary, strategy=self.name, options=asdict(self), **fields)
