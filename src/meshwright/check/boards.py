"""Jobs on a grid of boards, looked at again: right shapes, boards that are alive, no board with two jobs at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from .verdict import Finding, Verdict

__all__ = ["check_boards"]

Part = tuple[str, tuple[int, int], Sequence[int], Sequence[int], float, float]  # job, shape asked for, rows, columns, start, end


def check_boards(rows: int, columns: int, failed: Iterable[tuple[int, int]], parts: Sequence[Part]) -> Verdict:
    """`parts` hold their boards from start to end; a job may be turned by 90 degrees. Jobs that move are not looked at here."""
    dead, findings = set(failed), list[Finding]()
    witness: dict[str, Any]
    held: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for name, shape, own_rows, own_columns, start, end in parts:
        if (len(set(own_rows)), len(set(own_columns))) not in (shape, shape[::-1]):
            findings.append(Finding(check="plan", message=f"job {name} asked for {shape[0]} x {shape[1]} boards", witness={"job": name}))
        for board in ((r, c) for r in own_rows for c in own_columns):
            if board in dead or not (0 <= board[0] < rows and 0 <= board[1] < columns):
                witness = {"job": name, "board": list(board)}
                findings.append(Finding(check="plan", message=f"job {name} has a board that is not alive", witness=witness))
            held.setdefault(board, []).append((start, end, name))
    for board, spans in held.items():
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            if start < end:
                witness = {"board": list(board), "at_s": start}
                findings.append(Finding(check="plan", message=f"jobs {one} and {other} share a board", witness=witness))
    return Verdict(findings=tuple(findings))
