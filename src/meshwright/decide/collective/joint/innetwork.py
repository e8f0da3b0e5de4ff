"""Collectives with switches that add and copy: reduce into a switch, multicast from it, where that beats what ranks can do alone.

Cite: ForestColl (arXiv 2402.06787), whose formulation with in-network multicast and aggregation this follows; in practice NVLink SHARP and SwitchML.
Left open by the paper: whole trees through capable switches. Our answer: switches that both add and copy are nodes of the trees like ranks, so a
tree may branch in them and, in an all-reduce, be rooted in them; joint packing (`joint`) does the rest. The other operations are not faster in
bytes this way, but a rank sends once what a switch copies to many, or adds up from many: fewer messages and hops.
Deviations: every capable switch is spanned by the packing and cut off afterwards where no rank lies behind it, so with several capable switches, or
plain ones between them, the result can lie below the program without balance rows at capable switches; `notes["limit_time_s"]` states that program's
optimum, which is a limit for such trees and need not be reachable (`notes["limit_is_reached"]`).
Invariant: as `joint`; a switch receives one message from each child and sends one, or receives one and sends one to each child.
Cost: as `joint`, with the capable switches as further nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ....errors import Unsupported, UsageError
from ....kernels.effort import Deadline
from ..bounds.collective import collective_bound
from ..connected import require_connected
from ..forestcoll.strategy import CITE as JOINT_CITE
from ..problem import CollectivePlan, CollectiveProblem, options_of, require_operation
from ..rates import RateGraph, rate_graph
from ..trees.lower import tree_steps
from ..trees.lp import Packing, PackingProblem, solve_packing
from .demand import COLLECTED, PACKED, SPREAD, demand_of
from .exact import ExactDemand, exact_demand, packing_time
from .innetwork_lower import InNetworkLowering, lower_in_network
from .pieces import MAX_DEPTH, MAX_EXPLICIT_STEPS, MAX_RUN_STEPS, MIN_PIECES_LEFT, choose_pieces, rate_units
from .trees import DemandTrees, cut_parts, shard_parts, smallest_quantum, trees_of

__all__ = ["CITE", "DEVIATIONS", "InNetwork"]

CITE = JOINT_CITE
DEVIATIONS = (
    "capable switches are spanned by the packing, and cut off where no rank lies behind them",
    "the program without balance rows at capable switches is stated as a limit only",
)


@dataclass(frozen=True, kw_only=True)
class InNetwork:
    """Options as those of `Joint`; the program has switch actors (`CollectivePlan.switches`) and channel sets."""

    max_trees: int = 256
    pieces: int | None = None
    max_pieces: int = 512
    unroll: bool | None = None
    quantum: int | None = None
    depth: int | None = None

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (another operation; no switch that can do it; no whole trees), TimeLimit, UsageError."""
        for option in ("max_trees", "pieces", "max_pieces", "quantum", "depth"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="innetwork")
        if problem.op not in PACKED:
            raise Unsupported(f"in-network compute adds nothing to {problem.op}", hint="use --strategy auto")
        require_operation(problem, "joint packing in the network", PACKED)
        deadline = problem.deadline()
        graph = rate_graph(problem.fabric, problem.ranks)
        require_connected(problem, graph)
        able = _able(problem, graph)
        packed = self._packed(problem, graph, able)
        trees = self._trees(packed, graph, deadline)
        units = trees.exact.units
        time_s = packing_time(packed, [trees.exact]) * problem.size_bytes / graph.unit_Bps
        parts, shards, units_per_shard = shard_parts(problem, trees)
        wanted = self.pieces or choose_pieces(problem, trees.height, float(time_s), most=self.max_pieces, units=units)
        most = MAX_EXPLICIT_STEPS if self.unroll else MAX_RUN_STEPS
        quantum = self.quantum or smallest_quantum(parts, most // min(wanted, MIN_PIECES_LEFT))
        parts = cut_parts(parts, quantum)
        pieces = self.pieces or 1 << max(min(wanted, most // tree_steps(parts)), 1).bit_length() - 1
        unroll = self.unroll if self.unroll is not None else pieces * tree_steps(parts) <= MAX_EXPLICIT_STEPS
        depth = self.depth or min(MAX_DEPTH, pieces)
        elements = -(-problem.size_bytes // problem.element_bytes)
        how = InNetworkLowering(
            fabric=problem.fabric, ranks=problem.ranks, switches=tuple(able), names=tuple(graph.names[v] for v in trees.nodes), op=problem.op,
            root=problem.root, shards=shards, units=units_per_shard, pieces=pieces, unroll=unroll, depth=depth,
            chunk_bytes=-(-elements // (shards * units_per_shard * pieces)) * problem.element_bytes,
        )  # fmt: skip
        chosen = replace(self, pieces=pieces, unroll=unroll, quantum=quantum, depth=depth)
        return CollectivePlan(
            program=lower_in_network(parts, how), bound=collective_bound(problem), strategy="innetwork", options=options_of(chosen),
            notes=_notes(problem, graph, packed, able, trees, time_s, pieces, deadline), switches=tuple(able),
        )  # fmt: skip

    def _packed(self, problem: CollectiveProblem, graph: RateGraph, able: list[str]) -> PackingProblem:
        """Joint packing with the capable switches as members."""
        # As members, switches may send more than they receive, so trees may branch in them; they have no share of their own to spread.
        members = (*range(graph.ranks), *(graph.names.index(s) for s in able))
        return PackingProblem(graph.nodes, graph.arcs, (demand_of(problem, members),), graph.mirrored and problem.op == "all-reduce")

    def _trees(self, packed: PackingProblem, graph: RateGraph, deadline: Deadline) -> DemandTrees:
        what = "in-network packing"
        first = solve_packing(packed, what=what, deadline=deadline)

        def programs() -> Iterator[tuple[PackingProblem, Packing]]:
            yield packed, first
            for unit in rate_units(sorted(set(packed.rate.values()))):
                coarse = replace(packed, rate={arc: int(rate // unit) for arc, rate in packed.rate.items()})
                yield coarse, solve_packing(coarse, what=what, deadline=deadline)
            yield packed, solve_packing(packed, what=what, deadline=deadline, even=False)

        best: ExactDemand | None = None
        # The optimum first, then coarser rates, then the optimum without even shares, whose denominators are often smaller.
        for coarse, solved in programs():
            found = next(exact_demand(coarse, solved, 0, most_units=self.max_trees), None)
            if found is not None and (best is None or packing_time(packed, [found]) < packing_time(packed, [best])):
                best = found
            if best is not None and float(packing_time(packed, [best])) <= first.time * (1 + 1e-9):
                break
        if best is None:
            raise Unsupported(f"the optimum needs more than {self.max_trees} trees, and so do roundings of the rates", hint="raise max_trees")
        return trees_of(packed, best, group=graph.group, names=graph.names, deadline=deadline)


def _able(problem: CollectiveProblem, graph: RateGraph) -> list[str]:
    """Switches that do what the operation asks of them: copy what spreads, add what is collected. Raises: Unsupported where none does."""
    copies, adds = problem.op in SPREAD, problem.op in COLLECTED
    attached = _attached(graph)
    able = [s.name for s in problem.fabric.switches if (s.multicast or not copies) and (s.aggregate or not adds) and s.name in attached]
    if not able:
        what = " and ".join(word for word, asked in (("adds", adds), ("copies", copies)) if asked)
        raise Unsupported(f"in-network compute needs a switch that {what}", hint="use --strategy joint or forestcoll")
    return able


def _attached(graph: RateGraph) -> set[str]:
    """Names of nodes with links both ways."""
    return {graph.names[v] for v in {v for _, v in graph.arcs} & {u for u, _ in graph.arcs}}


def _notes(
    problem: CollectiveProblem, graph: RateGraph, packed: PackingProblem, able: list[str], trees: DemandTrees, time_s: Fraction, pieces: int,
    deadline: Deadline,
) -> dict[str, Any]:  # fmt: skip
    switches = {s.name: s for s in problem.fabric.switches}
    # The limit: capable switches are no members but need no balance, so trees may branch without spanning them.
    free = {name: v for v, name in enumerate(graph.names) if name in switches}
    limit = solve_packing(
        replace(
            packed,
            demands=(
                replace(
                    demand_of(problem, range(graph.ranks)), copying=frozenset(v for name, v in free.items() if switches[name].multicast),
                    adding=frozenset(v for name, v in free.items() if switches[name].aggregate),
                ),
            ),
            mirrored=packed.mirrored and all(s.multicast == s.aggregate for s in switches.values()),
        ), what="the limit of in-network trees", deadline=deadline, even=False,
    ).time * problem.size_bytes / graph.unit_Bps  # fmt: skip
    return {
        "in_network": True,
        "switches": able,
        "trees": trees.exact.units,
        "distinct_trees": len(trees.down),
        "height": trees.height,
        "pieces": pieces,
        "ranks": graph.ranks,
        "bandwidth_time_s": str(time_s),
        "limit_time_s": limit,
        "limit_is_reached": float(time_s) <= limit * (1 + 1e-9),
        "all_switches_capable": len(able) == len(switches),
    }
