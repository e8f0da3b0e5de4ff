"""Which parts of a captured forward graph can be split over tensor-parallel ranks, column-parallel in, row-parallel out.

Cite: see CITE.
Left open by the paper: it names the layers of a transformer; user modules have no such names. Our answer: a region is found on
the graph. It starts at linears that read one replicated value (q, k, v; gate, up; fc1), their outputs are split by
columns, the split is carried through the operators (`sharding`), and the region is good if everything ends in linears that contract the split
dimension (row-parallel), or in a cross-entropy over it (`tensor_vocabulary`). Where an operator would need another operand split
too (keys and values of cross-attention), the linears that produce it join the region; where key-value heads are repeated for their query
heads, the linears behind them are split by whole key-value heads.
Deviations: packed projections are cut block by block (3 blocks for q, k, v; unequal blocks as the operators after them cut); degrees that
do not divide get uneven shares (`tensor_shares`).
Invariant: outside a region every value is whole on all ranks; inside, every value is split or whole; a region's results are partial sums.
Cost: O(nodes) per candidate linear.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cite import Cite
from ...graph.graph import OpGraph, OpNode
from .graph_index import GraphIndex
from .sharding import short_name
from .tensor_experts import expert_regions
from .tensor_regions import Region, try_region
from .tensor_vocabulary import POSITIONS, embedding_region, loss_region, splittable_embedding, splittable_loss

__all__ = ["CITE", "DEVIATIONS", "Kept", "Region", "find_regions", "kept_notes", "search_regions"]

CITE = Cite(
    key="shoeybi2019megatron",
    title="Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    year=2019,
    venue="arXiv:1909.08053",
)
DEVIATIONS = (
    "regions are found on the captured graph instead of by layer class",
    "shares may be uneven, so nothing is padded",
    "the cross-entropy sends its sums in one message",
)


def kept_notes(kept: Sequence[Kept]) -> tuple[str, ...]:
    """One line per reason, naming the first layer and how many more."""
    first: dict[str, list[Kept]] = {}
    for k in kept:
        first.setdefault(re.sub(r"_?\d+", "", k.why), []).append(k)
    return tuple(f"{ks[0]}" + (f"; {len(ks) - 1} more like it" if len(ks) > 1 else "") for ks in first.values())


@dataclass(frozen=True)
class Kept:
    """A layer with weights that could be split elsewhere, and stays whole here. `why` names the operator in the way."""

    node: str
    module: str
    why: str

    def __str__(self) -> str:
        return f"{self.module or self.node} ({self.node}) is kept whole: {self.why}"


def find_regions(graph: OpGraph) -> tuple[Region, ...]:
    """All disjoint regions, in graph order. The same for every tensor degree; a degree uses those that it can share out."""
    return search_regions(graph)[0]


def search_regions(graph: OpGraph) -> tuple[tuple[Region, ...], tuple[Kept, ...]]:
    """`find_regions`, and what was kept whole with the reason."""
    g = GraphIndex(graph)
    taken: set[str] = set()
    regions: list[Region] = []
    why: dict[str, str] = {}
    for found in _vocabulary(g, why):
        regions += found
        taken.update(n for r in found for n in r.nodes)
    regions += (of_experts := expert_regions(g, why))
    taken.update(n for r in of_experts for n in r.nodes)
    for n in graph.nodes:
        product = g.product(n.name)
        if n.name in taken or product is None:
            continue
        group = [r for r in g.products_of(product.x) if r not in taken]
        reasons: list[str] = []
        region = try_region(g, group, taken, whys=reasons)
        if region is None and len(group) > 1:
            region = try_region(g, [n.name], taken, whys=reasons)
        if region is not None and region.units > 1:
            regions.append(region)
            taken.update(region.nodes)
        elif n.name not in why:
            why[n.name] = reasons[0] if reasons else "too narrow"
    for n in graph.nodes:
        weights = [v for v in n.inputs if v.startswith("param:") and len(g.shapes[v]) > 1]
        if weights and n.name not in taken and short_name(n.target) not in ("linear", "embedding"):
            why.setdefault(n.name, f"{n.target} has no known split")
    regions.sort(key=lambda r: g.order.get(r.nodes[0], len(g.order)))
    kept = [Kept(n.name, n.module, why[n.name]) for n in graph.nodes if n.name in why and n.name not in taken]
    return tuple(regions), tuple(kept)


def _vocabulary(g: GraphIndex, why: dict[str, str]) -> list[list[Region]]:
    """Bundles of regions over the vocabulary: each table with the heads tied to it and their losses."""
    tables: dict[str, list[OpNode]] = {}
    for n in g.node.values():
        if short_name(n.target) == "embedding" and n.inputs and n.inputs[0].startswith("param:"):
            tables.setdefault(n.inputs[0], []).append(n)
    heads: dict[str, list[Region]] = {}  # weight -> regions
    for n in g.node.values():
        if short_name(n.target) != "cross_entropy_loss":
            continue
        reason = splittable_loss(g, n)
        head = None if reason else loss_region(g, n, why)
        if head is None:
            why.setdefault(n.name, reason or "its logits are not made by a linear that can be split by columns")
            continue
        heads.setdefault(f"param:{head[0].shards[0].param}", []).extend(head)
    bundles = []
    for weight in dict.fromkeys((*tables, *heads)):
        looked_up, losses = tables.get(weight, []), heads.get(weight, [])
        reason = next((r for n in looked_up if (r := splittable_embedding(g, n))), "")
        openers = {n for r in losses for n in r.nodes}
        if not reason and any(r not in openers and short_name(g.node[r].target) != "embedding" for r in g.readers[weight]):
            reason = "its table is read by an operator that is not split over the vocabulary"
        if reason:
            why.update((n.name, reason) for n in looked_up if reason != POSITIONS)  # nobody splits a table of positions
            why.update((r.nodes[0], f"tied to a table: {reason}") for r in losses if r.shards)
            continue
        name = weight.removeprefix("param:")
        units = g.shapes[weight][0]
        bundles.append([replace(r, bundle=name) for r in (*losses, *(embedding_region(g, n) for n in looked_up)) if units > 1])
    return bundles
