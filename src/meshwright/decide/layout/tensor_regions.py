"""Growing one tensor-parallel region on a captured graph: from the linears that open it to where its split dimension is summed away.

See `megatron` for the method and its invariant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

from ...graph.graph import OpGraph, OpNode
from ...plan.plan import ParamShard
from .sharding import Grouped, Needs, Pieces, Refused, Split, propagate, short_name

__all__ = ["GraphIndex", "Region", "try_region"]

BLOCK_CHOICES = (1, 3, 2, 4)
# Linears that may open one region: more than a fused attention or gated block has.
MAX_REGION_ENTRIES = 16
# Nodes of one region: a search that has gone so far has left the block that it began in.
MAX_REGION_NODES = 200


@dataclass(frozen=True)
class Region:
    """`entries` are the values whose gradients become partial sums; `rows` what holds partial sums (row-parallel linears and the like).

    `units`: the indivisible units (heads, columns, rows of a table) that ranks share; `groups`: the numbers of key-value heads in it. Regions
    of one `bundle` are split together or not at all, with the same shares. `outputs`: results that leave the region split.
    """

    nodes: tuple[str, ...]
    entries: tuple[str, ...]
    rows: tuple[str, ...]
    shards: tuple[ParamShard, ...]
    row_bias: tuple[tuple[str, str], ...]  # (row linear, bias parameter)
    units: int
    groups: tuple[int, ...] = ()
    bundle: str = ""
    outputs: tuple[tuple[str, Split], ...] = ()
    maxima: tuple[str, ...] = ()  # of the rows, those combined by maximum
    losses: tuple[str, ...] = ()  # cross-entropies that are executed in three parts, the first of which is here


class GraphIndex:
    """A graph's nodes by name, who reads what, and shapes."""

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

        self.from_input: set[str] = set()
        for n in graph.nodes:
            if any(v.startswith("input:") or v in self.from_input for v in n.inputs):
                self.from_input.add(n.name)

    def is_linear(self, name: str, *, tied: bool = False) -> bool:
        """A linear over an activation, with a weight that nothing else reads (`tied`: but embeddings)."""
        n = self.node.get(name)
        return (
            n is not None
            and short_name(n.target) == "linear"
            and len(n.inputs) >= 2
            and not n.inputs[0].startswith("param:")
            and n.inputs[1].startswith("param:")
            and all(self.param_readers[p] == 1 or (tied and self.only_embeddings(p, name)) for p in n.inputs[1:])
        )

    def only_embeddings(self, param: str, but: str) -> bool:
        return all(r == but or short_name(self.node[r].target) == "embedding" for r in self.readers[param])


@dataclass
class _Attempt:
    """What is assumed of the linears that open a region: their blocks, and which of their results are split by key-value heads."""

    heads: list[str]
    blocks: int
    mixed: dict[str, tuple[int, ...]] = field(default_factory=dict)  # unequal blocks of a linear's result
    groups: dict[str, int] = field(default_factory=dict)
    ungrouped: set[str] = field(default_factory=set)  # values that are split by elements after all
    whys: list[str] = field(default_factory=list)


def try_region(g: GraphIndex, group: list[str], taken: set[str], *, whys: list[str] | None = None, loss: bool = False) -> Region | None:
    """A region opened by the linears of `group`, or None; then `whys` gets the reasons. `loss`: one that ends in a cross-entropy."""
    reasons = [] if whys is None else whys
    mixed = {h: sizes for h in group if (sizes := _unequal_pieces(g, h))}
    for blocks in (1, *BLOCK_CHOICES[1:]) if not mixed else (1,):
        attempt = _Attempt(list(group), blocks, mixed=dict(mixed))
        found = _attempt(g, attempt, taken, loss)
        reasons += attempt.whys
        if found is not None:
            return found
    return None


