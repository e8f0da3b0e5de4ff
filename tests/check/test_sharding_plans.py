"""Sharding plans: those of the planner are right, and every single change of a state, a redistribution or a figure is refused or means the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from meshwright.check.sharding import check_sharding
from meshwright.plan.sharding import ShardingPlan

pytest.importorskip("torch")

from meshwright.decide.layout.autoddl import AutoDDL
from meshwright.decide.layout.autoddl.problem import ShardingProblem
from meshwright.testing.contracts.layout import COST, star
from meshwright.testing.nets import captured

replace = msgspec.structs.replace
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron": ("chain", {"search": "megatron"}), "data": ("residual", {"search": "data"}), "on two axes": ("chain", {"search": "data+megatron"}),
}  # fmt: skip


@lru_cache
def plan(case: str) -> ShardingPlan:
    net, options = CASES[case]
    return AutoDDL(**options).plan(ShardingProblem(graph=captured(net), fabric=star(4), cost=COST), seed=3)


def other_states(state: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for axis, kind in enumerate(state):
        yield from ((*state[:axis], x, *state[axis + 1 :]) for x in ("R", "B", "P", "S0", "S1") if x != kind)


def mutants(made: ShardingPlan) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...], ShardingPlan]]:
    """(value whose state it is, old state, new state, mutant)."""
    for field in ("sources", "hubs"):
        table = getattr(made, field)
        yield from ((k, s, n, replace(made, **{field: {**table, k: n}})) for k, s in table.items() for n in other_states(s))
    graph = captured(CASES[next(c for c in CASES if plan(c) is made)][0])
    for node in graph.nodes:
        op = made.ops[node.name]
        for new in other_states(op.output):
            yield node.name, op.output, new, replace(made, ops={**made.ops, node.name: replace(op, output=new)})
        for i, (state, value) in enumerate(zip(op.inputs, node.inputs, strict=True)):
            for new in other_states(state):
                inputs = (*op.inputs[:i], new, *op.inputs[i + 1 :])
                yield value, state, new, replace(made, ops={**made.ops, node.name: replace(op, inputs=inputs)})


@pytest.mark.parametrize("case", CASES)
def test_another_state_is_refused_unless_it_means_the_same(case: str) -> None:
    made, graph = plan(case), captured(CASES[case][0])
    assert check_sharding(made, graph).ok
    trained = {f"param:{p.name}" for p in graph.parameters}
    for node in graph.nodes:
        trained |= {node.name} if trained & set(node.inputs) else set()
    refused = 0
    for value, old, new, mutant in mutants(made):
        verdict = check_sharding(mutant, graph)
        same = value not in trained and [k.replace("R", "B") for k in old] == [k.replace("R", "B") for k in new]  # copies without a gradient
        assert verdict.status == "wrong" or same, (value, old, new)
        refused += verdict.status == "wrong"
    assert refused > 100


@pytest.mark.parametrize("case", CASES)
def test_other_redistributions_and_figures_are_refused(case: str) -> None:
    made, graph = plan(case), captured(CASES[case][0])
    wrong = [replace(made, moves=made.moves[:i] + made.moves[i + 1 :]) for i in range(len(made.moves))]
    for i, move in enumerate(made.moves):
        shorter = [replace(move, **{f: getattr(move, f)[:-1]}) for f in ("forward", "backward", "bucket") if getattr(move, f)]
        shorter += [replace(move, slot=move.slot + 5), replace(move, source="param:nobody"), replace(move, forward=((7, "B"),))]
        wrong += [replace(made, moves=(*made.moves[:i], other, *made.moves[i + 1 :])) for other in shorter]
    if made.buckets:
        wrong += [replace(made, buckets=()), replace(made, buckets=tuple(replace(b, steps=()) for b in made.buckets))]
    first = made.bytes_sent[0]
    for reason in ("activations", "gradients", "parameters", "loader"):
        wrong.append(replace(made, bytes_sent=(replace(first, **{reason: getattr(first, reason) + 8}), *made.bytes_sent[1:])))
    wrong += [replace(made, time_s=2 * made.time_s), replace(made, bound_time_s=2 * made.time_s), replace(made, bytes_sent=made.bytes_sent[1:])]
    wrong += [replace(made, devices=made.devices[:1] * 4), replace(made, mesh=(*made.mesh, 2)), replace(made, fingerprint="x")]
    name = next(iter(made.ops))
    wrong += [replace(made, ops={k: v for k, v in made.ops.items() if k != name}), replace(made, sources={})]
    wrong.append(replace(made, ops={**made.ops, name: replace(made.ops[name], inputs=())}))
    wrong.append(replace(made, sources={**made.sources, "input:0": ("Q",) * len(made.mesh)}))
    wrong.append(replace(made, sources={**made.sources, "input:0": ("R",) * 7}))
    for mutant in wrong:
        assert check_sharding(mutant, graph).status == "wrong", mutant
    if made.moves:
        assert check_sharding(replace(made, moves=(*made.moves, made.moves[0])), graph).status == "wrong"
