"""The schedule that a wiring's expansion rule makes, as a plan: a `Program` like any other, checked and simulated.

Breadth-first broadcasts on the explicit graph (`bfb`) are at least as good; this is the published rule, to look at and to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

import numpy as np

from ..check.wiring import check_schedule
from ..decide.collective import CollectiveProblem
from ..decide.collective.bfb.strategy import BFB
from ..decide.collective.bounds.collective import collective_bound
from ..decide.collective.classic.rounds import Area, Move, plan_rounds, reverse
from ..decide.collective.multipath.strategy import Multipath
from ..decide.collective.problem import CollectivePlan
from ..decide.topology import TopologyProblem
from ..decide.topology.directconnect.schedule import Schedule, expanded, turned
from ..decide.topology.directconnect.strategy import WiringDesign
from ..errors import Unsupported, UsageError
from ..plan.plan import Plan
from .collective.job import plan_collective

__all__ = ["MAX_TRANSFERS", "OPERATIONS", "plan_expansion"]

OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")

MAX_TRANSFERS = 200_000  # of a schedule that becomes a program: of L2(K4), 36 nodes, 1,800; of 256 nodes with 4 ports, some 100,000


@dataclass(frozen=True, kw_only=True)
class _ByRule(BFB):
    """`bfb` with the moves of schedules that are there already. Not in the list of strategies: it needs the wiring's base graph.

    gather: on the wiring; scatter: on the wiring turned round, played backwards.
    """

    gather: Schedule | None = field(default=None, repr=False)
    scatter: Schedule | None = field(default=None, repr=False)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        halves = [half for half in (self.scatter, self.gather) if half is not None]
        n, pieces = len(problem.ranks), lcm(*(half.pieces for half in halves))
        rounds = reverse(moves_of(self.scatter, pieces)) if self.scatter is not None else []
        rounds += moves_of(self.gather, pieces) if self.gather is not None else []
        areas = {"data": Area("output" if problem.op == "all-gather" else "input", n * pieces)}
        factor = str(sum(half.load for half in halves) * halves[0].wiring.ports / n)
        notes = {"expansion": halves[-1].wiring.name, "steps": len(rounds), "pieces": pieces, "bandwidth_factor": factor}
        chosen = BFB(pieces=pieces, pack=self.pack)
        bound = collective_bound(problem)
        return plan_rounds(problem, chosen, rounds, areas, order=tuple(range(n)), pack=self.pack, name=self.name, bound=bound, notes=notes)


def moves_of(schedule: Schedule, pieces: int) -> list[list[Move]]:
    """One message per link and step, of shards in so many pieces; every link has a stream of its own."""
    streams = {link: k for k, link in enumerate(sorted((b, a) for a, b in schedule.wiring.links()))}
    sent: dict[tuple[int, int, int], list[int]] = {}
    times = pieces // schedule.pieces
    for t in schedule.transfers:
        own = range(t.source * pieces + t.first * times, t.source * pieces + t.last * times)
        sent.setdefault((t.step, t.receiver, t.sender), []).extend(own)
    rounds: list[list[Move]] = [[] for _ in range(schedule.steps)]
    for (step, receiver, sender), blocks in sorted(sent.items()):
        rounds[step].append(Move(sender, receiver, tuple(sorted(blocks)), stream=streams[receiver, sender]))
    return rounds


def plan_expansion(design: WiringDesign, problem: TopologyProblem, op: str, size_bytes: int) -> Plan:
    """The plan of `op` on the design's fabric by the rules of its expansions; the transfers are replayed before, the program is checked after.

    The rules broadcast; what goes from each to each (all-to-all) takes the paths of a linear program (`multipath`).
    Raises: Unsupported (loops, parallel cables, too large), UsageError (other operations), CheckFailed.
    """
    if op not in OPERATIONS:
        raise UsageError(f"no schedule of {op} comes with a wiring", where="operation", hint=f"one of {', '.join(OPERATIONS)}")
    collective = CollectiveProblem.on(design.fabric(problem), op, size_bytes)
    if op == "all-to-all":
        return plan_collective(collective, candidates=[Multipath()])[0]
    gather = _replayed(design, expanded(design.wiring)) if op != "reduce-scatter" else None
    scatter = _replayed(design, turned(design.wiring)) if op != "all-gather" else None
    return plan_collective(collective, candidates=[_ByRule(gather=gather, scatter=scatter)])[0]


def _replayed(design: WiringDesign, schedule: Schedule) -> Schedule:
    """The schedule, its transfers proved. Raises: Unsupported (too many), CheckFailed."""
    if len(schedule.transfers) > MAX_TRANSFERS:
        hint = "design fewer accelerators, or use --strategy forestcoll"
        raise Unsupported(f"{len(schedule.transfers)} transfers, of at most {MAX_TRANSFERS}", where=design.name, hint=hint)
    transfers = [(t.step, t.source, t.first, t.last, t.sender, t.receiver) for t in schedule.transfers]
    links = list(schedule.wiring.links())
    check_schedule(design.nodes, links, schedule.pieces, transfers, steps=schedule.steps, load=schedule.load).raise_if_wrong()
    return schedule
