"""Collectives on the GPUs of one server: interpolation in a table, a compact model of a whole table, and sizes beyond the table.

All three rest on the optimally pipelined transfer. A message of W bytes per link that crosses h hops in pieces costs, with the best number of pieces,
(sqrt(h * a) + sqrt(W / B))^2: a latency, a term in the square root of W, and W / B. A plain alpha-beta line lacks the middle term and is off by
tens of per cent between 1 MB and 1 GB, where it matters.
- `CollectiveCurve`: linear between the two nearest measured sizes (alpha-beta, locally).
- `CollectiveModel`, eight numbers for a whole table (all operations, GPU counts, sizes): latency, latency per hop, square-root term and its
  exponent's distance from one, rate, factors of all-reduce (square-root term) and of all-to-all (latency, square-root term).
- `beyond`: above the largest measured size the rate is `PAYLOAD_SHARE` of the link's (payload of NVLink packets; assumed, not fitted) and the
  square-root term is what the largest measured sizes leave.
`wire_bytes` is what enters or leaves each GPU: S (n-1)/n, twice that for an all-reduce (nccl-tests' bus bandwidth).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, UnknownName
from .robust_fit import fit_positive

__all__ = ["CollectiveCurve", "CollectiveModel", "fit_collectives", "wire_bytes"]

F64 = NDArray[np.float64]
OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
PAYLOAD_SHARE = 0.8  # of a link's rate that sizes beyond the table reach: payload of NVLink packets, assumed and not fitted
LATENCY_SIZES = 4  # the smallest of the table, which give the latency beyond it
ROOT_SIZES = 4  # the largest of the table, which give the square-root term beyond it
START = (4.0, 1.0, 20.0, 0.5, 0.8, 0.8, 7.0, 1.0)  # us, us, us at 1 MB, -, share of the link, -, us, -


def wire_bytes(operation: str, size_bytes: F64 | float, gpus: F64 | int) -> F64:
    """Bytes over each GPU's link, one direction, of the usual ring. Raises: UnknownName."""
    if operation not in OPERATIONS:
        raise UnknownName(f"no operation {operation!r}", hint=f"one of: {', '.join(OPERATIONS)}")
    moved = np.asarray(size_bytes, np.float64) * (np.asarray(gpus) - 1) / np.asarray(gpus)
    return np.asarray(2 * moved if operation == "all-reduce" else moved)


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """One operation on one number of GPUs: rising sizes, positive times; `link_Bps` per GPU and direction."""

    operation: str
    gpus: int
    link_Bps: float
    sizes: F64
    times_s: F64

    def __post_init__(self) -> None:
        x, y = self.sizes, self.times_s
        if len(x) < 2 or len(x) != len(y) or np.any(np.diff(x) <= 0) or np.any(x <= 0) or not np.all(np.isfinite(y) & (y > 0)):
            raise FormatError("a curve needs two or more rising positive sizes with positive finite times", hint="remove duplicates and zeros")
        wire_bytes(self.operation, 1.0, self.gpus)

    def at(self, sizes: F64 | float) -> F64:
        """Seconds: linear between measured sizes, the smallest's below them, `beyond` above them."""
        x = np.atleast_1d(np.asarray(sizes, np.float64))
        inside = np.interp(x, self.sizes, self.times_s)
        return np.where(x > self.sizes[-1], self.beyond(x), inside).reshape(np.shape(sizes))

    def beyond(self, sizes: F64 | float) -> F64:
        """Seconds above the table by the pipelined transfer at the assumed share of the link's rate."""
        rate = PAYLOAD_SHARE * self.link_Bps
        latency_s = float(np.median(self.times_s[:LATENCY_SIZES]))
        wire, last = wire_bytes(self.operation, self.sizes[-ROOT_SIZES:], self.gpus), self.times_s[-ROOT_SIZES:]
        # What the largest measured sizes take beyond latency and rate is put down to the square-root term.
        root = float(np.median(np.maximum(last - wire / rate - latency_s, 0) / np.sqrt(wire)))
        moved = wire_bytes(self.operation, np.asarray(sizes, np.float64), self.gpus)
        return np.asarray(latency_s + root * np.sqrt(moved) + moved / rate)


@dataclass(frozen=True, kw_only=True)
class CollectiveModel:
    """`numbers`: latency, latency per hop (us), square-root term at 1 MB (us), distance of its exponent, rate as a share of the link's,
    factor of all-reduce, latency (us) and factor of all-to-all."""

    link_Bps: float
    numbers: tuple[float, ...]

    def time_s(self, operation: str, size_bytes: F64 | float, gpus: F64 | int) -> F64:
        """Seconds. Raises: UnknownName."""
        moved = wire_bytes(operation, size_bytes, gpus)
        which = np.full(moved.shape, OPERATIONS.index(operation))
        return _time_s(np.asarray(self.numbers), self.link_Bps, which, np.asarray(gpus, np.float64), moved)


def _time_s(e: F64, link_Bps: float, which: NDArray[np.int64], gpus: F64, wire: F64) -> F64:
    reduce, exchange = which == OPERATIONS.index("all-reduce"), which == OPERATIONS.index("all-to-all")
    # An all-reduce passes a ring twice.
    hops = np.where(reduce, 2.0, 1.0) * (gpus - 1)
    latency_us = np.where(exchange, e[6], e[0] + e[1] * hops)
    root_us = e[2] * (wire / 1e6) ** (1 / (1 + e[3])) * np.where(exchange, e[7], 1.0) * np.where(reduce, e[5], 1.0)
    return np.asarray((latency_us + root_us) * 1e-6 + wire / (e[4] * link_Bps))


def fit_collectives(curves: Sequence[CollectiveCurve]) -> CollectiveModel:
    """One model of all curves of a table. Raises: FormatError when there are none or they differ in their link."""
    links = {c.link_Bps for c in curves}
    if len(links) != 1:
        raise FormatError("a compact model is of one table with one link rate", hint="fit each table on its own")
    which = np.concatenate([np.full(len(c.sizes), OPERATIONS.index(c.operation)) for c in curves])
    gpus = np.concatenate([np.full(len(c.sizes), float(c.gpus)) for c in curves])
    wire = np.concatenate([wire_bytes(c.operation, c.sizes, c.gpus) for c in curves])
    times_s, link = np.concatenate([c.times_s for c in curves]), links.pop()
    numbers = fit_positive(lambda e: _time_s(e, link, which, gpus, wire), times_s, [START])
    return CollectiveModel(link_Bps=link, numbers=tuple(numbers.tolist()))
