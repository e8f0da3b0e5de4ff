"""Where the ranks of a bench run: in the job that this process is a rank of, on a lab, or as processes of this machine."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

from ..errors import MeshwrightError, RunError
from .measure import RATES, BenchRow, Request

__all__ = ["in_job", "on_lab", "on_this_machine", "rows_of"]

WORKER = ("-m", "meshwright.bench.worker")
MAX_RUN_S = 3600.0  # of a whole bench: a rank that hangs must not keep the others for ever


def rows_of(output: str) -> list[BenchRow]:
    """Rank 0's lines. Raises: the error that rank 0 reports."""
    rows = []
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        if line.startswith('{"error"'):
            said = msgspec.json.decode(line)["error"]
            raise _typed(said)
        rows.append(msgspec.json.decode(line, type=BenchRow))
    return rows


def in_job(request: Request, env: dict[str, str]) -> list[BenchRow]:
    """As a rank of a job that was started by somebody else; rows at rank 0, none elsewhere."""
    from .worker import measure

    os.environ.update({name: value for name, value in env.items() if name != "MESHWRIGHT_BENCH"})
    rows: list[BenchRow] = []
    measure(request, env["MESHWRIGHT_BENCH_BACKENDS"].split(","), rows.append)
    return rows


def on_this_machine(ranks: int, env: dict[str, str]) -> list[BenchRow]:
    """Raises: what `LocalRanks.run` raises."""
    from ..run.ranks.launcher import LocalRanks, scratch_folder
    from .worker import bench_rank

    with scratch_folder("bench") as folder:
        started = LocalRanks(ranks, folder, bench_rank, {}, limit_s=MAX_RUN_S, environment=env)
        started.run()
        return started.results(list[BenchRow])[0]


def on_lab(name: str, env: dict[str, str], order: list[int] | None) -> list[BenchRow]:
    """One rank per device of a lab. Times are simulated at each link's measured goodput, where it was measured and nothing else is planned for.

    Raises: what the lab raises, RunError when a rank fails.
    """
    from ..lab.lab import Lab

    lines: list[str] = []

    def sink(rank: int, line: bytes) -> None:
        if rank == 0:
            lines.append(line.decode(errors="replace").strip())

    lab = Lab.open(name)
    if lab.state.verified and "MESHWRIGHT_FABRIC" not in env:
        env = {**env, RATES: json.dumps([x.rate_Bps for x in lab.measured_fabric.links])}
    try:
        result = lab.run([sys.executable, *WORKER], order=order, env=env, timeout_s=MAX_RUN_S, sink=sink, check=False)
    finally:
        lab.close()
    rows = rows_of("\n".join(lines))
    if result.exit_code:
        raise RunError(f"rank {result.first_failure} of lab {name!r} failed", data={"returncodes": list(result.returncodes)})
    return rows


def _typed(said: dict[str, Any]) -> MeshwrightError:
    return RunError(said.get("message", "rank 0 failed"), where=said.get("where", ""), hint=said.get("hint", ""), data=said.get("data") or {})
