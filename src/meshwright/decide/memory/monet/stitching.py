"""Plans of networks beyond one integer programme's reach: the closure within blocks, beside the floor of the closure without them.

What is computed again is computed from its own block's input, which is held: so one block's results at a time exist twice. The closure's limit is
lowered by bisection until the peak of its plan, counted over its runs, is within the budget, for several sizes of blocks.
Source: the card of MONeT, section 3.8 (ii). Deviation: one knapsack over all blocks instead of an integer programme per block and a table; what is
computed again is so once. Invariant: the plan's peak is within the budget. Cost: `TRIALS` knapsacks per size of blocks.
"""

from __future__ import annotations

from typing import Any

from ....errors import Infeasible
from ....step_graph import StepPlan
from ..step import finished
from .blocks import blocks
from .closure import closure, floor_bytes, once_again
from .merging import Merged
from .schedule import runs_of
from .solving import infeasible

__all__ = ["stitched"]

TRIALS = 7  # limits tried between the budget and the least
SIZES = (8, 5, 16)  # least operators per block that are tried
CLOSE = 5e-3  # to the floor: near enough to stop


def stitched(m: Merged, budget_bytes: int | None, *, nodes: int, seed: int, options: dict[str, Any]) -> StepPlan:
    """`budget_bytes` None: the least peak that is found. Raises: Infeasible."""
    search = _Search(m, budget_bytes, nodes, seed, options)
    if budget_bytes is None:
        return search.leanest()
    try:
        search.floor_s = closure(m, budget_bytes, nodes=nodes, seed=seed).floor_s
    except Infeasible:
        raise infeasible(m, budget_bytes, search.leanest().peak_bytes, proved=False) from None
    best: StepPlan | None = None
    for size in SIZES:
        plan = search.fastest(blocks(m, operators=size), budget_bytes)
        if plan is not None and (best is None or plan.time_s < best.time_s):
            best = plan
        if best is not None and search.close(best):
            break
    if best is not None:
        return best
    lean = search.leanest()
    if lean.peak_bytes > budget_bytes:
        raise infeasible(m, budget_bytes, lean.peak_bytes, proved=False, floor_s=search.floor_s)
    return lean


class _Search:
    def __init__(self, m: Merged, budget_bytes: int | None, nodes: int, seed: int, options: dict[str, Any]) -> None:
        self.m, self.budget, self.nodes, self.seed, self.options = m, budget_bytes, nodes, seed, options
        self.floor_s: float | None = None
        self.least = floor_bytes(m)

    def plan(self, limit: int, block_of: tuple[int, ...]) -> StepPlan | None:
        """The closure's plan at that limit; None when it has no answer."""
        try:
            c = closure(self.m, limit, nodes=self.nodes, seed=self.seed, block_of=block_of)
        except Infeasible:
            return None
        runs, boundary = runs_of(self.m, once_again(self.m, c))
        fields = {"budget_bytes": self.budget, "floor_s": self.floor_s, "least_bytes": self.least}
        return finished(self.m.graph, runs, boundary, strategy="monet", options=self.options, **fields)

    def close(self, plan: StepPlan) -> bool:
        return self.floor_s is not None and plan.time_s <= self.floor_s * (1 + CLOSE)

    def fastest(self, block_of: tuple[int, ...], budget_bytes: int) -> StepPlan | None:
        """The fastest plan that fits, over limits between the least bytes and the budget."""
        best: StepPlan | None = None
        low, high, limit = self.m.fixed_bytes, budget_bytes, budget_bytes
        for _ in range(TRIALS):
            plan = self.plan(limit, block_of)
            if plan is None:
                low = limit
            elif plan.peak_bytes <= budget_bytes:
                low = limit
                if best is None or plan.time_s < best.time_s:
                    best = plan
                if self.close(plan):
                    break
            else:
                high = limit
            # the first step down is by what was too much: usually the working set of one block
            less = budget_bytes - (plan.peak_bytes - budget_bytes) if plan is not None and limit == budget_bytes else 0
            limit = max((low + high) // 2, min(less, high - 1))
        return best

    def leanest(self) -> StepPlan:
        """The plan of least peak among those of the closure at rising limits."""
        found: StepPlan | None = None
        for size in SIZES:
            block_of = blocks(self.m, operators=size)
            limit = self.least
            while (plan := self.plan(limit, block_of)) is None:
                limit += max(1, (limit - self.m.fixed_bytes) // 5)
            for _ in range(3):
                if plan is not None and (found is None or plan.peak_bytes < found.peak_bytes):
                    found = plan
                limit += max(1, (limit - self.m.fixed_bytes) // 8)
                plan = self.plan(limit, block_of)
        assert found is not None
        return found
