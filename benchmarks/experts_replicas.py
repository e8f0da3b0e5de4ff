"""Copies of hot experts on four ranks with links of 100 Mbit/s: the same layer with and without, routing by Zipf's law, training and inference.

Run: `python benchmarks/experts_replicas.py [--steps 9]` (root; about two minutes). 16 experts of 256 x 256 (two matrices, 524 kB), k = 1, 2,048
tokens a rank; which expert a token chooses is drawn by Zipf's law of exponent 1.0, 1.2, 1.5, alike on all ranks, hottest on rank 0. One job runs
both layers in turn; times are those of the slowest rank, medians. The layer with copies decides by itself after its first calls
(`MoELayer(spare=1, replan=3)`).
Outputs of both are compared in every step. Raw: results/experts_replicas.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

FABRIC = "star:4?link=12.5MB/s"
EXPONENTS, EXPERTS, WIDTH, INNER, TOKENS = (1.0, 1.2, 1.5), 16, 256, 256, 2048
REPLAN, LAB = 3, "bench-replicas"


def child(steps: int) -> None:
    import torch
    import torch.distributed as dist

    from meshwright.drive.plans import read_fabric
    from meshwright.nn import FeedForward, MoELayer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, fabric, rows = dist.get_rank(), read_fabric(FABRIC), []

    class Drawn(torch.nn.Module):
        """Logits that choose what was drawn."""

        chosen: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 20.0 * torch.nn.functional.one_hot(self.chosen, EXPERTS).float()

    for exponent in EXPONENTS:
        shares = torch.tensor([(i + 1.0) ** -exponent for i in range(EXPERTS)])
        for training in (True, False):
            layers = {
                name: MoELayer(
                    FeedForward(WIDTH, INNER, bias=False), EXPERTS, k=1, router=Drawn(), dropless="loop", fabric=fabric, seed=1, spare=spare,
                    replan=REPLAN,
                )
                for name, spare in (("without", 0), ("with", 1))
            }  # fmt: skip
            times: dict[str, list[float]] = {name: [] for name in layers}
            apart = 0.0
            for step in range(REPLAN + 1 + steps):
                draw = torch.Generator().manual_seed(97 * step + rank)
                chosen = torch.multinomial(shares, TOKENS, replacement=True, generator=draw)
                data = torch.randn(TOKENS, WIDTH, generator=draw)
                outputs = {}
                for name in sorted(layers, reverse=bool(step % 2)):
                    layer, x = layers[name], data.clone().requires_grad_(training)
                    layer.router.chosen = chosen
                    dist.barrier()
                    began = perf_counter()
                    with torch.set_grad_enabled(training):
                        y = layer(x)
                        if training:
                            y.square().sum().backward()
                    lasted = torch.tensor([perf_counter() - began])
                    dist.all_reduce(lasted, dist.ReduceOp.MAX)
                    outputs[name] = y.detach()
                    if step > REPLAN:
                        times[name].append(float(lasted))
                apart = max(apart, float((outputs["with"] - outputs["without"]).abs().max() / outputs["without"].abs().max()))
            copies = layers["with"].copies
            rows.append({
                "exponent": exponent, "training": training, "times": times, "apart": apart, "copies": copies.made.copies, "moves": copies.moves,
                "busiest": copies.made.busiest, "before": copies.made.before, "bound": copies.made.bound,
            })  # fmt: skip
    if rank == 0:
        print("ROWS " + json.dumps(rows), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.steps)
        return
    import machine

    run = [sys.executable, "-m", "meshwright"]
    subprocess.run([*run, "lab", "up", FABRIC, "--name", LAB, "--no-verify", "--quiet"], check=True)
    try:
        command = [*run, "lab", "run", LAB, "--", sys.executable, __file__, "--child", "--steps", str(args.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        subprocess.run([*run, "lab", "down", LAB, "--quiet"], check=True)
    said = next(line for line in done.stdout.splitlines() if "ROWS " in line)
    raw: list[dict[str, Any]] = json.loads(said[said.index("ROWS ") + 5 :])
    rows = []
    for x in raw:
        with_s, without_s = (statistics.median(x["times"][n]) for n in ("with", "without"))
        expected_s = sum(saved_s for _, _, saved_s, _ in x["moves"]) / REPLAN  # each beside the copies before it
        rows.append({
            "what": f"zipf {x['exponent']}, {'training' if x['training'] else 'inference'}: with copies beside without",
            "value": with_s, "peer": without_s, "unit": "s", "gain": without_s / with_s, "copies": len(x["copies"]), "expected_saving_s": expected_s,
            "saving_s": without_s - with_s,
            "busiest_rows": x["busiest"], "before_rows": x["before"], "bound_rows": x["bound"], "outputs_apart": x["apart"],
        })  # fmt: skip
        print(f"{rows[-1]['what']:<56} {with_s * 1e3:6.0f} ms, {without_s * 1e3:6.0f} ms: {without_s / with_s:.2f} times, {len(x['copies'])} copies, "
              f"saves {1e3 * (without_s - with_s):.0f} ms (expected {1e3 * expected_s:.0f}), busiest {x['busiest']} of {x['before']} rows "
              f"(bound {x['bound']}), outputs {x['apart']:.1e} apart")  # fmt: skip
    machine.record("experts_replicas", rows, command="python benchmarks/experts_replicas.py", raw=raw)


if __name__ == "__main__":
    main()
