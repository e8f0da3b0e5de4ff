"""Regions of expert layers: tensor ranks, which all have the same tokens, divide the experts that their replica has.

Cite: D. Lepikhin and others, "GShard" (arXiv 2006.16668), section 3.2; NVIDIA's Megatron-Core, whose expert groups lie folded over tensor ranks.
Left open there: ranks without sequence parallelism, whose tokens are alike. Our answer: each places the rows of its own experts, sends those to the
neighbouring replicas with the same index, and the ranks' tokens add up to the result. So every row is multiplied once and travels once.
Deviations: experts are divided whole; none is cut along its inner dimension.
Invariant: a region is one layer from its rows to its sums; tokens and weights go in whole, the result is a partial sum.
Cost: O(1) per layer.
"""

from __future__ import annotations

from ...graph.graph import OpNode
from ...plan.context import ALL_TO_ALL
from ...plan.experts import COUNTS, MLP, ROWS, TOKENS
from ...plan.plan import ParamShard
from .graph_index import GraphIndex
from .split import Split
from .tensor_regions import Region

__all__ = ["expert_regions"]


def expert_regions(g: GraphIndex, why: dict[str, str]) -> list[Region]:
    """Of every expert layer; `why` gets the reason of one that stays whole on every tensor rank."""
    found = []
    for n in list(g.node.values()):
        if n.target == MLP:
            region = _region(g, n)
            if isinstance(region, Region):
                found.append(region)
            else:
                why[n.name] = region
    return found


def _region(g: GraphIndex, mlp: OpNode) -> Region | str:
    before: list[OpNode] = []
    for value, target in zip(mlp.inputs[:2], (ROWS, COUNTS), strict=True):
        chain = _back(g, value, target)
        if not chain:
            return f"its rows are not made by {target}"
        before += chain
    after = _ahead(g, mlp.name)
    weights = [v for v in mlp.inputs[2:] if v in g.trained_params or v.startswith("param:")]
    if not after or len(weights) != 2 or weights != list(mlp.inputs[2:]):
        return "its results are read before they are tokens again" if not after else "its experts are not parameters as they are"
    rows, sums = before[0], after[-1]
    nodes = {n.name for n in (*before, mlp, *after)}
    if rows.args[2] is not None or any(r not in nodes for x in nodes - {sums.name} for r in g.readers.get(x, ())):
        return "its rows are read elsewhere too"
    held = g.shapes[weights[0]][0]
    split = Split(0, g.shapes[mlp.name][0] // held)
    entries = tuple(v for v in dict.fromkeys((rows.inputs[0], *sums.inputs[2:])) if v in g.made_from_params)
    inside = tuple(sorted(nodes, key=g.order.__getitem__))
    exchanging = any(g.node[x].target == ALL_TO_ALL for x in inside)
    return Region(
        inside, entries, (sums.name,), tuple(ParamShard(param=p.removeprefix("param:"), axis=0) for p in weights), (), held, bundle=mlp.name,
        inner=tuple((x, split) for x in inside if x != sums.name) if exchanging else (),
    )  # fmt: skip


def _back(g: GraphIndex, value: str, target: str) -> list[OpNode]:
    """The operator that makes a value, first, and the exchange between, if there is one; empty for others."""
    chain: list[OpNode] = []
    n = g.node.get(value)
    if n is not None and n.target == ALL_TO_ALL:
        chain, n = [n], g.node.get(n.inputs[0])
    return [n, *chain] if n is not None and n.target == target else []


def _ahead(g: GraphIndex, value: str) -> list[OpNode]:
    """What makes tokens of a layer's results, last, and the exchange between."""
    chain: list[OpNode] = []
    readers = [g.node[r] for r in g.readers.get(value, ())]
    if len(readers) == 1 and readers[0].target == ALL_TO_ALL:
        chain = readers
        readers = [g.node[r] for r in g.readers.get(readers[0].name, ())]
    return [*chain, readers[0]] if len(readers) == 1 and readers[0].target == TOKENS else []
