"""What is decided: at how many bits each row of each message of a distributed graph training is sent.

An exchange is one layer's messages in one direction. In its round r of W - 1, worker i sends to worker (i + r) mod W; the round takes as long as its
slowest message, bytes times seconds per byte plus latency, and rounds follow each other. A row's weight is what its rounding adds to the variance of
the gradient, times (2^b - 1)^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ....codec.rows import FULL, PARAMETER_BYTES, WIDTHS, message_bytes, noise_factor
from ....errors import UsageError
from ....fabric.fabric import Fabric
from ....graph.graph import Work
from ...strategies import Listed

__all__ = ["Assignment", "Channel", "Exchange", "HaloProblem", "HaloStrategy", "Widths"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Widths = dict[tuple[str, int, int], I64]  # (exchange, source, destination) -> bits of each row, in the order in which rows are sent


@dataclass(frozen=True, eq=False)
class Channel:
    """`weight` [rows], in the order in which rows are sent."""

    src: int
    dst: int
    weight: F64


@dataclass(frozen=True, eq=False)
class Exchange:
    """One layer in one direction: `forward0`, `backward1`. `dim`: numbers in a row. Channels without rows are left out."""

    name: str
    dim: int
    channels: tuple[Channel, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloProblem:
    """`exchanges`: in the order in which an epoch does them. `works`: by (rank, exchange, "central" or "marginal"), what is computed. `own`: nodes of
    each worker, for the memory of what they hold.

    Raises: UsageError for weights that are negative or not finite, ranks that are no devices; Disconnected.
    """

    fabric: Fabric
    ranks: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    works: Mapping[tuple[int, str, str], Work] = field(default_factory=dict)
    own: tuple[int, ...] = ()
    name: str = "graph"

    def __post_init__(self) -> None:
        names = {d.name for d in self.fabric.devices}
        if missing := [r for r in self.ranks if r not in names]:
            raise UsageError(f"{missing[0]!r} is no device of {self.fabric.name}", where="ranks", hint=f"one of {', '.join(sorted(names))}")
        self.fabric.require_connected()
        for x in self.exchanges:
            for c in x.channels:
                if x.dim < 1 or not (np.isfinite(c.weight).all() and (c.weight >= 0).all()):
                    hint = "traced ranges must be finite: does the training diverge?"
                    raise UsageError("weights must be finite and not negative", where=f"{x.name}, {c.src} to {c.dst}", hint=hint)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """[ranks, ranks, 2]: latency in s and seconds per byte of a message."""
        at = [self.fabric.actor_of[name] for name in self.ranks]
        return np.array([[self.fabric.message_costs(a, b) for b in at] for a in at], np.float64)

    def round_of(self, c: Channel) -> int:
        return (c.dst - c.src) % len(self.ranks)

    def uniform(self, bits: int) -> Widths:
        return {(x.name, c.src, c.dst): np.full(len(c.weight), bits, np.int64) for x in self.exchanges for c in x.channels}

    def variance(self, widths: Widths, exchange: str = "") -> float:
        """Of an exchange, or of all."""
        total = 0.0
        for x in self.exchanges:
            for c in x.channels if exchange in ("", x.name) else ():
                bits = widths[x.name, c.src, c.dst]
                total += sum(noise_factor(b) * float(c.weight[bits == b].sum()) for b in WIDTHS)
        return total

    def rounds_s(self, widths: Widths, exchange: str = "") -> float:
        """Seconds of the rounds of an exchange, or of all: the time that assignments are chosen by."""
        total = 0.0
        for x in self.exchanges:
            if exchange in ("", x.name):
                slowest: dict[int, float] = {}
                for c in x.channels:
                    latency, per_byte = self.costs[c.src, c.dst]
                    took = latency + per_byte * modelled_bytes(widths[x.name, c.src, c.dst], x.dim)
                    slowest[self.round_of(c)] = max(slowest.get(self.round_of(c), 0.0), took)
                total += sum(slowest.values())
        return total

    def size_bytes(self, x: Exchange, c: Channel, widths: Widths) -> int:
        """Of the message, to the byte."""
        kinds, counts = np.unique(widths[x.name, c.src, c.dst], return_counts=True)
        return message_bytes(dict(zip(kinds.tolist(), counts.tolist(), strict=True)), x.dim)


def modelled_bytes(bits: I64, dim: int) -> float:
    """Bytes of a message without rounding up to whole ones (less than 3 in all)."""
    return float(bits.sum()) * dim / 8 + PARAMETER_BYTES * float((bits != FULL).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Bits of every row. `rounds_s`, `variance`: of all exchanges. `exact`: no other assignment of the same groups is better; else `gap` says by how
    much one could be, as a share of what was minimised."""

    strategy: str
    widths: Widths
    rounds_s: float
    variance: float
    exact: bool = True
    gap: float = 0.0


class HaloStrategy(Listed, Protocol):
    """A frozen dataclass of options."""

    def plan(self, problem: HaloProblem, *, rng: np.random.Generator) -> Assignment: ...
