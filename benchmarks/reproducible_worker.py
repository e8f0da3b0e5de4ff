"""One rank of `benchmarks/reproducible.py`: sums of one set of contributions, again and again under jitter, their bits and their times.

`JOB`: JSON with `plans` (name -> plan file of an all-reduce), `elements`, `runs` (per plan), `timed` (plan name, elements, iterations) or null.
Jitter: before every sum each rank sleeps for a random time of up to JITTER_S, another one each time, so that ranks arrive in any order.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import meshwright.torch
from meshwright.bench.digest import uneven

JITTER_S = 0.02


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def fold(rows: list[torch.Tensor]) -> torch.Tensor:
    while len(rows) > 1:
        rows = [rows[i] + rows[i + 1] if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def backend(**settings: Any) -> Any:
    meshwright.torch.configure(**{"plans": None, "reproducible": None, "fabric": None, **settings})
    return dist.new_group(backend="meshwright")


def summed(group: Any, row: torch.Tensor, dice: random.Random) -> torch.Tensor:
    out = row.clone()
    time.sleep(dice.uniform(0, JITTER_S))
    dist.all_reduce(out, group=group)
    return out


def agree(bits: set[str]) -> int:
    """How many different results all ranks have seen."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(bits))
    return len({x for row in found for x in row})


def lasted(group: Any, elements: int, iterations: int) -> float:
    """Median seconds of an all-reduce, each as long as at its slowest rank, after one of warm-up."""
    times = []
    for _ in range(iterations + 1):
        x = torch.ones(elements)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x, group=group)
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return median(times[1:])


def main() -> None:
    job = json.loads(os.environ["JOB"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    dice, elements = random.Random(rank), job["elements"]
    rows = [uneven(0, r, elements, torch.float32) for r in range(n)]
    want, found = fold(rows), dict[str, Any]()
    bits: set[str] = set()
    for name, plan in job["plans"].items():
        group = backend(plans=(plan,), reproducible="tree")
        own = {digest(summed(group, rows[rank], dice)) for _ in range(job["runs"])}
        found[f"tree {name}"] = agree(own)
        bits |= own
        if job["timed"] and job["timed"][0] == name:
            found["tree_s"] = lasted(group, *job["timed"][1:])
        dist.destroy_process_group(group)
    found["tree all"], found["tree digest"], found["is the fold"] = agree(bits), sorted(bits)[0], bits == {digest(want)}
    ring = summed(None, rows[rank], dice)
    found["gloo differs"] = float((ring != want).float().mean())
    found["gloo digest"] = digest(ring)
    left = rows[0].clone()
    for row in rows[1:]:
        left += row
    turned = rows[-1].clone()  # a single buffer whose contributions arrive the other way round
    for row in rows[-2::-1]:
        turned += row
    found["single buffer differs"] = float((left != turned).float().mean())
    if job["timed"]:
        found["gloo_s"] = lasted(None, *job["timed"][1:])
    group = backend(reproducible="exact")
    exact = {digest(summed(group, rows[(rank * step + turn) % n], dice)) for turn in range(n) for step in (1, 3)}
    found["exact all"] = agree(exact)
    sums = torch.stack([r.double() for r in rows]).sum(0)
    found["exact error"] = float(((summed(group, rows[rank], dice).double() - sums).abs() / torch.stack(rows).abs().amax(0).double()).max())
    dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
