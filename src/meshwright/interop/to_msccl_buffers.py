"""In which buffer the chunks of every step lie: the first or the second home, copies where a chunk changes homes without a store, cuts in between."""

from __future__ import annotations

from ..program.program import Program
from .to_msccl_memory import Access, Home, Memory, Move, Place, accesses_of, execution_order
from .to_msccl_order import root_of

__all__ = ["moves_of"]

Cell = tuple[int, int]  # root buffer, chunk


def moves_of(p: Program, place: Place, most: int, depth: int) -> tuple[list[Move], Memory]:
    """The program's steps with homes, cut to at most `most` chunks each. Copies come first, in lanes of their own.

    Raises: Unsupported where the schedule does not fit the place, or no order completes it with channels of `depth`.
    """
    memory = Memory(p, place)
    if place == "in":
        memory.require_in_place()
    accesses = accesses_of(p, memory, execution_order(p, depth))
    memory.cut(accesses)
    return _Homes(p, memory, accesses, most).moves(), memory


class _Homes:
    """Gives homes to the chunks of all steps, and cuts steps where their chunks lie apart."""

    def __init__(self, p: Program, memory: Memory, accesses: list[Access], most: int) -> None:
        self.p, self.memory, self.accesses, self.most = p, memory, accesses, most
        self.by_order = sorted(range(len(accesses)), key=lambda k: accesses[k].move.order)

    def cells(self, of: tuple[int, int], size: int) -> list[Cell]:
        unit = self.memory.unit
        return [(of[0], of[1] // unit + k) for k in range(size // unit)]

    def moves(self) -> list[Move]:
        stored, summed = self._stored()
        copied = self._copied(stored, summed)
        homes = self._homes(copied)
        pieces = self._pieces(homes)
        return self._written(homes, pieces, copied)

    def _stored(self) -> tuple[list[set[Cell]], list[set[Cell]]]:
        """Per rank: cells that some step stores, and those whose first store is a local sum onto them. Allots scratch."""
        stored: list[set[Cell]] = [set() for _ in range(self.p.ranks)]
        summed: list[set[Cell]] = [set() for _ in range(self.p.ranks)]
        read: list[set[Cell]] = [set() for _ in range(self.p.ranks)]
        for k in self.by_order:
            a = self.accesses[k]
            r = a.move.rank
            if "X" in a.move.parts:
                read[r].update(c for c in self.cells(a.src, a.size) if self.memory.in_input(r, c) < 0)
            if "D" in a.move.parts:
                cells = self.cells(a.dst, a.size)
                if a.move.parts == "XAD":
                    summed[r].update(c for c in cells if c not in stored[r])
                stored[r].update(cells)
        for r in range(self.p.ranks):
            self.memory.allot(r, stored[r] | read[r])
        return stored, summed

    def _copied(self, stored: list[set[Cell]], summed: list[set[Cell]]) -> list[set[Cell]]:
        """Per rank: cells that are copied from the first to the second home before anything else."""
        out: list[set[Cell]] = [set() for _ in range(self.p.ranks)]
        if self.memory.place == "in":
            return out
        for r in range(self.p.ranks):
            out[r] = {cell for cell in summed[r] if self.memory.in_input(r, cell) >= 0}
            root, lo, hi = self.memory.outputs[r]
            for k in range(lo // self.memory.unit, hi // self.memory.unit):
                if self.memory.in_input(r, (root, k)) >= 0 and (root, k) not in stored[r]:
                    out[r].add((root, k))
        return out

    def _homes(self, copied: list[set[Cell]]) -> list[tuple[list[Home], list[Home]]]:
        """Per step the homes of the cells it reads and of those it stores."""
        moved = [set(cells) for cells in copied]
        if self.memory.place != "both":  # copied cells that nobody stores to stay readable in the input, so that nobody need wait for the copy
            stores: list[set[Cell]] = [set() for _ in copied]
            for a in self.accesses:
                if "D" in a.move.parts and moved[a.move.rank]:
                    stores[a.move.rank].update(self.cells(a.dst, a.size))
            moved = [cells & stored for cells, stored in zip(moved, stores, strict=True)]
        self.synced = [set(cells) for cells in moved]
        out: list[tuple[list[Home], list[Home]]] = [([], []) for _ in self.accesses]
        for k in self.by_order:
            a = self.accesses[k]
            r = a.move.rank
            if "X" in a.move.parts:
                for cell in self.cells(a.src, a.size):
                    first = None if cell in moved[r] else self.memory.first_home(r, cell)
                    out[k][0].append(first or self.memory.second_home(r, cell))
            if "D" in a.move.parts:
                cells = self.cells(a.dst, a.size)
                moved[r].update(cells)
                out[k][1].extend(self.memory.second_home(r, cell) for cell in cells)
        return out

    def _pieces(self, homes: list[tuple[list[Home], list[Home]]]) -> list[list[int]]:
        """Per step the first chunks of its pieces; both ends of a message are cut alike."""
        if all(a.size == self.memory.unit for a in self.accesses):  # nothing to cut
            return [[0]] * len(self.accesses)
        label = list(range(len(self.accesses)))
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        for k, a in enumerate(self.accesses):
            if a.move.sends >= 0:
                sends.setdefault(a.move.sends, []).append(k)
            if a.move.receives >= 0:
                receives.setdefault(a.move.receives, []).append(k)
        # messages match first in first out, so the k-th send and the k-th receive are one message and get the same cuts
        for channel, ends in sends.items():
            for x, y in zip(ends, receives.get(channel, []), strict=True):
                label[root_of(label, x)] = root_of(label, y)
        cuts: dict[int, set[int]] = {}
        for k, (src, dst) in enumerate(homes):
            mine = cuts.setdefault(root_of(label, k), {0})
            for home in (src, dst):
                mine.update(j for j in range(1, len(home)) if home[j] != (home[j - 1][0], home[j - 1][1] + 1))
        out = []
        for k, a in enumerate(self.accesses):
            chunks = a.size // self.memory.unit
            at = sorted(cuts[root_of(label, k)])
            out.append([j for lo, hi in zip(at, [*at[1:], chunks], strict=True) for j in range(lo, hi, self.most)])
        return out

    def _written(self, homes: list[tuple[list[Home], list[Home]]], pieces: list[list[int]], copied: list[set[Cell]]) -> list[Move]:
        moves: list[Move] = []
        copy_of: list[dict[tuple[int, int], int]] = [{} for _ in range(self.p.ranks)]
        for r, cells in enumerate(copied):
            for run in self._runs(r, sorted(cells)):
                first = self.memory.first_home(r, run[0])
                assert first is not None, "only cells of the input are copied"
                copy_of[r] |= dict.fromkeys(run, len(moves))
                moves.append(Move(r, -1 - r, -1, "XD", -1, -1, first, self.memory.second_home(r, run[0]), len(run)))
        last: list[int] = []
        begin = len(moves)
        for starts in pieces:
            begin += len(starts)
            last.append(begin - 1)
        # pieces stand between the step they are of and the next one, in the same order
        scale = 1 + max(map(len, pieces), default=1)
        for k, a in enumerate(self.accesses):
            m, starts = a.move, pieces[k]
            ends = [*starts[1:], a.size // self.memory.unit]
            for j, (lo, hi) in enumerate(zip(starts, ends, strict=True)):
                src, dst = (home[lo] if home else ("", 0) for home in homes[k])
                after = [last[d] for d in m.after] if j == 0 else []
                for used, of in (("X" in m.parts, a.src), ("D" in m.parts, a.dst)):
                    used &= bool(self.synced[m.rank])
                    for cell in self.cells((of[0], of[1] + lo * self.memory.unit), (hi - lo) * self.memory.unit) if used else ():
                        if cell in self.synced[m.rank]:
                            after.append(copy_of[m.rank][cell])
                after = sorted(set(after))
                moves.append(Move(m.rank, m.lane, m.order * scale + j, m.parts, m.receives, m.sends, src, dst, hi - lo, after))
        return moves

    def _runs(self, rank: int, cells: list[Cell]) -> list[list[Cell]]:
        """Cells whose first and second homes both follow each other, at most `most` together."""
        runs: list[list[Cell]] = []
        for cell in cells:
            if runs and len(runs[-1]) < self.most and (runs[-1][-1][0], runs[-1][-1][1] + 1) == cell and self._follows(rank, runs[-1][-1], cell):
                runs[-1].append(cell)
            else:
                runs.append([cell])
        return runs

    def _follows(self, rank: int, one: tuple[int, int], two: tuple[int, int]) -> bool:
        a, b = self.memory.first_home(rank, one), self.memory.first_home(rank, two)
        c, d = self.memory.second_home(rank, one), self.memory.second_home(rank, two)
        return a is not None and b is not None and (a[0], a[1] + 1) == b and (c[0], c[1] + 1) == d
