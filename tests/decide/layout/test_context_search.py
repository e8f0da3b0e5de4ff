"""Context degrees in layer tables and in the search: rows are a rank's share of the whole model's, exchanges cost what they move, plans follow."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from captured import captured
from meshwright.cost import assumed_cost
from meshwright.cost_models.gpu_rates import GPU_RATES
from meshwright.decide.layout.context import context_graph
from meshwright.decide.layout.context_costs import LEAST_POSITIONS, again_s, context_degrees, exchange_s, same_starts
from meshwright.decide.layout.cut import order_units
from meshwright.decide.layout.layer_costs import FULL, layer_table
from meshwright.decide.layout.operator_times import OperatorTimes
from meshwright.decide.layout.profiled.symmetric import alike_part
from meshwright.drive.layout.search import LayoutFindings, find_layouts
from meshwright.drive.plans import check_plan
from meshwright.drive.training.found_layout import not_runnable, plan_found
from meshwright.errors import Infeasible, Unsupported, UsageError
from meshwright.fabric.servers import server_kinds
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.io.costs.profile_documents import read_layout, read_measured_runs
from meshwright.io.fabric.name import load_fabric
from meshwright.job import Training
from meshwright.plan.context import exchange_of
from meshwright.profile.frameworks import framework
from meshwright.profile.layer_profile import Entry, ProfileEntryMissing
from meshwright.profile.layer_table import LayerChoice, LayerTable
from meshwright.profile.network import ProfiledLayout, ProfiledStage, Replica, TrainingRuntime
from meshwright.testing.layer_tables import fabric

MODEL = "examples/llama.py:tiny"
NET = load_fabric("laptop:4")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return captured(MODEL)


def table_of(graph: OpGraph, spec: str = "dgx-a100:1", contexts: tuple[int, ...] = (2, 4), tensors: tuple[int, ...] = (1, 2)) -> LayerTable:
    net = load_fabric(spec)
    return layer_table(
        lambda b: at_batch(graph, b), server_kinds(net), assumed_cost(net), microbatches=(2,), tensors=tensors, precision=FULL, contexts=contexts,
        least=8,
    )  # fmt: skip


def test_rows_are_a_ranks_share_of_the_whole(graph: OpGraph) -> None:
    table = table_of(graph)
    for tensor in (1, 2):
        entry = Entry("a100", 2, tensor)
        whole = table.rows[entry]
        for parts in (2, 4):
            mine = table.row(entry, parts)
            assert [r.output_bytes * parts for r in mine] == [r.output_bytes for r in whole]
            for a, b in zip(mine, whole, strict=True):
                if tensor == 1:
                    assert a.parameters == b.parameters and sum(a.flops) * parts == pytest.approx(sum(b.flops), rel=0.02)
                else:  # where heads travel, tensor ranks keep attention whole
                    assert b.parameters <= a.parameters and sum(a.flops) * parts >= 0.98 * sum(b.flops)
            if tensor > 1:
                continue
            kept = [sum(r.kept_bytes[0] for r in x) for x in (mine, whole)]
            assert kept[1] / parts < kept[0] < 1.9 * kept[1] / parts  # beside its own, what came of others' keys and values
    there, here = (table.priced(Entry("a100", 2, 1), LayerChoice(context=c), c)["output_bytes"].sum() for c in (1, 4))
    assert there == 4 * here
    with pytest.raises(ProfileEntryMissing, match="context degree 8"):
        table.row(Entry("a100", 2, 1), 8)


@pytest.mark.parametrize(("tensor", "rate_Bps"), [(1, 2e9), (2, 5e7)])
def test_an_exchange_costs_what_leaves_the_server(graph: OpGraph, tensor: int, rate_Bps: float) -> None:
    """Two servers of four: four ranks fit into one; beside two tensor ranks, half of a ring's hops share two NICs."""
    net = fabric([("fast", 2, 4)], nic_Bps=10**8 // (4 if tensor == 2 else 1))
    kind, cost = server_kinds(net)[0], assumed_cost(net)
    size, hop = 1e6, (kind.inside_latency_s if tensor == 1 else kind.outside_latency_s) + cost.transport.per_message_s
    nodes = [n for n in context_graph(at_batch(graph, 2), 4, "ring").nodes if n.name.startswith("scaled_dot_product_attention/")]
    forward, backward = exchange_s(nodes, 4, tensor, kind, cost, lambda n: size, lambda n, back: 1.0 if back else 0.0)
    assert forward == pytest.approx(3 * (size / rate_Bps + hop)) and backward == 0.0  # hidden behind attention
    whole = [n for n in context_graph(at_batch(graph, 2), 4, "ulysses").nodes if n.name.startswith("scaled_dot_product_attention/")]
    there, back = exchange_s(whole, 4, tensor, kind, cost, lambda n: size, lambda n, back: 9.0)
    moved = 0.75 * size / 2e9 if tensor == 1 else 0.5 * size / kind.device_nic_Bps
    assert there == back and there > 2 * moved and there == pytest.approx(2 * moved, abs=2e-3)


def test_a_frameworks_attention_is_divided(graph: OpGraph) -> None:
    """Rounds of a ring, and heads over all positions, are together what one rank would compute, at the share of the peak of their lengths."""
    kind = server_kinds(load_fabric("dgx-a100:1"))[0]
    for name in ("torchtitan", "megatron-2021"):
        found = {}
        for way in ("", "ring", "ulysses"):
            g = context_graph(at_batch(graph, 4), 2 if way else 1, way)
            times = OperatorTimes(g, kind.device, GPU_RATES["a100"], framework(name), "bf16", 2.0)
            rounds = [n for n in g.nodes if n.forward.flops and n.name.partition("/")[0].startswith("scaled_dot_product")]
            found[way] = sum(times.time_s(n, backward=False, part=1.0, row=False) for n in rounds)
        assert found[""] / 2.5 < found["ulysses"] < found[""] and found[""] / 2.5 < found["ring"]


def found_for(graph: OpGraph, **more: object) -> LayoutFindings:
    options = {"global_batch": 1, "precision": FULL, "microbatches": (1,), "tensors": (1,), "contexts": (2, 4), "levels": (0,), "simulated": 8}
    return find_layouts(lambda b: at_batch(graph, b), NET, assumed_cost(NET), **options | {"refine": 1, "schedules": ("1f1b",)} | more)  # type: ignore[arg-type]


def test_one_long_sample_is_divided_and_becomes_a_checked_plan(graph: OpGraph) -> None:
    found = found_for(graph)
    by_degree = {j.candidate.layout.context: j for j in reversed(found.found.ranked)}
    assert {2, 4} <= {*by_degree}
    assert all(j.time_s >= found.found.bounds.universal_s * (1 - 1e-9) for j in found.found.ranked)
    best = found.found.best
    assert best.time_s >= found.found.bounds.family_s * (1 - 1e-9)
    chosen = by_degree[4]
    layout = chosen.candidate.layout
    assert (layout.name, layout.data, layout.global_batch, {c.context for c in chosen.candidate.choices}) == ("dp1 cp4 tp1 pp1 mb1", 4, 1, {4})
    assert not not_runnable(found, chosen)
    plan = plan_found(found, chosen, Training(model=MODEL, global_batch=1), NET, assumed_cost(NET), graph)
    check_plan(plan)
    assert plan.layout is not None and (plan.layout.context, plan.layout.data) == (4, 4) and exchange_of(plan.layout)


def test_degrees_asked_for_and_not(graph: OpGraph) -> None:
    assert context_degrees(graph, (), 64) == [] and context_degrees(graph, (1,), 64) == [] and context_degrees(graph, (4, 1, 2), 8) == [2, 4]
    long = msgspec.structs.replace(
        graph, inputs=tuple(msgspec.structs.replace(x, shape=(x.shape[0], 4 * LEAST_POSITIONS)) for x in graph.inputs)
    )
    assert context_degrees(long, (), 64) == [2, 4] and context_degrees(long, (), 2) == [2]
    with pytest.raises(Infeasible, match="context degree 3 is not possible"):
        found_for(graph, contexts=(3,))
    units = order_units(graph, ())
    with pytest.raises(Unsupported, match="not those of the whole model"):
        same_starts(("", "nobody"), units, graph.model)


def test_measured_profiles_know_no_context(tmp_path: Path) -> None:
    layout = ProfiledLayout(stages=(ProfiledStage(layers=3, replicas=(Replica(device="A"),) * 2),), microbatch=1, microbatches=(1, 1), context=2)
    path = tmp_path / "layout.json"
    path.write_bytes(msgspec.json.encode({"schema": "meshwright.profiled-layout", "version": 1, "layout": layout}))
    with pytest.raises(Unsupported, match="context degree 2: measured layer times are of whole sequences"):
        read_layout(path)
    path.write_bytes(msgspec.json.encode({"schema": "meshwright.measured-runs", "version": 1, "runs": [{"layout": layout, "time_s": 1.0}]}))
    with pytest.raises(Unsupported, match="measured layer times"):
        read_measured_runs(path)


def test_pipelines_are_groups_of_a_context_degree() -> None:
    stages = (ProfiledStage(layers=3, replicas=(Replica(device="fast"),) * 4),)
    assert ProfiledLayout(stages=stages, microbatch=2, microbatches=(3,) * 4, context=2).global_batch == 12
    many = ProfiledLayout(stages=(replace(stages[0], replicas=stages[0].replicas * 16),), microbatch=1, microbatches=(3,) * 64, context=64)
    assert alike_part(many, TrainingRuntime(gpus_per_server={"fast": 4})).data == 8  # a few stand for all, whoever shares samples
    with pytest.raises(UsageError, match="4 pipelines do not divide into groups of 3"):
        ProfiledLayout(stages=stages, microbatch=2, microbatches=(3,) * 4, context=3)


def test_blocks_that_come_again_cost_time_and_no_memory(graph: OpGraph) -> None:
    """Selective recomputation of a ring's layers gives up what came, and pays for what attention does not hide of two messages one way."""
    net = fabric([("fast", 2, 4)], nic_Bps=10**8)
    kind, cost = server_kinds(net)[0], assumed_cost(net)
    block = next(n for n in context_graph(at_batch(graph, 2), 4, "ring").nodes if n.name.endswith("/kv1"))
    one = 1e6 / 2e9 + kind.inside_latency_s + cost.transport.per_message_s
    hidden, seen, late = (again_s(block, attend * one, 4, 1, kind, cost, 1e6) for attend in (3.0, 1.5, 0.0))
    assert (hidden, seen, late) == (0.0, pytest.approx(0.5 * one), pytest.approx(one))
    rows = table_of(graph, tensors=(1,)).row(Entry("a100", 2, 1), 4)
    sizes = [x.outputs[0].shape for x in context_graph(graph, 4, "ring").nodes if "/kv" in x.name]
    elements = sum(s[1] * s[2] * s[3] for s in sizes)
    given_up = sum(r.kept_bytes[0] - r.kept_bytes[1] for r in rows)
    assert given_up > elements * 2 * 4 and sum(r.again_s[1] for r in rows) > 0  # float32, two samples
