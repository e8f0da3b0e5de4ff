"""Timing collectives: warm-up, then iterations that all ranks begin together; an iteration lasts as long as at its slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..decide.collective.problem import busbw_factor
from .digest import digest_of
from .operations import REDUCING, Case, make_case
from .together import Start

__all__ = ["RATES", "BenchRow", "Request", "Timed", "bench"]

RATES = "MESHWRIGHT_BENCH_RATES"  # a JSON list: goodput of each link of the fabric that is planned for, B/s


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What `collective bench` was asked for. `check`: count wrong elements after one more, untimed run of each form. `digest`: of bits of sums."""

    op: str
    sizes: tuple[int, ...]
    dtype: str = "float"
    reduction: str = "sum"
    root: int = 0
    iterations: int = 5
    warmup: int = 1
    check: bool = True
    seed: int = 0
    digest: bool = False


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One form (out of place or in place) of one collective."""

    time_s: float  # median over iterations of the slowest rank
    least_s: float
    most_s: float
    algbw_Bps: float
    busbw_Bps: float
    wrong: int | None = None  # elements, over all ranks


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    size_bytes: int
    count: int
    out_of_place: Timed | None
    in_place: Timed | None
    ran: str = ""  # strategy, or why the built-in backend ran it
    simulated_s: float | None = None
    bound_s: float | None = None
    digest: str = ""


def bench(
    request: Request, backend: str, group: Any, control: Any, describe: Any = None, *, in_place_only: bool = False
) -> Iterator[BenchRow]:  # fmt: skip
    """A row per size. `group`: measured; `control`: a gloo group that carries barriers and times, so that nothing of ours measures itself.

    `describe(op, root, elements, dtype)` gives (what ran, simulated seconds, bound in seconds) after the measurement.
    """
    from .data import DTYPES

    dtype = DTYPES[request.dtype]
    n = dist.get_world_size(group)
    for size_bytes in request.sizes:
        forms: list[Timed | None] = []
        for in_place in (False, True):
            if in_place_only and not in_place and request.op != "all-to-all":
                forms.append(None)
                continue
            case = make_case(request.op, size_bytes, dtype, request.reduction, request.root, in_place=in_place, seed=request.seed, group=group)
            forms.append(_timed(case, request, size_bytes, n, control) if case is not None else None)
        ran, simulated, bound = describe(request.op, request.root, size_bytes) if describe is not None else ("", None, None)
        digest = ""
        if request.digest and request.op in REDUCING:
            digest = digest_of(request.op, size_bytes, request.dtype, request.reduction, request.root, request.seed, group, control)
        yield BenchRow(
            backend=backend, size_bytes=size_bytes, count=size_bytes // dtype.itemsize, out_of_place=forms[0], in_place=forms[1], ran=ran,
            simulated_s=simulated, bound_s=bound, digest=digest,
        )  # fmt: skip


def _timed(case: Case, request: Request, size_bytes: int, ranks: int, control: Any) -> Timed:
    times: list[float] = []
    start = Start(lambda values: _over_ranks(values, dist.ReduceOp.MAX, control))
    while len(times) < request.warmup + request.iterations:
        case.fill()
        start.begin()
        began = time.perf_counter()
        case.call()
        counts, longest = start.counts(time.perf_counter() - began)
        if counts:
            times.append(longest)
    times = times[request.warmup :]
    wrong = None
    if request.check:
        case.fill()
        dist.barrier(control)
        case.call()
        wrong = int(_over_ranks([float(case.wrong())], dist.ReduceOp.SUM, control)[0])
    time_s = statistics.median(times)
    algbw = size_bytes / time_s
    return Timed(
        time_s=time_s, least_s=min(times), most_s=max(times), algbw_Bps=algbw, busbw_Bps=algbw * float(busbw_factor(request.op, ranks)), wrong=wrong
    )  # fmt: skip


def _over_ranks(values: Iterable[float], op: Any, control: Any) -> list[float]:
    row = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(row, op, group=control)
    found: list[float] = row.tolist()
    return found
