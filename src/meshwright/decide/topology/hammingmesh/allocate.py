"""Where a job's boards fit on a HammingMesh with failed and taken boards: exactly, or a proof that they do not, and the nearest shape that does.

A job of u x v boards needs u rows and v columns, in any places, whose crossings are all free: rows and columns of a HammingMesh are networks, so any
v columns form a ring. Free boards of a row are the bits of one integer. Rows are chosen one after the other; a branch ends when too few rows are left
that share v columns with those chosen, or when too few columns are left that u rows have. What is refused has been tried in every way. Large grids
have too many ways: after `QUICK_WORK_S` rows are also grown greedily from each row, and after `MAX_WORK_S` the answer is that it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ....errors import Infeasible, TimeLimit, UsageError
from ....kernels.effort import count_work, worked_s

__all__ = ["MAX_SIDE", "Board", "Boards", "Submesh", "allocate", "defragment", "find", "greedy"]

MAX_SIDE = 64  # rows or columns of boards
LIKELY_ROWS = 6  # begun with when the nearest shape is looked for: with half of 64 x 64 boards dead it has 4 to 12
MAX_MOVED = 2  # jobs that are moved at once to make room
QUICK_WORK_S, MAX_WORK_S = 0.5, 5.0  # of one search, counted: before rows are grown greedily, and after that. 64 x 64 boards, half dead: 0.2
WORK_PER_BRANCH_S = 1e-6  # counted work (`kernels.effort`) of a choice of rows that is looked at
Board = tuple[int, int]


@dataclass(frozen=True)
class Submesh:
    """Rows and columns of boards, in order; all crossings belong to one job."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def boards(self) -> list[Board]:
        return [(r, c) for r in self.rows for c in self.columns]


@dataclass
class Boards:
    """A grid of boards: `free[r]` has bit c set where board (r, c) is alive and not taken. `taken`: job -> its part."""

    rows: int
    columns: int
    free: list[int]
    taken: dict[str, Submesh] = field(default_factory=dict)

    @staticmethod
    def of(rows: int, columns: int, failed: Iterable[Board] = ()) -> Boards:
        """Raises: UsageError for sides out of 1..64 and boards outside the grid."""
        if not (1 <= rows <= MAX_SIDE and 1 <= columns <= MAX_SIDE):
            raise UsageError(f"a grid of {rows} x {columns} boards; sides must be 1..{MAX_SIDE}", where="boards", hint="e.g. 8x8")
        boards = Boards(rows, columns, [(1 << columns) - 1] * rows)
        for r, c in failed:
            if not (0 <= r < rows and 0 <= c < columns):
                raise UsageError(f"there is no board {r}.{c}", where="failed", hint=f"rows 0..{rows - 1}, columns 0..{columns - 1}")
            boards.free[r] &= ~(1 << c)
        return boards

    @property
    def free_boards(self) -> int:
        return sum(row.bit_count() for row in self.free)

    def take(self, job: str, part: Submesh) -> None:
        """Raises: UsageError for a name or board that is taken already."""
        mask = _mask(part.columns)
        if job in self.taken or any(self.free[r] & mask != mask for r in part.rows):
            raise UsageError("its name or one of its boards is taken", where=f"job {job}")
        for r in part.rows:
            self.free[r] &= ~mask
        self.taken[job] = part

    def give_back(self, job: str) -> Submesh:
        part = self.taken.pop(job)
        for r in part.rows:
            self.free[r] |= _mask(part.columns)
        return part


def _mask(columns: Iterable[int]) -> int:
    return sum(1 << c for c in columns)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _turned(free: Sequence[int], columns: int) -> list[int]:
    return [sum((row >> c & 1) << r for r, row in enumerate(free)) for c in range(columns)]


