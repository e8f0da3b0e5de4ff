"""MONeT: how fast the joint programme proves optima, how far plans of whole networks are above their floor, and what memory costs in time.

Run: `python benchmarks/monet.py [--quick]` (minutes; processor seconds of this process). Random graphs: layers of ten operators with the edges of a
transformer layer, random sizes and times; budgets: half of the activations, and near the least. Networks: `memory_nets.py` and a 24-layer GPT,
operators measured here; budgets as shares of the measured no-recompute peak, parameters, their gradients and inputs aside (of the paper's networks
they are some hundredths, of these up to a third). The paper's overheads are the paper's, on its own GPU and batch sizes. Kinds: recomputation
alone, joint with exact implementations, and with normalisations from their outputs, which the paper has and which rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

from meshwright.capture.step import capture_step
from meshwright.check.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible
from meshwright.probe.step_costs import StepCosts, costs_file, measure_step
from meshwright.run.step import measured_peak_bytes, runner_of, step_tensors
from meshwright.run.step_choices import with_variants
from meshwright.step_graph import StepGraph, StepNode, StepStorage

Row = dict[str, Any]
# share of the plain peak -> overhead, from the paper's repository (16 GB GPU)
PAPER = {
    "resnet50": {10.01 / 15.06: 0.0322, 8.01 / 15.06: 0.0556, 6.00 / 15.06: 0.0931, 4.99 / 15.06: 0.1195},
    "unet": {10.01 / 14.32: -0.0410, 5.01 / 14.32: 0.1151},
    "vgg11": {9.71 / 14.12: -0.0530, 5.51 / 14.12: 0.0911},
}
LARGER = {"resnet50": 8, "vgg11": 32, "unet": 2}  # times the batch of `memory_nets`, so that activations are most of the bytes, as in the paper
ROUNDING = ("resnet50", "unet", "vgg16")
NEAR_EFFORT = 3_000_000
LAYER = ((0,), (1,), (2,), (3,), (0, 4), (5,), (6,), (7,), (8,), (5, 9))  # operator k reads these values of its layer; 0 is the residual stream


def card_graph(operators: int, seed: int) -> StepGraph:
    """A chain of such layers; every backward node reads what its operator read and, half of the time, its result."""
    rng = np.random.default_rng(seed)
    storages = [StepStorage(size_bytes=64, owner="x", kind="input")]
    nodes = [StepNode(name="x", target="placeholder", phase="input", storages=(0,))]

    def put(name: str, phase: str, inputs: list[int]) -> int:
        storages.append(StepStorage(size_bytes=int(rng.integers(64, 257)), owner=name))
        made = (len(storages) - 1,)
        time_s = float(rng.integers(1, 21)) * 1e-3
        nodes.append(
            StepNode(name=name, target="op", phase=phase, inputs=tuple(sorted({*inputs})), storages=made, makes=made, time_s=time_s)  # type: ignore[arg-type]
        )
        return len(nodes) - 1

    values, forward = [0], []
    for k in range(operators):
        if k % 10 == 0:
            values = [values[-1]]
        values.append(put(f"f{k}", "forward", [values[i] for i in LAYER[k % 10]]))
        forward.append(values[-1])
    boundary, gradient = len(nodes), forward[-1]
    for k in reversed(range(operators)):
        reads = [gradient, *nodes[forward[k]].inputs, *([forward[k]] if rng.random() < 0.5 else [])]
        gradient = put(f"b{k}", "backward", reads)
    return StepGraph(name=f"{operators} operators", nodes=tuple(nodes), storages=tuple(storages), boundary=boundary, results=(forward[-1], gradient))


def random_rows(seeds: int) -> Iterator[Row]:
    for operators in (10, 20, 30, 40):
        for seed in range(seeds):
            graph = card_graph(operators, seed)
            activations = sum(graph.storages[s].size_bytes for n in graph.nodes[: graph.boundary] for s in n.makes)
            keep = keep_everything(graph)
            least = FusionAware(effort=NEAR_EFFORT).plan(graph, None, rng=np.random.default_rng(0)).peak_bytes
            near = least + (keep.peak_bytes - least) // 10
            for where, budget in (("half", keep.peak_bytes - activations // 2), ("near the least", near)):
                start = time.process_time()
                plan = Monet(exact_operators=operators).plan(graph, budget, rng=np.random.default_rng(0))
                took = time.process_time() - start
                assert not check_step_plan(graph, plan).findings
                label = f"{operators} operators, graph {seed}, {where}: proved {plan.optimal}, overhead {plan.time_s / keep.time_s - 1:.3f}"
                yield {"what": label, "value": round(took, 2), "unit": "s", "limit": 30}


def network(name: str, costs: StepCosts) -> tuple[Any, StepGraph]:
    torch.manual_seed(0)
    if name == "gpt24":
        module, inputs = memory_nets.GPT(layers=24), memory_nets.gpt12()[1]
    else:
        module, inputs = getattr(memory_nets, name)()
        inputs = tuple(x.repeat(LARGER.get(name, 1), *[1] * (x.dim() - 1)) for x in inputs)
    step = capture_step(module, inputs, loss=memory_nets.NETS.get(name, "cross-entropy"), name=name)
    graph = measure_step(step.graph_module, step.step_graph, costs=costs)
    costs.save()
    return step, graph


def fixed_bytes(graph: StepGraph) -> int:
    """Parameters, inputs, and the results that the step gives (gradients, buffers, loss)."""
    results = {s for r in graph.results for s in graph.nodes[r].storages if graph.storages[s].kind == "made"}
    return graph.fixed_bytes() + sum(graph.storages[s].size_bytes for s in results)


def network_rows(name: str, shares: list[float]) -> Iterator[Row]:
    costs = StepCosts(costs_file())
    step, graph = network(name, costs)
    keep = keep_everything(graph)
    plain = measured_peak_bytes(runner_of(step, keep, graph=graph), step_tensors(step))
    aside = fixed_bytes(graph)
    kinds = [("alone", graph), ("joint", with_variants(step, graph, costs=costs))]
    if name in ROUNDING:
        kinds.append(("joint, rounding too", with_variants(step, graph, costs=costs, rounding=True)))
    for kind, planned in kinds:
        for share in shares:
            start = time.process_time()
            budget = round(aside + share * (plain - aside))
            label = f"{name} {kind} at {share:.3f} of activations, {budget / plain:.3f} of {plain:,} B"
            try:
                plan = Monet().plan(planned, budget, rng=np.random.default_rng(0))
            except Infeasible as refused:
                least = (refused.data["least_bytes"] - aside) / (plain - aside)
                yield {"what": f"{label}: not found, least {least:.3f}", "value": None, "unit": "overhead"}
                continue
            took = time.process_time() - start
            assert not check_step_plan(planned, plan).findings
            measured = measured_peak_bytes(runner_of(step, plan, graph=planned), step_tensors(step))
            paper = PAPER.get(name, {}).get(share)
            yield {
                "what": label, "value": round(plan.time_s / keep.time_s - 1, 4), "unit": "overhead", "paper": paper, "solve_s": round(took, 1),
                "ways": sum(a.alternative >= 0 for a in plan.actions),
                "above_floor": None if plan.floor_s is None else round(plan.time_s / plan.floor_s - 1, 4),
                "measured_to_predicted_peak": round(measured / plan.peak_bytes, 4),
            }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[Row]:
    yield from random_rows(1 if args.quick else 3)
    for name in args.networks.split(","):
        shares = sorted(PAPER.get(name, {0.8: 0.0, 0.6: 0.0, 0.5: 0.0, 0.4: 0.0}), reverse=True)
        yield from network_rows(name, shares[:2] if args.quick else shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one random graph of each size, two budgets per network")
    parser.add_argument("--networks", default="gpt24,resnet50,unet,vgg11")
    args = parser.parse_args()
    found = []
    for row in rows(args):
        found.append(row)
        more = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "value", "unit") and v is not None)
        print(f"{row['what']:<64} {row['value']} {row['unit']} {more}", flush=True)
    machine.record("monet", found, command="python benchmarks/monet.py" + (" --quick" if args.quick else ""))


if __name__ == "__main__":
    main()
