"""Growing one tensor-parallel region on a captured graph: from the linears that open it to where its split dimension is summed away.

See `megatron` for the method and its invariant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd

from ...graph.graph import OpNode
from ...plan.context import KINDS
from ...plan.plan import ParamShard
from .graph_index import GraphIndex, Product
from .sharding import propagate, short_name
from .split import Grouped, Needs, Pieces, Refused, Split

__all__ = ["Region", "try_region"]

BLOCK_CHOICES = (1, 3, 2, 4)
# Linears that may open one region: more than a fused attention or gated block has.
MAX_REGION_ENTRIES = 16
# Nodes of one region: a search that has gone so far has left the block that it began in.
MAX_REGION_NODES = 200
# Nodes that are looked through for the linears behind a value: rotary positions, a norm of heads and their repetition are some 30.
MAX_NODES_BEHIND = 64
# Ways to grow one region: each value that is whole where a split one is wanted can be made split, or be cut.
MAX_GROWTHS = 24


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
    whole: tuple[str, ...] = ()  # trained parameters that every rank has whole, and uses for its part: their gradients are partial sums
    maxima: tuple[str, ...] = ()  # of the rows, those combined by maximum
    losses: tuple[str, ...] = ()  # cross-entropies that are executed in three parts, the first of which is here
    inner: tuple[tuple[str, Split], ...] = ()  # what lies in it between steps, where it is several: around exchanges of positions


@dataclass(frozen=True)
class _Attempt:
    """What is assumed of a region: the products that open it, their blocks, which of their results are split by key-value heads, which values are
    split by elements after all, and of which whole values every rank takes its part."""

    heads: tuple[str, ...]
    blocks: int
    mixed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # unequal blocks of a product's result
    groups: Mapping[str, int] = field(default_factory=dict)
    ungrouped: frozenset[str] = frozenset()
    cut: frozenset[str] = frozenset()


def try_region(g: GraphIndex, group: list[str], taken: set[str], *, whys: list[str] | None = None, loss: bool = False) -> Region | None:
    """A region opened by the products of `group`, or None; then `whys` gets the reasons. `loss`: one that ends in a cross-entropy."""
    reasons = [] if whys is None else whys
    mixed = {h: sizes for h in group if (sizes := _unequal_pieces(g, h))}
    for blocks in (1, *BLOCK_CHOICES[1:]) if not mixed else (1,):
        found = _Growths(g, taken, loss, reasons).of(_Attempt(tuple(group), blocks, mixed=mixed))
        if found is not None:
            return found
    return None


class _Growths:
    """Tries what may be assumed of a region, the likelier first: a value that is whole where a split one is wanted is made split by the products
    behind it, or is cut; one of fewer heads than its readers is split by them, or by elements."""

    def __init__(self, g: GraphIndex, taken: set[str], loss: bool, whys: list[str]) -> None:
        self.g, self.taken, self.loss, self.whys, self.left = g, taken, loss, whys, MAX_GROWTHS

    def of(self, a: _Attempt) -> Region | None:
        if self.left == 0 or len(a.heads) > MAX_REGION_ENTRIES:
            return None
        self.left -= 1
        try:
            return grow_region(self.g, a, self.taken, loss=self.loss)
        except Needs as need:
            options = self.made_split(a, need)
        except Grouped as need:
            options = self.grouped(a, need)
        except Refused as why:
            self.whys.append(str(why))
            return None
        return next((found for option in options if (found := self.of(option)) is not None), None)

    def made_split(self, a: _Attempt, need: Needs) -> list[_Attempt]:
        beside = dict.fromkeys(r for p in map(self.g.product, _behind(self.g, need.value)) if p is not None for r in self.g.products_of(p.x))
        more = tuple(x for x in beside if x not in a.heads and x not in self.taken)
        options = [replace(a, heads=a.heads + more)] if more else []
        return [*options, replace(a, cut=a.cut | {need.value})]

    def grouped(self, a: _Attempt, need: Grouped) -> list[_Attempt]:
        behind = [x for x in _behind(self.g, need.value) if x in a.heads and x not in a.groups]
        if need.value in a.ungrouped or not behind:
            self.whys.append(f"{need.value} is not made by a linear of {need.groups} heads")
            return []
        groups = {x: need.groups for x in behind if self.g.shapes[x][-1] % need.groups == 0}
        options = [replace(a, groups={**a.groups, **groups})] if groups else []
        return [*options, replace(a, ungrouped=a.ungrouped | {need.value})]


def _behind(g: GraphIndex, value: str) -> list[str]:
    """The products that `value` is made of, through other operators: of several, where positions are turned (rotary), heads normalised."""
    found: list[str] = []
    seen, stack = {value}, [value]
    while stack and len(seen) <= MAX_NODES_BEHIND:
        name = stack.pop()
        if g.product(name) is not None:
            found.append(name)
        elif name in g.node:
            new = [v for v in g.node[name].inputs if v in g.made_from_params and v not in seen]
            seen.update(new)
            stack += new
    return found


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
    opened: list[Product] = []
    for name in a.heads:
        product = g.product(name, tied=loss)
        if product is None or product.x in splits:
            raise Refused(name)
        opened.append(product)
        split = _opened(g, a, name)
        splits[name] = split
        if product.turned:
            splits[product.turned] = split.at(1)
        for p, axis in ((product.weight, product.columns), (product.bias, 0)):
            if p:
                shards.append(ParamShard(param=p.removeprefix("param:"), axis=axis, blocks=split.blocks, groups=split.groups, mixed=split.mixed))
        count.add(name, g.shapes[name][-1], split)
    inside, rows, losses = {*a.heads, *(p.turned for p in opened if p.turned)}, list[str](), list[str]()
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
        if short_name(n.target) == "linear" or g.product(name) is not None:
            product = _row(g, n, splits, shards, row_bias, count)
            if product.turned:
                inside.add(product.turned)
                splits[product.turned] = Split(0)
            rows.append(name)
            continue
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
    nodes = tuple(sorted(inside, key=g.order.__getitem__))
    weighted = {*a.heads, *rows, *(p for x in (*a.heads, *rows) if (p := _turned(g, x, loss)))}
    beside = dict.fromkeys(v for x in nodes if x not in weighted for v in g.node[x].inputs if v not in splits)
    whole = tuple(v for v in beside if v in g.trained_params)
    if used := next((v for v in whole if not inside.issuperset(g.readers[v])), ""):
        raise Refused(f"{used} would get a partial gradient inside the region, and a whole one outside")
    entries = tuple(dict.fromkeys((*(p.x for p in opened), *(v for v in beside if v in g.made_from_params))))
    exchanging = any(g.node[x].target in KINDS for x in nodes)
    return Region(
        nodes, entries, tuple(rows), tuple(shards), tuple(row_bias), count.units, tuple(sorted(count.groups)), nodes[0], tuple(outputs),
        whole=tuple(v.removeprefix("param:") for v in whole), losses=tuple(losses),
        inner=tuple((x, s) for x in nodes if isinstance(s := splits.get(x), Split)) if exchanging else (),
    )  # fmt: skip


def _propagated(g: GraphIndex, a: _Attempt, n: OpNode, splits: Mapping[str, Split | Pieces | None]) -> Split | Pieces | None:
    known = {v: splits.get(v) for v in n.inputs}
    while True:
        try:
            return propagate(n, known, g.shapes)
        except Needs as need:
            if need.value not in a.cut:
                raise
            if n.target.startswith("meshwright."):
                raise Refused(f"{n.name}: {need.value}, which every rank has whole, is exchanged") from None
            known[need.value] = need.split
        except Grouped as need:
            if need.value not in a.ungrouped or need.otherwise is None:
                raise
            return need.otherwise


def _classes(g: GraphIndex, n: OpNode, source: Split | Pieces | None) -> Split:
    rank = len(g.shapes[n.inputs[0]])
    if not isinstance(source, Split) or source != Split(1 if rank > 1 else 0):
        raise Refused(f"{n.name}: the classes are not what is split")
    return source


def _row(
    g: GraphIndex, n: OpNode, splits: Mapping[str, Split | Pieces | None], shards: list[ParamShard], row_bias: list[tuple[str, str]], count: _Units
) -> Product:
    product = g.product(n.name)
    source = splits.get(product.x) if product is not None else None
    if product is None or not isinstance(source, Split) or source.dim != len(g.shapes[product.x]) - 1 or source.groups:
        raise Refused(f"{n.name} does not contract the split dimension")
    shards.append(ParamShard(param=product.weight.removeprefix("param:"), axis=1 - product.columns, blocks=source.blocks, mixed=source.mixed))
    if product.bias:
        row_bias.append((n.name, product.bias.removeprefix("param:")))
    count.add(n.name, g.shapes[product.x][-1], source)
    return product


def _turned(g: GraphIndex, name: str, loss: bool) -> str:
    product = g.product(name, tied=loss)
    return product.turned if product is not None else ""


def _readers_in_order(g: GraphIndex, names: Iterable[str]) -> list[str]:
    return sorted({r for name in names for r in g.readers.get(name, ())}, key=g.order.__getitem__)