def _attempt(g: GraphIndex, a: _Attempt, taken: set[str], loss: bool) -> Region | None:
    fallback: set[str] = set()
    while len(a.heads) <= MAX_REGION_ENTRIES:
        try:
            return grow_region(g, a, taken, loss=loss)
        except Needs as need:
            more = [x for x in _linears_behind(g, need.value) if x not in a.heads and x not in taken]
            if not more:
                a.whys.append(f"{need.value} would have to be split too")
                return None
            a.heads += more
        except Grouped as need:
            behind = [x for x in _linears_behind(g, need.value) if x in a.heads and x not in a.groups]
            if need.value in a.ungrouped or not behind:
                a.whys.append(f"{need.value} is not made by a linear of {need.groups} heads")
                return None
            fallback.add(need.value)
            a.groups |= {x: need.groups for x in behind if g.shapes[x][-1] % need.groups == 0 and _makes(g, x, need.value)}
            if not a.groups:
                return None
        except Refused as why:
            a.whys.append(str(why))
            if not fallback:
                return None
            a.ungrouped |= fallback
            a.groups, fallback = {}, set()
    return None


def _makes(g: GraphIndex, linear: str, value: str) -> bool:
    """`value` comes from this linear, through operators with one activation operand."""
    for _ in range(12):
        if value == linear:
            return True
        n = g.node.get(value)
        activations = [v for v in n.inputs if v in g.node] if n is not None else []
        if len(activations) != 1:
            return False
        value = activations[0]
    return False


def _unequal_pieces(g: GraphIndex, linear: str) -> tuple[int, ...]:
    """Sizes of the pieces that a packed projection's result is cut into along its features, where they differ."""
    width, rank = g.shapes[linear][-1], len(g.shapes[linear])
    cuts: set[int] = set()
    for name in g.readers.get(linear, ()):
        n = g.node[name]
        kind = short_name(n.target)
        last = (n.args[2] if len(n.args) > 2 else 0) if kind in ("split", "split_with_sizes") else n.args[1] if kind == "slice" else None
        if not isinstance(last, int) or last % rank != rank - 1:
            continue
        if kind == "slice":
            low, high, _ = slice(*(n.args[2:4] + [None, None])[:2]).indices(width)
            cuts |= {low, high}
        elif isinstance(n.args[1], list):
            at = 0
            for size in n.args[1]:
                cuts |= {at, at + size}
                at += size
    edges = sorted(cuts | {0, width})
    sizes = tuple(b - a for a, b in pairwise(edges))
    return sizes if len(set(sizes)) > 1 else ()


def _linears_behind(g: GraphIndex, value: str, limit: int = 12) -> list[str]:
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


def _opened(g: GraphIndex, a: _Attempt, name: str) -> Split:
    """The split of an opening linear's result."""
    rank, width = len(g.shapes[name]), g.shapes[name][-1]
    groups = a.groups.get(name, 0)
    sizes = a.mixed.get(name)
    if sizes:  # of packed projections the key and value blocks are the smaller ones
        return Split(rank - 1, mixed=tuple((s, groups if groups and s < max(sizes) else 0) for s in sizes))
    if width % a.blocks:
        raise Refused(f"{name}: {width} columns are not {a.blocks} blocks")
    return Split(rank - 1, a.blocks, groups)


