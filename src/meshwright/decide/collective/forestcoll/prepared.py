"""What plans of forests share whatever the size: forests, the parts of shards that trees carry, how parts are cut, how full links get."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any

import numpy as np

from ....kernels.effort import count_work
from ....program.program import Program
from ..memo import with_chunk_bytes
from ..problem import CollectiveProblem
from ..rates import rate_graph
from ..trees.lower import Lowering, Part, lower_parts, tree_steps
from ..trees.shards import shard_weights
from .forest import Forest, Limb, Tree, common_units

__all__ = [
    "Late", "Prepared", "bandwidth_s", "is_uneven", "lowering_of", "notes_of", "parts_of", "servers_of", "shards_of", "uses_way_back", "weights_of",
]  # fmt: skip
WORK_PER_LOWERED_STEP_S = 1e-5  # counted work (`kernels.effort`) of lowering a step, in seconds of a quiet core


class Late(Exception):
    """Carries what was found past a deadline out of the memory, which must not keep it."""

    def __init__(self, found: Prepared) -> None:
        super().__init__("late")
        self.found = found


@dataclass(frozen=True)
class Prepared:
    """What plans of all sizes share: forests and parts; and, once known, parts cut finer and programs.

    `servers` > 1: folded, parts are the first server's only.
    """

    op: str
    forests: list[Forest]
    relay: bool
    servers: int
    parts: list[Part]
    units: int
    ranks: int
    fixed: tuple[int, ...] = ()  # folded: ranks of the server of the one root, which are stored too
    cuts: dict[int, tuple[list[Part], int]] = field(default_factory=dict)
    lowered: dict[tuple[int, int, bool, int, int, bool, int], Program] = field(default_factory=dict)
    times: dict[tuple[Hashable, ...], tuple[tuple[float, int], float]] = field(default_factory=dict)  # what programs took, and the work

    @property
    def limbs(self) -> bool:
        """Whether parts of trees go on to servers that differ."""
        return any(p.limbs for p in self.parts)

    def cut(self, quantum: int) -> tuple[list[Part], int]:
        """Parts of at most `quantum` units, and their steps for one piece where pieces are iterations."""
        if quantum not in self.cuts:
            parts = _cut(self.parts, quantum)
            self.cuts[quantum] = parts, tree_steps(parts, fused=False)
        return self.cuts[quantum]

    def quantum(self, most_steps: int) -> int:
        """The smallest most units per part (a power of two) with which the program keeps to `most_steps` per piece, if any does."""
        quantum, largest = 1, max(p.units for p in self.parts)
        while quantum < largest and self.cut(quantum)[1] > most_steps:
            quantum *= 2
        return quantum

    def program(self, how: Lowering, quantum: int) -> Program:
        """The parts lowered. Repeats, depths and chunk sizes are the same everywhere, so they are written in afterwards."""
        count_work(WORK_PER_LOWERED_STEP_S * self.cut(quantum)[1] * how.stored_pieces)
        key = quantum, how.stored_pieces, how.unroll, how.pace, how.lead, how.fused, how.window
        if key not in self.lowered:
            self.lowered[key] = lower_parts(self.cut(quantum)[0], replace(how, pieces=how.stored_pieces, depth=1))
        program = with_chunk_bytes(self.lowered[key], how.chunk_bytes)
        channels = replace(program.channels, depth=program.channels.depth * how.depth)
        return replace(program, channels=channels, lanes=replace(program.lanes, repeat=np.full_like(program.lanes.repeat, how.repeat)))

    @cached_property
    def fullest_link(self) -> Fraction:
        """Seconds that the fullest link needs per byte of a weight."""
        forests, op, load = self.forests, self.op, dict[tuple[int, int], int]()
        common = lcm(*(forest.k for forest in forests))
        for number, forest in enumerate(forests):
            climbs = op in ("reduce-scatter", "reduce") or (op == "all-reduce" and number == 0)
            for (u, v), trees in forest.load.items():
                arc = (v, u) if climbs else (u, v)
                load[arc] = load.get(arc, 0) + trees * (common // forest.k)
        graph = forests[-1].graph if op == "all-reduce" else forests[0].graph
        arcs = (graph.reversed() if op in ("reduce-scatter", "reduce") else graph).arcs
        kinds = {(used, arcs[arc]) for arc, used in load.items()}  # few, of very many links
        return max(Fraction(used, rate) for used, rate in kinds) / common / graph.unit_Bps


def servers_of(forests: list[Forest]) -> int:
    """Alike servers whose ranks are equal runs in order, in all forests; 1 = no such symmetry."""
    if any(f.symmetry is None or not f.symmetry.stride() for f in forests):
        return 1
    return forests[0].symmetry.members if forests[0].symmetry else 1


def weights_of(problem: CollectiveProblem) -> list[int]:
    """Shares of data that every rank's trees carry."""
    n = len(problem.ranks)
    if problem.op in ("broadcast", "reduce"):
        return [int(r == problem.root) for r in range(n)]
    return shard_weights(problem) if problem.shard_bytes is not None else [1] * n


def is_uneven(problem: CollectiveProblem) -> bool:
    return problem.shard_bytes is not None and len(set(problem.shard_bytes)) > 1


def shards_of(problem: CollectiveProblem) -> int:
    return 1 if problem.op in ("broadcast", "reduce") else len(problem.ranks)


