"""Blocks, chunks and contracts of the classic algorithms: how a problem's bytes are cut and what the program promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import gcd

from ....errors import Unsupported
from ....program.program import Contract
from ..problem import SHARDED, CollectiveProblem
from ..trees.shards import MAX_BUFFER_CHUNKS

__all__ = ["block_chunks", "classic_contract", "refuse"]


def refuse(problem: CollectiveProblem, name: str, able: Sequence[str]) -> Unsupported:
    """The refusal of an operation that an algorithm does not have."""
    return Unsupported(f"{name} has no {problem.op}; it has {', '.join(able)}", hint="use --strategy auto")


def block_chunks(problem: CollectiveProblem, areas: Mapping[str, tuple[int, bool]]) -> tuple[dict[str, list[int]], int]:
    """Chunks of every block of every area (`blocks`, `by_rank`), and the bytes of a chunk.

    Equal blocks are one chunk each, the message padded to whole elements per block. Uneven shards (areas by rank) are multiples of a chunk
    that divides all of them. Raises: Unsupported when that chunk is too small.
    """
    uneven = problem.shard_bytes
    if uneven is None or not any(by_rank for _, by_rank in areas.values()):
        blocks = next(count for name, (count, _) in areas.items() if name in ("data", "input"))
        elements = -(-problem.size_bytes // problem.element_bytes)
        return {name: [1] * count for name, (count, _) in areas.items()}, -(-elements // blocks) * problem.element_bytes
    chunk = gcd(*uneven)
    if problem.size_bytes // chunk > MAX_BUFFER_CHUNKS:
        raise Unsupported(
            f"the shards' sizes have only {chunk} B in common, {problem.size_bytes // chunk} chunks", hint="round the shards to a common multiple"
        )
    return {name: [size // chunk for size in uneven] if by_rank else [1] * count for name, (count, by_rank) in areas.items()}, chunk


def classic_contract(problem: CollectiveProblem, inputs: Sequence[int], outputs: Sequence[int], sizes: Mapping[str, Sequence[int]]) -> Contract:
    """The contract of a program whose rank r reads `inputs[r]` and ends with `outputs[r]` (the same buffer when in place).

    Of operations with shards a rank's shard may be several blocks, as many as every other's.
    """
    op, n = problem.op, len(problem.ranks)
    size = sizes["data"] if "data" in sizes else sizes["input"]
    total, start = sum(size), [0, *accumulate(size)]
    whole_in = tuple((b, 0, total) for b in inputs)
    whole_out = tuple((b, 0, total) for b in outputs)
    rooted = op in ("broadcast", "reduce", "scatter", "gather")
    if op in SHARDED:
        each = len(size) // n
        own = [(start[each * r], start[each * (r + 1)] - start[each * r]) for r in range(n)]
        if op in ("all-gather", "gather"):
            whole_in = tuple((b, *own[r]) for r, b in enumerate(inputs))
        else:
            whole_out = tuple((b, *own[r]) for r, b in enumerate(outputs))
    if op == "scatter":
        whole_in = tuple((b, 0, total if r == problem.root else 0) for r, b in enumerate(inputs))
    if op == "permute":
        whole_out = tuple((b, 0, total if problem.peers[r] >= 0 else 0) for r, b in enumerate(outputs))
    assert len(whole_in) == len(whole_out) == n
    return Contract(op=op, inputs=whole_in, outputs=whole_out, root=problem.root if rooted else -1, peers=problem.peers if op == "permute" else ())
