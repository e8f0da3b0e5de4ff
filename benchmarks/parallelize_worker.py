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
from meshwright.drive.training.sharding import ShardingWanted

PLANS: dict[str, dict[str, Any]] = {  # what is planned beyond the layout: nothing, and as few messages as there can be
    "planned": {}, "few": {"collective": "ring", "wishes": [ShardingWanted(level=0, overlap=False)]},
}  # fmt: skip
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


def planned_step(shape: dict[str, int], samples: int, plan_file: Path, options: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    ranks, length = dist.get_world_size(), shape["sequence"]
    if dist.get_rank() == 0:
        mw.write_plan(plan_file, mw.plan(
            build(shape), batch_of(0, samples, length), fabric=f"laptop:{ranks}", data=ranks, tensor=1, pipeline=1, microbatch=samples // ranks,
            zero=0, **options,
        ))  # fmt: skip
    dist.barrier()
    model = build(shape)
    return model, mw.torch.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan_file)


def case(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    shape, samples = CASES[name]["shape"], CASES[name]["samples"]
    rank, part, length = dist.get_rank(), samples // dist.get_world_size(), shape["sequence"]
    theirs = torch.nn.parallel.DistributedDataParallel(build(shape))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    ours = {way: planned_step(shape, samples, folder / f"{way}.json", options) for way, options in PLANS.items()}

    def mine(i: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[rank * part : (rank + 1) * part] for x in batch_of(i, samples, length))

    def ddp(i: int) -> None:
        x, y = mine(i)
        their_optimizer.zero_grad()
        loss = F.cross_entropy(theirs(x).flatten(0, 1), y.flatten())
        loss.backward()
        their_optimizer.step()

    ways: dict[str, Callable[[int], Any]] = {"ddp": ddp} | {way: lambda i, step=step: step(mine(i)) for way, (_, step) in ours.items()}
    times: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in ways}
    for k in range(WARM_ROUNDS + rounds):
        order = list(ways.items())
        for way, one in order if k % 2 else reversed(order):
            found = timed(one, k * STEPS)
            if k >= WARM_ROUNDS:
                times[way].append(found)
    apart = {
        way: max(float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), model.parameters(), strict=True))
        for way, (model, _) in ours.items()
    }  # fmt: skip
    wall, cpu = ({way: statistics.median(t[k] for found in rows for t in found) for way, rows in times.items()} for k in (0, 1))
    return {"case": name, "wall_s": wall, "cpu_s": cpu, "parameters_apart": apart, "rounds": times}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rounds, only = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for name in CASES:
        if only in name:
            row = case(name, folder, rounds)
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
