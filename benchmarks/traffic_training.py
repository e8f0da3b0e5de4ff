"""Traffic planned in a job's own first 20 steps, in the lab: what those steps take, and the steps after them, beside torch's DDP and PowerSGD rank 1.

    python benchmarks/traffic_training.py [--rates 50,100,200] [--rounds 4]          (root or user namespaces; two to four minutes a rate)

Four gloo ranks, one shaped link each, 88 tensors of 1.06 million parameters, backward not paced. Every rival trains its own copy of the model from
the same start with the same batches. The first 21 steps of all take turns, one step of each, so their totals are of the same minutes. The planner
fits and plans at the beginning of steps 19 to 21, which is counted. Then rounds as in `traffic_steps.py`: of five steps the last three count. A step
lasts as long as at its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine
import traffic_steps
from traffic_steps import LEAD, STEPS, Trained, say

RANKS, PLANNED, LIMIT = 4, 20, 1.05
RATES = (50, 100, 200)  # Mbit/s
DENSE, POWER, OURS = "torch ddp", "torch powersgd rank 1", "planned in training"


def rank_main() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    from meshwright.torch import traffic_in_training

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    trained = {
        DENSE: Trained(0.0, lambda ddp: None),
        POWER: Trained(0.0, lambda ddp: ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook), one_bucket=True),
        OURS: Trained(0.0, lambda ddp: traffic_in_training(ddp, steps=PLANNED)),
    }
    first: dict[str, list[float]] = {name: [] for name in trained}
    begun_s = dict.fromkeys(trained, 0.0)
    for step in range(PLANNED + 1):  # the last plan is settled as the next step begins
        say(f"step {step}")
        for name, one in trained.items():
            begin = time.perf_counter()
            first[name].append(one.step())
            begun_s[name] += time.perf_counter() - begin
    planner = trained[OURS].state
    done = planner.done
    times: dict[str, list[float]] = {name: [] for name in trained}
    for turn in range(int(os.environ["ROUNDS"])):
        say(f"round {turn + 1}")
        for name in random.Random(turn).sample(sorted(trained), len(trained)):
            for _ in range(LEAD):
                trained[name].step()
            times[name] += [trained[name].step() for _ in range(STEPS)]
    if dist.get_rank() == 0:
        plan = planner.plan
        Path(os.environ["FOUND"]).write_text(json.dumps({
            "done": done, "first_s": first, "first_steps_s": begun_s, "step_s": {n: median(t) for n, t in times.items()}, "all_s": times,
            "groups": [(g.codec, g.last - g.first) for g in plan.groups] if plan and not plan.leave else "left to ddp",
            "loss": {n: one.loss for n, one in trained.items()},
        }))  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def at_rate(rate: int, rounds: int) -> dict[str, Any]:
    from meshwright.lab import Lab

    with tempfile.TemporaryDirectory() as folder, Lab.up(traffic_steps.star(rate, RANKS), verify=True) as lab:
        found = Path(folder) / "found.json"
        env = {"ROUNDS": str(rounds), "OMP_NUM_THREADS": "1", "FOUND": str(found)}
        lab.run([sys.executable, __file__, "--rank"], env=env, timeout_s=580, sink=lambda rank, line: sys.stderr.write(f"{line.decode()}\n"))
        return {"rate_Mbit": rate, **json.loads(found.read_text())}


def rows_of(raw: dict[str, Any]) -> list[dict[str, Any]]:
    at, t, begun = f"{raw['rate_Mbit']} Mbit/s", raw["step_s"], raw["first_steps_s"]
    first = f"{at}: the first {PLANNED + 1} steps, planning included, over those of {DENSE}"
    assert raw["done"], f"the plan is to be settled within {PLANNED} steps"
    return [
        {"what": f"{at}: planned over {DENSE}", "value": round(t[OURS] / t[DENSE], 3), "unit": "x", "limit": LIMIT},
        {"what": f"{at}: planned over {POWER}", "value": round(t[OURS] / t[POWER], 3), "unit": "x", "limit": LIMIT},
        {"what": first, "value": round(begun[OURS] / begun[DENSE], 3), "unit": "x"},
        {"what": f"{at}: loss after equal steps over {DENSE}", "value": round(raw["loss"][OURS] / raw["loss"][DENSE], 3), "unit": "x"},
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main()
        return
    raw = [at_rate(int(rate), args.rounds) for rate in args.rates.split(",")]
    rows = [row for one in raw for row in rows_of(one)]
    for row in rows:
        print(f"{row['what']:<90} {row['value']:>8} {row['unit']}")
    for one in raw:
        print(f"{one['rate_Mbit']} Mbit/s: {({k: round(v, 4) for k, v in one['step_s'].items()})}, groups {one['groups']}")
    machine.record("traffic_training", [*rows, *({"what": "raw", **one} for one in raw)], command="python benchmarks/traffic_training.py")


if __name__ == "__main__":
    main()
