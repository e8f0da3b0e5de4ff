"""One worker of `sparse_aggregate.py`, started by it in the lab.

`JOB`: {elements, turns, seats: [{switch, worker, children, above}], cases: [{density, overlap}]}. Worker 0 prints a line per case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def received_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


def drawn(rank: int, case: dict[str, float], elements: int, number: int) -> Any:
    """Whole numbers; `overlap`: this share of the places comes from one list for all."""
    own, common = np.random.default_rng([number, rank + 1]), np.random.default_rng([number, 0])
    same, mine = common.random(elements) < case["density"], own.random(elements) < case["density"]
    chosen = np.where(own.random(elements) < case["overlap"], same, mine)
    return np.where(chosen, own.integers(1, 51, elements), 0).astype(np.float32)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    from meshwright.run.aggregate.client import Seat
    from meshwright.run.aggregate.control import Hop
    from meshwright.run.aggregate.fallback import GlooHosts
    from meshwright.run.aggregate.sockets import parse_address
    from meshwright.run.aggregate.sparse_reducer import WAYS, Load, SparseReducer, link_bytes

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads(os.environ["JOB"])
    at = job["seats"][rank]
    seat = Seat(job="sparse", worker=at["worker"], children=at["children"], workers=world, above=tuple(Hop(**hop) for hop in at["above"]))
    reducer = SparseReducer.join(parse_address(at["switch"]), seat, GlooHosts(dist.group.WORLD), rank)
    for number, case in enumerate(job["cases"]):
        elements = job["elements"]
        parts = [drawn(r, case, elements, number) for r in range(world)]
        true, mine = np.sum(parts, axis=0), parts[rank]
        times: dict[str, list[float]] = {way: [] for way in (*WAYS, "auto")}
        wrong, came, taken = 0, 0, []
        for turn in range(job["turns"] + 1):
            for way in times:
                data = mine.copy()
                dist.barrier()
                most = int(np.count_nonzero(mine))
                begin, before = time.perf_counter(), received_bytes()
                if way == "auto":
                    taken.append(reducer.best(elements, most))
                reducer.all_reduce(data, way=way)
                took = time.perf_counter() - begin
                came = received_bytes() - before if way == "sparse" else came
                if turn:
                    times[way].append(took)
                wrong += not np.allclose(data, true, atol=1e-2)
        bad = torch.tensor([wrong])
        dist.all_reduce(bad)
        if rank == 0:
            load = Load(world, elements, max(int(np.count_nonzero(p)) for p in parts), int(np.count_nonzero(true)))
            needed = link_bytes("sparse", load, words=reducer.words, span=reducer.span)
            found = {**case, "times_s": times, "taken": taken[-1], "wrong": int(bad), "pairs": load.pairs, "union": load.union,
                     "sparse_bytes_in": came, "bytes_needed": round(needed), "lost_switch": str(reducer.why or "")}  # fmt: skip
            print(json.dumps(found), flush=True)
    if rank == 0:
        print("paces " + json.dumps(reducer.pace), file=sys.stderr, flush=True)
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
