"""Arenas: how far above their lower bound, and in what time; MiniMalloc's public instances if their folder is given.

Run: `python benchmarks/static_memory.py [--instances FOLDER]` (minutes on one core; processor seconds). Random graphs: operators on four streams with
events, storages with one to three readers, sizes spread evenly. Joint graphs: training steps of `memory_nets.py`.
Peers in the same run: greedy by size, and the total without sharing.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

from meshwright.arena import ArenaProblem, intervals_problem, rows
from meshwright.check.arena import check_arena
from meshwright.decide.memory.static import FirstFit, StaticMemory, conflicts, heaviest_antichain, lifetimes
from meshwright.errors import Infeasible
from meshwright.io.plan.minimalloc_csv import read_buffers_csv

CAPACITY = 1_048_576


def random_graph(storages: int, seed: int, streams: int = 4) -> ArenaProblem:
    """Half as many operators as storages; six in ten wait for one of the twenty before them, and every reader for who writes."""
    rng = np.random.default_rng(seed)
    ops = storages // 2
    stream = rng.integers(0, streams, ops).astype(np.int32)
    after: list[set[int]] = [{int(rng.integers(max(0, v - 20), v))} if v and rng.random() < 0.6 else set() for v in range(ops)]
    sources = np.sort(rng.integers(0, ops - 1, storages))
    consumers = []
    for s in sources.tolist():
        far = rng.random() >= 0.97
        ends = {min(ops - 1, s + int(rng.integers(1, ops // 10) if far else rng.geometric(1 / 8))) for _ in range(rng.integers(1, 4))}
        consumers.append(sorted(ends))
        for v in ends:
            after[v].add(s)
    return ArenaProblem(
        stream=stream, after=rows([sorted(a) for a in after]), size_bytes=rng.integers(1, 2000, storages) * 512,
        sources=rows(sources[:, None].tolist()), consumers=rows(consumers), alignment_bytes=512,
    )  # fmt: skip


def graph_rows(storages: int, seed: int) -> list[dict[str, object]]:
    problem = random_graph(storages, seed)
    start = time.process_time()
    life = lifetimes(problem)
    heaviest_antichain(problem, life)
    bound_s = time.process_time() - start
    pairs = len(conflicts(life).items) // 2
    start = time.process_time()
    plan = StaticMemory().plan(problem, rng=np.random.default_rng(0))
    plan_s = time.process_time() - start
    verdict = check_arena(problem, plan)
    greedy = FirstFit().plan(problem, rng=np.random.default_rng(0))
    name = f"{storages} storages on 4 streams, seed {seed}"
    return [
        {"what": f"{name}: arena over bound", "value": round(plan.arena_bytes / plan.bound_bytes, 4), "unit": "x", "limit": 1.08,
         "peer": round(greedy.arena_bytes / plan.bound_bytes, 4), "unshared": round(int(problem.size_bytes.sum()) / plan.bound_bytes, 2),
         "pairs": pairs, "check": verdict.status},
        {"what": f"{name}: order and bound", "value": round(bound_s, 2), "unit": "s", "limit": 10.0},
        {"what": f"{name}: everything", "value": round(plan_s, 2), "unit": "s", "limit": 60.0},
    ]  # fmt: skip


def instance_rows(folder: Path) -> Iterator[dict[str, object]]:
    for file in sorted(folder.glob("*.csv")):
        table = read_buffers_csv(file)
        problem = intervals_problem(table.lower, table.upper, table.size_bytes, names=table.names)
        greedy = FirstFit().plan(problem, rng=np.random.default_rng(0))
        start = time.process_time()
        try:
            plan = StaticMemory(capacity_bytes=CAPACITY).plan(problem, rng=np.random.default_rng(0))
            height, status = plan.arena_bytes, check_arena(problem, plan).status
        except Infeasible as error:
            height, status = int(error.data["found_bytes"]), "over capacity"
        took = time.process_time() - start
        best = StaticMemory().plan(problem, rng=np.random.default_rng(0))
        yield {
            "what": f"{file.name}: {'' if height <= CAPACITY else 'not '}found under {CAPACITY}",
            "value": round(took, 2), "unit": "s", "limit": 30.0, "arena_bytes": height, "check": status,
            "greedy_bytes": greedy.arena_bytes, "bound_bytes": best.bound_bytes, "least_bytes": best.arena_bytes, "optimal": best.optimal,
        }  # fmt: skip


def run_rows(runs: int) -> list[dict[str, object]]:
    """A training step's graph on one to four threads over one storage, at random moments: how many runs have the bits of eager."""
    import torch
    from torch import nn
    from torch.fx.experimental.proxy_tensor import make_fx

    from meshwright.run.executor.arena import arena_graph

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))
    names, values = zip(*((n, p.detach().clone()) for n, p in net.named_parameters()), strict=True)

    def step(x: torch.Tensor, target: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        given = [p.requires_grad_() for p in parameters]
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, dict(zip(names, given, strict=True)), (x,)), target)
        return [loss, *torch.autograd.grad(loss, given)]

    inputs = [torch.randn(32, 64), torch.randint(0, 10, (32,)), *values]
    graph = make_fx(step)(*[x.clone() for x in inputs])
    inputs = [x.detach() for x in inputs]
    wanted, right = graph(*inputs), 0
    made = [arena_graph(graph, inputs, streams=streams) for streams in (1, 2, 3, 4)]
    for seed in range(runs):
        found = made[seed % 4].run(*inputs, sleep_s=5e-4, seed=seed)
        right += all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return [{"what": f"runs on threads with the bits of eager, of {runs}", "value": right, "unit": "runs", "limit": runs, "higher_is_better": True}]


def step_rows(net: str, loss: str) -> Iterator[dict[str, object]]:
    """The joint graph of a net's training step (without dropout: random operators are not run on threads), on one stream and on four."""
    import torch

    from meshwright.capture.step import capture_step
    from meshwright.run.executor.arena import arena_graph
    from meshwright.run.steps.step import step_tensors

    torch.manual_seed(0)
    module, inputs = getattr(memory_nets, net)()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.eval()
    step = capture_step(module, inputs, loss=loss, name=net)
    for streams in (1, 4):
        made = arena_graph(step.graph_module, step_tensors(step), streams=streams)
        yield {
            "what": f"step of {net} on {streams} streams: arena over bound", "value": round(made.plan.arena_bytes / made.plan.bound_bytes, 4),
            "unit": "x", "limit": 1.05, "storages": len(made.plan.offset_bytes), "arena_bytes": made.plan.arena_bytes,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=Path, help="folder with MiniMalloc's CSV files")
    parser.add_argument("--storages", default="2000,20000,50000")
    args = parser.parse_args()
    graph_rows(200, 0)  # compiles
    found = []
    for row in measured(args):
        found.append(row)
        print(f"{row['what']:<60} {row['value']:>10} {row['unit']} {row.get('limit', '')}", flush=True)
    machine.record("static_memory", found, command="python benchmarks/static_memory.py")


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for count in args.storages.split(","):
        yield from graph_rows(int(count), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield {"what": "memory of all of it", "value": round(peak / 2**30, 2), "unit": "GiB", "limit": 2.0}
    yield from run_rows(100)
    for net, loss in memory_nets.NETS.items():
        yield from step_rows(net, loss)
    if args.instances:
        yield from instance_rows(args.instances)


if __name__ == "__main__":
    main()
