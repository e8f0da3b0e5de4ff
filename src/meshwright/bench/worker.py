"""One rank of `collective bench`: `python -m meshwright.bench.worker` under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Rank 0 prints one JSON line per row, for the command to show.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import MeshwrightError
from ..run.group.group import MeshwrightGroup
from ..run.group.predict import executor_transport, predicted_time_s
from ..run.machine.process import CALIBRATING, STATE
from ..run.ranks.worker import Seat
from .data import DTYPES
from .measure import RATES, BenchRow, Request, bench

__all__ = ["Described", "bench_rank", "main", "measure"]

MAX_LINK_S = 60.0  # until all ranks have connected


def measure(request: Request, backends: list[str], emit: Any) -> None:
    """Rows of every backend in turn, size by size within one; `emit(row)` is called at rank 0."""
    import meshwright.torch  # registers the backend

    del meshwright
    timeout = timedelta(seconds=float(os.environ.get("MESHWRIGHT_TIMEOUT_S", "600")))
    dist.init_process_group(backends[0], timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    groups = {backends[0]: dist.group.WORLD} | {name: dist.new_group(backend=name, timeout=timeout) for name in backends[1:]}
    for name, group in groups.items():
        describe = Described(group, DTYPES[request.dtype]) if isinstance(group, MeshwrightGroup) else None
        for row in bench(request, name, group, control, describe):
            if dist.get_rank() == 0:
                emit(row)
    dist.barrier(control)
    dist.destroy_process_group()


class Described:
    """What ran, its simulated time at the links' measured rates where they are known, and the bound, from the group's own plans."""

    def __init__(self, group: MeshwrightGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.rates: list[int] = msgspec.json.decode(os.environ.get(RATES, "[]"), type=list[int])

    def __call__(self, op: str, root: int, size_bytes: int) -> tuple[str, float | None, float | None]:
        plans = self.group.engine.plans
        chosen = plans.choose(op, root, size_bytes)
        ran = chosen if isinstance(chosen, str) else chosen.strategy
        if plans.fabric is None or self.group.rank():
            return ran, None, None
        from ..decide.collective import CollectiveProblem, collective_bound
        from ..fabric.edit import burst_s

        simulated = bound = None
        try:
            problem = CollectiveProblem(fabric=plans.fabric, op=op, size_bytes=size_bytes, ranks=plans.devices, root=root, element_bytes=1)
            # What is measured and simulated begins with full token buckets.
            bound = max(0.0, float(collective_bound(problem).exact - burst_s(plans.fabric)))
            if not isinstance(chosen, str):
                transport = executor_transport(plans.fabric, plans.ranks_per_core)
                fabric = plans.fabric
                if self.rates:
                    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=r) for x, r in zip(fabric.links, self.rates, strict=True)))
                simulated = predicted_time_s(chosen.form, fabric, plans.devices, transport, size_bytes)
        except MeshwrightError as error:  # the row says why a figure is missing
            ran = f"{ran}; {error}"
        return ran, simulated, bound


def preload() -> None:
    """What ranks need beside the imports of this module."""
    import meshwright.torch  # noqa: F401


def bench_rank(seat: Seat) -> list[BenchRow]:
    """A rank that our launcher started."""
    link = seat.link(MAX_LINK_S)
    link.go()
    link.progress[STATE] = CALIBRATING
    rows: list[BenchRow] = []
    measure(*asked(), rows.append)
    return rows


def asked() -> tuple[Request, list[str]]:
    """(what to measure, on which backends), from the environment."""
    request = msgspec.json.decode(os.environ["MESHWRIGHT_BENCH"], type=Request)
    return request, os.environ.get("MESHWRIGHT_BENCH_BACKENDS", "meshwright,gloo").split(",")


def main() -> int:
    torch.set_num_threads(1)

    def emit(row: Any) -> None:
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()

    try:
        measure(*asked(), emit)
    except MeshwrightError as error:
        if os.environ.get("RANK") == "0":
            sys.stdout.write(msgspec.json.encode({"error": error.to_json()}).decode() + "\n")
        sys.stderr.write(f"rank {os.environ.get('RANK')}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
