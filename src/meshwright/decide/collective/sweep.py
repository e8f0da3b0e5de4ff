"""Strategies over many sizes: planned at some, and at those between with the neighbours' plans, cut for the size and simulated.

A schedule is a pattern of messages; another size changes how long they are. So every strategy plans at the first and last size and at sizes at
most MAX_SIZE_FACTOR times apart (one size class per plan, as solvers need time); at a size between two of them each strategy has the better of both
neighbours' schedules (the nearer one's, if it leads at neither), exactly resized, and those that come near the fastest plan afresh. Times are
simulated at every size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...bound import Bound
from ...errors import MeshwrightError, TimeLimit
from ...kernels.effort import Budget
from .bounds.collective import collective_bound
from .choice import MAX_SEARCH_STEPS, explained, rank, tuned
from .memo import with_chunk_bytes
from .problem import SHARDED, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ranked
from .program_time import simulated_steps, simulated_time_s

__all__ = ["SweepRow", "planned_sizes", "resized", "sweep"]

MAX_SIZE_FACTOR = 16  # sizes planned at are at most this factor apart
MAX_FEW_SIZES = 4  # so few sizes are all planned at
MAX_QUICK_STEPS = 80_000  # simulated steps up to which a plan is quick to judge; of slower ones only one neighbour's is tried
MAX_TIMES_FASTEST = 1.2  # strategies that take no longer than the fastest, times this, plan afresh between planned sizes too


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One size: the ranking, best first, and the bound. `planned`: every strategy planned at this very size."""

    problem: CollectiveProblem
    bound: Bound
    ranked: tuple[Ranked, ...]
    planned: bool


def planned_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes, ascending, that every strategy plans at."""
    ascending = sorted(set(sizes))
    if len(ascending) <= MAX_FEW_SIZES:
        return ascending
    chosen = [ascending[0]]
    for size, following in zip(ascending[1:], [*ascending[2:], None], strict=True):
        if following is None or following > MAX_SIZE_FACTOR * chosen[-1]:
            chosen.append(size)
    return chosen


def sweep(
    problem: CollectiveProblem, sizes: Sequence[int], candidates: Sequence[CollectiveStrategy], *, search: bool = True,
    each_s: float = 5.0, every: bool = False, budget: Budget | None = None,
) -> Iterator[SweepRow]:  # fmt: skip
    """The ranking for every size, ascending. `each_s`: most seconds of one candidate per size class, of counted work; `every`: plan at every size;
    `budget`: of sizes, with the clock's net: sizes that it cuts have fewer candidates or are left out.

    Raises: as `rank`.
    """
    ascending = sorted(set(sizes))
    anchors = ascending if every else planned_sizes(ascending)
    by_name = {c.label: c for c in candidates}
    budget = budget or Budget(len(ascending))
    before: SweepRow | None = None
    for size in anchors:
        if not budget.spend():
            return
        at = replace(problem, size_bytes=size, effort_s=each_s * len(candidates))
        with budget.net():
            row = SweepRow(
                problem=at, bound=collective_bound(at), ranked=tuple(rank(at, candidates, search=search, each_s=each_s)), planned=True,
            )  # fmt: skip
        for between in ascending:
            if before is None or not before.problem.size_bytes < between < size:
                continue
            if not budget.spend():
                break
            try:
                with budget.net():
                    found = _between(replace(problem, size_bytes=between), before, row, by_name, search, each_s)
            except TimeLimit:
                if budget.cut is None:
                    raise
                break
            yield found
        yield row
        before = row


def _between(
    problem: CollectiveProblem, low: SweepRow, high: SweepRow, by_name: dict[str, CollectiveStrategy], search: bool, each_s: float
) -> SweepRow:
    """The ranking at a size between two others."""
    bound = collective_bound(problem)
    entries: list[Ranked] = []
    leaders = _leaders(low.ranked) | _leaders(high.ranked)
    for name, candidate in by_name.items():
        best: Ranked | None = None
        for row, plan in _worth_trying(problem, low, high, name, both=name in leaders):
            if name in leaders and simulated_steps(plan.program) > MAX_QUICK_STEPS:
                continue  # planned afresh anyway
            made = resized(plan, row.problem, problem, bound)
            if made is not None:
                time_s = simulated_time_s(made.program, problem.fabric, (*problem.ranks, *made.switches), problem.transport)
                if best is None or best.time_s is None or time_s < best.time_s:
                    best = Ranked(strategy=name, plan=made, time_s=time_s, why="")
        if best is None or name in leaders:
            afresh = _afresh(problem, name, candidate, False, each_s)
            best = afresh if best is None else _faster(best, afresh)
        entries.append(best)
    late = _leaders(explained(entries)) - leaders
    for i, entry in enumerate(entries):
        if entry.strategy in late:
            entries[i] = _faster(entry, _afresh(problem, entry.strategy, by_name[entry.strategy], False, each_s))
    ranked = explained(entries)
    first = ranked[0]
    if search and first.plan is not None and first.plan.program.executed_steps <= MAX_SEARCH_STEPS:
        again = _afresh(problem, first.strategy, by_name[first.strategy], True, each_s)
        ranked = explained([_faster(e, again) if e.strategy == first.strategy else e for e in entries])
    return SweepRow(problem=problem, bound=bound, ranked=tuple(ranked), planned=False)


def _leaders(ranked: Sequence[Ranked]) -> set[str]:
    """The fastest, and those near it that are simulated quickly."""
    best_s = ranked[0].time_s
    if best_s is None:
        return set()
    near = [r for r in ranked[1:] if r.time_s is not None and r.time_s <= MAX_TIMES_FASTEST * best_s and r.plan is not None]
    return {ranked[0].strategy, *(r.strategy for r in near if r.plan is not None and simulated_steps(r.plan.program) <= MAX_QUICK_STEPS)}


def _faster(a: Ranked, b: Ranked) -> Ranked:
    return b if a.time_s is None or (b.time_s is not None and b.time_s < a.time_s) else a


def _worth_trying(
    problem: CollectiveProblem, low: SweepRow, high: SweepRow, name: str, *, both: bool
) -> list[tuple[SweepRow, CollectivePlan]]:  # fmt: skip
    """Both neighbours' plans; of a strategy that leads at neither, and of those that take long to simulate, the one of the nearer size."""
    found = [(row, r.plan) for row in (low, high) for r in row.ranked if r.strategy == name and r.plan is not None]
    if not both or any(simulated_steps(plan.program) > MAX_QUICK_STEPS for _, plan in found):
        nearer = low if problem.size_bytes**2 <= low.problem.size_bytes * high.problem.size_bytes else high
        found = [pair for pair in found if pair[0] is nearer] or found
    return found


