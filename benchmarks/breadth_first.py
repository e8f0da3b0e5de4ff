"""Breadth-first with sharded weights in the lab: how much of the gradients' reductions is left uncovered.

Run: `python benchmarks/breadth_first.py [--steps 5]` (root or user namespaces, a quiet machine; a minute; prints and writes
benchmarks/results/breadth_first.json). Two replicas of two pipeline devices with four stages each, 4 MB of fp32 gradients per stage, links of
200 Mbit/s, paced stages: a stage's backward over all micro-batches lasts 1.5 times its reduction at the links' rate. Four programs of one
schedule take turns: without collectives, with the last reduction alone (nothing is left to cover it, so what it adds is a reduction's time), with
all reductions, and with the gathers of weights too. Exposed is what a step gets longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import star
from pipeline_runs import our_walk, timed

RATE_BPS = 25_000_000  # 200 Mbit/s
STAGES, MICROBATCHES, REPLICAS, DEVICES = 4, 4, 2, 2
GRADIENT_BYTES = 4_000_000  # of one stage
REDUCTION_S = GRADIENT_BYTES / REPLICAS / RATE_BPS
COVER = 1.5  # of the reduction at full link rate; measured reductions are longer, and 1.2 of those is asked
LIMIT = 1.3  # exposed reductions over one stage's


def plans() -> dict[str, Any]:
    from meshwright.decide.pipeline import PipelineProblem
    from meshwright.decide.pipeline.breadthfirst import BreadthFirst
    from meshwright.drive.pipeline.pipelines import plan_schedule

    backward_s = COVER * REDUCTION_S / MICROBATCHES * STAGES  # of one micro-batch, whole device
    problem = PipelineProblem.of(
        DEVICES, MICROBATCHES, data=REPLICAS, forward_s=backward_s / 2, backward_s=backward_s, message_bytes=4096, p2p_rate_Bps=RATE_BPS,
        gradient_bytes=STAGES * GRADIENT_BYTES, weight_bytes=2 * STAGES * GRADIENT_BYTES,
    )  # fmt: skip
    whole = BreadthFirst(chunks=STAGES, sharded=True).plan(problem)

    def only(keep: Any) -> Any:
        return replace(whole, collectives=tuple(tuple(c for c in row if keep(c)) for row in whole.collectives))

    last = {max(row, key=lambda c: c.after) for row in only(lambda c: c.kind == "reduce").collectives}
    made = {
        "no collectives": (replace(problem, gradient_bytes=(0,) * DEVICES), replace(whole, collectives=())),
        "last reduction": (problem, only(lambda c: c in last)),
        "reductions": (problem, only(lambda c: c.kind == "reduce")),
        "reductions and gathers": (problem, whole),
    }
    return {name: plan_schedule(p, s, "breadth-first") for name, (p, s) in made.items()}


def rank_main() -> None:
    import torch
    import torch.distributed as dist

    from meshwright.run.pipeline.stages import precise_sleep

    torch.set_num_threads(1)
    precise_sleep()
    dist.init_process_group("gloo")
    made = plans()
    walks = {name: our_walk(plan, dist.get_rank()) for name, plan in made.items()}
    found = timed({name: (w.clear, w.step) for name, w in walks.items()}, int(os.environ["STEPS"]))
    if dist.get_rank() == 0:
        planned = {name: plan.prediction.time_s for name, plan in made.items()}
        print(json.dumps({"measured": found, "planned": planned}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main()
        return 0
    from meshwright.lab import Lab

    said: list[str] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank == 0 and text.startswith('{"measured"'):
            said.append(text)
        elif "Warning" not in text:
            sys.stderr.write(text)

    with Lab.up(star(200, 200, 200, 200)) as lab:
        lab.run([sys.executable, __file__, "--rank"], env={"STEPS": str(args.steps), "OMP_NUM_THREADS": "1"}, timeout_s=600, sink=sink)
    raw = json.loads(said[0])
    t = {name: median(values) for name, values in raw["measured"].items()}
    one = t["last reduction"] - t["no collectives"]
    reductions, gathers = t["reductions"] - t["no collectives"], t["reductions and gathers"] - t["reductions"]
    backward_s = COVER * REDUCTION_S
    rows = [
        {"what": "breadth-first, 2 x 2, four stages per rank: exposed reductions over one stage's", "value": round(reductions / one, 3), "unit": "x",
         "limit": LIMIT, "measured_s": {k: round(v, 4) for k, v in t.items()}, **raw},
        {"what": "one stage's reduction", "value": round(one, 4), "unit": "s"},
        {"what": "a stage's backward over all micro-batches, over its reduction (1.2 asked)", "value": round(backward_s / one, 3), "unit": "x"},
        {"what": "exposed gathers", "value": round(gathers, 4), "unit": "s"},
    ]  # fmt: skip
    for row in rows:
        print(f"{row['what']:<90} {row['value']} {row['unit']}")
    machine.record("breadth_first", rows, command=f"python benchmarks/breadth_first.py --steps {args.steps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
