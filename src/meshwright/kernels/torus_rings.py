"""Two rings on a torus that share no cable and each pass every accelerator once: an all-reduce on both, both ways, keeps all four links busy.

A Cartesian product of two cycles always has such a pair (Kotzig 1973). Edges of rows begin as one colour, of columns as the other. A unit square
whose two horizontal edges have one colour and whose two vertical edges have the other exchanges them. Squares on the diagonal merge cycles of both
colours at once; for each row that is left the square above it that leaves fewest cycles is taken; last, any square that leaves fewer. What a square
does is read off the places of its corners on their cycles.
"""

from __future__ import annotations

from ..errors import Unsupported, UsageError

__all__ = ["ring_pair"]

Ring = tuple[int, ...]


def ring_pair(rows: int, columns: int) -> tuple[Ring, Ring]:
    """Two edge-disjoint Hamiltonian cycles; node (i, j) is number i · columns + j.

    Raises: UsageError for a side under 3 (its cables join the same pair twice); Unsupported if squares run out, which is not known to happen.
    """
    if rows < 3 or columns < 3:
        raise UsageError(f"a torus of {rows} x {columns} has double cables", where="rings", hint="both sides must be 3 or more")
    if rows < columns:
        turned = ring_pair(columns, rows)
        return tuple(tuple(x % rows * columns + x // rows for x in ring) for ring in turned)  # type: ignore[return-value]
    painted = _Painted(rows, columns)
    _merge(painted)
    if painted.cycles != 2:
        raise Unsupported(f"no pair of rings was found on a torus of {rows} x {columns}", where="rings", hint="use one ring")
    return painted.ring(0), painted.ring(1)


class _Painted:
    """`across[i][j]`: colour of the cable (i, j)-(i, j + 1); `down[i][j]`: of (i, j)-(i + 1, j). Every node has two cables of each colour."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.across = [[0] * columns for _ in range(rows)]
        self.down = [[1] * columns for _ in range(rows)]
        self.place: list[list[tuple[int, int]]] = [[], []]  # [colour][node]: (cycle, place on it)
        self.count = [0, 0]
        self.walk_both()

    @property
    def cycles(self) -> int:
        return sum(self.count)

    def neighbours(self, node: int, colour: int) -> tuple[int, int]:
        i, j = divmod(node, self.columns)
        up, left = (i - 1) % self.rows, (j - 1) % self.columns
        found = []
        if self.across[i][j] == colour:
            found.append(i * self.columns + (j + 1) % self.columns)
        if self.across[i][left] == colour:
            found.append(i * self.columns + left)
        if self.down[i][j] == colour:
            found.append((i + 1) % self.rows * self.columns + j)
        if self.down[up][j] == colour:
            found.append(up * self.columns + j)
        a, b = found
        return a, b

    def ring(self, colour: int, start: int = 0) -> Ring:
        order, before, at = [start], start, self.neighbours(start, colour)[0]
        while at != start:
            order.append(at)
            a, b = self.neighbours(at, colour)
            before, at = at, b if a == before else a
        return tuple(order)

    def walk(self, colour: int) -> None:
        place: list[tuple[int, int]] = [(-1, -1)] * (self.rows * self.columns)
        self.count[colour] = 0
        for node in range(len(place)):
            if place[node][0] < 0:
                for k, x in enumerate(self.ring(colour, node)):
                    place[x] = self.count[colour], k
                self.count[colour] += 1
        self.place[colour] = place

    def change(self, i: int, j: int) -> int | None:
        """By how much exchanging the square right of and below (i, j) changes the number of cycles; None where its colours do not allow it."""
        below, right = (i + 1) % self.rows, (j + 1) % self.columns
        flat, upright = self.across[i][j], self.down[i][j]
        if not (flat == self.across[below][j] != upright == self.down[i][right]):
            return None
        a, b, c, d = i * self.columns + j, i * self.columns + right, below * self.columns + j, below * self.columns + right
        return self._effect(flat, (a, b), (c, d)) + self._effect(upright, (a, c), (b, d))

    def _effect(self, colour: int, first: tuple[int, int], second: tuple[int, int]) -> int:
        """Edges `first` and `second` are replaced by those between their first ends and between their second ends."""
        place = self.place[colour]
        if place[first[0]][0] != place[second[0]][0]:
            return -1
        # on one cycle: walked the same way they are joined crosswise, which is one cycle again; opposite ways, two
        return 0 if self._forward(colour, first) == self._forward(colour, second) else 1

    def _forward(self, colour: int, edge: tuple[int, int]) -> bool:
        a, b = self.place[colour][edge[0]][1], self.place[colour][edge[1]][1]
        return b == a + 1 or (b == 0 and a != 1)

    def exchange(self, i: int, j: int) -> None:
        below, right = (i + 1) % self.rows, (j + 1) % self.columns
        for table, at in ((self.across, (i, j)), (self.across, (below, j)), (self.down, (i, j)), (self.down, (i, right))):
            table[at[0]][at[1]] ^= 1

    def walk_both(self) -> None:
        self.walk(0)
        self.walk(1)


def _merge(painted: _Painted) -> None:
    rows, columns = painted.rows, painted.columns
    for i in range(columns - 1):
        painted.exchange(i, i)
    painted.walk_both()
    for i in range(columns - 1, rows - 1):
        known = [(change, j) for j in range(columns) if (change := painted.change(i, j)) is not None]
        if known:
            painted.exchange(i, min(known)[1])
            painted.walk_both()
    while painted.cycles > 2:
        known2 = [(change, i, j) for i in range(rows) for j in range(columns) if (change := painted.change(i, j)) is not None]
        best = min(known2, default=(0, 0, 0))
        if best[0] >= 0:
            return
        painted.exchange(best[1], best[2])
        painted.walk_both()
