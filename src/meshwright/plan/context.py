"""Context parallelism: ranks that share samples and divide the positions of their sequences. Names and arithmetic, without torch.

A sequence is cut into 2n chunks for n ranks; rank r holds chunks r and 2n-1-r, one after the other ("zigzag"). So under a causal mask every rank has
as many pairs of query and key as every other, whatever the exchange. Positions are kept apart by all operators but attention; attention node
A (`aten.scaled_dot_product_attention`) of a captured graph becomes, with n ranks,

ring: `A/kv0` joins key and value, `A/kv<j>` is the neighbour's `A/kv<j-1>`; `A/r<j>` attends to block j and merges the result into what came before;
A itself is the last of these steps. Cite: RING. Blocks that came are kept until backward, or (ring-again) come a second time then, from the last to
the first: the neighbour behind has each a round earlier.
ulysses: `A/out` holds what every other rank needs of queries, keys and values, `A/in` what came; `A/heads` attends for this rank's heads over all
positions; `A/back` is what came back of that, from which A is put together. Cite: ULYSSES.

The gradient of an exchanged value goes the other way, and is added to that of what was sent.
"""

from __future__ import annotations

import msgspec

from ..cite import Cite
from ..errors import Unsupported
from ..graph.graph import OpGraph
from .copies import COPIED, ExpertCopies
from .plan import ContextExchange, TrainingLayout

__all__ = [
    "ALL_TO_ALL", "COPIES", "EXCHANGES", "HEADS", "JOIN", "KINDS", "OUT", "PART", "RING", "RING_BLOCK", "RING_END", "SHIFT", "TILE_ELEMENTS",
    "ULYSSES", "UNITE", "among_experts", "came_from", "copies_in", "exchange_of", "exchange_parts", "exchanges_in", "filled_rows", "layout_exchanges",
    "neighbours", "part_of", "position_ranges", "received_again", "require_positions",
]  # fmt: skip

RING = Cite(
    key="liu2024ring", title="Ring Attention with Blockwise Transformers for Near-Infinite Context", year=2024, venue="ICLR '24, arXiv:2310.01889"
)
ULYSSES = Cite(
    key="jacobs2023ulysses", title="DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models",
    year=2023, venue="arXiv:2309.14509",
)  # fmt: skip
EXCHANGES: dict[str, Cite] = {"ring": RING, "ring-again": RING, "ulysses": ULYSSES}

# Exchanges between ranks: no compute steps.
SHIFT, ALL_TO_ALL = "meshwright.context_shift.default", "meshwright.context_all_to_all.default"
COPIES = "meshwright.expert_copies.default"
KINDS = {SHIFT: "shift", ALL_TO_ALL: "all-to-all", COPIES: COPIED}
# Compute steps.
JOIN, RING_BLOCK, RING_END = "meshwright.context_join.default", "meshwright.ring_block.default", "meshwright.ring_end.default"
OUT, HEADS, UNITE = "meshwright.context_out.default", "meshwright.context_heads.default", "meshwright.context_unite.default"
PART = "meshwright.context_part.default"  # this rank's positions of a value that every rank has whole

TILE_ELEMENTS = 1 << 22  # scores of a round of ring attention that exist at a time


def part_of(node: str, value: str) -> str:
    """The node that takes a rank's positions of `value`, which every rank has whole, for `node`."""
    return f"{node}/part/{value.replace(':', '.')}"  # a colon would make it a parameter's


def require_positions(extent: int, parts: int, where: str) -> None:
    """Raises: Unsupported, with the nearest lengths that divide."""
    least = 2 * parts
    if extent % least:
        low, high = extent // least * least, -(-extent // least) * least
        near = f"{low} or {high}" if low else f"{high}"
        raise Unsupported(
            f"sequences of {extent} positions do not divide into 2 x {parts} chunks", where=where,
            hint=f"sequences of {near} positions (pad them; targets of padding as the loss's ignore_index), or another --context degree",
        )  # fmt: skip


def position_ranges(extent: int, blocks: int, part: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The [start, stop) ranges that a rank holds of a dimension of `blocks` sequences, one after the other."""
    block, chunk = extent // blocks, extent // blocks // (2 * parts)
    last = 2 * parts - 1 - part
    return tuple((b * block + i * chunk, b * block + (i + 1) * chunk) for b in range(blocks) for i in (part, last))


def exchanges_in(graph: OpGraph) -> tuple[ContextExchange, ...]:
    """The exchanges of a graph of one rank's positions, in order."""
    return tuple(
        ContextExchange(kind=KINDS[n.target], source=n.inputs[0], target=n.name, again=n.args[-1] is True or msgspec.UNSET, **n.kwargs)
        for n in graph.nodes if n.target in KINDS
    )  # fmt: skip


def layout_exchanges(layout: TrainingLayout) -> tuple[ContextExchange, ...]:
    return () if layout.exchanges is msgspec.UNSET else layout.exchanges


def among_experts(layout: TrainingLayout, x: ContextExchange) -> bool:
    """Whether an exchange is of rows of experts or of their numbers, among the ranks that divide experts; else among those that divide positions."""
    numbers = {y.counts for y in layout_exchanges(layout) if y.counts is not msgspec.UNSET}
    return layout.context == 1 or x.kind == COPIED or x.counts is not msgspec.UNSET or x.source in numbers or x.target in numbers


def copies_in(layout: TrainingLayout) -> dict[str, ExpertCopies]:
    """Copies of experts by layer."""
    return {x.target.rpartition("/")[0]: x.copies for x in layout_exchanges(layout) if x.copies is not msgspec.UNSET}


def neighbours(layout: TrainingLayout) -> tuple[str, int]:
    """What neighbouring data replicas divide among them, and how many do: ("context", n) or ("experts", n), of layouts where some divide positions
    and some experts the former; ("server", n) where they share no more than a server; else ("", 1)."""
    if layout.context > 1 or layout.expert > 1:
        return ("context", layout.context) if layout.context > 1 else ("experts", layout.expert)
    return ("server", layout.server_replicas) if layout.server_replicas else ("", 1)


def exchange_parts(layout: TrainingLayout, x: ContextExchange) -> int:
    """Neighbouring data replicas that take part in an exchange."""
    return layout.expert if among_experts(layout, x) else layout.context


def filled_rows(layout: TrainingLayout) -> dict[str, str]:
    """By value of experts' rows: the value that holds how many of each expert's are filled."""
    exchanges, found = layout_exchanges(layout), dict[str, str]()
    came = {x.source: x.target for x in exchanges}
    came |= {target: source for source, target in came.items()}
    for x in exchanges:
        if x.counts is not msgspec.UNSET:
            found[x.source], found[x.target] = x.counts, came[x.counts]
    return found


def exchange_of(layout: TrainingLayout) -> str:
    """ "ring", "ring-again", "ulysses", or "" without context parallelism."""
    if layout.context == 1:
        return ""
    if received_again(layout):
        return "ring-again"
    return "ring" if any(x.kind == "shift" for x in layout_exchanges(layout)) else "ulysses"


def received_again(layout: TrainingLayout) -> frozenset[str]:
    """Values that come of others in forward, are given up, and come again for backward."""
    return frozenset(x.target for x in layout_exchanges(layout) if x.again is True)


def came_from(kind: str, member: int, parts: int, block: int) -> tuple[int, int]:
    """(member of the context group, block) from which block `block` of an exchanged value came to `member`; a shifted value is one block."""
    return ((member - 1) % parts, block) if kind == "shift" else (block, member)

