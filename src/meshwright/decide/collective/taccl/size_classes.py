"""All that the sizes of one class share: routes, orders, messages and lowered programs, the best of each choice of routes and instances.

Routes come from the greedy first routing and from the integer program. For each, chunks are cut into more and more instances while that helps.
The few best are lowered and simulated for the class's own bytes; a single size then only picks among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ....cost import Transport
from ....errors import TimeLimit
from ....kernels.effort import Deadline, worked_s
from ....program.program import Program
from ..memo import with_chunk_bytes
from ..program_time import simulated_time_s
from .contiguity import Runs, join_runs, replay_runs
from .exact_routing import route_exactly
from .lower import Layout, adjoining, lower_transfers
from .routing_problem import Routes, RoutingProblem, greedy_routes, transfers_of
from .schedule import Schedule, Timing, Transfer, improved, replay
from .setup import Setup, SizeClass, joint_transfers

__all__ = ["Kept", "Limits", "kept_for", "picked", "routed", "routed_phases"]

MAX_TRANSFERS = 10_000  # of a schedule with instances
MAX_SIMULATED_TRANSFERS = 4_000  # of a schedule, up to which several of its orders are simulated
MIN_INSTANCE_BYTES = 64  # a chunk is not cut below; what many messages cost is in the model
MAX_INSTANCES = 16  # parts that a chunk is cut into, which follow each other
MAX_APART_TRANSFERS = 1_000  # of routes, up to which those with senders kept apart are tried too
MAX_TIMES_OTHER_ROUTES = 1.1  # routes whose whole chunks take longer than others', times this, are not cut into instances
MAX_LOWERED_CHOICES = 5  # choices of routes and instances that are lowered ...
MAX_LOWERED_TRANSFERS = 12_500  # ... and their transfers together
MAX_TIMES_FASTEST = 1.2  # a choice that takes longer than the fastest, times this, for the class's bytes is dropped
MAX_JOIN_GAP_SHARE = 1e-3  # relative gap at which the integer program that joins messages stops
MAX_KEPT_TRANSFERS = 8_000  # of all choices, up to which a single size picks among them; beyond, the class has decided


@dataclass(frozen=True)
class Limits:
    """What may be spent: work from its beginning, the clock; work and nodes of an integer program, its binaries; whether messages may be joined."""

    begin_s: float
    total_s: float
    clock_s: float
    solver_work_s: float
    nodes: int
    binaries: int
    merge: bool

    def spent(self, share: float) -> bool:
        return self.until(share).past

    def until(self, share: float) -> Deadline:
        return Deadline(self.begin_s + share * self.total_s, self.clock_s)

    def solver(self, share: float) -> Deadline:
        """For an integer program that begins now."""
        return Deadline(worked_s() + min(self.solver_work_s, share * self.total_s), self.clock_s)


@dataclass(frozen=True)
class Kept:
    """One choice of routes per phase and instances, scheduled and lowered. `program`: its chunks have the class's bytes."""

    phases: tuple[Routes, ...]
    how: tuple[str, ...]
    instances: int
    transfers: list[Transfer]
    runs: Runs
    program: Program

    def schedule(self, timing: Timing) -> Schedule:
        """The times of the same order for other bytes."""
        return replay_runs(self.transfers, timing, self.runs)


@dataclass(frozen=True)
class _Scheduled:
    phases: tuple[Routes, ...]
    how: tuple[str, ...]
    instances: int
    transfers: list[Transfer]
    schedules: list[Schedule]  # the shortest first
    spare: list[Schedule]  # the order that is best without costs per message, if there are such costs

    @property
    def makespan_s(self) -> float:
        return self.schedules[0].makespan_s


Choices = Sequence[Sequence[tuple[str, Routes]]]  # per phase: (how, routes) to choose from


def kept_for(
    setup: Setup, size_class: SizeClass, transport: Transport | None, problems: Sequence[RoutingProblem], choices: Choices, instances: int | None,
    limits: Limits,
) -> tuple[Kept, ...]:  # fmt: skip
    """The best choices for a class, the best first. `instances`: how many to take; None = as many as help."""
    work = _Class(setup, size_class, transport, limits)
    return work.lowered(work.scheduled(problems, choices, instances))