def parts_of(problem: CollectiveProblem, forests: list[Forest], *, stored: bool) -> tuple[list[Part], int]:
    """Parts of every shard and units per shard, in the smallest whole numbers; `stored`: only of the first server's shards."""
    up = forests[0] if problem.op in ("all-reduce", "reduce-scatter", "reduce") else None
    down = None if problem.op in ("reduce-scatter", "reduce") else forests[-1]
    units = common_units(forests[0], forests[-1])
    rows = {id(f): _segments(f, units, stored=stored, by_end=problem.op == "scatter") for f in forests}
    parts: list[Part] = []
    for root in range(len(problem.ranks)):
        pair = [rows[id(forest)].get(root) if forest else None for forest in (up, down)]
        if not any(pair):
            continue
        shard = 0 if shards_of(problem) == 1 else root
        hang = [[x for x in forest.limbs if x.shard == root] if forest else [] for forest in (up, down)]
        # Reduce and broadcast trees of a shard have borders of their own: cut at the union of both, every part has one tree up and one down.
        borders = sorted({end for row in pair if row for _, end in row})
        first = 0
        for border in borders:
            one, two = (next(tree for tree, end in row if end >= border) if row else None for row in pair)
            limbs = _limbs_of(shard, hang[0], hang[1], one is not None, two is not None)
            whole = Part(shard, 0, border, one, two, limbs)
            parts.append(whole.cut(first, border - first))
            first = border
    every = [x for p in parts for x in (p, *p.limbs)]
    divisor = gcd(units, *(p.first for p in every), *(p.units for p in every))

    def coarser(p: Part) -> Part:
        return replace(p, first=p.first // divisor, units=p.units // divisor, limbs=tuple(map(coarser, p.limbs)))

    return [coarser(p) for p in parts], units // divisor


def _limbs_of(shard: int, up: list[Limb], down: list[Limb], climbs: bool, descends: bool) -> tuple[Part, ...]:
    """Limbs of one shard as parts; of an all-reduce, both ways are the same trees (`ForestColl` takes others where they are not)."""
    return tuple(
        Part(shard, x.first, x.tree.units, x.tree if climbs else None, x.tree if descends else None) for x in (up if climbs else down)
    )


def _cut(parts: list[Part], quantum: int) -> list[Part]:
    return [p.cut(i, min(quantum, p.units - i)) for p in parts for i in range(0, p.units, quantum)]


def _segments(forest: Forest, units: int, *, stored: bool, by_end: bool) -> dict[int, list[tuple[Tree, int]]]:
    """By shard: (tree, end) of its trees, laid end to end over `units` units per weight. A shard is its root's, or a path's last rank's."""
    out: dict[int, list[tuple[Tree, int]]] = {}
    for tree in forest.trees if stored else forest.every_tree():
        row = out.setdefault(tree.order[-1] if by_end else tree.root, [])
        row.append((tree, (row[-1][1] if row else 0) + tree.units * (units // forest.k)))
    return out


def lowering_of(problem: CollectiveProblem, forest: Forest, units: int, pieces: int, unroll: bool, servers: int, depth: int) -> Lowering:
    elements, total = -(-problem.size_bytes // problem.element_bytes), shards_of(problem) * units * pieces
    return Lowering(
        fabric=problem.fabric, ranks=problem.ranks, names=forest.graph.names, op=problem.op, root=problem.root,
        shards=shards_of(problem), units=units, pieces=pieces, unroll=unroll, depth=depth, servers=servers, fused=unroll,
        chunk_bytes=-(-elements // total) * problem.element_bytes, name=f"forestcoll {problem.op}",
        fixed=forest.symmetry.fixed if forest.symmetry is not None and servers > 1 else (),
    )  # fmt: skip


def bandwidth_s(problem: CollectiveProblem, forests: list[Forest]) -> float:
    """Time of all bytes on the fullest links, one forest after the other."""
    per_weight = sum(f.stretch / f.k for f in forests) / forests[0].graph.unit_Bps
    return float(problem.size_bytes * per_weight / sum(weights_of(problem)))


def uses_way_back(problem: CollectiveProblem, ready: Prepared) -> bool | None:
    """Whether trees of one root could use links that lead into its server; None for many roots."""
    if problem.op not in ("broadcast", "reduce"):
        return None
    return len(ready.forests[0].graph.arcs) == len(rate_graph(problem.fabric, problem.ranks, relay=ready.relay).arcs)


def notes_of(problem: CollectiveProblem, ready: Prepared, pieces: int) -> dict[str, Any]:
    """`bandwidth_time_s`: the most loaded link at full rate, without padding; `halves_optimum_s`: sum of the halves' exact optima."""
    forests, weight = ready.forests, weights_of(problem)
    shard = Fraction(problem.size_bytes, sum(weight))
    return {
        "trees_per_root": forests[0].k,
        "distinct_trees": sum(f.distinct for f in ({id(f): f for f in forests}.values())),
        "height": max((f.height for f in forests), default=0),
        "weights": weight if len(set(weight)) > 1 else "equal",
        "pieces": pieces,
        "ranks": len(problem.ranks),
        "bandwidth_time_s": str(shard * ready.fullest_link),
        "halves_optimum_s": str(sum((shard * f.optimum / f.graph.unit_Bps for f in forests), Fraction(0))),
        "exact": all(f.stretch == f.k * f.optimum for f in forests),
        "ratio": str(sum(f.optimum / f.graph.unit_Bps for f in forests) / sum(f.stretch / f.k / f.graph.unit_Bps for f in forests)),
        "method": ", ".join(dict.fromkeys(f.method for f in forests)),
    }
