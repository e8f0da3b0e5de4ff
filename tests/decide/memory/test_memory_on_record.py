"""Peaks, times and floors of every memory strategy on small steps, layers and arenas are as on record."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest

from meshwright.arena import ArenaProblem, rows
from meshwright.decide.memory import RecomputeProblem, StageBudget, strategies
from meshwright.decide.memory.auto import auto_plan
from meshwright.decide.memory.fusionaware.frontier import frontier_of
from meshwright.decide.memory.fusionaware.fused import fused_peak_bytes, priced
from meshwright.decide.memory.problem import Layer, Operator
from meshwright.decide.memory.step import least_bound_bytes
from meshwright.graph.step_graph import StepGraph
from meshwright.testing.steps import random_step_graph
from on_record import made, require_on_record

EFFORT = 1_500
SHARES = (1.0, 0.9, 0.75, 0.6)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps(seed: int) -> None:
    """From the least peak, and from what fewer and fewer bytes allow."""
    found: dict[str, dict[str, Any]] = {}
    for ways in (False, True):
        graph = random_step_graph(random.Random(seed), forward=5 + seed, alternatives=ways)
        least = least_bound_bytes(graph)
        for kind in strategies("step"):
            if ways and not kind.chooses_ways:
                continue
            strategy = kind(effort=EFFORT) if any(f.name == "effort" for f in fields(kind)) else kind()
            for share in (None, *SHARES):
                budget = None if share is None else int(least / share)
                row = made(lambda s=strategy, g=graph, b=budget: {"plan": s.plan(g, b, rng=rng())})
                if "plan" in row:
                    plan = strategy.plan(graph, budget, rng=rng())
                    row = made(lambda p=plan: {
                        "peak_bytes": p.peak_bytes, "time_s": p.time_s, "floor_s": p.floor_s, "least_bytes": p.least_bytes, "actions": p.actions,
                        "options": p.options,
                    })  # fmt: skip
                found[f"{'ways ' * ways}{kind.name} {share}"] = row
    require_on_record(f"memory-steps-{seed}", found)


def test_auto() -> None:
    found: dict[str, dict[str, Any]] = {}
    for seed in (4, 5):
        for ways in (False, True):
            graph = random_step_graph(random.Random(seed), forward=6, alternatives=ways)
            for share in (None, 1.0, 0.8, 0.6, 0.3):
                budget = None if share is None else int(least_bound_bytes(graph) / share)

                def plan(graph: Any = graph, budget: int | None = budget) -> dict[str, Any]:
                    chosen, said = auto_plan(graph, budget, rng=rng())
                    return {"strategy": chosen.strategy, "peak": chosen.peak_bytes, "time": chosen.time_s, "floor": chosen.floor_s, **said}

                found[f"{seed} {ways} {share}"] = made(plan)
    require_on_record("memory-auto", found)


def test_compiled_steps() -> None:
    """Nodes with the names and prices of a compiled graph, in which calls are fused."""
    found: dict[str, dict[str, Any]] = {}
    targets = ("aten.add.Tensor", "aten.mm.default", "aten.relu.default", "aten.sum.dim_IntList", "aten.native_layer_norm.default", "aten.mul.Tensor")
    for seed in range(5):
        graph = random_step_graph(random.Random(seed), forward=8, alternatives=False)
        r = random.Random(seed)
        nodes = tuple(n if n.phase == "input" or not n.makes else msgspec.structs.replace(n, target=r.choice(targets)) for n in graph.nodes)
        flops = {n.name: float(r.randrange(10**3)) for n in nodes if n.target == "aten.mm.default"}
        graph = priced(msgspec.structs.replace(graph, nodes=nodes), flops, flops_per_s=1e6, bytes_per_s=1e3)

        def cut(graph: StepGraph = graph) -> dict[str, Any]:
            frontier = frontier_of(graph, EFFORT, False, True)
            plans = [frontier.lives.plan(e.hold_from, strategy="fusionaware", options={"compiled": True}) for e in frontier.entries]
            return {
                "prices": [n.time_s for n in graph.nodes], "peaks": [e.peak_bytes for e in frontier.entries],
                "times": [e.time_s for e in frontier.entries], "plain_s": frontier.plain_s, "floors": [frontier.floor_s(b) for b in (50, 100, 200)],
                "fused": [fused_peak_bytes(graph, p) for p in plans if p is not None], "least": frontier.least_bytes,
            }  # fmt: skip

        found[str(seed)] = made(cut)
    require_on_record("memory-compiled", found)


def layer(seed: int) -> Layer:
    r = random.Random(seed)
    sizes, operators = [r.randint(1, 50)], list[Operator]()
    for i in range(6):
        reads = tuple(sorted({len(sizes) - 1, r.randrange(len(sizes))}))
        makes = tuple(range(len(sizes), len(sizes) + r.choice((1, 1, 2))))
        sizes += [r.randint(1, 50) for _ in makes]
        operators.append(Operator(name=f"op{i}", time_s=r.randint(1, 20) / 8, reads=reads, makes=makes))
    return Layer(operators=tuple(operators), sizes=tuple(sizes), needed=tuple(sorted(r.sample(range(len(sizes)), 4))))


def test_regions() -> None:
    found: dict[str, dict[str, Any]] = {}
    for seed in range(4):
        for budget in (150, 400, 900, 10**6):
            stages = (StageBudget(layers=3, in_flight=2, budget_bytes=budget), StageBudget(layers=2, in_flight=1, budget_bytes=budget // 2))
            problem = RecomputeProblem(layer=layer(seed), stages=stages, core=("op2", "op3"))
            for kind in strategies("regions"):
                for n, strategy in enumerate(kind.variants(problem, every=2)):
                    found[f"{seed} {budget} {kind.name} {n}"] = made(lambda s=strategy, p=problem: {"plan": s.plan(p, rng=rng())})
    require_on_record("memory-regions", found)


def arena(seed: int) -> ArenaProblem:
    r = random.Random(seed)
    ops, count = 12, 9
    stream = [r.randrange(3) for _ in range(ops)]
    after = [sorted({r.randrange(v) for _ in range(r.randrange(3))}) if v else [] for v in range(ops)]
    sources = [[r.randrange(ops - 3)] for _ in range(count)]
    ahead = [{s} for s in range(ops)]
    for v in range(ops):
        for u in (*after[v], *([w for w in range(v) if stream[w] == stream[v]][-1:])):
            ahead[v] |= ahead[u]
    consumers = [sorted({s[0], *r.sample([v for v in range(ops) if s[0] in ahead[v]], 1)}) for s in sources]
    return ArenaProblem(
        stream=np.array(stream, np.int32), after=rows(after), size_bytes=np.array([r.randint(1, 99) for _ in range(count)], np.int64),
        sources=rows(sources), consumers=rows(consumers), alignment_bytes=(1, 4)[seed % 2], from_start=frozenset({0}), to_end=frozenset({1}),
        runs=((2, 3),) if seed % 3 == 0 else (),
    )  # fmt: skip


def test_arenas() -> None:
    found = {
        f"{seed} {kind.name}": made(lambda k=kind, s=seed: {"plan": k().plan(arena(s), rng=rng())})
        for seed in range(10) for kind in strategies("arena")
    }  # fmt: skip
    require_on_record("memory-arenas", found)
