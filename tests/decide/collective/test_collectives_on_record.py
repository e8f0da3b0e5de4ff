"""Programs, times and bounds of every collective strategy on small fabrics are as on record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.cost import Transport
from meshwright.decide.collective import OPERATIONS, STRATEGIES, CollectiveProblem, CollectiveStrategy, auto
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.program.hash import program_hash
from on_record import made, numbers_in, require_on_record

EFFORT_S = 0.02  # of counted work: little, for the strategies that search until it is spent


def star() -> Fabric:
    """Five devices of unlike links round one switch, and a shortcut."""
    links = [Link(src=a, dst=b, rate_Bps=10**9 * (1 + i), latency_s=1e-6 * (i + 1)) for i in range(5) for a, b in ((f"d{i}", "s"), ("s", f"d{i}"))]
    links += [Link(src=a, dst=b, rate_Bps=2 * 10**9, latency_s=1e-6) for a, b in (("d0", "d1"), ("d1", "d0"))]
    return Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(5)), switches=(Switch(name="s"),), links=tuple(links))


def torus() -> Fabric:
    """Two by three devices, each joined with its neighbours."""
    near = [(r, c, x, y) for r in range(2) for c in range(3) for x, y in ((1 - r, c), (r, (c + 1) % 3), (r, (c - 1) % 3))]
    links = tuple(Link(src=f"{r}{c}", dst=f"{x}{y}", rate_Bps=10**10, latency_s=2e-6) for r, c, x, y in near)
    return Fabric(name="torus", devices=tuple(Device(name=f"{r}{c}") for r in range(2) for c in range(3)), links=links)


FABRICS = {"star": star, "torus": torus, "islands": lambda: load_fabric("two-islands:2"), "dgx": lambda: load_fabric("dgx1-v100:1")}


def figures(kind: CollectiveStrategy, problem: CollectiveProblem) -> dict[str, Any]:
    plan = kind.plan(problem, rng=np.random.default_rng(0))
    time_s = simulated_time_s(plan.program, problem.fabric, (*problem.ranks, *plan.switches), problem.transport)
    return {
        "time_s": time_s, "bound_s": plan.bound, "program": program_hash(plan.program)[:12], "steps": len(plan.program.steps),
        "options": plan.options, "notes": numbers_in(map(str, plan.notes)),
    }  # fmt: skip


@pytest.mark.parametrize("name", FABRICS)
def test_every_strategy(name: str) -> None:
    fabric, found = FABRICS[name](), dict[str, dict[str, Any]]()
    n = len(fabric.devices)
    for op in OPERATIONS:
        for size in ((240 * n, 40_000 * n) if n < 6 else (40_000 * n,)):
            problem = CollectiveProblem.on(fabric, op, size, transport=Transport(per_message_s=1e-6), effort_s=EFFORT_S, root=n - 2)
            for kind in STRATEGIES:
                if not kind.chooses and kind.applies(problem) and (kind.name not in ("blink", "taccl") or (op == "all-reduce" and n < 6)):
                    found[f"{op} {size} {kind.name}"] = made(lambda k=kind, p=problem: figures(k(), p))
    require_on_record(f"collective-{name}", found)


def test_unlike_shards_promises_and_choices() -> None:
    fabric, found = star(), dict[str, dict[str, Any]]()
    names = tuple(d.name for d in fabric.devices)
    asked = {
        "shards": CollectiveProblem(fabric=fabric, op="all-gather", ranks=names, size_bytes=4000, shard_bytes=(400, 0, 1600, 1200, 800)),
        "peers": CollectiveProblem(fabric=fabric, op="permute", ranks=names, size_bytes=4000, peers=(2, -1, 0, 0, 1)),
        "tree": CollectiveProblem(fabric=fabric, op="all-reduce", ranks=names[:4], size_bytes=1 << 16, reproducible="tree", numbers=(2, 0, 3, 1)),
        "exact": CollectiveProblem(fabric=fabric, op="reduce-scatter", ranks=names[:4], size_bytes=1 << 12, reproducible="exact"),
        "few": CollectiveProblem(fabric=fabric, op="all-to-all", ranks=names[1:4], size_bytes=12_000),
    }
    for name, problem in asked.items():
        for kind in STRATEGIES:
            if not kind.chooses and kind.name not in ("blink", "taccl"):
                found[f"{name} {kind.name}"] = made(lambda k=kind, p=problem: figures(k(), p))
        if name in ("tree", "few"):
            few = [kind() for kind in STRATEGIES if not kind.chooses and kind.name not in ("blink", "taccl")]
            found[f"{name} auto"] = made(lambda p=problem, c=few: {r.strategy: (r.time_s, r.plan is None) for r in auto(p, candidates=c)})
    require_on_record("collective-asked", found)


def test_variants_inside_other_programs() -> None:
    fabric, found = torus(), dict[str, dict[str, Any]]()
    for op in OPERATIONS:
        problem = CollectiveProblem.on(fabric, op, 24_000, effort_s=EFFORT_S)
        for use in ("in network", "inlined", "beside", "beside, in iterations"):
            for kind in STRATEGIES:
                if not kind.chooses and kind.name not in ("blink", "taccl") and kind.applies(problem):
                    for variant in kind.variants(problem, use):  # type: ignore[arg-type]
                        found[f"{op} {use} {kind.name} {variant.label}"] = made(lambda v=variant, p=problem: figures(v, p))
    require_on_record("collective-variants", found)
