"""What every layout strategy proposes for small jobs, in which order and with which times, is as on record."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost import Cost, Transport, assumed_cost
from meshwright.decide.layout import LayoutProblem, strategies
from meshwright.decide.layout.autoddl.problem import ShardingProblem
from meshwright.decide.layout.mixed.candidate import Demands
from meshwright.decide.layout.mixed.search import search_mixed
from meshwright.graph.scale import at_batch
from meshwright.testing.contracts.layout import profile_problem, star
from meshwright.testing.layer_tables import fabric, problem
from on_record import made, numbers_in, require_on_record

COST = Cost(per_call_s=1e-6, transport=Transport(per_message_s=1e-5))


def test_degrees() -> None:
    pytest.importorskip("torch")
    from meshwright.testing.nets import captured

    found: dict[str, dict[str, Any]] = {}
    for net, devices, batch, memory in (("chain", 4, 8, 0), ("residual", 6, 12, 0), ("chain", 2, 8, 60_000), ("residual", 4, 4, 8_000)):
        net_of = star(devices, memory=memory)
        asked = LayoutProblem(
            graph_at=lambda b, n=net: at_batch(captured(n), b), fabric=net_of, cost=assumed_cost(net_of), global_batch=batch
        )
        for kind in strategies("degrees"):
            found[f"{net} {devices} {batch} {memory} {kind.name}"] = made(lambda k=kind, a=asked: {
                "why": numbers_in(c.why for c in k().plan(a)),
                "estimates": [c.estimate_s for c in k().plan(a) if c.layout is not None],
                "layouts": [c.layout for c in k().plan(a)],
            })  # fmt: skip
    require_on_record("layout-degrees", found)


def test_choices_per_layer() -> None:
    found: dict[str, dict[str, Any]] = {}
    cases = {
        "one kind": problem(fabric([("fast", 2, 2)]), [3, 1, 2, 4], batch=8),
        "two kinds": problem(fabric([("fast", 1, 2), ("slow", 1, 2)]), [2, 5, 1, 3], batch=8),
        "trunk": problem(fabric([("fast", 1, 2), ("old", 2, 1)], trunk_Bps=10**7), [1, 1, 6], batch=4),
        "little memory": problem(fabric([("fast", 2, 2)]), [3, 1, 2, 4], batch=8, memory=160_000),
    }
    for case, asked in cases.items():

        def search(asked: Any = asked) -> dict[str, Any]:
            result = search_mixed(asked, Demands())
            judged = [*result.ranked, *result.others]
            return {
                "times": [j.time_s for j in judged], "why": numbers_in(j.why for j in judged), "best": result.best.candidate.identity,
                "sources": [j.candidate.source for j in judged], "over": [j.estimate.over_bytes for j in judged],
                "memory": [j.estimate.memory_bytes for j in judged], "counts": result.counts,
                "bounds": (result.bounds.universal_s, result.bounds.family_s), "bound names": (result.bounds.universal, result.bounds.family),
            }  # fmt: skip

        found[case] = made(search)
    require_on_record("layout-layers", found)


def test_states_of_operators() -> None:
    pytest.importorskip("torch")
    from meshwright.testing.nets import captured

    found: dict[str, dict[str, Any]] = {}
    for net in ("chain", "residual"):
        for devices, memory in ((2, 0), (4, 0), (4, 9_000), (6, 0)):
            asked = ShardingProblem(graph=captured(net), fabric=star(devices), cost=COST, memory_bytes=memory)
            for kind in strategies("operators"):

                def plan(kind: Any = kind, asked: Any = asked) -> dict[str, Any]:
                    p = kind().plan(asked, seed=3)
                    return {
                        "time_s": p.time_s, "bound_s": p.bound_time_s, "memory_bytes": p.memory_bytes, "mesh": p.mesh, "ops": p.ops,
                        "sources": p.sources, "options": {k: v for k, v in p.options.items() if not str(k).endswith("_s")},
                    }  # fmt: skip

                found[f"{net} {devices} {memory} {kind.name}"] = made(plan)
    require_on_record("layout-operators", found)


def test_profiled() -> None:
    found: dict[str, dict[str, Any]] = {}
    for gpus, batch, memory in ((2, 4, 0), (4, 8, 0), (4, 8, 10**8)):
        for kind in strategies("profile"):

            def plan(kind: Any = kind, asked: Any = profile_problem(gpus, batch, memory)) -> dict[str, Any]:
                judged = kind().plan(asked)
                return {
                    "times": [j.prediction.time_s for j in judged if j.prediction is not None], "why": numbers_in(j.why for j in judged),
                    "bounds": [j.prediction.bound_s for j in judged if j.prediction is not None], "layouts": [j.layout for j in judged],
                }  # fmt: skip

            found[f"{gpus} {batch} {memory} {kind.name}"] = made(plan)
    require_on_record("layout-profiled", found)
