"""The schedule that a wiring's expansion rule makes, as a plan: a `Program` like any other, checked and simulated.

Breadth-first broadcasts on the explicit graph (`bfb`) are at least as good; this is the published rule, to look at and to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..check.wiring import check_schedule
from ..decide.collective import CollectiveProblem
from ..decide.collective.bfb.strategy import BFB
from ..decide.collective.bounds.collective import collective_bound
from ..decide.collective.classic.rounds import Area, Move, plan_rounds, reverse
from ..decide.collective.problem import CollectivePlan
from ..decide.topology import TopologyProblem
from ..decide.topology.directconnect.schedule import Schedule, expanded
from ..decide.topology.directconnect.strategy import WiringDesign
from ..errors import Unsupported
from ..plan.plan import Plan
from .collective.job import plan_collective

__all__ = ["MAX_TRANSFERS", "plan_expansion"]

MAX_TRANSFERS = 200_000  # of a schedule that becomes a program: of L2(K4), 36 nodes, 1,800; of 256 nodes with 4 ports, some 100,000


@dataclass(frozen=True, kw_only=True)
class _ByRule(BFB):
    """`bfb` with the moves of a schedule that is there already. Not in the list of strategies: it needs the wiring's base graph."""

    schedule: Schedule | None = field(default=None, repr=False)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Unsupported (reduce-scatters of one-way wirings, which run on the reversed graph)."""
        assert self.schedule is not None
        made, n = self.schedule, len(problem.ranks)
        if problem.op != "all-gather" and not made.wiring.paired:
            said = f"the rule makes an all-gather; {problem.op} needs the reversed wiring"
            raise Unsupported(said, where=made.wiring.name, hint="use --strategy bfb")
        gather = moves_of(made)
        rounds = [] if problem.op == "all-gather" else reverse(gather)
        rounds += [] if problem.op == "reduce-scatter" else gather
        areas = {"data": Area("output" if problem.op == "all-gather" else "input", n * made.pieces)}
        factor = str(made.load * made.wiring.ports / n)
        notes = {"expansion": made.wiring.name, "steps": len(rounds), "pieces": made.pieces, "bandwidth_factor": factor}
        chosen = BFB(pieces=made.pieces, pack=self.pack)
        bound = collective_bound(problem)
        return plan_rounds(problem, chosen, rounds, areas, order=tuple(range(n)), pack=self.pack, name=self.name, bound=bound, notes=notes)


def moves_of(schedule: Schedule) -> list[list[Move]]:
    """One message per link and step; every link has a stream of its own."""
    streams = {link: k for k, link in enumerate(sorted((b, a) for a, b in schedule.wiring.links()))}
    sent: dict[tuple[int, int, int], list[int]] = {}
    for t in schedule.transfers:
        own = range(t.source * schedule.pieces + t.first, t.source * schedule.pieces + t.last)
        sent.setdefault((t.step, t.receiver, t.sender), []).extend(own)
    rounds: list[list[Move]] = [[] for _ in range(schedule.steps)]
    for (step, receiver, sender), blocks in sorted(sent.items()):
        rounds[step].append(Move(sender, receiver, tuple(sorted(blocks)), stream=streams[receiver, sender]))
    return rounds


def plan_expansion(design: WiringDesign, problem: TopologyProblem, op: str, size_bytes: int) -> Plan:
    """The plan of `op` on the design's fabric by the rules of its expansions; the transfers are replayed before, the program is checked after.

    Raises: Unsupported (loops, parallel cables, too large, reduce-scatters of one-way wirings), CheckFailed.
    """
    schedule = expanded(design.wiring)
    if len(schedule.transfers) > MAX_TRANSFERS:
        hint = "design fewer accelerators, or use --strategy forestcoll"
        raise Unsupported(f"{len(schedule.transfers)} transfers, of at most {MAX_TRANSFERS}", where=design.name, hint=hint)
    transfers = [(t.step, t.source, t.first, t.last, t.sender, t.receiver) for t in schedule.transfers]
    links = list(schedule.wiring.links())
    check_schedule(design.nodes, links, schedule.pieces, transfers, steps=schedule.steps, load=schedule.load).raise_if_wrong()
    collective = CollectiveProblem.on(design.fabric(problem), op, size_bytes)
    return plan_collective(collective, candidates=[_ByRule(schedule=schedule)])[0]
