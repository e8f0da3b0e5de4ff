"""What a planner of expert layers is asked, the choices that it has, and the arithmetic of one weight layout for all of them.

Layout: with fewer experts than ranks, S = ranks / experts neighbours share an expert, and each owns 1/S of its inner dimension, whatever the degree
r. With more experts than ranks each rank owns experts / ranks whole ones, and S = 1. A degree r >= 1 makes S / r neighbours gather their slices, so
that r ranks hold one copy together and S / r copies share the tokens; r = 0 gathers all experts to the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...cost import Cost
from ...errors import UsageError
from ...fabric.edit import sustained
from ...fabric.fabric import Fabric
from ...graph.graph import Work
from ..strategies import Listed

__all__ = ["MAX_CHUNKS", "Choice", "ExpertPlan", "ExpertProblem", "ExpertShape", "ExpertStrategy", "Exchanges", "degrees_of"]

MAX_CHUNKS = 32  # parts of the capacity that overlap: Tutel's limit


class Choice(NamedTuple):
    """How one step of the layer runs. degree: Tutel's r; chunks: its overlap degree d; algorithm: "linear", "2dh", or a strategy of exchanges."""

    degree: int
    chunks: int
    algorithm: str

    @property
    def text(self) -> str:
        return f"r={self.degree} d={self.chunks} {self.algorithm}"


def degrees_of(ranks: int, experts: int, *, divisible: bool = True) -> tuple[int, ...]:
    """Degrees that a layer has: 0 and the divisors of S. `divisible`: its experts can be cut along an inner dimension; others have 0 and 1.

    Raises: UsageError where neither number divides the other.
    """
    shares_of(ranks, experts)
    shares = ranks // experts if experts < ranks else 1
    return (0, *(r for r in range(1, (shares if divisible else 1) + 1) if shares % r == 0))


