"""Places deferrable work into the idle time of a pipeline schedule, over as few steps as it takes, without moving any of its actions.

Cite: Osawa, Li, Hoefler, "PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher Information Matrices", MLSys 2023.
Left open by the paper: work that any of several ranks may do (copies and replicas of a stage), collectives that need all of them at once, work in
    pieces, work other than K-FAC, and how far from the best possible the answer is. Our answer: an item goes to the first idle time that is long
    enough on the rank where it ends first (serial insertion), under several orders of the items; with few items, under all orders. Beside it
    stands a bound.
Deviations: the paper walks through the idle times of one device at a time; inverses wait for both factors, because the damping is split by both.
Invariant: an item lies between two actions of its rank as they run without it; so every action keeps its time. A cycle of `steps` steps repeats.
Cost: O(items · idle times · ranks of an item) per order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...bound import Bound, Certificate
from ...cite import Cite
from ...deferrable import Deferrable, FillWork
from ...errors import Infeasible, UsageError
from ...program.program import Program, Unit
from ...timeline import Timeline
from .fill_place import Attempt, Idle, Placement, Rule
from .fill_work import require_sound
from .problem import PipelineProblem

__all__ = ["CITE", "Filling", "Idle", "Placement", "fill_bubbles", "idle_times", "refresh_bound"]

CITE = Cite(
    key="osawa2023pipefisher", title="PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher Information Matrices",
    year=2023, venue="MLSys", authors="Osawa, Li, Hoefler", url="https://arxiv.org/abs/2211.14133",
)  # fmt: skip

# Items up to which every order is tried: 720 orders at most, each placed whole.
MAX_EXHAUSTIVE_ITEMS = 6
# Relative: what sums of durations and of idle times may be off as floats. The bound counts so much less work, and its certificate says so.
ROUNDING = Fraction(1, 10**12)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A cycle of `steps` steps, each as long as without the work. `kept_bytes`: most that waits for its work, per rank."""

    steps: int
    idle: Idle
    work: FillWork
    placements: tuple[Placement, ...]
    kept_bytes: tuple[int, ...]
    order: str
    bound: Bound  # on the seconds of a cycle

    @property
    def bound_steps(self) -> int:
        return round(float(self.bound) / self.idle.step_s) if self.idle.step_s else 1

    def work_s(self, rank: int) -> float:
        return sum(p.end_s - p.start_s for p in self.placements if p.rank == rank)

    def used(self, *, filled: bool) -> float:
        """Share of ranks x time that computes, without or with the work."""
        ranks = len(self.idle.gaps)
        total = self.steps * self.idle.step_s * ranks
        work = sum(self.work_s(r) for r in range(ranks)) if filled else 0.0
        return (sum(self.idle.busy_s) * self.steps + work) / total if total else 1.0


def idle_times(program: Program, timeline: Timeline) -> Idle:
    """Of a simulated step, from the lane of every rank that computes."""
    start, end = np.zeros(len(program.steps)), np.zeros(len(program.steps))
    known = timeline.spans.step >= 0
    start[timeline.spans.step[known]], end[timeline.spans.step[known]] = timeline.spans.start_s[known], timeline.spans.end_s[known]
    gaps, ends, busy = [], [], []
    for rank in range(program.ranks):
        lane = int(np.flatnonzero((program.lanes.actor == rank) & (program.lanes.unit == int(Unit.COMPUTE)))[0])
        first, last = int(program.lanes.start[lane]), int(program.lanes.end[lane])
        now, found, done, total = 0.0, [], {}, 0.0
        for place, step in enumerate(range(first, last)):
            if start[step] > now:
                found.append((now, float(start[step]), place))
            now = float(end[step])
            total += now - float(start[step])
            op = int(program.steps.op[step])
            if op >= 0:
                for m in _microbatches(program, op):
                    done[f"{int(program.ops.stage[op])}{program.ops.name[op]}{m}"] = now
        if timeline.makespan_s > now:
            found.append((now, timeline.makespan_s, last - first))
        gaps.append(tuple(found))
        ends.append(done)
        busy.append(total)
    return Idle(step_s=timeline.makespan_s, gaps=tuple(gaps), action_end_s=tuple(ends), busy_s=tuple(busy))


def _microbatches(program: Program, op: int) -> range:
    first = int(program.ops.microbatch[op])
    low, sep, high = program.ops.module[op].partition("-")
    return range(int(low), int(high) + 1) if sep else range(first, first + 1)


