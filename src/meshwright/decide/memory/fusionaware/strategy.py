"""The fastest schedule found for any budget, from one search over schedules, with the floor and the gap to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Infeasible
from ....graph.step_graph import StepGraph, StepPlan
from ..problem import StepStrategy
from ..step import size_text
from .frontier import frontier_of
from .network import CITE

__all__ = ["CITE", "DEFAULT_EFFORT", "FusionAware"]

# Runs of nodes simulated in the search of one frontier: some seconds.
DEFAULT_EFFORT = 100_000_000
# The same per node, which is less for graphs of fewer than 500 nodes: twice as many schedules as a graph of a thousand nodes gets.
EFFORT_PER_NODE = 200_000


def effort_of(graph: StepGraph) -> int:
    """The effort that is spent on a graph unless told otherwise."""
    return min(EFFORT_PER_NODE * len(graph.nodes), DEFAULT_EFFORT)


@dataclass(frozen=True, kw_only=True)
class FusionAware(StepStrategy):
    """`effort`: runs of nodes simulated in the search; None = `effort_of` the graph. `replay_random`: whoever runs the plan restores the generator
    for what draws again. `once`: nothing runs more than twice, which is what a forward and a backward graph can say."""

    name: ClassVar[str] = "fusionaware"
    cite: ClassVar[Cite] = CITE
    in_frontier: ClassVar[bool] = True

    effort: int | None = None
    replay_random: bool = True
    once: bool = False

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible with the least peak found and the least that any plan needs."""
        effort = effort_of(graph) if self.effort is None else self.effort
        frontier = frontier_of(graph, effort, self.replay_random, self.once)
        entry = frontier.within(budget_bytes)
        if entry is None:
            assert budget_bytes is not None
            least = frontier.entries[-1].peak_bytes
            raise Infeasible(
                f"the least peak found is {size_text(least)} (no plan needs less than {size_text(frontier.least_bytes)}), the budget is "
                f"{size_text(budget_bytes)}", where=graph.name, hint="raise the budget, or make the batch smaller",
                data={"least_bytes": least, "bound_bytes": frontier.least_bytes, "budget_bytes": budget_bytes},
            )  # fmt: skip
        floor = frontier.floor_s(entry.peak_bytes if budget_bytes is None else budget_bytes)
        gap = entry.time_s / floor - 1 if floor > 0 else 0.0
        plan = frontier.lives.plan(
            entry.hold_from, entry.hold_to, entry.ahead, strategy=self.name, options={"origin": entry.origin, "effort": effort},
            budget_bytes=budget_bytes, floor_s=floor, least_bytes=frontier.least_bytes, optimal=gap <= 1e-9,
            notes=(f"at most {gap:.2%} above the bound of any plan within these bytes",),
        )  # fmt: skip
        assert plan is not None
        return plan
