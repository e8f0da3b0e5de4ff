"""Orders, times and bounds of every pipeline schedule on small problems are as on record."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.decide.pipeline import STRATEGIES, PipelineProblem, PipelineStrategy
from meshwright.decide.pipeline.bound import any_bound
from meshwright.decide.pipeline.judge import judge
from meshwright.drive.pipeline.pipelines import collective_planner
from meshwright.program.hash import program_hash
from on_record import made, numbers_in, require_on_record

PROBLEMS = {
    "even": PipelineProblem.of(4, 8),
    "unlike": PipelineProblem.of(
        4, 6, forward_s=[1, 2, 1, 3], input_grad_s=[2, 1, 2, 2], weight_grad_s=[1, 1, 2, 1], activation_bytes=[5, 4, 3, 6], message_bytes=2,
        p2p_latency_s=0.25, p2p_rate_Bps=4, weight_bytes=64, gradient_bytes=16, speeds=[1, 2, 1, 1], data=2,
    ),
    "capped": PipelineProblem.of(4, 8, forward_s=2.0, backward_s=4.0, activation_bytes=8, weight_bytes=16, memory_cap_bytes=16 + 8 * 5),
    "hosts": PipelineProblem.of(
        2, 5, forward_s=[1.5, 1.0], activation_bytes=10, message_bytes=1, p2p_latency_s=0.5, host_out_Bps=20.0, host_in_Bps=20.0,
        memory_cap_bytes=70, exchange_s=0.3,
    ),
    "odd": PipelineProblem.of(3, 7, forward_s=[1, 1, 2], first_input_grad=False, pair_overlap=0.5, p2p_latency_s=0.125),
}  # fmt: skip


def figures(strategy: PipelineStrategy, problem: PipelineProblem) -> dict[str, Any]:
    schedule = strategy.plan(problem, rng=np.random.default_rng(0))
    j = judge(problem, schedule, collective_planner(problem))
    return {
        "time_s": j.time_s, "bound_s": j.bound, "bubble": (j.bubble, j.span_bubble), "in_flight": j.in_flight, "memory_bytes": j.memory_bytes,
        "over_bytes": j.over_bytes, "program": program_hash(j.program)[:12], "placement": schedule.placement, "orders": schedule.orders,
        "offloads": schedule.offloads, "options": schedule.options, "notes": numbers_in(schedule.notes), "traits": strategy.settled().traits,
    }  # fmt: skip


def test_every_schedule() -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, problem in PROBLEMS.items():
        found[name] = made(lambda p=problem: {"any bound": any_bound(p), "problem": p})
        for kind in STRATEGIES:
            for n, strategy in enumerate(kind.variants(problem, chunks=(2,), effort=20 if name == "odd" else 0)):
                found[f"{name} {kind.name} {n}"] = made(lambda s=strategy, p=problem: figures(s, p))
    require_on_record("pipeline", found)
