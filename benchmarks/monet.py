"""MONeT: how fast the joint programme proves optima, how far plans of whole networks are above their floor, and what memory costs in time.

Run: `python benchmarks/monet.py [--quick] [--parts resnet50,unet] [--pieces FOLDER]` (most of an hour the first time, when operators are
measured; processor seconds of this process). Random graphs: layers of ten operators with the edges of a transformer layer, random sizes and
times; budgets: half of the activations, and near the least. Networks: `memory_nets.py` and a 24-layer GPT, operators measured here; budgets as
shares of the measured no-recompute peak, parameters, their gradients and inputs aside in both, since batches here are smaller (of VGG-16 the
paper's bytes per image). The paper's overheads are the paper's, on its own GPU and batch sizes. Kinds: recomputation alone, joint with exact
implementations, with those that round (normalisations from their outputs, which the paper has, and weight gradients by images), and with those and
images channels last, as convolutions' kernels have them. `measured`: whole steps run in turns with plain ones as they are written, medians,
processor seconds of one thread, freed memory kept by the process; predicted overheads are sums of operators as measured in whole plain steps.
`same_layout` and `measured_same_layout`: the same plans channels last over the plain step channels last, which is faster: what planning alone costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

from meshwright.capture.step import capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible
from meshwright.graph.step_graph import StepGraph, StepNode, StepStorage
from meshwright.kernels.garbage import kept_memory
from meshwright.probe.steps.costs import StepCosts, costs_file
from meshwright.probe.steps.priced import priced_graphs
from meshwright.run.calibrate.operators import quiet_single_thread
from meshwright.run.steps.step import StepRunner, measured_peak_bytes, runner_of, step_tensors

Row = dict[str, Any]
# from the paper's repository (16 GB GPU), in GiB: the plain peak, parameters with their gradients, images, and (peak, overhead)
PAPER: dict[str, tuple[float, float, int, tuple[tuple[float, float], ...]]] = {
    "resnet50": (15.06, 0.190, 184, ((10.01, 0.0322), (8.01, 0.0556), (6.00, 0.0931), (4.99, 0.1195))),
    "unet": (14.32, 0.231, 11, ((10.01, -0.0410), (5.01, 0.1151))),
    "vgg16": (14.12, 1.031, 176, ((9.71, -0.0530), (5.51, 0.0911))),
}
SAME = ("vgg16",)  # the paper's very net and image size: budgets are its bytes per image; of the others the same share of the plain peak
LARGER = {"resnet50": 8, "vgg16": 3, "unet": 2}  # times the batch of `memory_nets`, so that activations are most of the bytes, as in the paper
NETWORKS = ("gpt24", "resnet50", "unet", "vgg16")
IMAGES = ("resnet50", "unet", "vgg16")
RUNS = 3
TIMED_S = 5.0
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


class Network:
    """A network's step in one layout, with the times of its operators in their places."""

    def __init__(self, name: str, costs: StepCosts, *, channels_last: bool = False) -> None:
        torch.manual_seed(0)
        if name == "gpt24":
            module, inputs = memory_nets.GPT(layers=24), memory_nets.gpt12()[1]
        else:
            module, inputs = getattr(memory_nets, name)()
            inputs = tuple(x.repeat(LARGER.get(name, 1), *[1] * (x.dim() - 1)) for x in inputs)
        loss = memory_nets.NETS.get(name, "cross-entropy")
        self.costs, self.step = costs, capture_step(module, inputs, loss=loss, name=name, channels_last=channels_last)
        self.plain, _ = priced_graphs(self.step, costs)

    def joint(self, *kinds: str) -> StepGraph:
        return priced_graphs(self.step, self.costs, kinds=kinds)[1]


def fixed_bytes(graph: StepGraph) -> int:
    """Parameters, inputs, and the results that the step gives (gradients, buffers, loss)."""
    results = {s for r in graph.results for s in graph.nodes[r].storages if graph.storages[s].kind == "made"}
    return graph.fixed_bytes() + sum(graph.storages[s].size_bytes for s in results)


Ready = tuple[StepRunner, list[torch.Tensor]]


