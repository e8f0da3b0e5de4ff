"""Measured exchanges: pooled rows forward and their gradients backward, between processes that start as far apart as their lookups end.

Cite: NeuroShard, MLSys 2023, section 3.2. One process per device, on this machine or in a lab with shaped links; lookups are replaced by sleep, so
that processes do not contend for cores. A forward time counts from a device's own start: waiting for late ones is in it. In a lab links rest until
their token buckets are full, as they are after a step's lookups: else an exchange is faster or slower by what the one before it left in them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ...graph.embeddings import Tables
from ...run.ranks.answers import answer, answers, seated
from ...run.ranks.worker import Seat

__all__ = ["ExchangeRequest", "ExchangeTask", "exchange_rank", "exchange_tasks", "measure_exchanges"]

MAX_SKEW_S = 0.019  # of drawn starts
LEAST_TABLES, MOST_TABLES = 10, 59  # of a drawn task
RESTS = 2  # times as long as it takes to fill a bucket


class ExchangeTask(msgspec.Struct, kw_only=True):
    """`columns`: sums of devices. `start_s`: when each begins the forward exchange; none: after `compute_s` and its backward exchange."""

    columns: list[int]
    start_s: list[float] = []
    compute_s: list[float] = []


class ExchangeRequest(msgspec.Struct, kw_only=True):
    tasks: list[ExchangeTask]
    batch: int
    element_bytes: int = 4
    runs: int = 5
    rest_s: float = 0.0  # before each
    timeout_s: float = 600.0


class _Report(msgspec.Struct, kw_only=True):
    backward_s: list[float]
    forward_s: list[float]


def exchange_tasks(tables: Tables, devices: int, points: int, rng: np.random.Generator) -> list[ExchangeTask]:
    """Drawn loads of every degree of balance, with starts up to `MAX_SKEW_S` apart."""
    from .compute import widths_of

    widths = [w for t in tables.tables for w in widths_of(t)]
    found = []
    for _ in range(points):
        sums, p = np.zeros(devices, int), rng.random()
        for w in sorted(rng.choice(widths, int(rng.integers(LEAST_TABLES, MOST_TABLES + 1))), reverse=True):
            sums[int(rng.integers(devices)) if rng.random() < p else int(sums.argmin())] += w
        starts = rng.random(devices) * rng.random() * MAX_SKEW_S
        found.append(ExchangeTask(columns=sums.tolist(), start_s=(starts - starts.min()).tolist()))
    return found


def measure_exchanges(
    tasks: Sequence[ExchangeTask], devices: int, batch: int, *, lab: object = None, runs: int = 5, timeout_s: float = 600.0, element_bytes: int = 4
) -> tuple[list[list[float]], list[list[float]]]:  # fmt: skip
    """(backward, forward) seconds of every task and device: medians. `lab`: a `meshwright.lab.Lab` that stands; none: this machine's loopback."""
    links = getattr(getattr(lab, "fabric", None), "links", ())
    rest_s = RESTS * max((link.burst_bytes / link.rate_Bps for link in links), default=0.0)
    request = ExchangeRequest(tasks=list(tasks), batch=batch, element_bytes=element_bytes, runs=runs, rest_s=rest_s, timeout_s=timeout_s)
    ranks = answers(request, devices, exchange_rank, _Report, lab=lab, limit_hint="ask for fewer points")
    pairs = [[[x[i] for x in kind] for i in range(len(tasks))] for kind in ([r.backward_s for r in ranks], [r.forward_s for r in ranks])]
    return pairs[0], pairs[1]


def exchange_rank(seat: Seat) -> _Report:
    """A rank that the launcher started."""
    return seated(seat, ExchangeRequest, _measure)


def _measure(request: ExchangeRequest) -> _Report:
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    share = [len(range(r, request.batch, world)) for r in range(world)]
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[request.element_bytes]
    most = max((max(t.columns) for t in request.tasks), default=0)
    wide, small = torch.zeros(max(1, most * request.batch), dtype=dtype), torch.zeros(max(1, world * most * share[0]), dtype=dtype)
    sizes = [([t.columns[rank] * b for b in share], [c * share[rank] for c in t.columns]) for t in request.tasks]

    def rounds(start_s: Sequence[float] | None) -> list[float]:
        """Medians. Tasks take turns: what disturbs the machine for a while disturbs all alike."""
        taken: list[list[float]] = [[] for _ in request.tasks]
        for _ in range(request.runs):
            for n, (mine, theirs) in enumerate(sizes):
                pooled, got = wide[: sum(mine)], small[: sum(theirs)]
                if start_s is None:
                    taken[n].append(_run(pooled, got, mine, theirs, 0.0, request.rest_s))
                else:
                    taken[n].append(_run(got, pooled, theirs, mine, start_s[n], request.rest_s))
        return [statistics.median(x) for x in taken]

    back, starts = rounds(None), list[float]()
    for task, took in zip(request.tasks, back, strict=True):
        ends = torch.zeros(world, dtype=torch.float64)
        ends[rank] = task.start_s[rank] if task.start_s else task.compute_s[rank] + took
        dist.all_reduce(ends)
        starts.append(float(ends[rank] - ends.min()))
    found = _Report(backward_s=back, forward_s=rounds(starts))
    dist.barrier()
    return found


def _run(into: torch.Tensor, out: torch.Tensor, into_sizes: list[int], out_sizes: list[int], start_s: float, rest_s: float) -> float:
    time.sleep(rest_s)
    dist.barrier()
    if start_s > 0:
        time.sleep(start_s)
    began = time.perf_counter()
    dist.all_to_all_single(into, out, into_sizes, out_sizes)
    return time.perf_counter() - began


if __name__ == "__main__":
    answer(Path(sys.argv[1]), ExchangeRequest, _measure)
