"""How placed embedding tables lie in one array, and which nodes of a captured graph look them up. Arithmetic and names, without torch.

A pack is [parts, slots]: part i holds the shards of holder i, one after the other, and zeros up to the longest part. With the degree n of
`plan.experts` a rank has parts / n of them, which lie and travel as experts do: node M (`meshwright.table_rows`) reads `M/ids`, what came of the
others' blocks of row numbers, and `M/back` is what came back of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

__all__ = ["IDS", "TABLE_IDS", "TABLE_ROWS", "Packing", "Place", "packing_of"]

TABLE_IDS, TABLE_ROWS = "meshwright.table_ids.default", "meshwright.table_rows.default"
IDS = "ids"


class Place(NamedTuple):
    """A shard of a part: its table, rows and columns; where its weights begin in the part, its lookups in ids, its columns in pooled rows."""

    part: int
    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    slot: int
    lookup: int
    column: int

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def elements(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Packing:
    """`dims`, `means`, `lookups`: of every table its columns, whether rows of a sample are averaged, and the lookups of a sample at most. `numbers`:
    all of it as operators get it."""

    parts: int
    dims: tuple[int, ...]
    means: tuple[bool, ...]
    lookups: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def slots(self) -> int:
        """Elements of the longest part."""
        return max([p.slot + p.elements for p in self.places], default=0)

    @property
    def longest(self) -> int:
        """Lookups of a sample in the part with most of them."""
        return max([p.lookup + self.lookups[p.table] for p in self.places], default=0)

    @property
    def columns(self) -> int:
        return max([p.column + p.width for p in self.places], default=0)

    def of_part(self, part: int) -> list[Place]:
        return [p for p in self.places if p.part == part]

    def first(self, table: int) -> int:
        """Where the table's columns begin among those of all."""
        return sum(self.dims[:table])

    def elements_of(self, part: int) -> int:
        """Elements that a sample's lookups read there."""
        return sum(p.width * self.lookups[p.table] for p in self.of_part(part))

    def numbers(self) -> list[int]:
        found = [self.parts, len(self.dims)]
        for triple in zip(self.dims, map(int, self.means), self.lookups, strict=True):
            found += triple
        for p in self.places:
            found += [p.part, p.table, *p.rows, *p.columns]
        return found


@lru_cache(maxsize=64)
def _packing(numbers: tuple[int, ...]) -> Packing:
    parts, tables = numbers[:2]
    of_tables, shards = numbers[2 : 2 + 3 * tables], numbers[2 + 3 * tables :]
    lookups = of_tables[2::3]
    ends = [[0, 0, 0] for _ in range(parts)]
    places = []
    for i in range(0, len(shards), 6):
        part, table, *corners = shards[i : i + 6]
        place = Place(part, table, (corners[0], corners[1]), (corners[2], corners[3]), *ends[part])
        ends[part] = [place.slot + place.elements, place.lookup + lookups[table], place.column + place.width]
        places.append(place)
    return Packing(parts, of_tables[::3], tuple(map(bool, of_tables[1::3])), lookups, tuple(places))


def packing_of(numbers: Sequence[int]) -> Packing:
    """What `Packing.numbers` wrote."""
    return _packing(tuple(numbers))