def ratio_of(planned: Ready, plain: Ready) -> float:
    """Median processor seconds of a whole step over the plain one's, run in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    with quiet_single_thread(), kept_memory():
        for runner, tensors in (planned, plain):
            runner.run([*tensors])  # what is compiled at first use
        while len(times[0]) < RUNS or (sum(times[0]) < TIMED_S and len(times[0]) < 15):
            for found, (runner, tensors) in zip(times, (planned, plain), strict=True):
                start = time.thread_time()
                runner.run([*tensors])
                found.append(time.thread_time() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def shares_of(name: str, batch: int, beyond_bytes: int) -> dict[float, float | None]:
    """Share of the plain peak, what is aside apart -> the paper's overhead; `beyond_bytes`: of the plain peak here."""
    if name not in PAPER:
        return dict.fromkeys((0.8, 0.6, 0.5, 0.4))
    plain, aside, images, found = PAPER[name]
    whole = beyond_bytes * images / batch / 2**30 if name in SAME else plain - aside
    return {(peak - aside) / whole: over for peak, over in found}


def network_rows(name: str, quick: bool) -> Iterator[Row]:
    costs = StepCosts(costs_file())
    net = Network(name, costs)
    keep = keep_everything(net.plain)
    whole = runner_of(net.step, keep, graph=net.plain), step_tensors(net.step)
    plain = measured_peak_bytes(*whole)
    aside = fixed_bytes(net.plain)
    shares = shares_of(name, net.step.source.batch_size, plain - aside)
    bases = {id(net): (keep, whole)}  # of each layout: the step that keeps everything
    kinds = [("alone", net, net.plain), ("joint", net, net.joint("exact"))]
    if name in IMAGES:
        kinds.append(("joint, rounding too", net, net.joint("rounding")))
        last = Network(name, costs, channels_last=True)
        kinds.append(("joint, channels last", last, last.joint("rounding")))
        fastest = keep_everything(last.plain)
        bases[id(last)] = fastest, (runner_of(last.step, fastest, graph=last.plain), step_tensors(last.step))
    for kind, within, planned in kinds:
        for share in [*shares][: 2 if quick else None]:
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
            runner, tensors = runner_of(within.step, plan, graph=planned), step_tensors(within.step)
            measured = measured_peak_bytes(runner, tensors)
            row = {
                "what": label, "value": round(plan.time_s / keep.time_s - 1, 4), "unit": "overhead", "paper": shares[share],
                "solve_s": round(took, 1), "measured": round(ratio_of((runner, tensors), whole) - 1, 4),
                "ways": sum(a.alternative >= 0 for a in plan.actions),
                "above_floor": None if plan.floor_s is None else round(plan.time_s / plan.floor_s - 1, 4),
                "measured_to_predicted_peak": round(measured / plan.peak_bytes, 4),
            }  # fmt: skip
            own, own_whole = bases[id(within)]
            if within is not net:
                row["same_layout"] = round(plan.time_s / own.time_s - 1, 4)
                row["measured_same_layout"] = round(ratio_of((runner, tensors), own_whole) - 1, 4)
            yield row


def parts(args: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    found: dict[str, Callable[[], Iterator[Row]]] = {"random": partial(random_rows, 1 if args.quick else 3)}
    return found | {name: partial(network_rows, name, args.quick) for name in NETWORKS}


def printed(rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        found.append(row)
        more = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "value", "unit") and v is not None)
        print(f"{row['what']:<64} {row['value']} {row['unit']} {more}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one random graph of each size, two budgets per network")
    parser.add_argument("--parts", default=",".join(("random", *NETWORKS)), help="which of them to run, by commas")
    parser.add_argument("--pieces", type=Path, help="a folder that keeps every part's rows: those that it holds are not run again")
    args = parser.parse_args()
    kept: dict[str, list[Row]] = {}
    for name, run in parts(args).items():
        file = args.pieces / f"{name}.json" if args.pieces else None
        if file is not None and file.exists():
            kept[name] = json.loads(file.read_text())
        elif name in args.parts.split(","):
            kept[name] = printed(run())
            if file is not None:
                file.write_text(json.dumps(kept[name]))
    if len(kept) < 1 + len(NETWORKS):
        return print(f"not recorded: {', '.join(x for x in ('random', *NETWORKS) if x not in kept)} to do")
    found = [row for rows in kept.values() for row in rows]
    machine.record("monet", found, command="python benchmarks/monet.py" + (" --quick" if args.quick else ""))


if __name__ == "__main__":
    main()
