"""Where the ranks of a bench run: in the job that this process is a rank of, on a lab, or as processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec

from ...errors import MeshwrightError, RunError
from ..process import die_with_parent
from .measure import BenchRow, Request

__all__ = ["in_job", "on_lab", "on_this_machine", "rows_of"]

WORKER = ("-m", "meshwright.run.bench.worker")
LIMIT_S = 3600.0


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
    """Raises: RunError when a rank fails, with its last words; what rank 0 reports."""
    from ..rendezvous import hosted_rendezvous

    with hosted_rendezvous(ranks) as rendezvous:
        return _started(ranks, {**os.environ, **env, **rendezvous})


def _started(ranks: int, common: dict[str, str]) -> list[BenchRow]:
    parent = os.getpid()

    def bound_to_us() -> None:
        die_with_parent(parent)

    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            mine = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, *WORKER]
            started.append(subprocess.Popen(command, env=mine, stdout=out, stderr=subprocess.PIPE, text=True, preexec_fn=bound_to_us))
        output, said = started[0].communicate(timeout=LIMIT_S)
        rows = rows_of(output)
        for rank, process in enumerate(started):
            words = said if rank == 0 else process.communicate(timeout=60)[1]
            if process.returncode:
                last = [x for x in words.strip().splitlines() if x][-1:] or [""]
                raise RunError(f"rank {rank} ended with exit code {process.returncode}", hint=last[0][:300], data={"rank": rank})
        return rows
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def on_lab(name: str, env: dict[str, str], order: list[int] | None) -> list[BenchRow]:
    """One rank per device of a lab. Raises: what the lab raises, RunError when a rank fails."""
    from ...lab.lab import Lab

    lines: list[str] = []

    def sink(rank: int, line: bytes) -> None:
        if rank == 0:
            lines.append(line.decode(errors="replace").strip())

    lab = Lab.open(name)
    try:
        result = lab.run([sys.executable, *WORKER], order=order, env=env, timeout_s=LIMIT_S, sink=sink, check=False)
    finally:
        lab.close()
    rows = rows_of("\n".join(lines))
    if result.exit_code:
        raise RunError(f"rank {result.first_failure} of lab {name!r} failed", data={"returncodes": list(result.returncodes)})
    return rows


def _typed(said: dict[str, Any]) -> MeshwrightError:
    return RunError(said.get("message", "rank 0 failed"), where=said.get("where", ""), hint=said.get("hint", ""), data=said.get("data") or {})
