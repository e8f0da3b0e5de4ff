"""What has to get where: the chunks of a collective, as routing sees them.

A chunk starts at one rank and must reach others. Reductions are routed as the gathers that they are when time runs backwards: a
reduce-scatter is an all-gather, a reduce is a broadcast, on reversed links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..problem import CollectiveProblem

__all__ = ["IN_PLACE", "REDUCES", "Chunk", "chunks_of", "image_of_chunks"]

REDUCES = ("reduce-scatter", "all-reduce", "reduce")  # begin with a reduction
IN_PLACE = (*REDUCES, "all-gather", "broadcast", "scatter", "gather")  # one buffer per rank


@dataclass(frozen=True)
class Chunk:
    """Part `part` of what rank `source` holds for `dests`; `block` counts the collective's blocks (see `chunks_of`)."""

    source: int
    dests: frozenset[int]
    block: int
    part: int


def chunks_of(problem: CollectiveProblem, chunkup: int) -> tuple[list[Chunk], int]:
    """(chunks in order of block and part, blocks of one rank's buffer).

    Blocks: all-gather, reduce-scatter, all-reduce: one per rank; broadcast and reduce: one; all-to-all: source · ranks + destination; scatter and
    gather: the rank it belongs to; permute: the destination. A block's bytes are the buffer's (size_bytes) over the second result.
    """
    n, op, root = len(problem.ranks), problem.op, problem.root
    everyone = frozenset(range(n))
    blocks: list[tuple[int, int, frozenset[int]]]  # block, source, destinations
    per_buffer = n
    if op in ("all-gather", "reduce-scatter", "all-reduce"):
        blocks = [(r, r, everyone - {r}) for r in range(n)]
    elif op in ("broadcast", "reduce"):
        blocks, per_buffer = [(0, root, everyone - {root})], 1
    elif op == "all-to-all":
        blocks = [(s * n + d, s, frozenset([d])) for s in range(n) for d in range(n) if s != d]
    elif op == "scatter":
        blocks = [(d, root, frozenset([d])) for d in range(n) if d != root]
    elif op == "gather":
        blocks = [(s, s, frozenset([root])) for s in range(n) if s != root]
    else:
        blocks, per_buffer = [(d, s, frozenset([d])) for d, s in enumerate(problem.peers) if s >= 0 and s != d], 1
    return [Chunk(s, d, block, part) for block, s, d in blocks for part in range(chunkup)], per_buffer


def chunks_in_all(problem: CollectiveProblem, chunkup: int) -> int:
    """How many chunks `chunks_of` makes."""
    n = len(problem.ranks)
    blocks = {
        "broadcast": 1, "reduce": 1, "all-to-all": n * (n - 1), "scatter": n - 1, "gather": n - 1,
        "permute": sum(s >= 0 and s != d for d, s in enumerate(problem.peers)),
    }  # fmt: skip
    return blocks.get(problem.op, n) * chunkup


def image_of_chunks(chunks: Sequence[Chunk], rank: Sequence[int]) -> tuple[int, ...] | None:
    """Where a permutation of the ranks takes every chunk; None when the collective is not symmetric under it."""
    found = {(c.source, c.dests, c.part): i for i, c in enumerate(chunks)}
    out = []
    for c in chunks:
        image = found.get((rank[c.source], frozenset(rank[d] for d in c.dests), c.part))
        if image is None:
            return None
        out.append(image)
    return tuple(out)