class _Units:
    """What every split dimension of a region divides into: elements of blocks, or key-value heads."""

    def __init__(self) -> None:
        self.units = 0
        self.groups: set[int] = set()

    def add(self, name: str, extent: int, split: Split) -> None:
        if not split.mixed and extent % split.blocks:
            raise Refused(f"{name}: {extent} is not {split.blocks} blocks")
        for size, groups in split.mixed or ((extent // split.blocks, split.groups),):
            if groups and size % groups:
                raise Refused(f"{name}: {size} is not {groups} heads")
            if groups:
                self.groups.add(groups)
            else:
                self.units = gcd(self.units, size)


def grow_region(g: GraphIndex, a: _Attempt, taken: set[str], *, loss: bool) -> Region:
    """Carries the split of the opening linears to where it ends. Raises: Refused, Needs, Grouped."""
    splits: dict[str, Split | Pieces | None] = {}
    shards: list[ParamShard] = []
    count = _Units()
    for name in a.heads:
        n = g.node[name]
        if n.inputs[0] in splits:
            raise Refused(name)
        split = _opened(g, a, name)
        splits[name] = split
        shards += [
            ParamShard(param=p.removeprefix("param:"), axis=0, blocks=split.blocks, groups=split.groups, mixed=split.mixed) for p in n.inputs[1:]
        ]
        count.add(name, g.shapes[name][-1], split)
    inside, rows, losses = set(a.heads), list[str](), list[str]()
    outputs: list[tuple[str, Split]] = []
    row_bias: list[tuple[str, str]] = []
    frontier = _readers_in_order(g, a.heads)
    while frontier:
        name = frontier.pop(0)
        if name in inside or name in losses:
            continue
        if name in taken or len(inside) > MAX_REGION_NODES:
            raise Refused(f"{name} belongs to another region")
        n = g.node[name]
        source = splits.get(n.inputs[0])
        if loss and short_name(n.target) == "cross_entropy_loss":
            outputs.append((n.inputs[0], _classes(g, n, source)))
            losses.append(name)
            continue
        inside.add(name)
        if short_name(n.target) == "linear":
            _row(g, n, source, shards, row_bias, count)
            rows.append(name)
            continue
        if any(v.startswith("param:") for v in n.inputs):
            raise Refused(f"{name}: a whole parameter inside a region would get a partial gradient")
        out = _propagated(g, a, n, splits)
        if out is None and n.outputs:
            raise Refused(f"{name}: {n.target} of whole values")
        splits[name] = out
        if isinstance(out, Split) and len(n.outputs) <= 1:
            count.add(name, g.shapes[name][out.dim], out)
        frontier = sorted({*frontier, *_readers_in_order(g, [name])}, key=g.order.__getitem__)
    if bool(losses) != loss or (not loss and not rows) or (losses and rows) or len(losses) > 1:
        raise Refused("no row-parallel linear closes the region" if not loss else "no cross-entropy closes the region")
    for name in inside - set(rows):
        if name in g.outputs or any(r not in inside and r not in losses for r in g.readers.get(name, ())):
            raise Refused(f"{name} is read outside the region")
    for name in rows:
        if any(r in inside for r in g.readers.get(name, ())):
            raise Refused(f"{name}: a partial sum is read inside the region")
    if any(count.units % groups for groups in count.groups):
        raise Refused(f"{count.units} units are not {sorted(count.groups)} groups")
    entries = tuple(dict.fromkeys(g.node[h].inputs[0] for h in a.heads))
    nodes = tuple(sorted(inside, key=g.order.__getitem__))
    return Region(
        nodes, entries, tuple(rows), tuple(shards), tuple(row_bias), count.units, tuple(sorted(count.groups)), nodes[0], tuple(outputs),
        losses=tuple(losses),
    )  # fmt: skip


def _propagated(g: GraphIndex, a: _Attempt, n: OpNode, splits: dict[str, Split | Pieces | None]) -> Split | Pieces | None:
    try:
        return propagate(n, {v: splits.get(v) for v in n.inputs}, g.shapes)
    except Grouped as need:
        if need.value in a.ungrouped and need.otherwise is not None:
            return need.otherwise
        raise


def _classes(g: GraphIndex, n: OpNode, source: Split | Pieces | None) -> Split:
    rank = len(g.shapes[n.inputs[0]])
    if not isinstance(source, Split) or source != Split(1 if rank > 1 else 0):
        raise Refused(f"{n.name}: the classes are not what is split")
    return source


def _row(
    g: GraphIndex, n: OpNode, source: Split | Pieces | None, shards: list[ParamShard], row_bias: list[tuple[str, str]], count: _Units
) -> None:
    if not isinstance(source, Split) or not g.is_linear(n.name) or source.dim != len(g.shapes[n.inputs[0]]) - 1 or source.groups:
        raise Refused(f"{n.name} does not contract the split dimension")
    shards.append(ParamShard(param=n.inputs[1].removeprefix("param:"), axis=1, blocks=source.blocks, mixed=source.mixed))
    if len(n.inputs) > 2:
        row_bias.append((n.name, n.inputs[2].removeprefix("param:")))
    count.add(n.name, g.shapes[n.inputs[0]][-1], source)


def _readers_in_order(g: GraphIndex, names: Iterable[str]) -> list[str]:
    return sorted({r for name in names for r in g.readers.get(name, ())}, key=g.order.__getitem__)
