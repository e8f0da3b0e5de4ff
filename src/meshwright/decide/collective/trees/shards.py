"""Uneven shards: weights of the roots, and chunks that are the same size everywhere without any padding.

Weights are the shards over what they have in common; where that makes more than MAX_WEIGHT_UNITS units, they are rounded to that many, which only
shifts load between trees: every byte is still sent, and bounds are computed from the shards themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import gcd, isqrt

from ....errors import Unsupported
from ....program.program import Contract
from ..problem import CollectiveProblem

__all__ = ["MAX_BUFFER_CHUNKS", "ShardTable", "shard_contract", "shard_table", "shard_weights"]

MAX_WEIGHT_UNITS = 4096  # units of weight of all roots; finer shards are rounded, which shifts load between trees only
MIN_CHUNKS_PER_PART = 64  # where parts are rounded to whole chunks: then a part is off by about 1/64 at most
MAX_BUFFER_CHUNKS = 1 << 20  # chunks of one buffer; shards that have so little in common that more are needed are refused


def shard_weights(problem: CollectiveProblem) -> list[int]:
    """Whole numbers in the proportion of the shards, exactly if they add up to at most MAX_WEIGHT_UNITS."""
    shards = problem.shards
    unit = gcd(*shards)
    weight = [s // unit for s in shards]
    if sum(weight) <= MAX_WEIGHT_UNITS:
        return weight
    rounded = [max(1, round(s * MAX_WEIGHT_UNITS / sum(shards))) if s else 0 for s in shards]
    common = gcd(*rounded)
    return [w // common for w in rounded]


@dataclass(frozen=True)
class ShardTable:
    """First chunk and number of chunks of every rank's shard."""

    start: tuple[int, ...]
    count: tuple[int, ...]
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return self.start[-1] + self.count[-1]


def shard_table(problem: CollectiveProblem, units: int, pieces: int) -> ShardTable:
    """Chunks that divide every shard into `units` equal parts of `pieces` pieces per unit of weight, where whole elements and MAX_BUFFER_CHUNKS
    allow it; else chunks so fine that rounding the parts to them hardly matters.

    Raises: Unsupported when the shards have too little in common.
    """
    shards = problem.shards
    common = gcd(*shards) // problem.element_bytes
    total = sum(shards) // problem.element_bytes
    most = MAX_BUFFER_CHUNKS * common // total  # parts that `common` may be cut into
    if most < 1:
        raise Unsupported(
            f"the shards' sizes have only {common * problem.element_bytes} B in common, which makes {total // common} chunks",
            hint="round the shards up to a common multiple",
            data={"common_bytes": common * problem.element_bytes},
        )
    divisors = sorted({d for i in range(1, isqrt(common) + 1) if common % i == 0 for d in (i, common // i)})
    divisors = [d for d in divisors if d <= most]
    # Best first: parts and pieces whole; parts whole and pieces about; both rounded but fine; as fine as there is.
    ways = ([d for d in divisors if d % (units * pieces) == 0], [d for d in divisors if d % units == 0 and d >= units * pieces],
            [d for d in divisors if d >= MIN_CHUNKS_PER_PART * units * pieces], divisors[-1:])  # fmt: skip
    cut = next(way[0] for way in ways if way)
    count = tuple(s // problem.element_bytes * cut // common for s in shards)
    return ShardTable((0, *accumulate(count[:-1])), count, common // cut * problem.element_bytes)


def shard_contract(op: str, buffers: list[int], table: ShardTable, root: int) -> Contract:
    """The contract of an in-place operation with shards."""
    own = tuple((b, s, c) for b, s, c in zip(buffers, table.start, table.count, strict=True))
    whole = tuple((b, 0, table.chunks) for b in buffers)
    inputs = own if op in ("all-gather", "gather") else whole
    if op == "scatter":
        inputs = tuple((b, 0, table.chunks if r == root else 0) for r, b in enumerate(buffers))
    outputs = own if op in ("reduce-scatter", "scatter") else whole
    return Contract(op=op, inputs=inputs, outputs=outputs, root=root if op in ("scatter", "gather") else -1)
