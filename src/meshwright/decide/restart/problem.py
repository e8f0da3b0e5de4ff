"""The restart decision: the ranks of a new layout need regions of tensors; files of an old layout's ranks lie on devices and on storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ...kernels.assignment import Assignment
from ...plan.regions import Box, Region, TensorSpec, elements
from ..strategies import Listed

__all__ = [
    "STORAGE", "LostPart", "Piece", "PlacementProblem", "PlacementStrategy", "RestartProblem", "RestartStrategy", "TransferStrategy", "Transfers",
]  # fmt: skip

STORAGE = -1  # as a source: the checkpoint on storage that every rank can read


@dataclass(frozen=True, kw_only=True)
class RestartProblem:
    """`needs[r]`: what new rank r must hold. `files`: what each old rank's file holds. `homes`: devices that have a file, by file.

    `placement[r]`: the device of new rank r, `servers[r]` the server it is in ("" unknown). `stored`: files on storage that all can read.
    Devices without a new rank run no process: what only they hold cannot be sent.
    """

    tensors: Mapping[str, TensorSpec]
    needs: tuple[Mapping[str, Region], ...]
    files: Mapping[str, Mapping[str, Region]]
    homes: Mapping[str, tuple[str, ...]]
    placement: tuple[str, ...]
    servers: tuple[str, ...] = ()
    stored: frozenset[str] = frozenset()

    @cached_property
    def holders(self) -> dict[str, list[tuple[str, Region]]]:
        """(file, region) of every file that holds a part of a tensor, by tensor, in the order of file names."""
        found: dict[str, list[tuple[str, Region]]] = {}
        for file in sorted(self.files):
            for name, region in self.files[file].items():
                found.setdefault(name, []).append((file, region))
        return found

    @cached_property
    def rank_of(self) -> dict[str, int]:
        return {device: rank for rank, device in enumerate(self.placement)}

    def size_bytes(self, tensor: str, *boxes: Box) -> int:
        return elements(boxes) * self.tensors[tensor].item_bytes


@dataclass(frozen=True)
class Piece:
    """Rank `rank` gets `box` of `tensor`, read from `file` by rank `source` (itself: the file is local; STORAGE: it reads the shared file)."""

    rank: int
    tensor: str
    box: Box
    file: str
    source: int


@dataclass(frozen=True)
class LostPart:
    """Nobody that takes part holds this; `files` had it."""

    rank: int
    tensor: str
    box: Box
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Where every byte comes from. Bytes per new rank: reused in place, from other ranks, from storage; `links`: (source, rank) -> bytes."""

    pieces: tuple[Piece, ...]
    lost: tuple[LostPart, ...]
    needed_bytes: tuple[int, ...]
    reused_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    stored_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    links: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are not in place."""
        return sum(self.received_bytes) + sum(self.stored_bytes)


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """`reuse[i, j]`: bytes of what new rank i needs that lie on device j (`reuse_bytes`). `allowed[i, j]`: may it go there? None = anywhere."""

    reuse: NDArray[np.int64]
    allowed: NDArray[np.bool_] | None = None


class RestartStrategy(Listed, Protocol):
    """A frozen dataclass of options. answers: which of the decision's questions its `plan` takes: "placement" (which rank goes on which device) or
    "transfers" (which byte comes from where)."""

    answers: ClassVar[Literal["placement", "transfers"]]


class PlacementStrategy(RestartStrategy, Protocol):
    answers: ClassVar[Literal["placement", "transfers"]] = "placement"

    def plan(self, problem: PlacementProblem) -> Assignment:
        """Every rank on a device of its own; the cost is minus the bytes in place."""
        ...


class TransferStrategy(RestartStrategy, Protocol):
    answers: ClassVar[Literal["placement", "transfers"]] = "transfers"

    def plan(self, problem: RestartProblem) -> Transfers:
        """A function of the problem alone: every rank of a run works out the same."""
        ...
