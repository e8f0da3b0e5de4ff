"""One rank of `parallelize.py`: short rounds of DDP steps and of `parallelize` steps in turn, on the same samples; of each step the seconds at its
slowest rank, and the processor time of all ranks and their threads together."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

import meshwright as mw

WARM_ROUNDS, STEPS = 3, 2  # rounds that do not count, steps of a round
CASES = {
    "gpt 3.3 M, 8 samples of 128 a rank": {"shape": {"vocabulary": 256, "sequence": 128, "layers": 4, "width": 256, "heads": 8}, "samples": 16},
    "gpt 0.8 M, 4 samples of 64 a rank": {"shape": {"vocabulary": 256, "sequence": 64, "layers": 4, "width": 128, "heads": 4}, "samples": 8},
    "gpt 12.6 M, 4 samples of 128 a rank": {"shape": {"vocabulary": 256, "sequence": 128, "layers": 4, "width": 512, "heads": 8}, "samples": 8},
}  # fmt: skip


def build(shape: dict[str, int]) -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt.build(**shape)[0]


def batch_of(step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(step: Callable[[int], Any], first: int) -> list[tuple[float, float]]:
    """(seconds, processor seconds) of a round's steps; the ranks begin each together."""
    found = []
    for i in range(first, first + STEPS):
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        step(i)
        lasted = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        dist.all_reduce(lasted, dist.ReduceOp.MAX)
        dist.all_reduce(used)
        found.append((float(lasted), float(used)))
    return found


def case(name: str, plan_file: Path, rounds: int) -> dict[str, Any]:
    shape, samples = CASES[name]["shape"], CASES[name]["samples"]
    rank, part, length = dist.get_rank(), samples // dist.get_world_size(), shape["sequence"]
    if rank == 0:
        mw.write_plan(plan_file, mw.plan(
            build(shape), batch_of(0, samples, length), fabric=f"laptop:{dist.get_world_size()}", data=dist.get_world_size(), tensor=1, pipeline=1,
            microbatch=part, zero=0,
        ))  # fmt: skip
    dist.barrier()
    theirs = torch.nn.parallel.DistributedDataParallel(build(shape))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    ours = build(shape)
    step = mw.torch.parallelize(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4), plan_file)

    def mine(i: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[rank * part : (rank + 1) * part] for x in batch_of(i, samples, length))

    def ddp(i: int) -> None:
        x, y = mine(i)
        their_optimizer.zero_grad()
        loss = F.cross_entropy(theirs(x).flatten(0, 1), y.flatten())
        loss.backward()
        their_optimizer.step()

    def planned(i: int) -> None:
        step(mine(i))

    times: dict[str, list[list[tuple[float, float]]]] = {"ddp": [], "parallelize": []}
    for k in range(WARM_ROUNDS + rounds):
        order = (("ddp", ddp), ("parallelize", planned)) if k % 2 else (("parallelize", planned), ("ddp", ddp))
        for way, one in order:
            found = timed(one, k * STEPS)
            if k >= WARM_ROUNDS:
                times[way].append(found)
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    wall, cpu = ({way: statistics.median(t[k] for found in rows for t in found) for way, rows in times.items()} for k in (0, 1))
    return {
        "case": name, "ddp_s": wall["ddp"], "parallelize_s": wall["parallelize"], "ddp_cpu_s": cpu["ddp"], "parallelize_cpu_s": cpu["parallelize"],
        "parameters_apart": apart, "rounds": times,
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rounds, only = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for i, name in enumerate(CASES):
        if only in name:
            row = case(name, folder / f"plan-{i}.json", rounds)
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
