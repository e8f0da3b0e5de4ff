"""What a collective planner is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal, Protocol, get_args

import numpy as np

from ...bound import Bound
from ...cost import Transport
from ...errors import UnknownName, UsageError
from ...fabric import Fabric
from ...program import Program

__all__ = ["OPERATIONS", "CollectivePlan", "CollectiveProblem", "CollectiveStrategy", "Operation", "Ranked", "busbw_factor"]

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce"]
OPERATIONS: tuple[str, ...] = get_args(Operation)


@dataclass(frozen=True, kw_only=True)
class CollectiveProblem:
    """One collective on some devices of a fabric.

    Args:
        ranks: device names; rank i of the program is `ranks[i]`.
        size_bytes: all-gather, the gathered result; reduce-scatter, one rank's whole input; otherwise the buffer.
        root: rank that broadcasts or that the reduction ends at; ignored by the other operations.
        transport: cost of messages beyond the links' rate and latency; None = none.
        time_limit_s: planners stop near it with the best they have.
    Raises: UnknownName for an operation or device that does not exist, UsageError for fewer than two ranks, repeated ranks, a
        size below one element or not a multiple of it, a root that is no rank.
    """

    fabric: Fabric
    op: str
    ranks: tuple[str, ...]
    size_bytes: int
    root: int = 0
    element_bytes: int = 4
    seed: int = 0
    time_limit_s: float = 60.0
    transport: Transport | None = None

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            raise UnknownName(f"no collective {self.op!r}", hint=f"operations: {', '.join(OPERATIONS)}")
        for name in self.ranks:
            self.fabric.device(name)
        if len(self.ranks) < 2:
            raise UsageError(f"a collective needs at least 2 ranks, got {len(self.ranks)}", hint="name more devices")
        if len(set(self.ranks)) < len(self.ranks):
            twice = next(r for i, r in enumerate(self.ranks) if r in self.ranks[:i])
            raise UsageError(f"device {twice!r} is named twice", hint="each rank needs a device of its own")
        if self.element_bytes < 1:
            raise UsageError(f"element_bytes must be >= 1, got {self.element_bytes}")
        if self.size_bytes < self.element_bytes or self.size_bytes % self.element_bytes:
            raise UsageError(
                f"size {self.size_bytes} B is not a positive multiple of the element size {self.element_bytes} B",
                hint="round the size up to whole elements",
            )
        if not 0 <= self.root < len(self.ranks):
            raise UsageError(f"root must be 0..{len(self.ranks) - 1}, got {self.root}")
        if self.time_limit_s <= 0:
            raise UsageError(f"time_limit_s must be > 0, got {self.time_limit_s}")

    @staticmethod
    def on(fabric: Fabric, op: str, size_bytes: int, **more: Any) -> CollectiveProblem:
        """The problem on all devices of the fabric, in fabric order."""
        return CollectiveProblem(fabric=fabric, op=op, size_bytes=size_bytes, ranks=tuple(d.name for d in fabric.devices), **more)


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """`program` has one in-place buffer per rank and its `contract` set; rank i runs on `problem.ranks[i]`.

    `options`: the strategy's options with every automatic choice filled in; running the strategy with them gives the same program.
    `notes`: facts for the user (trees, height, rank order, pieces, ...), JSON-able.
    """

    program: Program
    bound: Bound | None
    strategy: str
    options: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)


class CollectiveStrategy(Protocol):
    """Options are fields of a frozen dataclass; `plan` raises Unsupported rather than answer wrongly."""

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan: ...


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One candidate of `auto`: its plan and predicted time, or why it has none."""

    strategy: str
    plan: CollectivePlan | None
    time_s: float | None
    why: str


def options_of(strategy: object) -> dict[str, Any]:
    """The strategy's options as JSON-able data."""
    return asdict(strategy)  # type: ignore[call-overload,no-any-return]


def busbw_factor(op: str, ranks: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if op == "all-reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if op in ("all-gather", "reduce-scatter"):
        return Fraction(ranks - 1, ranks)
    return Fraction(1)