def _afresh(problem: CollectiveProblem, name: str, candidate: CollectiveStrategy, search: bool, each_s: float) -> Ranked:
    at = replace(problem, effort_s=each_s)
    try:
        plan, time_s = tuned(candidate, at, search=search, deadline=at.deadline())
    except MeshwrightError as error:
        return Ranked(strategy=name, plan=None, time_s=None, why=str(error))
    return Ranked(strategy=name, plan=plan, time_s=time_s, why="")


def resized(plan: CollectivePlan, before: CollectiveProblem, problem: CollectiveProblem, bound: Bound | None = None) -> CollectivePlan | None:
    """The plan's schedule for another size of the same problem: as many chunks, longer or shorter ones.

    None where chunks are not alike, or not the message's share that they would be in an equal split (uneven shards, for one).
    """
    program = plan.program
    chunk_bytes = np.unique(program.buffers.chunk_bytes)
    if program.contract is None or len(chunk_bytes) != 1 or before.shard_bytes is not None or problem.shard_bytes is not None or len(program.sizes):
        return None
    blocks = len(before.ranks) if before.op in (*SHARDED, "all-to-all") else 1
    whole = max(count for _, _, count in (*program.contract.inputs, *program.contract.outputs)) * int(program.lanes.repeat.max())
    if whole % blocks or _chunk_bytes(before, whole, blocks) != chunk_bytes[0]:
        return None
    return replace(plan, program=with_chunk_bytes(program, _chunk_bytes(problem, whole, blocks)), bound=bound or collective_bound(problem))


def _chunk_bytes(problem: CollectiveProblem, whole: int, blocks: int) -> int:
    per_block = -(-(problem.size_bytes // problem.element_bytes) // blocks)
    return -(-per_block // (whole // blocks)) * problem.element_bytes
