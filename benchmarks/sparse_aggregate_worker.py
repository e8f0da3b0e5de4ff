"""One worker of `sparse_aggregate.py`, started by it in the lab.

`JOB`: {elements, measured_s, min_turns, first_turns, most_tried, seats: [{switch, worker, children, above}], cases: [{density, overlap}]}. Worker 0
prints a line per case. In each turn every way that is not far behind is called once, `auto` too, in an order that is drawn anew.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

FAR_BEHIND = 1.5  # times the fastest way's median


def received_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


def drawn(rank: int, case: dict[str, float], elements: int, number: int) -> Any:
    """Whole numbers; `overlap`: this share of the places comes from one list for all."""
    own, common = np.random.default_rng([number, rank + 1]), np.random.default_rng([number, 0])
    same, mine = common.random(elements) < case["density"], own.random(elements) < case["density"]
    chosen = np.where(own.random(elements) < case["overlap"], same, mine)
    return np.where(chosen, own.integers(1, 51, elements), 0).astype(np.float32)


def measured(reducer: Any, job: dict[str, Any], number: int, rank: int, world: int) -> dict[str, Any]:
    """Of one case, at this worker: times (of the slowest), what `auto` took, what was wrong."""
    import torch
    import torch.distributed as dist

    from meshwright.run.aggregate.sparse_reducer import WAYS, Load, link_bytes

    case, elements = job["cases"][number], job["elements"]
    parts = [drawn(r, case, elements, number) for r in range(world)]
    true, most = np.sum(parts, axis=0), max(int(np.count_nonzero(p)) for p in parts)
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, "auto")}
    taken: dict[str, int] = {}
    wrong, came, tried = 0, 0, 0

    def call(way: str) -> float:
        nonlocal wrong, came
        data = parts[rank].copy()
        dist.barrier()
        begin, before = time.perf_counter(), received_bytes()
        reducer.all_reduce(data, way=way)
        slowest = torch.tensor([time.perf_counter() - begin])
        came = received_bytes() - before if way == "sparse" else came
        wrong += not np.allclose(data, true, atol=1e-2)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    for way in WAYS:
        call(way)
    while tried < job["most_tried"] and not reducer.settled(elements, most):  # `auto` tries ways that are close
        call("auto")
        tried += 1
    close, turn, turns = list(WAYS), 0, int(job["first_turns"])
    while turn < turns:
        order = [*close, "auto"]
        np.random.default_rng([number, turn]).shuffle(order)  # nobody always comes after the same one
        for way in order:
            if way == "auto":
                found = reducer.best(elements, most)
                taken[found] = taken.get(found, 0) + 1
            times[way].append(call(way))
        turn += 1
        if turn == job["first_turns"]:
            medians = {way: float(np.median(times[way])) for way in WAYS}
            least = min(medians.values())
            close = [way for way in WAYS if medians[way] <= FAR_BEHIND * least]
            turns = max(job["min_turns"], math.ceil(job["measured_s"] / least))
    bad = torch.tensor([wrong])
    dist.all_reduce(bad)
    load = Load(world, elements, most, int(np.count_nonzero(true)))
    needed = link_bytes("sparse", load, words=reducer.words, span=reducer.span)
    return {**case, "times_s": times, "taken": taken, "tried_calls": tried, "wrong": int(bad), "pairs": load.pairs, "union": load.union,
            "sparse_bytes_in": came, "bytes_needed": round(needed), "lost_switch": str(reducer.why or "")}  # fmt: skip


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    from meshwright.run.aggregate.client import Seat
    from meshwright.run.aggregate.control import Hop
    from meshwright.run.aggregate.fallback import GlooHosts
    from meshwright.run.aggregate.sockets import parse_address
    from meshwright.run.aggregate.sparse_reducer import SparseReducer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads(os.environ["JOB"])
    at = job["seats"][rank]
    seat = Seat(job="sparse", worker=at["worker"], children=at["children"], workers=world, above=tuple(Hop(**hop) for hop in at["above"]))
    reducer = SparseReducer.join(parse_address(at["switch"]), seat, GlooHosts(dist.group.WORLD), rank)
    for number in range(len(job["cases"])):
        row = measured(reducer, job, number, rank, world)
        if rank == 0:
            print(json.dumps(row), flush=True)
    if rank == 0:
        print("paces " + json.dumps(reducer.pace), file=sys.stderr, flush=True)
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
