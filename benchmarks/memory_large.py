"""Memory plans of large steps: processor time of planning, and how far the plan is from its bound.

Run: `python benchmarks/memory_large.py [NET ...] [--no-write]` (nets: gpt48, lstm48, lstm80, lstm400; the last takes half an hour, mostly capture).
Each net is captured and its operators are measured here (kept in the user's cache); neither counts: `plan_cpu_s` is the time of `memory plan`'s
search for a budget of 60 % of what keeping everything takes (85 % for the GPT, of which no plan needs less than 81 %), among exact implementations,
floors and checks included. A recurrent net is a cell that Python runs for so many steps, so every step's operators stand in the graph. `gap` is time
over floor, less one. Limits: 60 s for the GPT of 48 layers and for 6,000 nodes, 120 s for 10,000, 600 s for 50,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets
import torch
from torch import nn

BUDGET_SHARES = {"gpt48": 0.85}
BUDGET_SHARE = 0.6  # of the others
LIMITS_S = {"gpt48": 60, "lstm48": 60, "lstm80": 120, "lstm400": 600}


class Recurrent(nn.Module):
    def __init__(self, layers: int = 2, size: int = 64, vocabulary: int = 64) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, size), nn.Linear(size, vocabulary)
        self.cells = nn.ModuleList(nn.LSTMCell(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: list[Any] = [None for _ in self.cells]
        out = []
        for y in self.tokens(x).unbind(1):
            for k, cell in enumerate(self.cells):
                states[k] = cell(y, states[k])
                y = states[k][0]
            out.append(y)
        return self.head(torch.stack(out, 1))


def lstm(length: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Recurrent(), (torch.randint(0, 64, (16, length)), torch.randint(0, 64, (16, length)))


def lstm48() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return lstm(48)


def lstm80() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return lstm(80)


def lstm400() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return lstm(400)


def gpt48() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    tokens = torch.randint(0, 1000, (4, 64))
    return memory_nets.GPT(layers=48, sequence=64), (tokens, tokens.clone())


def one(net: str) -> dict[str, Any]:
    """In a fresh process."""
    import numpy as np

    from meshwright.capture.step import capture_step_of
    from meshwright.decide.memory.auto import auto_plan
    from meshwright.decide.memory.step import keep_everything
    from meshwright.probe.steps.costs import StepCosts, costs_file
    from meshwright.probe.steps.priced import priced_graphs

    torch.set_num_threads(1)
    begin = time.process_time()
    step = capture_step_of(f"{__file__}:{net}", loss="cross-entropy", device="cpu")
    captured = time.process_time()
    _, graph = priced_graphs(step, StepCosts(costs_file()), kinds=("exact",))
    measured = time.process_time()
    keep = keep_everything(graph)
    plan, said = auto_plan(graph, int(BUDGET_SHARES.get(net, BUDGET_SHARE) * keep.peak_bytes), rng=np.random.default_rng(0))
    return {
        "nodes": len(graph.nodes), "capture_cpu_s": captured - begin, "measure_cpu_s": measured - captured,
        "plan_cpu_s": time.process_time() - measured, "strategy": plan.strategy, "peak_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes,
        "keep_bytes": keep.peak_bytes, "slower": plan.time_s / keep.time_s - 1, "gap": None if not plan.floor_s else plan.time_s / plan.floor_s - 1,
        "others": said, "rss_peak_bytes": machine.memory_high_water_bytes(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("nets", nargs="*", default=list(LIMITS_S))
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    rows = []
    for net in args.nets:
        found = machine.fresh("memory_large", "--one", net, timeout_s=7200)
        rows.append({"what": f"{net}: planning {found['nodes']:,} nodes", "value": found["plan_cpu_s"], "unit": "CPU seconds", "limit": LIMITS_S[net],
                     **found})  # fmt: skip
        print(f"{rows[-1]['what']}: {found['plan_cpu_s']:.1f} s (asked {LIMITS_S[net]}), {found['slower']:+.2%} time, gap {found['gap']}", flush=True)
        if not args.no_write:
            machine.record("memory_large", rows, budget_share=BUDGET_SHARE, budget_shares=BUDGET_SHARES)


if __name__ == "__main__":
    main()
