"""Uneven shards: weights of the roots, and chunks that are the same size everywhere without any padding.

Weights are the shards over what they have in common; where that makes more than MAX_WEIGHT units, they are rounded to that many, which only
shifts load between trees: every byte is still sent, and bounds are computed from the shards themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import gcd, isqrt

from ....errors import Unsupported
from ....program.program import Contract
from ..problem import CollectiveProblem

__all__ = ["ShardTable", "shard_contract", "shard_table", "shard_weights"]

MAX_WEIGHT = 4096  # units of weight in all
FINE = 64  # chunks per part where parts are rounded
MAX_CHUNKS = 1 << 20  # of one buffer


def shard_weights(problem: CollectiveProblem) -> list[int]:
    """Whole numbers in the proportion of the shards, exactly if they add up to at most MAX_WEIGHT."""
    shards = problem.shards
    unit = gcd(*shards)
    weight = [s // unit for s in shards]
    if sum(weight) <= MAX_WEIGHT:
        return weight
    rounded = [max(1, round(s * MAX_WEIGHT / sum(shards))) if s else 0 for s in shards]
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
    """Chunks that divide every shard into `units` equal parts of `pieces` pieces per unit of weight, where whole elements and MAX_CHUNKS
    allow it; else chunks so fine that rounding the parts to them hardly matters.

    Raises: Unsupported when the shards have too little in common.
    """
    shards = problem.shards
    common = gcd(*shards) // problem.element_bytes
    total = sum(shards) // problem.element_bytes
    most = MAX_CHUNKS * common // total  # parts that `common` may be cut into
    if most < 1:
        raise Unsupported(
            f"the shards' sizes have only {common * problem.element_bytes} B in common, which makes {total // common} chunks",
            hint="round the shards up to a common multiple",
            data={"common_bytes": common * problem.element_bytes},
        )
    divisors = sorted({d for i in range(1, isqrt(common) + 1) if common % i == 0 for d in (i, common // i)})
    divisors = [d for d in divisors if d <= most]
    ways = ([d for d in divisors if d % (units * pieces) == 0], [d for d in divisors if d % units == 0 and d >= units * pieces],
            [d for d in divisors if d >= FINE * units * pieces], divisors[-1:])  # fmt: skip
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
