"""Small messages: all-reduces of 8 B to 31 KiB by groups of ours and of gloo's, in turn, in the same processes.

    python benchmarks/small_messages.py [--ranks 2 4 8] [--repeat 7]

Every repetition times `--calls` calls of each kind of group, ours first and gloo first in turn; each lasts as long as at its slowest rank.
`repeated` calls have one length, so they are foreseen (`run.group.consent`); `new` ones differ from all before by an element. Two plans are
compared as well: none; a fabric, whose plans begin at 32 KiB; and those of `laptop:N` with `min_bytes` 0, every one used. All samples are written
down. `thread_us` is processor time of rank 0's calling thread: what a layer in front of gloo costs there, on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

SIZES = (8, 64, 1024, 8192, 31744)


def rank_main(repeat: int, calls: int) -> None:
    import torch
    import torch.distributed as dist

    import meshwright.torch

    torch.set_num_threads(1)
    limit = timedelta(seconds=240)
    dist.init_process_group("gloo", timeout=limit)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups: dict[str, Any] = {"gloo": dist.group.WORLD, "ours": dist.new_group(backend="meshwright", timeout=limit)}
    meshwright.torch.configure(fabric=f"laptop:{ranks}", cache="0")
    groups["ours, with a fabric"] = dist.new_group(backend="meshwright", timeout=limit)
    meshwright.torch.configure(fabric=f"laptop:{ranks}", min_bytes=0, builtin=False, strategies=("direct",), cache="0")
    groups["ours, planned"] = dist.new_group(backend="meshwright", timeout=limit)
    fresh = 100_000

    def timed(group: Any, tensors: list[torch.Tensor]) -> tuple[float, float]:
        dist.barrier()
        begin, used = time.perf_counter(), time.thread_time()
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
        took, used = torch.tensor([time.perf_counter() - begin]), time.thread_time() - used
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took) / len(tensors), used / len(tensors)

    for size in SIZES:
        same = torch.zeros(max(1, size // 4))
        for group in groups.values():
            timed(group, [same] * 5)
        samples: dict[str, list[tuple[float, float]]] = {}
        for turn in range(repeat):
            names = list(groups)
            for name in names if turn % 2 else names[::-1]:
                samples.setdefault(name, []).append(timed(groups[name], [same] * calls))
            if size == SIZES[0]:
                for name in ("gloo", "ours"):
                    few = [torch.zeros(fresh + k) for k in range(10)]
                    samples.setdefault(f"{name}, new lengths of 400 kB", []).append(timed(groups[name], few))
                fresh += 10
        if rank == 0:
            for name, took in samples.items():
                lasted, used = ([one[k] for one in took] for k in (0, 1))
                row = {"ranks": ranks, "size_bytes": size, "group": name, "samples_s": lasted, "thread_us": round(1e6 * statistics.median(used), 1)}
                sys.stdout.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def run(ranks: int, repeat: int, calls: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, "--repeat", str(repeat), "--calls", str(calls)]
    started = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(ranks)]
    said = [one.communicate(timeout=550)[0] for one in started]
    found = [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]
    rows = []
    for row in found:
        took = statistics.median(row["samples_s"])
        kind = "gloo" + row["group"].removeprefix("ours").removeprefix("gloo").removesuffix(", planned").removesuffix(", with a fabric")
        theirs = next(o["samples_s"] for o in found if o["group"] == kind and o["size_bytes"] == row["size_bytes"])
        what = f"{ranks} ranks, all-reduce of {row['size_bytes']} B, {row['group']}"
        rows.append({"what": what, "value": round(1e6 * took, 1), "unit": "us", "over_gloo": round(took / statistics.median(theirs), 3), **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--calls", type=int, default=100)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args.repeat, args.calls)
        return
    import machine

    rows = [row for ranks in args.ranks for row in run(ranks, args.repeat, args.calls)]
    for row in rows:
        print(f"{row['what']:<70} {row['value']:>10} us  {row['over_gloo']:>7} x gloo  {row['thread_us']:>7} us of the thread")
    machine.record("small_messages", rows)


if __name__ == "__main__":
    main()
