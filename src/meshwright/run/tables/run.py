"""`run_tables`: a table plan on processes of this machine or of a lab, beside one process with whole embedding bags."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from ...graph.embeddings import Shard, Tables
from ..ranks.answers import answer, answers, seated
from ..ranks.worker import Seat
from .batches import indices_of
from .sharded import ShardedTables, whole_table

__all__ = ["TablesRequest", "TablesResult", "run_tables", "tables_rank"]

LEARNING_RATE = 0.01


class TablesRequest(msgspec.Struct, kw_only=True):
    """`verify`: every rank also trains whole tables on its own and compares. `operator`: as `ShardedTables`."""

    tables: Tables
    shards: list[Shard]
    devices: list[str]
    steps: int = 5
    seed: int = 0
    dtype: str = "float32"
    operator: str = "embedding_bag"
    verify: bool = True
    timeout_s: float = 300.0


class _Report(msgspec.Struct, kw_only=True):
    step_s: list[float]
    sent_bytes: int
    outputs_apart: float
    weights_apart: float


class TablesResult(msgspec.Struct, frozen=True, kw_only=True):
    """`step_s`: of every step the slowest rank. `sent_bytes`: of pooled rows, by rank. `outputs_apart`, `weights_apart`: largest difference from
    whole tables, over the largest entry; -1 where nothing was compared."""

    step_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    outputs_apart: float
    weights_apart: float

    @property
    def time_s(self) -> float:
        """Median step."""
        return statistics.median(self.step_s)


def run_tables(
    tables: Tables, shards: Sequence[Shard], devices: Sequence[str], *, steps: int = 5, seed: int = 0, dtype: str = "float32",
    operator: str = "embedding_bag", verify: bool = True, lab: Any = None, timeout_s: float = 300.0,
) -> TablesResult:  # fmt: skip
    """Steps of lookups, exchanges and SGD with one process per device, on batches drawn as the tables' histograms say.

    Raises: UsageError for no steps or a type that is no float; and what `LocalRanks.run` raises where a rank fails."""
    if steps < 1 or dtype not in ("float32", "float64"):
        raise UsageError(f"{steps} steps in {dtype}", where="--steps", hint="at least one step, in float32 or float64")
    request = TablesRequest(
        tables=tables, shards=list(shards), devices=list(devices), steps=steps, seed=seed, dtype=dtype, operator=operator, verify=verify,
        timeout_s=timeout_s,
    )  # fmt: skip
    ranks = answers(request, len(devices), tables_rank, _Report, lab=lab, limit_hint="fewer steps, or --no-verify")
    return TablesResult(
        step_s=tuple(map(max, zip(*(r.step_s for r in ranks), strict=True))), sent_bytes=tuple(r.sent_bytes for r in ranks),
        outputs_apart=max(r.outputs_apart for r in ranks), weights_apart=max(r.weights_apart for r in ranks),
    )  # fmt: skip


def tables_rank(seat: Seat) -> _Report:
    """A rank that the launcher started."""
    return seated(seat, TablesRequest, _train)


def _train(request: TablesRequest) -> _Report:
    torch.set_num_threads(1)
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, request.dtype)
    tables, rng = request.tables, np.random.default_rng(request.seed)
    bags = ShardedTables(
        tables, request.shards, request.devices, rank=rank, dtype=dtype, seed=request.seed, operator=request.operator, learning_rate=LEARNING_RATE
    )
    whole = {t.name: nn.Parameter(whole_table(tables, t.name, request.seed, dtype)) for t in tables.tables} if request.verify else {}
    own = np.array_split(np.arange(tables.batch), world)[rank]
    # Each output counts in the loss with a number of its own, so that a gradient that goes to the wrong place shows.
    draw = torch.Generator().manual_seed(request.seed)
    counts_for = {t.name: torch.empty(tables.batch, t.dim, dtype=dtype).uniform_(-1, 1, generator=draw) for t in tables.tables}
    found = _Report(step_s=[], sent_bytes=0, outputs_apart=-1.0, weights_apart=-1.0)
    for _ in range(request.steps):
        batch = {t.name: tuple(map(torch.from_numpy, indices_of(t, tables.batch, rng))) for t in tables.tables}
        mine = {name: _part_of(i, o, int(own[0]), int(own[-1]) + 1) if len(own) else (i[:0], o[:1]) for name, (i, o) in batch.items()}
        dist.barrier()
        began = time.perf_counter()
        pooled = bags(mine)
        sum((pooled[t.name] * counts_for[t.name][own]).sum() for t in tables.tables).backward()
        with torch.no_grad():
            for p in bags.parameters() if request.operator != "fbgemm" else ():
                p -= LEARNING_RATE * p.grad
                p.grad = None
        found.step_s.append(time.perf_counter() - began)
        found.sent_bytes = bags.sent_bytes
        if whole:
            found.outputs_apart = max(found.outputs_apart, _compared(tables, whole, batch, counts_for, pooled, own))
    if whole:
        names = [s for s in request.shards if s.device == request.devices[rank]]
        parts = [whole[s.table].detach()[s.rows[0] : s.rows[1], s.columns[0] : s.columns[1]] for s in names]
        found.weights_apart = max([_apart(a, b) for a, b in zip(bags.shard_weights(), parts, strict=True)] + [0.0])
    dist.barrier()
    return found


def _part_of(indices: torch.Tensor, offsets: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return indices[offsets[first] : offsets[end]], offsets[first : end + 1] - offsets[first]


def _compared(tables: Tables, whole: Mapping[str, Any], batch: Any, counts_for: Mapping[str, Any], pooled: Mapping[str, Any], own: Any) -> float:
    """A step of whole embedding bags on the whole batch; how far this rank's outputs were from theirs."""
    worst = 0.0
    for t in tables.tables:
        w, (indices, offsets) = whole[t.name], batch[t.name]
        out = nn.functional.embedding_bag(indices, w, offsets, mode=t.mode, include_last_offset=True)
        worst = max(worst, _apart(pooled[t.name].detach(), out.detach()[own]))
        (out * counts_for[t.name]).sum().backward()
        with torch.no_grad():
            w -= LEARNING_RATE * w.grad
            w.grad = None
    return worst


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if a.numel() else 0.0


if __name__ == "__main__":
    answer(Path(sys.argv[1]), TablesRequest, _train)
