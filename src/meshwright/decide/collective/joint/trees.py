"""Whole trees from a packing in whole numbers: edge splitting and Edmonds' branchings for each direction, loads tested summed.

Members of a demand need not be balanced here (a hub sends more than it receives), which lies outside the splitting theorem for Eulerian
graphs; what carries it is that the node split off is balanced and every member receives all units (the rooted form by Bang-Jensen, Frank
and Jackson). Should a split stick, `Unsupported` says at which switch and carries the whole graph, so that it can be studied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm

from ....errors import CheckFailed, Unsupported
from ....kernels.effort import NEVER, Deadline
from ..problem import CollectiveProblem
from ..trees.lower import Part, tree_steps
from ..trees.lp import Arc, PackingProblem
from ..trees.pack import DEFECT, Tree, pack_capacities
from .exact import ExactDemand

__all__ = ["DemandTrees", "cut_parts", "merged", "parts_of", "shard_parts", "smallest_quantum", "trees_of"]


@dataclass(frozen=True)
class DemandTrees:
    """Trees of one demand, `units` per direction in all; members are numbered by their place in the demand, other nodes follow.

    `down` are out-trees; `up` are out-trees of the reversed graph, climbed from the leaves. `nodes[i]` is the graph's node of number i.
    """

    exact: ExactDemand
    nodes: tuple[int, ...]
    up: tuple[Tree, ...]
    down: tuple[Tree, ...]

    @property
    def height(self) -> int:
        """Longest way up plus longest way down."""
        return max((t.height for t in self.up), default=0) + max((t.height for t in self.down), default=0)

    @property
    def load(self) -> dict[Arc, int]:
        """Units on every arc of the graph, both directions of the demand added up."""
        out: dict[Arc, int] = {}
        for trees, turned in ((self.down, False), (self.up, True)):
            for tree in trees:
                for path in tree.every_path:
                    for a, b in pairwise(path):
                        arc = (self.nodes[b], self.nodes[a]) if turned else (self.nodes[a], self.nodes[b])
                        out[arc] = out.get(arc, 0) + tree.units
        return out


def trees_of(
    problem: PackingProblem, exact: ExactDemand, *, group: Sequence[int], names: Sequence[str] = (), deadline: Deadline = NEVER
) -> DemandTrees:
    """Pack the trees of one demand; `group[v]` the server of graph node v.

    Raises: Unsupported (a splitting sticks: `data` holds the graph), TimeLimit, CheckFailed (summed loads exceed the packing).
    """
    demand = exact.demand
    members = list(demand.members)
    nodes = members + [v for v in range(problem.nodes) if v not in set(members)]
    number = {v: i for i, v in enumerate(nodes)}
    wanted = {i: w for i, w in enumerate(exact.weight) if w}

    def pack(loads: Mapping[Arc, int], way: str) -> tuple[Tree, ...]:
        capacities = {(number[u], number[v]): x for (u, v), x in sorted(loads.items())}
        here = [names[v] if v < len(names) else f"node {v}" for v in nodes]
        try:
            return pack_capacities(
                problem.nodes, capacities, len(members), wanted, [group[v] for v in nodes], names=here, deadline=deadline
            )  # fmt: skip
        except Unsupported as stuck:
            graph = [[here[u], here[v], x] for (u, v), x in capacities.items()]
            raise Unsupported(
                f"switches could not be removed from the {way} graph: {stuck.message}",
                hint="use --strategy forestcoll, and please report the graph in this error's data",
                data={"graph": graph, "roots": {here[i]: w for i, w in wanted.items()}, "members": here[: len(members)], **stuck.data},
            ) from stuck

    down = pack(exact.spread, "broadcast") if demand.spread else ()
    mirror = {(v, u): x for (u, v), x in exact.collect.items()}
    # Loads that are alike turned round need no packing of their own: the same trees are climbed.
    up = () if not demand.collect else down if mirror == exact.spread else pack(mirror, "reduce")
    trees = DemandTrees(exact, tuple(nodes), up, down)
    _require_sound(trees, wanted)
    return trees


def _require_sound(trees: DemandTrees, wanted: Mapping[int, int]) -> None:
    """Every direction has all its trees, each spans the members, and the summed loads stay within the packing's."""
    exact, members = trees.exact, len(trees.exact.demand.members)
    for some in (trees.up, trees.down):
        units: dict[int, int] = {}
        for tree in some:
            units[tree.root] = units.get(tree.root, 0) + tree.units
            joined = {tree.root}
            for v in tree.order[1:]:
                if tree.parent[v] not in joined or v in joined or tree.paths[v][0] != tree.parent[v] or tree.paths[v][-1] != v:
                    raise CheckFailed(f"a tree of root {tree.root} is broken at {v}", hint=DEFECT)
                joined.add(v)
            if len(joined) != members:
                raise CheckFailed(f"a tree of root {tree.root} spans {len(joined)} of {members} members", hint=DEFECT)
        if some and units != dict(wanted):
            raise CheckFailed(f"trees per root are {units}, wanted {dict(wanted)}", hint=DEFECT)
    for arc, load in trees.load.items():
        if Fraction(load, exact.units) > exact.load(arc):
            raise CheckFailed(f"arc {arc} carries {load} trees both ways, the packing allows {exact.load(arc) * exact.units}", hint=DEFECT)