def fill_bubbles(problem: PipelineProblem, idle: Idle, work: FillWork, *, margin: float = 0.0, most_steps: int = 256) -> Filling:
    """The shortest cycle found. `margin`: share by which an item's idle time must be longer than the item.

    Raises: UsageError (see `require_sound`, or an action that the schedule lacks), Infeasible when an item fits into no idle time, misses its
    deadline, or the cycle would be longer than `most_steps`.
    """
    if margin < 0:
        raise UsageError(f"must be >= 0, got {margin}", where="margin")
    require_sound(work, len(idle.gaps))
    for item in work.items:
        for rank, action in item.actions:
            if not 0 <= rank < len(idle.gaps) or action not in idle.action_end_s[rank]:
                raise UsageError(f"waits for {action} of rank {rank}, which does not run it", where=item.name)
    bound = refresh_bound(idle, work)
    best: Attempt | None = None
    refused: Infeasible | None = None
    for label, rule in _rules(work.items):
        try:
            attempt = Attempt(problem, idle, work, margin, most_steps, label).run(rule)
        except Infeasible as error:
            refused = refused or error
            continue
        if best is None or attempt.value() < best.value():
            best = attempt
        # a cycle is whole steps, and no order of the items gets below the bound
        if best.steps * Fraction(idle.step_s) <= bound.exact:
            break
    if best is None:
        assert refused is not None
        raise refused
    return Filling(
        steps=best.steps, idle=idle, work=work, placements=tuple(sorted(best.placed, key=lambda p: (p.step, p.rank, p.start_s, p.end_s))),
        kept_bytes=best.kept_peaks(), order=best.label, bound=bound,
    )  # fmt: skip


def refresh_bound(idle: Idle, work: FillWork) -> Bound:
    """Work that only some ranks can do, over their idle time in a step: so many steps at least."""
    families = {frozenset(range(len(idle.gaps)))} | {frozenset([r]) for r in range(len(idle.gaps))} | {frozenset(i.ranks) for i in work.items}
    best: tuple[int, list[int], Fraction, Fraction] = (1, [], Fraction(0), Fraction(1))
    for ranks in sorted(families, key=lambda x: (len(x), sorted(x))):
        must = Fraction(0)
        for i in work.items:
            # work of all its ranks together takes time on each of them; work of any one of them surely falls in here only if all of them do
            members = len(ranks & set(i.ranks)) if i.together else int(ranks.issuperset(i.ranks))
            must += Fraction(i.duration_s) * members
        free = sum((idle.idle_s(r) for r in ranks), Fraction(0))
        if must and free:
            steps = max(1, -(-(must * (1 - ROUNDING)) // free))
            if steps > best[0] or not best[1]:
                best = (int(steps), sorted(ranks), must, free)
    data = {
        "ranks": best[1], "work_s": str(best[2]), "idle_s": str(best[3]), "step_s": str(Fraction(idle.step_s)), "rounding": str(ROUNDING),
    }  # fmt: skip
    return Bound(quantity="cycle time", value=str(best[0] * Fraction(idle.step_s)), unit="s", certificate=Certificate(kind="fill", data=data))


def _rules(items: Sequence[Deferrable]) -> list[tuple[str, Rule]]:
    place = {i.name: n for n, i in enumerate(items)}
    tail: dict[str, float] = {}
    followers: dict[str, list[Deferrable]] = {}
    for i in items:
        for name in i.after:
            followers.setdefault(name, []).append(i)

    def length(i: Deferrable) -> float:
        # depth first with a stack of its own: chains of items may be longer than Python's recursion allows
        stack = [i]
        while stack:
            top = stack[-1]
            open_ = [f for f in followers.get(top.name, ()) if f.name not in tail]
            if top.name in tail or not open_:
                tail[top.name] = top.duration_s + max((tail[f.name] for f in followers.get(top.name, ())), default=0.0)
                stack.pop()
            else:
                stack += open_
        return tail[i.name]

    found: list[tuple[str, Rule]] = [
        ("priority", lambda i: (i.priority, place[i.name])),
        ("longest", lambda i: (i.deadline_steps or 1 << 30, -i.duration_s, place[i.name])),
        ("critical path", lambda i: (i.deadline_steps or 1 << 30, -length(i), place[i.name])),
    ]
    if len(items) <= MAX_EXHAUSTIVE_ITEMS:
        for order in itertools.permutations(i.name for i in items):
            found.append(("every order", _listed(order)))
    return found


def _listed(names: Sequence[str]) -> Rule:
    places = {n: k for k, n in enumerate(names)}
    return lambda i: (places[i.name],)