def shares_of(ranks: int, experts: int) -> tuple[int, int]:
    """(ranks that share an expert, experts that a rank has). Raises: UsageError."""
    if ranks < 1 or experts < 1:
        raise UsageError(f"needs at least one rank and one expert, got {ranks} and {experts}", where="experts")
    if max(ranks, experts) % min(ranks, experts):
        below = max(d for d in range(1, experts + 1) if max(ranks, d) % min(ranks, d) == 0)
        raise UsageError(
            f"{experts} experts cannot be divided evenly among {ranks} ranks", where="experts", hint=f"{below} experts, or a multiple of {ranks}",
            data={"ranks": ranks, "experts": experts, "nearest": below},
        )  # fmt: skip
    return (ranks // experts, 1) if experts < ranks else (1, experts // ranks)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of a layer. model: H, the length of a token; output: of what it becomes (0: H); inner: F; matrices: 2, or 3 of gated experts.

    inner_elements, whole_elements: of one expert's parameters, what is cut along F and what is not (0 and 0: matrices of F x H without biases).
    Raises: UsageError for sizes that do not divide.
    """

    ranks: int
    experts: int
    model: int
    inner: int
    output: int = 0
    matrices: int = 2
    element_bytes: int = 4
    inner_elements: int = 0
    whole_elements: int = 0

    def __post_init__(self) -> None:
        shares, _ = shares_of(self.ranks, self.experts)
        for name in ("model", "inner", "matrices", "element_bytes"):
            if getattr(self, name) < (0 if name == "inner" else 1):
                raise UsageError(f"must be at least 1, got {getattr(self, name)}", where=name)
        if self.inner % shares:
            raise UsageError(
                f"an inner dimension of {self.inner} cannot be cut into {shares} equal slices", where="inner",
                hint=f"{-(-self.inner // shares) * shares}", data={"inner": self.inner, "shares": shares},
            )  # fmt: skip
        object.__setattr__(self, "output", self.output or self.model)
        if not self.inner_elements and not self.whole_elements:
            object.__setattr__(self, "inner_elements", self.inner * ((self.matrices - 1) * self.model + self.output))

    @property
    def shares(self) -> int:
        """S: ranks that share an expert."""
        return shares_of(self.ranks, self.experts)[0]

    @property
    def local(self) -> int:
        """Experts that a rank owns, whole or a slice of."""
        return shares_of(self.ranks, self.experts)[1]

    @property
    def degrees(self) -> tuple[int, ...]:
        return degrees_of(self.ranks, self.experts, divisible=bool(self.inner))

    def require(self, choice: Choice, capacity: int) -> None:
        """Raises: UsageError for a degree, number of chunks or capacity that the layer does not have, with the nearest one that it has."""
        if choice.degree not in self.degrees:
            nearest = min(self.degrees, key=lambda r: abs(r - choice.degree))
            raise UsageError(
                f"{self.experts} experts on {self.ranks} ranks have no degree {choice.degree}", where="r",
                hint=f"r={nearest}; there are {', '.join(map(str, self.degrees))}", data={"degrees": list(self.degrees)},
            )  # fmt: skip
        if not 1 <= choice.chunks <= MAX_CHUNKS:
            raise UsageError(f"must be 1..{MAX_CHUNKS}, got {choice.chunks}", where="chunks")
        wanted = self.shares * choice.chunks
        if choice.degree and capacity % wanted:
            up = -(-capacity // wanted) * wanted
            raise UsageError(f"a capacity of {capacity} cannot be cut into {wanted} equal parts", where="capacity", hint=f"capacity {up}")

    def group(self, degree: int) -> int:
        """Neighbours that gather the slices which are cut along F: S / r, or all ranks."""
        return self.shares // degree if degree else self.ranks

    def whole_group(self, degree: int) -> int:
        """Neighbours that gather the parameters which are not cut along F."""
        return self.shares if degree else self.ranks

    def block_rows(self, choice: Choice, capacity: int) -> int:
        """Rows that a rank sends to each rank, of each expert there, in one chunk."""
        return capacity * max(choice.degree, 1) // (self.shares * choice.chunks)

    def block_elements(self, choice: Choice, capacity: int, *, out: bool = False) -> int:
        return self.local * self.block_rows(choice, capacity) * (self.output if out else self.model)

    @property
    def slice_elements(self) -> int:
        """Of a rank's part of what is cut along F."""
        return self.local * self.inner_elements // self.shares

    @property
    def whole_slice_elements(self) -> int:
        """Of a rank's part of what is not; rounded up, so parts of zeros may follow."""
        return -(-self.local * self.whole_elements // self.shares)

    def received_bytes(self, choice: Choice, capacity: int) -> tuple[int, int]:
        """(tokens, weights) that a rank receives in a forward pass: what Tutel's section 3.2 compares."""
        tokens = 0
        if choice.degree:
            each = self.block_elements(choice, capacity) + self.block_elements(choice, capacity, out=True)
            tokens = choice.chunks * (self.ranks - 1) * each
        weights = (self.group(choice.degree) - 1) * self.slice_elements + (self.whole_group(choice.degree) - 1) * self.whole_slice_elements
        return tokens * self.element_bytes, weights * self.element_bytes

    def flops(self, capacity: int) -> int:
        """Of a rank's forward pass, whatever the degree: all its rows or slices together are one rank's share of E · C rows · W ranks."""
        return 2 * self.experts * capacity * self.inner * ((self.matrices - 1) * self.model + self.output)

    def work(self, choice: Choice, capacity: int, *, backward: bool = False) -> Work:
        """Of a rank's experts for one chunk."""
        held = self.slice_elements * self.group(choice.degree) * self.element_bytes
        rows = self.experts * capacity if not choice.degree else self.ranks * self.local * self.block_rows(choice, capacity)
        moved = rows * (self.model + self.output) * self.element_bytes
        times = 2 if backward else 1
        parts = choice.chunks if choice.degree else 1
        return Work(
            flops=times * self.flops(capacity) // parts, bytes_read=times * (held + moved), bytes_written=times * moved,
            calls=times * 2 * self.matrices,
        )  # fmt: skip


class Exchange(Protocol):
    """A planned collective: name (content hash) and program, in place or from an input to an output (`program.calls.Callee` has both)."""

    @property
    def name(self) -> str: ...
    @property
    def program(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """What a layer's programs call; None where nothing is to be sent.

    tokens: all-to-all of all ranks; direct: it is one message for each pair of them, no more. gather, whole_gather: all-gathers among `group` and
    `whole_group` neighbours; scatter, whole_scatter: the reduce-scatters that undo them.
    """

    tokens: Exchange | None = None
    direct: bool = False
    gather: Exchange | None = None
    scatter: Exchange | None = None
    whole_gather: Exchange | None = None
    whole_scatter: Exchange | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertProblem:
    """A layer on devices of a fabric, rank i on `ranks[i]`. capacities: the rows per expert that are planned for, ascending; passes: "training"
    counts forward and backward, "inference" forward. Raises: UsageError, UnknownName."""

    fabric: Fabric
    ranks: tuple[str, ...]
    shape: ExpertShape
    capacities: tuple[int, ...]
    cost: Cost | None = None
    passes: str = "training"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fabric", sustained(self.fabric))
        for name in self.ranks:
            self.fabric.device(name)
        if len(self.ranks) != self.shape.ranks or len(set(self.ranks)) < len(self.ranks):
            raise UsageError(f"the layer is for {self.shape.ranks} different devices, got {len(self.ranks)}", where="ranks")
        if not self.capacities or min(self.capacities) < 1 or list(self.capacities) != sorted(set(self.capacities)):
            raise UsageError(f"must be ascending and at least 1, got {list(self.capacities)}", where="capacities")
        if self.passes not in ("training", "inference"):
            raise UsageError(f"must be training or inference, got {self.passes!r}", where="passes")


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """What to try: `candidates` in the order in which they should be; `window`: capacities within one of its multiples share a choice."""

    candidates: tuple[Choice, ...]
    strategy: str
    window: int
    options: Mapping[str, Any] = field(default_factory=dict)


class ExpertStrategy(Listed, Protocol):
    """Options are fields of a frozen dataclass; `plan` raises Unsupported rather than answer wrongly."""

    def plan(self, problem: ExpertProblem) -> ExpertPlan: ...