def find(free: Sequence[int], columns: int, u: int, v: int, turned: Sequence[int] | None = None) -> Submesh | None:
    """u rows and v columns whose crossings are free, or None: then there are none. `turned`: the grid with rows and columns exchanged, if known.

    Raises: TimeLimit where neither was found."""
    if u > v:  # the shorter side is chosen one by one
        found = find(_turned(free, columns) if turned is None else turned, len(free), v, u)
        return None if found is None else Submesh(found.columns, found.rows)
    able, chosen = list(enumerate(free)), None
    try:
        chosen = _rows(able, u, v, worked_s() + QUICK_WORK_S)
    except TimeLimit:
        chosen = _grown(free, u, v) or _rows(able, u, v, worked_s() + MAX_WORK_S)
    if chosen is None:
        return None
    mask = -1
    for r in chosen:
        mask &= free[r]
    return Submesh(tuple(sorted(chosen)), tuple(list(_bits(mask))[:v]))


def _grown(free: Sequence[int], u: int, v: int) -> list[int] | None:
    """From each row: the row that shares most columns with all that are chosen is next."""
    for start, mask in enumerate(free):
        chosen = [start]
        while len(chosen) < u and mask.bit_count() >= v:
            count_work(WORK_PER_BRANCH_S * len(free))
            chosen.append(max((r for r in range(len(free)) if r not in chosen), key=lambda r: ((free[r] & mask).bit_count(), -r)))
            mask &= free[chosen[-1]]
        if mask.bit_count() >= v:
            return chosen
    return None


def _rows(able: list[tuple[int, int]], u: int, v: int, until_s: float) -> list[int] | None:
    """`able`: (row, its columns that are shared with all rows chosen). The first choice of u of them that share v columns."""
    count_work(WORK_PER_BRANCH_S * len(able))
    if worked_s() > until_s:
        text = "no place was found for so many rows and columns, and not every choice of rows was tried"
        raise TimeLimit(text, where="allocation", hint="a smaller shape: on grids like this one the search takes too long")
    able = _peeled(able, u, v)
    if len(able) < u:
        return None
    if u == 0:
        return []
    able.sort(key=lambda row: row[1].bit_count())
    for i, (r, mask) in enumerate(able):
        if len(able) - i < u:
            return None
        rest = [(s, both) for s, other in able[i + 1 :] if (both := other & mask).bit_count() >= v]
        if len(rest) >= u - 1 and (found := _rows(rest, u - 1, v, until_s)) is not None:
            return [r, *found]
    return None


def _peeled(able: list[tuple[int, int]], u: int, v: int) -> list[tuple[int, int]]:
    """Without columns that fewer than u rows have and rows with fewer than v columns, until neither is left."""
    while True:
        enough = _held_by(u, [mask for _, mask in able])
        kept = [(r, both) for r, mask in able if (both := mask & enough).bit_count() >= v]
        if len(kept) < u or [m for _, m in kept] == [m for _, m in able]:
            return kept
        able = kept


def _held_by(u: int, masks: Sequence[int]) -> int:
    """Bits that at least u of the masks have: sums of all bits at once, `digits[k]` holding bit k of every column's count."""
    digits: list[int] = []
    for mask in masks:
        for k, digit in enumerate(digits):
            digits[k], mask = digit ^ mask, digit & mask
            if not mask:
                break
        else:
            if mask:
                digits.append(mask)
    enough, equal = 0, -1  # compared with u from the highest digit down
    for k in reversed(range(max(len(digits), u.bit_length()))):
        digit = digits[k] if k < len(digits) else 0
        if u >> k & 1:
            equal &= digit
        else:
            enough |= equal & digit
            equal &= ~digit
    return enough | equal


def greedy(free: Sequence[int], columns: int, u: int, v: int) -> Submesh | None:
    """The paper's: begin with the first row that has v columns, add rows while v remain. It may miss what is there."""
    chosen: list[int] = []
    shared = (1 << columns) - 1
    for r, row in enumerate(free):
        if len(chosen) < u and (shared & row).bit_count() >= v:
            chosen.append(r)
            shared &= row
    return Submesh(tuple(chosen), tuple(list(_bits(shared))[:v])) if len(chosen) == u else None


