"""`meshwright fabric allocate`: where jobs fit on the boards of a HammingMesh, or a proof that they do not; a mix of jobs replayed."""

from __future__ import annotations

import argparse
import re
from typing import Any

from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Where jobs fit on a grid of boards, some of them failed: exactly, or the nearest shape that does."
EPILOG = """\
examples:
  meshwright fabric allocate --boards 8x8 --failed 0.1,3.4 --job 2x3 --job 4x4
  meshwright fabric allocate --boards 16x16 --mix jobs.toml        every policy's utilisation

A job of RxC boards takes R rows and C columns of boards, in any places: each row and each column of boards is a network of its own."""

MAX_SIDE_DIGITS = 4  # of a number of rows or columns as it is written


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--boards", required=True, metavar="RxC", help="rows and columns of boards, at most 64 each")
    parser.add_argument("--failed", default="", metavar="LIST", help="boards that are not alive, as row.column, e.g. 0.1,3.4")
    parser.add_argument("--job", action="append", default=[], metavar="RxC", help="boards of a job; several jobs are placed in this order")
    parser.add_argument("--move", action="store_true", help="earlier jobs may move, at most two at a time")
    parser.add_argument("--mix", metavar="FILE", help="replay the jobs of this file instead (TOML: arrival, duration, boards)")


def _pair(text: str, sep: str, where: str) -> tuple[int, int]:
    from ..errors import UsageError

    found = re.fullmatch(rf"([0-9]{{1,{MAX_SIDE_DIGITS}}}){re.escape(sep)}([0-9]{{1,{MAX_SIDE_DIGITS}}})", text.strip())
    if not found:
        raise UsageError(f"{text[:32]!r} is not two whole numbers", where=where, hint=f"e.g. 2{sep}3")
    return int(found[1]), int(found[2])


def run(args: argparse.Namespace) -> Result:
    from ..drive.boards import place_jobs
    from ..errors import UsageError

    rows, columns = _pair(args.boards, "x", "--boards")
    failed = [_pair(part, ".", "--failed") for part in args.failed.split(",") if part]
    if bool(args.job) == bool(args.mix):
        raise UsageError("give --job, or --mix", hint="e.g. --job 2x3")
    if args.mix:
        return _mix(args.mix, rows, columns, failed)
    found = place_jobs(rows, columns, failed, [_pair(shape, "x", "--job") for shape in args.job], move=args.move)
    parts = [
        {
            "job": one.job, "rows": list(one.part.rows), "columns": list(one.part.columns),
            "moved": {job: {"rows": list(p.rows), "columns": list(p.columns)} for job, p in one.moved.items()},
        }
        for one in found
    ]  # fmt: skip
    document = {"schema": "meshwright.board-allocation", "version": 1, "rows": rows, "columns": columns, "failed": failed, "jobs": parts}
    return Result(document, "\n".join(line for part in parts for line in _lines(part)))


def _lines(part: dict[str, Any]) -> list[str]:
    def said(place: dict[str, Any]) -> str:
        return f"rows {','.join(map(str, place['rows']))} columns {','.join(map(str, place['columns']))}"

    return [f"{part['job']}: {said(part)}", *(f"  {job} moves to {said(place)}" for job, place in part["moved"].items())]


def _mix(path: str, rows: int, columns: int, failed: list[tuple[int, int]]) -> Result:
    from ..decide.topology.hammingmesh.replay import BoardJob
    from ..drive.boards import replay_jobs
    from ..io.fabric.network_jobs import read_board_jobs
    from ..io.quantity import show_time

    jobs = [BoardJob(**entry) for entry in read_board_jobs(path)]
    found = replay_jobs(rows, columns, failed, jobs)
    document = {
        "schema": "meshwright.board-replay", "version": 1, "rows": rows, "columns": columns, "failed": failed,
        "policies": [
            {
                "policy": r.policy, "utilisation": r.utilisation, "end_s": r.end_s, "wait_s": r.wait_s, "moves": sum(p.moves for p in r.placed),
                "jobs": [{"job": p.job.name, "start_s": p.start_s, "rows": list(p.part.rows), "columns": list(p.part.columns)} for p in r.placed],
            }
            for r in found
        ],
    }  # fmt: skip
    lines = [
        f"{len(jobs)} jobs on {rows} x {columns} boards, {len(set(failed))} failed",
        f"{'policy':<8}{'utilisation':>12}{'wait':>12}{'end':>12}{'moves':>7}",
    ]
    for r in found:
        moves = sum(p.moves for p in r.placed)
        lines.append(f"{r.policy:<8}{r.utilisation * 100:>10.1f} %{show_time(r.wait_s):>12}{show_time(r.end_s):>12}{moves:>7}")
    return Result(document, "\n".join(lines))
