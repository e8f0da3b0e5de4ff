"""The restart decision: the ranks of a new layout need regions of tensors; files of an old layout's ranks lie on devices and on storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...plan_regions import Box, Region, TensorSpec, elements

__all__ = ["STORAGE", "LostPart", "Piece", "RestartProblem", "Transfers"]

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
