"""Sharding plans as programs: proved, priced near the search's own model, and sending what the plan states, rank by rank and reason by reason."""

from __future__ import annotations

from collections import Counter
from math import gcd, prod
from pathlib import Path

import msgspec
import numpy as np
import pytest

from captured import captured
from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import executed_graph
from meshwright.check import check_program, worst_order_memory
from meshwright.cost import Cost, Transport
from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem
from meshwright.errors import PlanMismatch
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.graph.graph import GraphValue, OpGraph, Work
from meshwright.lower.sharding import Redistribution, lower_sharding, redistribution_program
from meshwright.plan.sbp import local_shape
from meshwright.plan.sharding import OPTIMIZERS, ShardingPlan
from meshwright.program.calls import inline
from meshwright.program.program import Part, Program
from meshwright.simulate import simulate_program

EXAMPLES = Path(__file__).parents[2] / "examples"
NETS = Path(__file__).parents[1] / "decide" / "layout" / "autoddl" / "sharding_problems.py"
MODELS = [
    (f"{EXAMPLES / 'gpt.py'}:tiny_tied", 4, (2, 2), "auto"), (f"{EXAMPLES / 'gpt.py'}:tiny", 4, (4,), "megatron"),
    (f"{EXAMPLES / 'convnet.py'}:tiny", 4, (2, 2), "auto"), (f"{EXAMPLES / 'convnet.py'}:tiny", 3, (3,), "data"),
    (f"{NETS}:fc_uneven", 4, (2, 2), "auto"), (f"{NETS}:branches", 2, (2,), "auto"), (f"{NETS}:fc", 8, (2, 2, 2), "auto"),
    (f"{NETS}:fc", 1, (1,), "auto"),
]  # fmt: skip


def star(devices: int) -> Fabric:
    row = tuple(Device(name=f"n{i}", kind="cpu", flops={"fp32": 10**8}) for i in range(devices))
    links = tuple(x for d in row for x in (Link(src=d.name, dst="s", rate_Bps=10**9), Link(src="s", dst=d.name, rate_Bps=10**9)))
    return Fabric(name="star", devices=row, switches=(Switch(name="s"),), links=links)


COST = Cost(per_call_s=1e-7, transport=Transport(per_message_s=1e-7))


def works_of(plan: ShardingPlan, graph: OpGraph) -> dict[str, Work]:
    """Work of the compute steps: of an operator the share of the axes that split any of its tensors."""
    found: dict[str, Work] = {}
    for node in graph.nodes:
        state = plan.ops[node.name]
        parts = prod(p for axis, p in enumerate(plan.mesh) if any(s[axis][0] == "S" for s in (*state.inputs, state.output)))
        found[f"{node.name}|F"], found[f"{node.name}|B"] = node.forward.share(1, parts), node.backward.share(1, parts)
    words = OPTIMIZERS[plan.optimizer][1]
    held = sum(prod(local_shape(p.shape, plan.sources[f"param:{p.name}"], plan.mesh, (0,) * len(plan.mesh))) for p in graph.parameters if p.trainable)
    found["|optimizer"] = Work(flops=words * held, bytes_read=words * held * 4, calls=1)
    return found


def sent_bytes(program: Program) -> list[dict[str, int]]:
    """What every rank sends, by the reason that names the communicator."""
    s, found = program.steps, [Counter[str]() for _ in range(program.ranks)]
    size, actor = program.message_bytes(), program.lanes.actor[program.lane_of_step()]
    for step in np.flatnonzero(s.parts & Part.SEND).tolist():
        reason = program.comms.name[program.channels.tag[s.chan_out[step]]].partition(":")[0]
        found[actor[step]][reason] += int(size[step])
    return [dict(x) for x in found]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("model", "devices", "mesh", "search"), MODELS)
def test_programs_of_plans(model: str, devices: int, mesh: tuple[int, ...], search: str) -> None:
    graph, fabric = captured(model, scalable=False), star(devices)
    plan = AutoDDL(search=search, mesh=mesh).plan(ShardingProblem(graph=graph, fabric=fabric, cost=COST, item_bytes=8))
    lowered = lower_sharding(plan, graph, dtype="float64")
    verdict = check_program(lowered.program, programs=lowered.callees)
    assert verdict.ok, verdict.findings
    assert all(gcd(*callee.steps.count.tolist()) <= 1 for callee in lowered.callees.values()), "chunks are as large as all pieces allow"
    flat = inline(lowered.program, lowered.callees).program
    for rank, sent in enumerate(sent_bytes(flat)):
        assert sent == {k: v for k, v in msgspec.structs.asdict(plan.bytes_sent[rank]).items() if v}, rank
    devices_of = [d.name for d in fabric.devices]
    timeline = simulate_program(lowered.program, fabric, devices_of, COST, works=works_of(plan, graph), programs=lowered.callees, record=False)
    assert timeline.makespan_s == pytest.approx(plan.time_s, rel=0.15)  # the model rounds uneven pieces up
    traced = lower_sharding(plan, executed_graph(trace_forward(model, device="cpu")), dtype="float64")
    assert traced.callees.keys() == lowered.callees.keys() and len(traced.program.steps) == len(lowered.program.steps)


