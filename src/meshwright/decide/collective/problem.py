"""What a collective planner is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import wraps
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import numpy as np

from ...bound import Bound
from ...cost import Transport
from ...errors import UnknownName, Unsupported, UsageError
from ...fabric.edit import sustained
from ...fabric.fabric import Fabric
from ...kernels.effort import Cut, Deadline
from ...program.program import REPRODUCIBLE, REPRODUCIBLE_SUMS, Program
from ..strategies import Listed

__all__ = [
    "EXACT_BYTES", "MIN_PIECE_BYTES", "OPERATIONS", "PIECES_BESIDE", "ROOTED", "SHARDED", "CollectivePlan", "CollectiveProblem",
    "CollectiveStrategy", "Operation", "Ranked", "Use", "busbw_factor", "cut_among", "options_of", "require_operation",
]  # fmt: skip

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather", "permute"]
OPERATIONS: tuple[str, ...] = get_args(Operation)
ROOTED = ("broadcast", "reduce", "scatter", "gather")
SHARDED = ("all-gather", "reduce-scatter", "scatter", "gather")  # operations whose ranks may own parts of unlike sizes
DEFAULT_EFFORT_S = 60.0  # counted work (`kernels.effort`) of a planner, in seconds of a quiet core, unless the problem states its own
MIN_PIECE_BYTES = 4096  # pieces of a pipeline are not made smaller (forests: 8192)
EXACT_BYTES = 8  # of the integers that stand for the elements of an exact sum: two limbs of 32 bits, added as one number
Use = Literal["alone", "in network", "inlined", "beside", "beside, in iterations"]
PIECES_BESIDE = 128  # iterations of programs that run side by side, which must have equal numbers of them


@dataclass(frozen=True, kw_only=True)
class CollectiveProblem:
    """One collective on some devices of a fabric. Token buckets of its links are left out (`fabric.edit.sustained`).

    Args:
        ranks: device names; rank i of the program is `ranks[i]`.
        size_bytes: all-gather, the gathered result; reduce-scatter and all-to-all, one rank's whole input; scatter and gather, the root's
            buffer; otherwise one rank's buffer.
        root: rank that broadcasts or scatters, or that a reduction or gather ends at; ignored by the other operations.
        shard_bytes: all-gather, reduce-scatter, scatter, gather: what each rank owns, together `size_bytes`; None = equal shares (padded
            to whole elements where the size does not divide).
        peers: permute: peers[i] is the rank whose buffer rank i receives, -1 = nothing; () = the next rank up, round the ring.
        reproducible: what is promised of the bits of sums: "run", "tree" or "exact" (docs/reproducibility.md; `program.Contract`). For "exact",
            elements travel as integers of EXACT_BYTES.
        numbers: numbers[i] is the number of rank i's contribution in the tree; () = i. A job's numbers stay when its ranks are placed anew.
        transport: cost of messages beyond the links' rate and latency; None = none.
        time_limit_s: a net: planners stop near it, by the clock, with the best they have, and say so; none unless the user asks for one.
        effort_s: how long they search, in seconds of counted work (`kernels.effort`), however busy the machine is; None = DEFAULT_EFFORT_S.
    Raises: UnknownName for an operation or device that does not exist, UsageError for fewer than two ranks, repeated ranks, a
        size below one element or not a multiple of it, a root that is no rank, shards that do not add up or that the operation does not
        have, peers that are no ranks, a level or numbers that there are not.
    """

    fabric: Fabric
    op: str
    ranks: tuple[str, ...]
    size_bytes: int
    root: int = 0
    element_bytes: int = 4
    seed: int = 0
    time_limit_s: float = float("inf")
    effort_s: float | None = None
    transport: Transport | None = None
    shard_bytes: tuple[int, ...] | None = None
    peers: tuple[int, ...] = ()
    reproducible: str = "run"
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fabric", sustained(self.fabric))
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
            raise UsageError(f"must be 0..{len(self.ranks) - 1}, got {self.root}", where="root", hint="it counts the ranks of this call, from 0")
        if self.time_limit_s <= 0:
            raise UsageError(f"time_limit_s must be > 0, got {self.time_limit_s}")
        if self.effort_s is not None and not self.effort_s > 0:
            raise UsageError(f"effort_s must be > 0, got {self.effort_s}")
        self._require_shards()
        self._require_peers()
        if self.reproducible not in REPRODUCIBLE:
            raise UnknownName(f"no level {self.reproducible[:32]!r}", where="reproducible", hint=f"levels: {', '.join(REPRODUCIBLE)}")
        if self.numbers and sorted(self.numbers) != list(range(len(self.ranks))):
            raise UsageError(f"must hold every number 0..{len(self.ranks) - 1} once", where="numbers")

    def _require_shards(self) -> None:
        shards = self.shard_bytes
        if shards is None:
            return
        if self.op not in SHARDED:
            raise UsageError(f"{self.op} has no shards", where="shard_bytes", hint=f"operations with shards: {', '.join(SHARDED)}")
        if len(shards) != len(self.ranks):
            raise UsageError(f"{len(shards)} shards for {len(self.ranks)} ranks", where="shard_bytes", hint="one per rank; 0 is allowed")
        for rank, shard in enumerate(shards):
            if shard < 0 or shard % self.element_bytes:
                raise UsageError(f"must be a multiple of {self.element_bytes} B, got {shard}", where=f"shard_bytes[{rank}]")
        if sum(shards) != self.size_bytes:
            raise UsageError(f"the shards add up to {sum(shards)} B, the size is {self.size_bytes} B", where="shard_bytes")

    def _require_peers(self) -> None:
        if self.op != "permute":
            if self.peers:
                raise UsageError(f"{self.op} has no peers", where="peers", hint="peers belong to permute")
            return
        n = len(self.ranks)
        if not self.peers:
            object.__setattr__(self, "peers", tuple((i - 1) % n for i in range(n)))
        if len(self.peers) != n:
            raise UsageError(f"{len(self.peers)} peers for {n} ranks", where="peers", hint="one per rank; -1 = receives nothing")
        for rank, peer in enumerate(self.peers):
            if not -1 <= peer < n:
                raise UsageError(f"must be -1..{n - 1}, got {peer}", where=f"peers[{rank}]")

    @property
    def budget_s(self) -> float:
        """Seconds of counted work that planners may do."""
        return DEFAULT_EFFORT_S if self.effort_s is None else self.effort_s

    def deadline(self, share: float = 1.0) -> Deadline:
        """When a planner that begins now must stop, or one that has a share of the time."""
        return Deadline.after(share * self.budget_s, share * self.time_limit_s)

    @property
    def shards(self) -> tuple[int, ...]:
        """Bytes that each rank owns, in whole elements: `shard_bytes`, or equal shares rounded up."""
        if self.shard_bytes is not None:
            return self.shard_bytes
        n = len(self.ranks)
        elements = self.size_bytes // self.element_bytes
        return (-(-elements // n) * self.element_bytes,) * n

    @staticmethod
    def on(fabric: Fabric, op: str, size_bytes: int, **more: Any) -> CollectiveProblem:
        """The problem on all devices of the fabric, in fabric order."""
        return CollectiveProblem(fabric=fabric, op=op, size_bytes=size_bytes, ranks=tuple(d.name for d in fabric.devices), **more)


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """`program` has one in-place buffer per rank and its `contract` set; rank i runs on `problem.ranks[i]`.

    `options`: the strategy's options with every automatic choice filled in; running the strategy with them gives the same program.
    `notes`: facts for the user (trees, height, rank order, pieces, ...), JSON-able.
    `switches`: the fabric's switches that the program's switch actors run on, in order; () for programs of ranks alone.
    """

    program: Program
    bound: Bound | None
    strategy: str
    options: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)
    switches: tuple[str, ...] = ()


class CollectiveStrategy(Listed, Protocol):
    """Options are fields of a frozen dataclass; what drivers need to know is here, with defaults. See docs/extending.md.

    operations: those that it has. chooses: it only chooses among others that are listed, so that `auto` leaves it out. searches: its `plan` may use
    all of the problem's effort.
    """

    operations: ClassVar[tuple[str, ...]] = OPERATIONS
    chooses: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    switch_actors: ClassVar[bool] = False  # its programs have switches as actors: they need switches that add, and run through aggregators
    folds: ClassVar[tuple[str, ...]] = ()  # operations that it plans among thousands of ranks: folded, or in few steps

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if callable(cls.__dict__.get("plan")):
            cls.plan = _promising(cls.plan)  # type: ignore[method-assign]

    def sums_by_tree(self, problem: CollectiveProblem) -> bool:
        """Whether its sums of this problem are the fold over the contributions' numbers, which `check` then proves; else "tree" is refused for it."""
        return False

    @classmethod
    def applies(cls, problem: CollectiveProblem) -> bool:
        """Cheap. False only where `plan` raises Unsupported with every option; the reason is in that error."""
        return problem.op in cls.operations

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        """What is worth planning, most promising first; () where nothing is.

        use: "alone", a program of its own; "in network", one in which switches add and copy; "inlined", one that a program calls: chunks are
        explicit (an option `unroll` is on) and ranks the only actors; "beside", explicit and not folded, and "beside, in iterations", as many as
        `PIECES_BESIDE`: for collectives that run at the same time.
        """
        if use == "inlined" and any(f.name == "unroll" for f in fields(cls)):  # type: ignore[arg-type]
            return (cls(unroll=True),)  # type: ignore[call-arg]
        return (cls(),) if use in ("alone", "inlined") else ()

    @property
    def label(self) -> str:
        """Its name in rankings, which tells variants apart."""
        return self.name

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Unsupported rather than answer wrongly."""
        ...


def _promising(plan: Callable[..., CollectivePlan]) -> Callable[..., CollectivePlan]:
    """A strategy's `plan`, refusing a level of reproducibility that it cannot keep, and writing the one that it keeps into the contract.

    Integers add up alike in any order, so every strategy does exact sums: its plan for the bytes of the integers.
    """

    @wraps(plan)
    def honest(self: Any, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        if problem.reproducible == "run" or problem.op not in REPRODUCIBLE_SUMS:
            return plan(self, problem, rng=rng)
        if problem.reproducible == "tree" and not self.sums_by_tree(problem):
            text = f"{self.name} adds up this {problem.op} in an order of its own, which is not the fold of a fixed tree"
            raise Unsupported(text, hint="use --strategy fold-tree, or --reproducible exact", data={"strategy": self.name})
        made = plan(self, _as_integers(problem) if problem.reproducible == "exact" else problem, rng=rng)
        kept = tuple(replace(c, reproducible=problem.reproducible, numbers=problem.numbers) for c in made.program.contracts)
        return replace(made, program=replace(made.program, contracts=kept))

    return honest


def _as_integers(problem: CollectiveProblem) -> CollectiveProblem:
    """The problem whose elements are the integers that stand for this one's."""
    if problem.element_bytes > EXACT_BYTES:
        raise Unsupported(f"elements of {problem.element_bytes} B do not fit into integers of {EXACT_BYTES} B", hint="--reproducible tree")
    elements = problem.size_bytes // problem.element_bytes
    shards = None if problem.shard_bytes is None else tuple(x // problem.element_bytes * EXACT_BYTES for x in problem.shard_bytes)
    return replace(problem, size_bytes=elements * EXACT_BYTES, element_bytes=EXACT_BYTES, shard_bytes=shards, reproducible="run")


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One candidate of `auto`: its plan and predicted time, or why it has none."""

    strategy: str
    plan: CollectivePlan | None
    time_s: float | None
    why: str
    cut: bool = False  # the clock, or an interrupt, left it out, or ended its search before it was done
    interrupted: bool = False  # an interrupt did


def cut_among(ranked: Sequence[Ranked]) -> Cut | None:
    """What a ranking says of the clock: how many of its candidates were looked at to the end, when that is not all of them."""
    whole = sum(not r.cut for r in ranked)
    return None if whole == len(ranked) else Cut(whole, len(ranked), any(r.interrupted for r in ranked))


def options_of(strategy: object) -> dict[str, Any]:
    """The strategy's options as JSON-able data."""
    return asdict(strategy)  # type: ignore[call-overload,no-any-return]


def require_operation(problem: CollectiveProblem, strategy: str, operations: Sequence[str], *, uneven: bool = False) -> None:
    """Raise Unsupported unless the strategy does the problem's operation, and its uneven shards where there are some."""
    if problem.op not in operations:
        raise Unsupported(
            f"{strategy} does not do {problem.op}", hint=f"it does {', '.join(operations)}; or use --strategy auto",
            data={"op": problem.op, "strategy": strategy},
        )  # fmt: skip
    if problem.shard_bytes is not None and not uneven and len(set(problem.shard_bytes)) > 1:
        raise Unsupported(
            f"{strategy} needs equal shards for {problem.op}", hint="use --strategy auto, or pad the shards to the largest",
            data={"op": problem.op, "strategy": strategy},
        )  # fmt: skip


def busbw_factor(op: str, ranks: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if op == "all-reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if op in ("all-gather", "reduce-scatter", "all-to-all"):
        return Fraction(ranks - 1, ranks)
    return Fraction(1)
