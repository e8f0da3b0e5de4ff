"""What a network is to carry (docs/formats.md): a training job's traffic, `meshwright.network-job`; jobs on boards, `meshwright.board-jobs`."""

from __future__ import annotations

import os
from typing import Any

from ..limits import MaxBytes
from .small_toml import read_table

__all__ = ["MAX_JOBS", "read_board_jobs", "read_network_job"]

MAX_JOBS = 10_000
MAX_SIDE = 64  # rows or columns of boards
MAX_SECONDS = 1e9
MAX_BYTES = 1 << 60


def read_network_job(path: str | os.PathLike[str]) -> dict[str, float]:
    """`compute_s`, `all_reduce_bytes` and `all_to_all_bytes` of one iteration, of one accelerator. Raises: UsageError, FormatError."""
    table = read_table(path, "meshwright.network-job", MaxBytes.NETWORK_JOBS)
    found = {
        "compute_s": table.number("compute_s", 0.0, most=MAX_SECONDS),
        "all_reduce_bytes": float(table.integer("all_reduce_bytes", 0, most=MAX_BYTES)),
        "all_to_all_bytes": float(table.integer("all_to_all_bytes", 0, most=MAX_BYTES)),
    }  # fmt: skip
    table.done()
    if not found["all_reduce_bytes"] + found["all_to_all_bytes"]:
        raise table.error("", "sends nothing", hint="give all_reduce_bytes or all_to_all_bytes")
    return found


def read_board_jobs(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """`name`, `rows`, `columns`, `arrival_s`, `duration_s` of every job. Raises: UsageError, FormatError."""
    top = read_table(path, "meshwright.board-jobs", MaxBytes.NETWORK_JOBS)
    found: dict[str, dict[str, Any]] = {}
    for table in top.tables("jobs", most=MAX_JOBS):
        name = table.text("name")
        if name in found:
            raise table.error("name", f"{name!r} is taken")
        found[name] = {
            "name": name, "rows": table.integer("rows", least=1, most=MAX_SIDE), "columns": table.integer("columns", least=1, most=MAX_SIDE),
            "arrival_s": table.number("arrival_s", 0.0, most=MAX_SECONDS), "duration_s": table.number("duration_s", most=MAX_SECONDS),
        }  # fmt: skip
        if not found[name]["duration_s"]:
            raise table.error("duration_s", "must be > 0")
        table.done()
    top.done()
    if not found:
        raise top.error("jobs", "there is no job")
    return list(found.values())