def allocate(boards: Boards, u: int, v: int, *, turn: bool = True) -> Submesh:
    """A place for u x v boards, or v x u with `turn`.

    Raises: Infeasible with the nearest shape that fits: most boards up to as many as asked, of equals the nearest sides. TimeLimit where it is not
    known. UsageError.
    """
    if u < 1 or v < 1:
        raise UsageError(f"a job of {u} x {v} boards", where="shape", hint="both sides must be 1 or more")
    late = None
    for shape in dict.fromkeys([(u, v), (v, u)] if turn else [(u, v)]):
        try:
            found = find(boards.free, boards.columns, *shape)
        except TimeLimit as error:
            late = error
            continue
        if found is not None:
            return found
    if late is not None:
        raise late
    near, certain = _nearest(boards, u, v)
    said = f"{near[0]} x {near[1]}{'' if certain else ', as far as was tried'}" if near else "none: no board is free"
    raise Infeasible(
        f"{u} x {v} boards do not fit: every choice of rows was tried", where="allocation", hint=f"the nearest shape that fits: {said}",
        data={
            "shape": [u, v], "free_boards": boards.free_boards, "nearest": list(near) if near else None, "nearest_is_certain": certain,
            "rows": boards.rows, "columns": boards.columns,
        },
    )  # fmt: skip


def _nearest(boards: Boards, u: int, v: int) -> tuple[tuple[int, int] | None, bool]:
    """For every number of rows the least number of columns that would be more boards is refused, or found and raised: few refusals prove the best.
    False: some search was cut, and what it looked for counts as refused."""
    most, best, turned, certain = min(u * v, boards.free_boards), 0, _turned(boards.free, boards.columns), True

    known: dict[tuple[int, int], bool] = {}

    def fits(shape: tuple[int, int]) -> bool:
        nonlocal certain
        if shape not in known and certain:
            try:
                known[shape] = find(boards.free, boards.columns, *shape, turned) is not None
            except TimeLimit:
                certain = False
        return known.get(shape, False)

    for a in sorted(range(1, boards.rows + 1), key=lambda a: (abs(a - LIKELY_ROWS), a)):
        while (b := best // a + 1) <= min(boards.columns, most // a) and fits((a, b)):
            best = a * b
    shapes = [(a, best // a) for a in range(1, boards.rows + 1) if best and best % a == 0 and best // a <= boards.columns]
    return next((s for s in sorted(shapes, key=lambda s: (abs(s[0] - u) + abs(s[1] - v), s)) if fits(s)), None), certain


def defragment(boards: Boards, u: int, v: int) -> tuple[Mapping[str, Submesh], Submesh] | None:
    """(jobs that move and where to, place for u x v boards): fewest jobs up to `MAX_MOVED`, then fewest boards; None where that does not make room.

    The new job is placed first, then those that move, largest first, each exactly; other orders and places are not tried.
    """
    for count in range(MAX_MOVED + 1):
        some = sorted(combinations(boards.taken, count), key=lambda jobs: (sum(len(boards.taken[j].boards) for j in jobs), jobs))
        for jobs in some:
            trial = Boards(boards.rows, boards.columns, list(boards.free), dict(boards.taken))
            old = {job: trial.give_back(job) for job in jobs}
            new = find(trial.free, trial.columns, u, v) or find(trial.free, trial.columns, v, u)
            if new is None:
                continue
            trial.take("", new)
            moved = {}
            for job in sorted(jobs, key=lambda j: -len(old[j].boards)):
                place = find(trial.free, trial.columns, *old[job].shape) or find(trial.free, trial.columns, *old[job].shape[::-1])
                if place is None:
                    break
                trial.take(job, place)
                moved[job] = place
            else:
                return moved, new
    return None
