"""A mix of jobs on a HammingMesh, replayed: when each begins and where, and how busy the boards are.

Jobs wait in one queue. At every arrival and end, each waiting job is tried in the order of arrival; one that does not fit lets later ones pass.
Policies: `greedy` (the paper's), `turned` (greedy, also turned by 90 degrees), `exact`, `moved` (exact, and jobs move to make room).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ....errors import Infeasible, TimeLimit
from .allocate import Board, Boards, Submesh, defragment, find, greedy

__all__ = ["POLICIES", "BoardJob", "Placed", "Replay", "best_replay", "replay"]

POLICIES = ("greedy", "turned", "exact", "moved")


@dataclass(frozen=True, kw_only=True)
class BoardJob:
    """`rows` x `columns` boards for `duration_s` from the moment it is placed."""

    name: str
    rows: int
    columns: int
    arrival_s: float
    duration_s: float


@dataclass(frozen=True)
class Placed:
    job: BoardJob
    start_s: float
    part: Submesh
    moves: int = 0  # jobs that moved to make room for it


@dataclass(frozen=True)
class Replay:
    """`utilisation`: board-seconds of jobs over those of boards that are alive, until the last job ends."""

    policy: str
    placed: tuple[Placed, ...]
    end_s: float
    utilisation: float
    wait_s: float  # on average


def _place(boards: Boards, job: BoardJob, policy: str) -> tuple[Submesh, int] | None:
    shapes = list(dict.fromkeys([(job.rows, job.columns), (job.columns, job.rows)]))
    search = greedy if policy in ("greedy", "turned") else find
    for shape in shapes[:1] if policy == "greedy" else shapes:
        if (part := search(boards.free, boards.columns, *shape)) is not None:
            return part, 0
    if policy == "moved" and (made := defragment(boards, job.rows, job.columns)) is not None:
        for name in made[0]:
            boards.give_back(name)
        for name, part in made[0].items():
            boards.take(name, part)
        return made[1], len(made[0])
    return None


def replay(rows: int, columns: int, failed: Iterable[Board], jobs: Sequence[BoardJob], policy: str) -> Replay:
    """Raises: UsageError for the grid; Infeasible for a job that does not fit even on the empty grid."""
    boards = Boards.of(rows, columns, failed)
    alive = boards.free_boards
    for job in jobs:
        if all(find(boards.free, columns, *shape) is None for shape in ((job.rows, job.columns), (job.columns, job.rows))):
            text = f"{job.rows} x {job.columns} boards never fit on {alive} boards that are alive"
            raise Infeasible(text, where=f"job {job.name}", hint="leave it out, or ask for fewer boards", data={"alive_boards": alive})
    left = sorted(jobs, key=lambda j: (j.arrival_s, j.name))
    if policy == "greedy":  # turned where it fits only so, as all others may be
        left = [j if greedy(boards.free, columns, j.rows, j.columns) else replace(j, rows=j.columns, columns=j.rows) for j in left]
    waiting: list[BoardJob] = []
    running: list[tuple[float, str]] = []
    placed: list[Placed] = []
    now = 0.0
    while left or waiting or running:
        now = min([j.arrival_s for j in left[:1]] + [end for end, _ in running[:1]]) if left or running else now
        while running and running[0][0] <= now:
            boards.give_back(heapq.heappop(running)[1])
        while left and left[0].arrival_s <= now:
            waiting.append(left.pop(0))
        still = []
        for job in waiting:
            found = _place(boards, job, policy)
            if found is None:
                still.append(job)
                continue
            boards.take(job.name, found[0])
            heapq.heappush(running, (now + job.duration_s, job.name))
            placed.append(Placed(job, now, *found))
        if still and not running and not left:
            job = still[0]
            raise Infeasible(f"the {policy} policy finds no place on the empty grid", where=f"job {job.name}", hint="use the exact policy")
        waiting = still
    end = max((p.start_s + p.job.duration_s for p in placed), default=0.0)
    busy = sum(p.job.rows * p.job.columns * p.job.duration_s for p in placed)
    wait = sum(p.start_s - p.job.arrival_s for p in placed) / max(1, len(placed))
    return Replay(policy, tuple(placed), end, busy / (alive * end) if end else 0.0, wait)


def best_replay(rows: int, columns: int, failed: Sequence[Board], jobs: Sequence[BoardJob]) -> list[Replay]:
    """All policies that place every job, the best utilisation first (of equals the one that moves less): never below greedy.

    Raises: as `replay`; TimeLimit where no policy knew all places in time."""
    found, late = [], None
    for policy in POLICIES:
        try:
            found.append(replay(rows, columns, failed, jobs, policy))
        except Infeasible as refused:
            if policy not in ("greedy", "turned"):
                raise refused
        except TimeLimit as error:
            late = error
    if late is not None and not found:
        raise late
    return sorted(found, key=lambda r: (-r.utilisation, sum(p.moves for p in r.placed), POLICIES.index(r.policy)))
