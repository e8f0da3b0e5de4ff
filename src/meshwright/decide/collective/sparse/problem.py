"""What a planner of sparse all-reduces is asked, and what it answers: programs of a cycle, whose sizes are symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....cost import Cost
from ....errors import UsageError
from ....fabric.edit import sustained
from ....fabric.fabric import Fabric
from ....graph.graph import Work
from ....program.program import Program
from ...strategies import Listed

__all__ = ["MAX_KEPT_OF_K", "SparsePlan", "SparseProblem", "SparseSizes", "SparseStrategy"]

MAX_KEPT_OF_K = 4, 3  # numerator, denominator: more entries are never sent, nor kept of a sum (`run.sparse.selection.MAX_KEPT_SHARE`)


@dataclass(frozen=True, kw_only=True)
class SparseSizes:
    """What the programs of an exchange are made of. `ranks`: their number. `wide`: 64-bit indices although 32 bits would do. `reach`: entries that a
    rank may select where that is more than usual; 0: as MAX_KEPT_OF_K says. The rest as in `SparseProblem`."""

    ranks: int
    elements: int
    k: int
    overlap: float = 0.3
    wide: bool = False
    reach: int = 0

    @property
    def entry_bytes(self) -> int:
        """An index and a value: 8, or 16 where indices need 64 bits."""
        return 16 if self.wide or self.elements > 1 << 31 else 8

    @property
    def most(self) -> int:
        """Entries that a rank may send, or a sum may keep."""
        return min(self.elements, max(self.reach, MAX_KEPT_OF_K[0] * self.k // MAX_KEPT_OF_K[1] + 1))

    def union(self, ranks: int) -> int:
        """Expected entries of the union of so many ranks' selections."""
        apart = self.elements * (1 - (1 - self.k / self.elements) ** ranks)
        return min(self.elements, round(self.overlap * self.k + (1 - self.overlap) * apart))


@dataclass(frozen=True, kw_only=True)
class SparseProblem:
    """An all-reduce of `elements` float32 of which every rank sends the k largest; rank i runs on device `ranks[i]`.

    overlap: share of a rank's selection that all ranks have in common (their union decides what the result weighs); the rest is independent.
    cost: prices of the ops "local|select" (a pass over the vector), "exact|select" (with an exact threshold), "region|accumulate",
    "global|select", "sums|merge" (finding those that are not zero), "result|decode", "result|merge", "tree|merge" and of messages; what it does not
    price is priced by bytes.
    Raises: UsageError, UnknownName.
    """

    fabric: Fabric
    ranks: tuple[str, ...]
    elements: int
    k: int
    overlap: float = 0.3
    cost: Cost | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fabric", sustained(self.fabric))
        for name in self.ranks:
            self.fabric.device(name)
        if len(self.ranks) < 2 or len(set(self.ranks)) < len(self.ranks):
            raise UsageError(f"needs at least 2 different devices, got {len(self.ranks)}", where="ranks")
        if self.elements < 1:
            raise UsageError(f"must be >= 1, got {self.elements}", where="elements")
        if not 1 <= self.k <= self.elements:
            raise UsageError(f"must be 1..{self.elements}, got {self.k}", where="k")
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"must be 0..1, got {self.overlap:g}", where="overlap")

    @property
    def sizes(self) -> SparseSizes:
        return SparseSizes(ranks=len(self.ranks), elements=self.elements, k=self.k, overlap=self.overlap)

    @property
    def entry_bytes(self) -> int:
        return self.sizes.entry_bytes

    @property
    def limit_words(self) -> float:
        """Ok-Topk's promise between its re-evaluations: 6k(P-1)/P words each way (of entries of two words)."""
        n = len(self.ranks)
        return 6 * self.k * (n - 1) / n * self.entry_bytes / 8

    @property
    def bound_words(self) -> float:
        """What each rank must receive at least of a result of k entries that were added up elsewhere: 2k(P-1)/P words (Ok-Topk, section 3.1)."""
        return self.limit_words / 3


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """`programs`: what a step may run, by name; `usual` is what it runs but for the others' turns. `words`: expected each way of the busiest rank
    in a usual step, by the published formula; `works`: of the programs' ops, by key."""

    strategy: str
    programs: Mapping[str, Program]
    usual: str
    words: float
    works: Mapping[str, Work]
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


class SparseStrategy(Listed, Protocol):
    """Options are fields of a frozen dataclass; `plan` raises Unsupported rather than answer wrongly."""

    def plan(self, problem: SparseProblem) -> SparsePlan: ...
