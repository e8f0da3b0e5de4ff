"""One worker of the aggregation benchmark: all-reduces through switches, or gloo's, timed in one process. Started by `aggregate.py` in the lab.

`CASES`: JSON list of {name, elements, dtype, arithmetic, repeat, switch: HOST:PORT or "", worker, children, above, slots}, each over all workers; an
empty switch is gloo. Worker 0 prints a line per case with the seconds of every repetition; every worker compares every result with the true sum.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np


def values(rank: int, turn: int, elements: int, dtype: str) -> Any:
    rng = np.random.default_rng(1000 * turn + rank)
    if dtype == "int32":
        return rng.integers(-(2**20), 2**20, elements, dtype=np.int32)
    return (rng.standard_normal(elements) * np.exp2(rng.integers(-8, 8, elements))).astype(np.float32)


def fold(parts: list[Any]) -> Any:
    """The complete binary tree, left to right, an odd tail promoted."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def right(result: Any, case: dict[str, Any], world: int, turn: int) -> bool:
    parts = [values(r, turn, case["elements"], case["dtype"]) for r in range(world)]
    if case["dtype"] == "int32":
        return bool((result == np.sum(parts, axis=0, dtype=np.int64)).all())
    if case["arithmetic"] == "tree":
        return bool((result.view(np.int32) == fold(parts).view(np.int32)).all())
    true = np.sum([p.astype(np.float64) for p in parts], axis=0)
    most = np.max(np.abs(parts), axis=0)
    whole = np.zeros(-(-len(most) // 256) * 256)
    whole[: len(most)] = most
    block = np.repeat(whole.reshape(-1, 256).max(axis=1), 256)[: len(most)]
    return bool((np.abs(result - true) <= world**2 * block / 2**31 * 1.001 + np.abs(true) * 2**-24).all())


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    from meshwright.run.aggregate.client import Seat, Stream
    from meshwright.run.aggregate.control import Hop
    from meshwright.run.aggregate.sockets import parse_address

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(os.environ["CASES"]):
        stream = None
        if case["switch"]:
            at = case["seats"][rank]
            seat = Seat(
                job=case["name"], worker=at["worker"], children=at["children"], workers=world, slots=case["slots"],
                mode="tree" if case["arithmetic"] == "tree" else "sum", above=tuple(Hop(**hop) for hop in at["above"]),
            )  # fmt: skip
            stream = Stream.join(parse_address(at["switch"]), seat)
        times, wrong = [], 0
        warm = case.get("warm", 1)
        for turn in range(case["repeat"] + warm):
            data = values(rank, turn, case["elements"], case["dtype"])
            tensor = torch.from_numpy(data)
            dist.barrier()
            begin = time.perf_counter()
            for again in range(case.get("in_a_row", 1)):
                if again:
                    data[:] = values(rank, turn, case["elements"], case["dtype"])
                if stream is not None:
                    stream.all_reduce(data, arithmetic=case["arithmetic"])
                else:
                    dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
            wrong += 0 if case["arithmetic"] == "gloo" and case["dtype"] != "int32" else not right(data, case, world, turn)
        counts: dict[str, Any] = {}
        if stream is not None:
            counts = vars(stream.counts)
            stream.close()
        bad = torch.tensor([wrong])
        dist.all_reduce(bad)
        if rank == 0:
            print(json.dumps({"case": case["name"], "times_s": times[warm:], "wrong": int(bad), **counts}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