def test_values_die_after_their_last_use() -> None:
    graph = captured(f"{NETS}:fc", scalable=False)
    plan = AutoDDL(search="data").plan(ShardingProblem(graph=graph, fabric=star(2), cost=COST))
    lowered = lower_sharding(plan, graph)
    program = inline(lowered.program, lowered.callees).program
    b = program.buffers
    kept = int((b.chunk_bytes * b.chunks)[(b.persistent == 1) & (b.actor == 0)].sum())
    everything = int((b.chunk_bytes * b.chunks)[b.actor == 0].sum())
    assert kept < worst_order_memory(program).peak_bytes[0] < everything


def test_a_value_of_several_tensors_is_counted_by_the_first() -> None:
    """What an operator hands on is its first tensor; indices beside it (int64) do not make it twice as large."""
    graph = captured(f"{NETS}:fc", scalable=False)
    node = graph.nodes[0]
    plan = AutoDDL(search="data").plan(ShardingProblem(graph=graph, fabric=star(2), cost=COST))

    def size_bytes(outputs: tuple[GraphValue, ...]) -> int:
        changed = msgspec.structs.replace(graph, nodes=(msgspec.structs.replace(node, outputs=outputs), *graph.nodes[1:]))
        b = lower_sharding(plan, changed).program.buffers
        return int((b.chunk_bytes * b.chunks)[b.name.index(f"value:{node.name}")])

    (value,) = node.outputs
    assert value.dtype == "float32" and size_bytes((value, msgspec.structs.replace(value, dtype="int64"))) == 2 * size_bytes((value,))


def test_plans_that_contradict_the_graph_are_refused() -> None:
    graph = captured(f"{NETS}:fc", scalable=False)
    plan: ShardingPlan = AutoDDL(search="data").plan(ShardingProblem(graph=graph, fabric=star(2), cost=COST))
    more = {**plan.ops, "more": plan.ops["linear"]}
    for change, what in (({"sources": {}}, "says nothing about"), ({"ops": {}}, "has no operator"), ({"ops": more}, "differ")):
        with pytest.raises(PlanMismatch, match=what):
            lower_sharding(msgspec.structs.replace(plan, **change), graph)
    moved = AutoDDL(search="megatron").plan(ShardingProblem(graph=graph, fabric=star(2), cost=COST))
    readers = {move.reader for move in moved.moves} & {*moved.ops}
    assert readers
    for name in readers:  # an operator whose operand is redistributed
        with pytest.raises(PlanMismatch, match=f"has no operator '{name}'"):
            lower_sharding(msgspec.structs.replace(moved, ops={k: v for k, v in moved.ops.items() if k != name}), graph)


@pytest.mark.parametrize("shape", [(3, 5), (0, 6), (4, 0)])
@pytest.mark.parametrize(("before", "after"), [("S0", "B"), ("S0", "S1"), ("P", "B"), ("P", "S0"), ("P", "S1"), ("M", "B")])
def test_a_redistribution_alone_is_proved_also_of_an_empty_tensor(shape: tuple[int, int], before: str, after: str) -> None:
    """And every rank sends the bytes of its pieces that another gets, no more."""
    lowered = redistribution_program((2,), "float32", Redistribution((shape,) * 2, (before,), ((0, after),), "test"))
    verdict = check_program(lowered.program, programs=lowered.callees)
    assert verdict.ok, verdict.findings
    flat = inline(lowered.program, lowered.callees).program
    rows, columns = ([local_shape(shape, (kind,), (2,), (r,))[k] for r in (0, 1)] for k, kind in enumerate(("S0", "S1")))
    whole = shape[0] * shape[1]
    sent = {
        "S0B": [rows[0] * shape[1], rows[1] * shape[1]], "S0S1": [rows[0] * columns[1], rows[1] * columns[0]],
        "PS0": [rows[1] * shape[1], rows[0] * shape[1]], "PS1": [shape[0] * columns[1], shape[0] * columns[0]],
    }.get(before + after, [whole, whole])  # fmt: skip
    assert [sum(x.values()) for x in sent_bytes(flat)] == [4 * n for n in sent]
