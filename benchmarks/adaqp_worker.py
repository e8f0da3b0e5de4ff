"""One rank of `benchmarks/adaqp.py`: graph trainings as plans say, one after the other. Not a benchmark by itself."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np


def alone(plan: Any, shares: Any, data: Any, rank: int) -> float:
    """Seconds of an epoch in which this rank computes beside the others, and nothing is sent: zeros stand for others' rows."""
    import torch.distributed as dist

    from meshwright.run.halo.exchange import HaloExchange
    from meshwright.run.halo.train import _Worker

    class Silent(HaloExchange):
        def _post(self, name: str, x: Any, send: Any, receive: Any, layer: int) -> None:
            self._waiting[name] = {peer: np.zeros((n, x.shape[1]), np.float32) for peer, n in enumerate(receive) if n}, x.shape[1]  # type: ignore[assignment]

        def _collect(self, name: str) -> Any:
            return self._waiting.pop(name)

    worker = _Worker(plan, shares, data, rank)
    worker.halo = Silent(None, shares[rank])
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        worker.epoch()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def last_bits(kept: list[Any]) -> dict[str, list[int]]:
    """Every message's rows at 2, 4, 8 and 32 bits, as the run chose them last."""
    from meshwright.plan.halo import LETTERS

    steps = kept[-1].steps if kept else ()
    return {f"{s.name} {m.src} {m.dst}": [m.widths.count(LETTERS[b]) for b in (2, 4, 8, 32)] for s in steps for m in s.messages}


def main() -> None:
    import torch.distributed as dist

    from meshwright.drive.plans import read_plan
    from meshwright.run.halo.exchange import HaloExchange
    from meshwright.run.halo.train import read_share, train_rank

    kept: list[Any] = []
    assign = HaloExchange.assign
    HaloExchange.assign = lambda self, job: (kept.append(job), assign(self, job))[1]  # type: ignore[method-assign]

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    for job in json.loads(os.environ["HALO_JOB"]):
        folder = Path(job["folder"])
        _, shares, data = read_share(folder, rank)
        for case in job["cases"]:
            plan = read_plan(folder / case["plan"])
            if case["epochs"] == 0:
                row: dict[str, Any] = {"compute_s": alone(plan, shares, data, rank)}
            else:
                kept.clear()
                row = {**msgspec.to_builtins(train_rank(plan, shares, data, case["epochs"])), "last_bits": last_bits(kept)}
            rows: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(rows, row)
            if rank == 0:
                sys.stdout.write(json.dumps({"row": {"case": case["name"], "ranks": rows}}) + "\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
