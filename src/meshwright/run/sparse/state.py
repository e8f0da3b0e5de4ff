"""What a rank keeps between sparse all-reduces, and what one of them returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.entries import entry_values

__all__ = ["Entries", "RankState", "StepStats", "Update"]

Entries = NDArray[np.signedinteger[Any]]
INT32_ELEMENTS = 1 << 31  # of a vector whose indices fit int32


@dataclass(kw_only=True)
class StepStats:
    """One step of one rank, in words of 4 bytes. `words_*` are entries of the sums (or dense parts), `control_words` all that is sent beside them.

    kind: the program of the cycle that ran, e.g. "steady", "thresholds+regions", "dense". `limit_words`: 6k(P-1)/P, the volume that Ok-Topk
    promises outside of its re-evaluations. selected: entries that this rank chose; result: entries of the sum.
    """

    step: int
    kind: str
    words_sent: int = 0
    words_received: int = 0
    control_words: int = 0
    limit_words: float
    selected: int = 0
    result: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    words_to_regions: NDArray[np.int64] | None = None  # words that each rank receives while sums are made
    balanced: bool = False

    @property
    def within_limit(self) -> bool:
        return max(self.words_sent, self.words_received) <= self.limit_words


@dataclass(frozen=True, kw_only=True)
class Update:
    """The same on every rank: the sum over ranks divided by their number, where it is not zero.

    entries: (index, bits of the sum) rows; indices rise, except with hashed regions. dense: all of it instead, after a dense step.
    """

    elements: int
    ranks: int
    entries: Entries
    stats: StepStats
    dense: NDArray[np.float32] | None = None

    @property
    def indices(self) -> NDArray[np.signedinteger[Any]]:
        return np.ascontiguousarray(self.entries[:, 0])

    @property
    def values(self) -> NDArray[np.float32]:
        """Mean over ranks, one per index."""
        scaled: NDArray[np.float32] = entry_values(self.entries) * np.float32(1 / self.ranks)
        return scaled

    def scatter(self, out: NDArray[np.float32]) -> None:
        """Write the mean over all of `out`: zeros where nothing was chosen."""
        if self.dense is not None:
            np.multiply(self.dense, np.float32(1 / self.ranks), out=out)
            return
        out[:] = 0
        out[self.entries[:, 0]] = self.values


@dataclass(kw_only=True)
class RankState:
    """`residual` holds what was not sent yet. A step writes residual + gradient into `sums` and swaps the two when it is complete, so a step that
    is refused or fails leaves the residual as it was. Scratch arrays grow and are kept."""

    rank: int
    ranks: int
    elements: int
    k: int
    wide: bool = False  # int64 indices
    step: int = 0
    residual: NDArray[np.float32] = field(init=False)
    sums: NDArray[np.float32] = field(init=False)
    bits: NDArray[np.int32] = field(init=False)  # of `sums`
    given: float = 0.0  # sum of what this rank gave into the last result, for the ledger of mass
    given_size: float = 0.0
    total: float = 0.0  # sum of the last result
    _rooms: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wide = self.wide or self.elements > INT32_ELEMENTS
        self.residual, self.sums = (np.empty(self.elements, np.float32) for _ in range(2))
        for x in (self.residual, self.sums):
            x.fill(0)  # touches the pages now, and not in the first step
        self.bits = self.sums.view(np.int32)

    @property
    def entry_words(self) -> int:
        return 4 if self.wide else 2

    @property
    def limit_words(self) -> float:
        """6k(P-1)/P for entries of two words."""
        return 3 * self.entry_words * self.k * (self.ranks - 1) / self.ranks

    def entries(self, name: str, rows: int) -> Entries:
        """Scratch of that name with room for so many entries."""
        return self.room(name, 2 * rows, np.int64 if self.wide else np.int32).reshape(-1, 2)

    def room(self, name: str, length: int, dtype: Any) -> NDArray[Any]:
        kept = self._rooms.get(name)
        if kept is None or len(kept) < length:
            kept = self._rooms[name] = np.empty(max(length, 0 if kept is None else 2 * len(kept)), dtype)
        return kept[:length]

    def commit(self) -> None:
        """The step is complete: its sums, with what was given away cleared, are the new residual."""
        self.residual, self.sums = self.sums, self.residual
        self.bits = self.sums.view(np.int32)
        self.step += 1