def most_instances(chunk_bytes: float) -> int:
    """Into how many a chunk may be cut."""
    return max(1, int(chunk_bytes // MIN_INSTANCE_BYTES))


class _Class:
    def __init__(self, setup: Setup, size_class: SizeClass, transport: Transport | None, limits: Limits) -> None:
        self.setup, self.size, self.transport, self.limits = setup, size_class, transport, limits
        self.safe = most_instances(size_class.least_bytes)

    def timing(self, instances: int) -> Timing:
        return Timing.of(self.setup.topology, self.size.chunk_bytes / instances, self.transport)

    def scheduled(self, problems: Sequence[RoutingProblem], choices: Choices, instances: int | None) -> list[_Scheduled]:
        """Every choice of routes (the k-th of each phase together), first whole, then in more and more instances while that helps; the best
        that every size of the class can be cut into first, then by time."""
        found: list[_Scheduled] = []
        for k in range(max(map(len, choices))):
            picked = [c[min(k, len(c) - 1)] for c in choices]
            phases, how = tuple(r for _, r in picked), tuple(h for h, _ in picked)
            if any(phases == other.phases for other in found):
                continue
            mine: list[_Scheduled] = []
            for count in [instances] if instances else self._instances(sum(len(links) for phase in phases for links in phase)):
                if mine and self.limits.spent(0.4):
                    break
                transfers = joint_transfers(self.setup, problems, phases, count)
                schedules = improved(transfers, self.timing(count), self._ties(transfers), self.limits.until(0.5))
                mine.append(_Scheduled(phases, how, count, transfers, schedules, self._spare(transfers, count)))
                if found and len(mine) == 1 and mine[0].makespan_s > MAX_TIMES_OTHER_ROUTES * found[0].makespan_s:
                    break
                # Two doublings that gain less than a thousandth together: more instances will not gain either.
                if len(mine) > 2 and mine[-1].makespan_s >= 0.999 * mine[-3].makespan_s:
                    break
            found += mine
        found.sort(key=lambda c: (c.makespan_s, len(c.transfers)))
        # The first must do for the smallest size of the class, too; others are picked only where chunks are large enough for them.
        first = next((c for c in found if c.instances <= self.safe), found[0])
        return [first, *(c for c in found if c is not first)]

    def _spare(self, transfers: Sequence[Transfer], count: int) -> list[Schedule]:
        """Where messages cost senders time, waits at shared ports differ from the schedule's, and its order may lose against the plain one."""
        timing = self.timing(count)
        if timing.overhead_s <= 0:
            return []
        free = Timing.of(self.setup.topology, self.size.chunk_bytes / count, None)
        return [replay(transfers, timing, improved(transfers, free, self._ties(transfers), self.limits.until(0.5))[0].order)]

    def _instances(self, transfers: int) -> list[int]:
        most = min(MAX_INSTANCES, most_instances(self.size.chunk_bytes / 2), max(1, MAX_TRANSFERS // max(transfers, 1)))
        return [1 << i for i in range(most.bit_length())]

    def _ties(self, transfers: Sequence[Transfer]) -> list[int]:
        """Own-box chunks first, then near ranks, as in the paper."""
        n, links = len(self.setup.problem.ranks), self.setup.topology.links
        return [(n if links[x.link].remote else 0) + (links[x.link].src - links[x.link].dst) % n for x in transfers]

    def lowered(self, found: Sequence[_Scheduled]) -> tuple[Kept, ...]:
        """The first few, each in the order of its own that simulates fastest: the orders of the same routes and instances compete among
        themselves only, so that the routes and instances in the options decide the rest again."""
        tried: list[tuple[float, _Scheduled, Schedule, Kept]] = []
        transfers = 0
        for choice in found:
            transfers += len(choice.transfers)
            if tried and (len(tried) >= MAX_LOWERED_CHOICES or transfers > MAX_LOWERED_TRANSFERS or self.limits.spent(0.8)):
                break
            first, *others = choice.schedules if len(choice.transfers) <= MAX_SIMULATED_TRANSFERS else choice.schedules[:1]
            near = [first, *(s for s in others + choice.spare if s.start_s != first.start_s and s.makespan_s <= MAX_TIMES_FASTEST * first.makespan_s)]
            orders = [(self._lowered(choice, s, solve=False), s) for s in near]
            times = [self.simulated_s(k) for k, _ in orders]
            best = times.index(min(times))
            tried.append((times[best], choice, orders[best][1], orders[best][0]))
        fastest = min(t for t, _, _, _ in tried)
        kept = [self._solved(*one) for one in tried if one[0] <= MAX_TIMES_FASTEST * fastest]
        if len(kept) > 1 and sum(len(k.transfers) for k in kept) > MAX_KEPT_TRANSFERS:
            kept = [min([k for k in kept if k.instances <= self.safe] or kept, key=self.simulated_s)]
        return tuple(kept)

    def _solved(self, time_s: float, choice: _Scheduled, schedule: Schedule, known: Kept) -> Kept:
        """With messages joined by the integer program, where that is faster."""
        if not (self.limits.merge and self.limits.nodes and self.timing(1).overhead_s > 0):
            return known
        other = self._lowered(choice, schedule, solve=True)
        return other if other.runs != known.runs and self.simulated_s(other) < time_s else known

    def simulated_s(self, kept: Kept) -> float:
        problem = self.setup.problem
        return simulated_time_s(kept.program, problem.fabric, problem.ranks, self.transport)

    def _lowered(self, choice: _Scheduled, schedule: Schedule, *, solve: bool) -> Kept:
        setup, transfers, k = self.setup, choice.transfers, choice.instances
        layout = Layout.of(setup.problem, setup.topology, setup.chunks, setup.per_buffer, setup.chunkup, k, transfers, schedule.order)

        def may_join(a: int, b: int) -> bool:
            return adjoining(layout, setup.topology, transfers, a, b)

        runs: Runs = [(t,) for t in schedule.order]
        if self.limits.merge:
            nodes = self.limits.nodes if solve else 0
            deadline, gap = self.limits.solver(0.1), MAX_JOIN_GAP_SHARE
            runs, schedule = join_runs(transfers, self.timing(k), schedule, may_join, deadline=deadline, nodes=nodes, gap=gap)
        chunk_bytes = max(1, round(self.size.chunk_bytes / k))
        program = lower_transfers(layout, setup.topology, transfers, runs, schedule, chunk_bytes, f"taccl {setup.problem.op}")
        return Kept(choice.phases, choice.how, k, transfers, runs, program)


def picked(kept: Sequence[Kept], setup: Setup, size_bytes: int, transport: Transport | None) -> tuple[Kept, Program]:
    """The choice that simulates fastest at this size, and its program."""
    problem, most = setup.problem, most_instances(setup.exact_bytes(size_bytes))
    kept = [k for k in kept if k.instances <= most] or kept
    programs = [with_chunk_bytes(k.program, setup.chunk_bytes(size_bytes, k.instances)) for k in kept]
    times = [simulated_time_s(p, problem.fabric, problem.ranks, transport) for p in programs] if len(kept) > 1 else [0.0]
    best = times.index(min(times))
    return kept[best], programs[best]


# ---- routes ----
def routed(problem: RoutingProblem, limits: Limits) -> tuple[tuple[str, Routes], ...]:
    """Routes to choose from, (how, routes): the integer program's and the greedy ones."""
    greedy, horizon_s = _greedy(problem, limits)
    found: list[tuple[str, Routes]] = [("greedy", greedy)]
    if sum(map(len, greedy)) <= MAX_APART_TRANSFERS:
        with suppress(TimeLimit):
            apart = greedy_routes(problem, limits.until(0.7), apart=True)
            found += [("greedy, senders apart", apart)] if apart != greedy else []
    size = sum(map(len, problem.allowed)) / max(1, len(problem.group))
    if size > limits.binaries or not limits.nodes:
        return tuple(found)
    # The greedy schedule is as short as the bound: nothing is left to solve.
    if horizon_s <= problem.floor_s * (1 + 1e-9):
        return (("greedy, at the bound", greedy),)
    exact = route_exactly(problem, greedy, horizon_s, deadline=limits.solver(0.4), nodes=limits.nodes)
    if exact is None:
        return tuple(found)
    gap = exact.time_s / exact.floor_s - 1 if exact.floor_s > 0 else float("inf")
    text = "optimal" if exact.optimal else f"within {100 * gap:.3g} %" if gap < float("inf") else "best found"
    return ((f"integer program: {text}", exact.routes), *found)


def _greedy(problem: RoutingProblem, limits: Limits) -> tuple[Routes, float]:
    """The better of the greedy routes and how long their schedule takes."""
    tried: list[tuple[float, bool, Routes]] = []
    deadline, half = limits.until(0.7), limits.until(0.35)
    for rare in (False, True):
        if rare and all(len(c.dests) == 1 for c in problem.chunks):
            break
        try:
            routes = greedy_routes(problem, deadline, rare=rare)
        except TimeLimit:
            if not tried:
                raise
            break
        transfers = transfers_of(problem, routes)
        tried.append((improved(transfers, problem.timing, [0] * len(transfers), deadline)[0].makespan_s, rare, routes))
        if len(transfers) > MAX_SIMULATED_TRANSFERS or half.past:
            break
    horizon_s, _, routes = min(tried, key=lambda x: x[:2])
    return routes, horizon_s


Route = Callable[[RoutingProblem], tuple[tuple[str, Routes], ...]]


def routed_phases(setup: Setup, problems: Sequence[RoutingProblem], route: Route) -> Choices:
    """Routes of every phase; the gather's also serve the reduction where links are the same both ways."""
    if not setup.mirrored:
        return [route(p) for p in problems]
    # Links are the same both ways: the reduction takes the gather's routes, turned round.
    forward = route(problems[1])
    into, of = problems[0].link_of, problems[1].links
    return [[(how, tuple(tuple(into[of[i][:2]] for i in links) for links in routes)) for how, routes in forward], forward]
