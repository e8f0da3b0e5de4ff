"""Several collectives at once: trees of all groups are chosen together, so that no link carries more than it must.

Cite: ForestColl (arXiv 2402.06787) for packing one collective; for several at once no publication that we know.
Left open by the paper: groups that share links. Our answer: one linear program in which every group is a demand and a link's capacity is shared
(`trees.lp`); then each group's loads become whole trees on their own (`joint.exact`, `joint.trees`), which cannot disturb the others.
Deviations: operations that move pairs' data (all-to-all, scatter, gather, permute) and uneven shards keep a schedule of their own, whose loads the
program plans around; devices outside a group forward its data only where that helps; the simulator decides whether the joint plan or independent
plans run, so the answer is never worse than both.
Invariant: the summed loads of all groups keep to T · rate on every link, tested exactly; every group's trees span its members.
Cost: one linear program with two columns per link and group, a few rounds; then per group as joint packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ....bound import Bound
from ....cite import Cite
from ....errors import Infeasible, TimeLimit, Unsupported, UsageError
from ....kernels.effort import NEVER, Deadline
from ....program.program import Program
from ..bounds.allreduce import best_bound, hosts_of
from ..bounds.collective import collective_bound
from ..joint.demand import PACKED, demand_of
from ..joint.exact import ExactDemand, exact_demand, packing_time
from ..joint.pieces import MAX_DEPTH, MAX_RUN_STEPS, choose_pieces, rate_units
from ..joint.strategy import CITE as JOINT_CITE
from ..joint.trees import DemandTrees, cut_parts, merged, parts_of, shard_parts, smallest_quantum, trees_of
from ..problem import CollectivePlan, CollectiveProblem, options_of
from ..rates import RateGraph, rate_graph
from ..trees.lower import Lowering, lower_parts, tree_steps
from ..trees.lp import Arc, Packing, PackingProblem, solve_packing
from .merge import merge_programs
from .problem import GroupsPlan, GroupsProblem

__all__ = ["CITE", "DEVIATIONS", "Groups", "groups_bound", "independent"]

CITE = JOINT_CITE
DEVIATIONS = (
    "all groups are demands of one linear program",
    "operations between pairs and uneven shards keep schedules of their own, which the program plans around",
    "devices outside a group forward only where that shortens the time",
)
BACKGROUND_DENOMINATOR = 16  # background loads are rounded up to 1/16 of the largest message, where exact ones need too many trees
MAX_PARTS_PER_UNIT = 16  # a group's unit is cut into at most so many, to be as small as another group's: links share evenly between messages
MAX_TIME_SHARE_WORTH_RELAYS = 0.98  # relays are used if they shorten the time below this share of it


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Options.

    max_trees: most trees per group and direction. pieces: pipeline pieces, the same for all groups; None = chosen, at most `max_pieces`.
    relay: may devices outside a group forward its data? None = where the ranks are not connected otherwise, or the time gets shorter.
    """

    name: ClassVar[str] = "groups"
    cite: ClassVar[Cite] = CITE

    max_trees: int = 256
    pieces: int | None = None
    max_pieces: int = 256
    relay: bool | None = None

    def plan(self, problem: GroupsProblem, *, rng: np.random.Generator, alone: Sequence[CollectivePlan | None] = ()) -> GroupsPlan:
        """`alone[i]`: group i's own schedule, for groups that are not packed.

        Raises: Infeasible (a group is not connected), Unsupported (a group that must keep its own schedule has none; no whole trees), TimeLimit,
            UsageError (options).
        """
        for option in ("max_trees", "pieces", "max_pieces"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="groups")
        deadline = problem.deadline()
        graph = rate_graph(problem.fabric, problem.ranks)
        own = {i: _own(problem, i, alone) for i, g in enumerate(problem.groups) if not _is_packed(g)}
        background = _loads_of(problem, graph, own)
        packed, packing, relay = self._program(problem, graph, background, deadline)
        numbers = [i for i, g in enumerate(problem.groups) if _is_packed(g)]
        exacts = self._whole(packed, packing, deadline)
        trees = [trees_of(packed, exact, group=graph.group, names=graph.names, deadline=deadline) for exact in exacts]
        time_s = packing_time(packed, exacts) / graph.unit_Bps if exacts else Fraction(0)
        pieces = self.pieces or self._pieces(problem, numbers, trees, float(time_s), unrolled=bool(own))
        programs = {i: plan.program for i, plan in own.items()}
        share = MAX_RUN_STEPS // (pieces * max(1, len(numbers)))
        unit = [Fraction(problem.groups[i].size_bytes, e.units) for i, e in zip(numbers, exacts, strict=True)]
        for i, found, size in zip(numbers, trees, unit, strict=True):
            finer = min(MAX_PARTS_PER_UNIT, round(size / min(unit)))
            programs[i] = _lowered(problem.groups[i], found, graph, pieces, share, finer, unroll=bool(own))
        order = range(len(problem.groups))
        program = merge_programs(len(problem.ranks), [(programs[i], problem.members(i)) for i in order], name="joint groups")
        strategies = tuple(own[i].strategy if i in own else "groups" for i in order)
        notes = _notes(problem, packing, exacts, trees, time_s, relay, pieces, float(graph.unit_Bps))
        chosen = replace(self, pieces=pieces, relay=relay)
        bound = groups_bound(problem, deadline)
        return GroupsPlan(program=program, bound=bound, strategies=strategies, options=options_of(chosen), notes=notes)

    def _program(
        self, problem: GroupsProblem, graph: RateGraph, background: dict[Arc, Fraction], deadline: Deadline
    ) -> tuple[PackingProblem, Packing, bool]:
        """The linear program and its optimum, with relays where they are needed, wanted, or shorten the time."""
        if not any(_is_packed(group) for group in problem.groups):
            raise Unsupported("no group's operation is packed in trees", hint=f"packed are {', '.join(PACKED)} with equal shards")
        found: list[tuple[PackingProblem, Packing, bool]] = []
        for relay in [False, True] if self.relay is None else [self.relay]:
            packed = packing_problem(problem, graph, relay=relay, background=background)
            try:
                found.append((packed, solve_packing(packed, what="packing of all groups", deadline=deadline), relay))
            except Infeasible:
                if relay or self.relay is not None:
                    raise
        first, last = found[0], found[-1]
        # Relaying costs other devices' links and time to plan, so it must gain that much.
        return last if last[1].time < MAX_TIME_SHARE_WORTH_RELAYS * first[1].time else first

    def _whole(self, packed: PackingProblem, packing: Packing, deadline: Deadline) -> list[ExactDemand]:
        """All demands in whole trees, as near to the optimum as at most `max_trees` trees allow."""
        best: tuple[Fraction, list[ExactDemand]] | None = None
        for coarse, solved in _programs(packed, packing, deadline):
            exacts = [next(exact_demand(coarse, solved, i, most_units=self.max_trees), None) for i in range(len(packed.demands))]
            whole = [e for e in exacts if e is not None]
            if len(whole) == len(exacts):
                time = packing_time(packed, whole)
                if best is None or time < best[0]:
                    best = time, whole
                if float(best[0]) <= packing.time * (1 + 1e-9):
                    break
        if best is None:
            raise Unsupported(f"some group needs more than {self.max_trees} trees at every rounding of the rates", hint="raise max_trees")
        return best[1]

    def _pieces(self, problem: GroupsProblem, numbers: Sequence[int], trees: Sequence[DemandTrees], time_s: float, *, unrolled: bool) -> int:
        wanted = 1
        steps = 0
        for i, found in zip(numbers, trees, strict=True):
            group = problem.groups[i]
            wanted = max(wanted, choose_pieces(group, found.height, time_s, most=self.max_pieces, units=found.exact.units))
            steps += tree_steps(merged(parts_of(found)))
        most = (MAX_RUN_STEPS // 5 if unrolled else MAX_RUN_STEPS) // max(steps, 1)
        return int(1 << max(min(wanted, most), 1).bit_length() - 1)


def packing_problem(problem: GroupsProblem, graph: RateGraph, *, relay: bool, background: dict[Arc, Fraction] | None = None) -> PackingProblem:
    """All groups that are packed as demands of one program, sizes in bytes."""
    switches = frozenset(v for v in range(graph.nodes) if graph.names[v] not in {d.name for d in problem.fabric.devices})
    demands = []
    for i, group in enumerate(problem.groups):
        if not _is_packed(group):
            continue
        demands.append(replace(demand_of(group, problem.members(i)), size=Fraction(group.size_bytes), nodes=None if relay else switches))
    mirrored = graph.mirrored and not background and all(g.op == "all-reduce" for g in problem.groups)
    return PackingProblem(graph.nodes, graph.arcs, tuple(demands), mirrored, background or {})


def groups_bound(problem: GroupsProblem, deadline: Deadline = NEVER) -> Bound | None:
    """A lower bound on the time of all groups together (certificate `packing`, or that of the slowest group alone).

    None when the solver does not finish by `deadline`.

    It counts every group, devices outside a group taken to forward its data only. Raises: Infeasible when a group is not connected.
    """
    graph = rate_graph(problem.fabric, problem.ranks)
    packed = packing_problem(problem, graph, relay=True)
    candidates: list[dict[tuple[str, str], float]] = []
    if packed.demands:
        try:
            price = solve_packing(packed, what="the dual of the packing of all groups", deadline=deadline, even=False).price
        except (TimeLimit, Unsupported):
            return None
        candidates.append({(graph.names[u], graph.names[v]): x for (u, v), x in price.items()})
        candidates.append({(graph.names[u], graph.names[v]): x + price.get((v, u), 0.0) for (u, v), x in price.items()})
    candidates.append({(graph.names[u], graph.names[v]): 1.0 for u, v in graph.arcs})
    hosts = [hosts_of(group) for group in problem.groups]
    found = [b for lengths in candidates if (b := best_bound(problem.groups, lengths, hosts)) is not None]
    found += [collective_bound(group) for group in problem.groups]  # all groups take at least as long as each alone
    return max(found, key=lambda b: b.exact, default=None)


def independent(problem: GroupsProblem, plans: Sequence[CollectivePlan]) -> GroupsPlan:
    """Each group as it was planned alone, all started together."""
    parts = [(plan.program, problem.members(i)) for i, plan in enumerate(plans)]
    program = merge_programs(len(problem.ranks), parts, name="independent groups")
    return GroupsPlan(program=program, bound=None, strategies=tuple(p.strategy for p in plans), options={})


# ---- parts of the planner ----------------------------------------------------------------------------------------
def _is_packed(group: CollectiveProblem) -> bool:
    return group.op in PACKED and group.shard_bytes is None


def _own(problem: GroupsProblem, number: int, alone: Sequence[CollectivePlan | None]) -> CollectivePlan:
    plan = alone[number] if number < len(alone) else None
    if plan is None:
        group = problem.groups[number]
        raise Unsupported(f"group {number} ({group.op}) is not packed in trees and has no schedule of its own", hint="plan its group alone first")
    return plan


def _loads_of(problem: GroupsProblem, graph: RateGraph, own: dict[int, CollectivePlan]) -> dict[Arc, Fraction]:
    """Bytes that schedules of their own put on every arc."""
    from ....simulate import compile_network

    loads: dict[Arc, Fraction] = {}
    number = {name: v for v, name in enumerate(graph.names)}
    for i, plan in own.items():
        program = plan.program
        network = compile_network(program, problem.fabric, problem.groups[i].ranks)
        size = program.message_bytes() * program.lanes.repeat[program.lane_of_step()]
        for step in np.flatnonzero((program.steps.parts & 16) != 0).tolist():
            channel = int(program.steps.chan_out[step])
            for link in network.route_link[network.route_ptr[channel] : network.route_ptr[channel + 1]].tolist():
                x = problem.fabric.links[link]
                arc = number[x.src], number[x.dst]
                loads[arc] = loads.get(arc, Fraction(0)) + int(size[step])
    return loads


def _programs(packed: PackingProblem, packing: Packing, deadline: Deadline) -> Iterator[tuple[PackingProblem, Packing]]:
    """The optimum; then optima of programs with rounder numbers: rates rounded down, background rounded up."""
    yield packed, packing
    grain = max(d.size for d in packed.demands) / BACKGROUND_DENOMINATOR
    around = {arc: -(-x // grain) * grain for arc, x in packed.background.items()}
    units = rate_units(sorted(set(packed.rate.values())))
    for unit in [Fraction(1), *units] if around else units:
        rate = {arc: int(rate // unit) for arc, rate in packed.rate.items()}
        coarse = replace(packed, rate=rate, background=around)
        yield coarse, solve_packing(coarse, what="packing of all groups", deadline=deadline)
    yield packed, solve_packing(packed, what="packing of all groups", deadline=deadline, even=False)


def _lowered(group: CollectiveProblem, trees: DemandTrees, graph: RateGraph, pieces: int, most_steps: int, finer: int, *, unroll: bool) -> Program:
    parts, shards, units = shard_parts(group, trees, finer)
    parts = cut_parts(parts, smallest_quantum(parts, most_steps))
    elements = -(-group.size_bytes // group.element_bytes)
    how = Lowering(
        fabric=group.fabric, ranks=group.ranks, names=tuple(graph.names[v] for v in trees.nodes), op=group.op, root=group.root, shards=shards,
        units=units, pieces=pieces, unroll=unroll, chunk_bytes=-(-elements // (shards * units * pieces)) * group.element_bytes,
        name=f"groups {group.op}", depth=min(MAX_DEPTH, pieces),
    )  # fmt: skip
    return lower_parts(parts, how)


def _notes(
    problem: GroupsProblem, packing: Packing, exacts: Sequence[ExactDemand], trees: Sequence[DemandTrees], time_s: Fraction, relay: bool, pieces: int,
    unit_Bps: float,
) -> dict[str, Any]:  # fmt: skip
    return {
        "groups": len(problem.groups),
        "trees": [e.units for e in exacts],
        "height": max((t.height for t in trees), default=0),
        "pieces": pieces,
        "relay": relay,
        "bandwidth_time_s": str(time_s),
        "of_optimum": round(packing.time / unit_Bps / float(time_s), 9) if time_s else 1.0,
        "rounds": packing.rounds,
    }
