"""Jobs on a grid of boards: placed one after the other, or replayed over time; each placement checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..check.boards import check_boards
from ..decide.topology.hammingmesh.allocate import Board, Boards, Submesh, allocate, defragment
from ..decide.topology.hammingmesh.replay import BoardJob, Replay, best_replay
from ..errors import Infeasible

__all__ = ["Allocated", "place_jobs", "replay_jobs"]

FOREVER_S = float("inf")


@dataclass(frozen=True)
class Allocated:
    """`moved`: jobs that moved to make room, and where to."""

    job: str
    part: Submesh
    moved: dict[str, Submesh]


def place_jobs(rows: int, columns: int, failed: Sequence[Board], shapes: Sequence[tuple[int, int]], *, move: bool = False) -> list[Allocated]:
    """Jobs `job1`, `job2`, ... in this order; with `move`, earlier ones may move. Raises: Infeasible (as `allocate`), UsageError, CheckFailed."""
    boards = Boards.of(rows, columns, failed)
    found: list[Allocated] = []
    for number, (u, v) in enumerate(shapes, 1):
        moved: dict[str, Submesh] = {}
        try:
            part = allocate(boards, u, v)
        except Infeasible:
            made = defragment(boards, u, v) if move else None
            if made is None:
                raise
            moved, part = dict(made[0]), made[1]
            for job in moved:
                boards.give_back(job)
            for job, place in moved.items():
                boards.take(job, place)
        boards.take(f"job{number}", part)
        found.append(Allocated(f"job{number}", part, moved))
    parts = [(f"job{i}", shape, boards.taken[f"job{i}"].rows, boards.taken[f"job{i}"].columns, 0.0, FOREVER_S) for i, shape in enumerate(shapes, 1)]
    check_boards(rows, columns, failed, parts).raise_if_wrong()
    return found


def replay_jobs(rows: int, columns: int, failed: Sequence[Board], jobs: Sequence[BoardJob]) -> list[Replay]:
    """Of every policy, the best first; those in which no job moves are checked. Raises: as `best_replay`; CheckFailed."""
    found = best_replay(rows, columns, failed, jobs)
    for replay in found:
        if not any(p.moves for p in replay.placed):
            parts = [
                (p.job.name, (p.job.rows, p.job.columns), p.part.rows, p.part.columns, p.start_s, p.start_s + p.job.duration_s) for p in replay.placed
            ]
            check_boards(rows, columns, failed, parts).raise_if_wrong()
    return found