def parts_of(trees: DemandTrees) -> list[Part]:
    """The message's units in root order; each root's segment is cut where its reduce tree or its broadcast tree changes."""
    parts: list[Part] = []
    first = 0
    for root, units in enumerate(trees.exact.weight):
        rows = [_ends(some, root) for some in (trees.up, trees.down)]
        start = 0
        for border in sorted({end for row in rows for _, end in row}):
            one, two = (next((tree for tree, end in row if end >= border), None) for row in rows)
            parts.append(Part(0, first + start, border - start, one, two))
            start = border
        first += units
    return parts


def _ends(trees: Sequence[Tree], root: int) -> list[tuple[Tree, int]]:
    """(tree, end) of a root's trees laid end to end."""
    out, end = [], 0
    for tree in trees:
        if tree.root == root:
            end += tree.units
            out.append((tree, end))
    return out


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring parts with the same pair of trees as one."""
    out: list[Part] = []
    for part in parts:
        if out and out[-1].shard == part.shard and out[-1].up is part.up and out[-1].down is part.down:
            out[-1] = replace(out[-1], units=out[-1].units + part.units)
        else:
            out.append(part)
    return out


def shard_parts(problem: CollectiveProblem, trees: DemandTrees, finer: int = 1) -> tuple[list[Part], int, int]:
    """Parts of the message, shards, and units per shard: a shard per rank for all-gather and reduce-scatter, else one.

    `finer`: units are cut into so many, because links share their rate evenly between messages: groups whose units are larger would lag.
    """
    parts = merged(parts_of(trees))
    n, units = len(problem.ranks), trees.exact.units
    if problem.op not in ("all-gather", "reduce-scatter"):
        return [replace(p, first=p.first * finer, units=p.units * finer) for p in parts], 1, units * finer
    # Trees' units and ranks' shards need not divide each other: on a grid of both, a part is cut wherever a shard ends.
    whole = lcm(units * finer, n)
    scale, each = whole // units, whole // n
    cut: list[Part] = []
    for part in parts:
        first, end = part.first * scale, (part.first + part.units) * scale
        while first < end:
            shard = first // each
            stop = min(end, (shard + 1) * each)
            cut.append(Part(shard, first - shard * each, stop - first, part.up, part.down))
            first = stop
    return cut, n, each


def cut_parts(parts: Sequence[Part], quantum: int) -> list[Part]:
    """Parts of at most `quantum` units."""
    return [replace(p, first=p.first + i, units=min(quantum, p.units - i)) for p in parts for i in range(0, p.units, quantum)]


def smallest_quantum(parts: Sequence[Part], most_steps: int) -> int:
    """The smallest power of two for `cut_parts` that keeps the program to `most_steps` per piece, or the largest part."""
    quantum, largest = 1, max(p.units for p in parts)
    while quantum < largest and tree_steps(cut_parts(parts, quantum)) > most_steps:
        quantum *= 2
    return quantum
