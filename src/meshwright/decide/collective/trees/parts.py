"""What is lowered: parts of shards with the trees that carry them, and how trees become steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....fabric.fabric import Fabric
from .pack import Tree
from .shards import ShardTable

__all__ = ["Lowering", "Part", "turns_of"]

MAX_LIMB_TURNS = 8  # 0.964 of the bound of an all-reduce on 1,024 servers, two of which differ. More gain nothing, and a checker has more to follow


def turns_of(servers: int, window: int) -> int:
    """Turns in which a piece enters so many alike servers, all but the one that has it."""
    return -(-(servers - 1) // window) if window else 1


@dataclass(frozen=True)
class Part:
    """`units` units of shard `shard` from `first` on. `up` is an out-tree of the reversed graph (climbed), `down` one of the graph.

    `limbs`: of units among these, trees to other ranks, rooted at ranks of this part's.
    """

    shard: int
    first: int
    units: int
    up: Tree | None
    down: Tree | None
    limbs: tuple[Part, ...] = ()

    def meets(self, other: Part) -> bool:
        return self.first < other.first + other.units and other.first < self.first + self.units

    def cut(self, first: int, units: int) -> Part:
        """So many units of it from `first` on, counted in the part."""
        start = self.first + first
        limbs = tuple(
            x.cut(max(start - x.first, 0), min(start + units, x.first + x.units) - max(start, x.first))
            for x in self.limbs if x.meets(Part(self.shard, start, units, None, None))
        )  # fmt: skip
        return Part(self.shard, start, units, self.up, self.down, limbs)


@dataclass(frozen=True)
class Lowering:
    """How trees become steps. `shards`: weight units (ranks, or 1); `units` parts per shard; `depth` of every channel."""

    fabric: Fabric
    ranks: tuple[str, ...]
    names: tuple[str, ...]  # of the forest's nodes
    op: str
    root: int
    shards: int
    units: int
    pieces: int
    unroll: bool
    chunk_bytes: int
    name: str
    depth: int = 2
    fused: bool = True  # a rank with several children receives and passes on to the first in one step; else all children have lanes of their own
    pace: int = 0  # pieces that a rank's sending lane with the longest way may be ahead of its others; 0 = every lane goes as it can
    lead: int = 1  # paced: pieces that it is ahead of those with fewer hops; where lanes repeat, pieces of an iteration: it divides `pieces`
    servers: int = 1  # folded: so many alike runs of rank numbers; only the first is stored
    fixed: tuple[int, ...] = ()  # folded: ranks of a server that is not one of these, but stored
    window: int = 0  # folded: servers that a tree serves at once; 0 = all
    table: ShardTable | None = None  # uneven shards: shard r's parts are shares of its chunks, out of `shard_units[r]`; needs `unroll`
    shard_units: tuple[int, ...] = ()

    @cached_property
    def moving(self) -> list[int]:
        """Ranks of the alike servers."""
        return [v for v in range(len(self.ranks)) if v not in set(self.fixed)]

    @cached_property
    def size(self) -> int:
        """Ranks of one alike server."""
        return len(self.moving) // self.servers

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """Of every rank of an alike server: (which server, which of its ranks)."""
        return {v: divmod(i, self.size) for i, v in enumerate(self.moving)}

    @cached_property
    def buffer(self) -> dict[int, int]:
        """The buffer of every rank in the plain form, and if its lanes are stored, in the program."""
        first = sorted((*self.moving[: self.size], *self.fixed))
        return {v: i for i, v in enumerate([*first, *self.moving[self.size :]])}

    @cached_property
    def members(self) -> list[int]:
        """By rank: the number of its server, 0 of one that stays."""
        return [self.place[v][0] if v in self.place else 0 for v in range(len(self.ranks))]

    @cached_property
    def stored(self) -> list[int]:
        """By rank: where its lanes are stored, itself or its twin in the first server."""
        return [self.moving[self.place[v][1]] if v in self.place else v for v in range(len(self.ranks))]

    def member(self, v: int) -> int:
        """The number of v's server, 0 of one that stays."""
        return self.members[v]

    def moved(self, v: int, by: int) -> int:
        """Where rank v goes so many servers further on."""
        if v not in self.place:
            return v
        server, position = self.place[v]
        return self.moving[(server + by) % self.servers * self.size + position]

    @cached_property
    def by_rank(self) -> bool:
        """Whether ranks that stay have shards of their own."""
        return bool(self.fixed) and self.shards == len(self.ranks)

    @cached_property
    def turns(self) -> int:
        """Limbs cut a piece into as many, one after the other."""
        return min(turns_of(self.servers, self.window), MAX_LIMB_TURNS)

    @cached_property
    def turn(self) -> int:
        """Folded, of all shards or by rank of one that stays: units that an image is further on."""
        return (1 if self.by_rank else self.shards) * self.units // self.servers

    @cached_property
    def chunks(self) -> int:
        if self.table is not None:
            return self.table.chunks
        return self.shards * self.units * self.stored_pieces

    @cached_property
    def stored_pieces(self) -> int:
        """Pieces that have steps of their own."""
        return self.pieces if self.unroll else self.lead

    @cached_property
    def repeat(self) -> int:
        return self.pieces // self.stored_pieces
