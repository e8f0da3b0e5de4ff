"""Which parts of a captured forward graph can be split over tensor-parallel ranks, column-parallel in, row-parallel out.

Cite: see CITE.
Left open by the paper: it names the layers of a transformer; user modules have no such names. Our answer: a region is found on
the graph. It starts at linears that read one replicated value (q, k, v; gate, up; fc1), their outputs are split by
columns, the split is carried through the operators (`sharding`), and the region is good if everything ends in linears that contract the split
dimension (row-parallel). Where an operator would need another operand split too (keys and values of cross-attention), the linears
that produce it join the region.
Deviations: embeddings and the output head stay whole here; packed projections are cut block by block (3 blocks for q, k, v).
Invariant: outside a region every value is whole on all ranks; inside, every value is split or whole; a region's results are partial sums.
Cost: O(nodes) per candidate linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from ...cite import Cite
from ...graph import OpGraph, OpNode
from ...plan import ParamShard
from .sharding import Needs, Refused, Split, propagate, short_name

__all__ = ["CITE", "DEVIATIONS", "Region", "find_regions"]

CITE = Cite(
    key="shoeybi2019megatron",
    title="Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    year=2019,
    venue="arXiv:1909.08053",
)
DEVIATIONS = ("regions are found on the captured graph instead of by layer class", "embedding and output head stay whole")

BLOCK_CHOICES = (1, 3, 2, 4)
MAX_ENTRIES = 16  # linears that may open one region
MAX_REGION_NODES = 200


@dataclass(frozen=True)
class Region:
    """`entries` are the values whose gradients become partial sums; `rows` the row-parallel linears, whose results do.

    `units` is the greatest degree that divides every split dimension: tensor degrees must divide it.
    """

    nodes: tuple[str, ...]
    entries: tuple[str, ...]
    rows: tuple[str, ...]
    shards: tuple[ParamShard, ...]
    row_bias: tuple[tuple[str, str], ...]  # (row linear, bias parameter)
    units: int


class _Graph:
    def __init__(self, graph: OpGraph) -> None:
        self.node = {n.name: n for n in graph.nodes}
        self.order = {n.name: i for i, n in enumerate(graph.nodes)}
        self.readers: dict[str, list[str]] = {}
        for n in graph.nodes:
            for value in dict.fromkeys(n.inputs):
                self.readers.setdefault(value, []).append(n.name)
        self.shapes: dict[str, tuple[int, ...]] = {n.name: n.outputs[0].shape for n in graph.nodes if n.outputs}
        self.shapes |= {f"param:{p.name}": p.shape for p in graph.parameters} | {f"buffer:{p.name}": p.shape for p in graph.buffers}
        self.shapes |= {f"input:{i}": x.shape for i, x in enumerate(graph.inputs)}
        self.outputs = set(graph.outputs)
        self.param_readers: dict[str, int] = {v: len(r) for v, r in self.readers.items() if v.startswith("param:")}

    def is_linear(self, name: str) -> bool:
        """A linear over an activation, with a weight that nothing else reads."""
        n = self.node.get(name)
        return (
            n is not None
            and short_name(n.target) == "linear"
            and len(n.inputs) >= 2
            and not n.inputs[0].startswith("param:")
            and n.inputs[1].startswith("param:")
            and all(self.param_readers[p] == 1 for p in n.inputs[1:])
        )


def find_regions(graph: OpGraph) -> tuple[Region, ...]:
    """All disjoint regions, in graph order. The same for every tensor degree; a degree uses those whose `units` it divides."""
    g = _Graph(graph)
    taken: set[str] = set()
    regions: list[Region] = []
    for n in graph.nodes:
        if n.name in taken or not g.is_linear(n.name):
            continue
        group = [r for r in g.readers[n.inputs[0]] if g.is_linear(r) and g.node[r].inputs[0] == n.inputs[0] and r not in taken]
        region = _try(g, group, taken) or (_try(g, [n.name], taken) if len(group) > 1 else None)
        if region is not None and region.units > 1:
            regions.append(region)
            taken.update(region.nodes)
    return tuple(regions)


def _try(g: _Graph, group: list[str], taken: set[str]) -> Region | None:
    for blocks in BLOCK_CHOICES:
        heads = list(group)
        while len(heads) <= MAX_ENTRIES:
            try:
                return _grow(g, heads, blocks, taken)
            except Needs as need:
                more = [x for x in _linears_behind(g, need.value) if x not in heads and x not in taken]
                if not more:
                    break
                heads += more
            except Refused:
                break
    return None


def _linears_behind(g: _Graph, value: str, limit: int = 12) -> list[str]:
    """Linears that produce `value` through operators with one activation operand."""
    for _ in range(limit):
        if g.is_linear(value):
            n = g.node[value]
            return [r for r in g.readers[n.inputs[0]] if g.is_linear(r)]
        n2 = g.node.get(value)
        if n2 is None:
            return []
        activations = [v for v in n2.inputs if v in g.node]
        if len(activations) != 1:
            return []
        value = activations[0]
    return []


def _grow(g: _Graph, heads: Sequence[str], blocks: int, taken: set[str]) -> Region:
    splits: dict[str, Split | None] = {}
    shards: list[ParamShard] = []
    units = 0
    for name in heads:
        n = g.node[name]
        width = g.shapes[name][-1]
        if width % blocks or n.inputs[0] in splits:
            raise Refused(name)
        splits[name] = Split(len(g.shapes[name]) - 1, blocks)
        shards += [ParamShard(param=p.removeprefix("param:"), axis=0, blocks=blocks) for p in n.inputs[1:]]
        units = gcd(units, width // blocks)
    inside = set(heads)
    rows: list[str] = []
    row_bias: list[tuple[str, str]] = []
    frontier = _readers_in_order(g, heads)
    while frontier:
        name = frontier.pop(0)
        if name in inside:
            continue
        if name in taken or len(inside) > MAX_REGION_NODES:
            raise Refused(name)
        n = g.node[name]
        inside.add(name)
        source = splits.get(n.inputs[0])
        if short_name(n.target) == "linear":
            units = gcd(units, _row(g, n, source, shards, row_bias))
            rows.append(name)
            continue
        if any(v.startswith("param:") for v in n.inputs):
            raise Refused(f"{name}: a whole parameter inside a region would get a partial gradient")
        out = propagate(n, {v: splits.get(v) for v in n.inputs}, g.shapes)
        if out is None:
            raise Refused(name)
        splits[name] = out
        extent = g.shapes[name][out.dim] if len(n.outputs) <= 1 else out.blocks
        if len(n.outputs) <= 1:
            if extent % out.blocks:
                raise Refused(name)
            units = gcd(units, extent // out.blocks)
        frontier = sorted({*frontier, *_readers_in_order(g, [name])}, key=g.order.__getitem__)
    if not rows:
        raise Refused("no row-parallel linear closes the region")
    for name in inside - set(rows):
        if name in g.outputs or any(r not in inside for r in g.readers.get(name, ())):
            raise Refused(f"{name} is read outside the region")
    for name in rows:
        if any(r in inside for r in g.readers.get(name, ())):
            raise Refused(f"{name}: a partial sum is read inside the region")
    entries = tuple(dict.fromkeys(g.node[h].inputs[0] for h in heads))
    return Region(tuple(sorted(inside, key=g.order.__getitem__)), entries, tuple(rows), tuple(shards), tuple(row_bias), units)


def _row(g: _Graph, n: OpNode, source: Split | None, shards: list[ParamShard], row_bias: list[tuple[str, str]]) -> int:
    if source is None or not g.is_linear(n.name) or source.dim != len(g.shapes[n.inputs[0]]) - 1:
        raise Refused(f"{n.name} does not contract the split dimension")
    shards.append(ParamShard(param=n.inputs[1].removeprefix("param:"), axis=1, blocks=source.blocks))
    if len(n.inputs) > 2:
        row_bias.append((n.name, n.inputs[2].removeprefix("param:")))
    return g.shapes[n.inputs[0]][-1] // source.blocks


def _readers_in_order(g: _Graph, names: Iterable[str]) -> list[str]:
    return sorted({r for name in names for r in g.readers.get(name, ())}, key=g.order.__getitem__)
