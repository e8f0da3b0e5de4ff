"""Programs as Chakra traces and back: the same times on the same fabric; what does not fit together is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.handover.chakra import chakra_of_plan, plan_of_chakra
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.plans import fabric_of
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.interop.chakra import Attribute, ChakraNode, ChakraSet, ChakraTrace, NodeType
from meshwright.interop.chakra_graph import ordered, summarise
from meshwright.interop.from_chakra import from_chakra
from meshwright.interop.to_chakra import to_chakra
from meshwright.io.fabric.name import load_fabric
from meshwright.plan.plan import Plan
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Space, Unit
from meshwright.simulate import simulate_program


def collective(op: str, name: str, fabric: str = "two-islands") -> Plan:
    devices = load_fabric(fabric)
    problem = CollectiveProblem(fabric=devices, op=op, ranks=tuple(d.name for d in devices.devices), size_bytes=4 << 20)
    return plan_collective(problem, candidates=[strategy(name)()])[0]


def pipeline(name: str, **options: int) -> Plan:
    problem = PipelineProblem.of(4, 4, forward_s=0.02, message_bytes=100_000, gradient_bytes=1_000_000, **options)
    return plan_pipeline(problem, name, {})


PLANS = {
    "1f1b": lambda: pipeline("1f1b"),
    "zbv": lambda: pipeline("zbv"),
    "chimera, copies sum": lambda: pipeline("chimera"),
    "two replicas": lambda: pipeline("interleaved", data=2),
    "ring": lambda: collective("all-reduce", "ring"),
    "trees": lambda: collective("all-gather", "forestcoll"),
    "all-to-all": lambda: collective("all-to-all", "direct"),
}


@pytest.mark.parametrize("name", PLANS)
def test_sends_and_receives_take_the_same_time_again(name: str) -> None:
    plan = PLANS[name]()
    assert plan.prediction is not None
    again = plan_of_chakra(chakra_of_plan(plan, inlined=True), fabric_of(plan))
    assert again.prediction is not None
    assert again.prediction.time_s == pytest.approx(plan.prediction.time_s, rel=1e-9)


def test_collectives_by_name_come_back_as_calls() -> None:
    plan = PLANS["two replicas"]()
    traces = chakra_of_plan(plan)
    called = [n for t in traces.traces for n in t.nodes if n.type is NodeType.COMM_COLL]
    assert called and {n.get("comm_size") for n in called} <= {1_000_000, 2_000_000, 500_000}
    assert all(len(m) == 2 for m in traces.groups.values()) and set(traces.groups.values()) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    again = plan_of_chakra(traces, fabric_of(plan), strategy="ring")
    assert again.main.requires == ("calls",)
    assert again.prediction is not None and plan.prediction is not None
    assert again.prediction.time_s == pytest.approx(plan.prediction.time_s, rel=0.05)


def test_attributes_have_the_types_that_feeders_read() -> None:
    traces = chakra_of_plan(PLANS["two replicas"]())
    kinds = {a.name: a.kind for t in traces.traces for n in t.nodes for a in n.attr if not a.name.startswith("meshwright.")}
    assert kinds == {
        "is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val", "comm_priority": "int32_val",
        "comm_size": "int64_val", "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val", "pg_name": "string_val",
    }  # fmt: skip
    for trace in traces.traces:
        assert [n.id for n in trace.nodes] == list(range(1, len(trace.nodes) + 1))
        assert all(dep < n.id for n in trace.nodes for dep in n.deps) and all(set(n.ctrl_deps) <= set(n.data_deps) for n in trace.nodes)
        assert all(n.get("is_cpu_op") is False for n in trace.nodes)


def test_an_all_gather_counts_one_ranks_input() -> None:
    """As collectives of ASTRA-sim do."""
    plan = collective("all-gather", "ring", "laptop:4")
    b = ProgramBuilder(ranks=4, name="caller")
    (name,) = plan.programs
    callee = plan.main
    comm = b.comm("all", range(4))
    for rank in range(4):
        contract = callee.contract
        assert contract is not None
        bound = contract.outputs[rank][0]
        chunks = int(callee.buffers.chunks[bound]) * int(callee.lanes.repeat.max())
        buffer = b.buffer(rank, chunks=chunks, chunk_bytes=(4 << 20) // chunks)
        local = int((callee.buffers.actor[:bound] == rank).sum())
        b.lane(rank).call(b.call(comm, name, [(local, buffer, 0)]))
    program = b.build()
    traces = to_chakra(program, np.zeros(len(program.steps)), programs=plan.programs)
    assert [n.get("comm_size") for t in traces.traces for n in t.nodes] == [1 << 20] * 4
    assert not traces.groups and all(n.get("pg_name") is None for t in traces.traces for n in t.nodes)


def test_repeats_lags_copies_and_joins() -> None:
    b = ProgramBuilder(ranks=2, name="odd")
    host = b.buffer(0, chunks=1, chunk_bytes=64, space=Space.HOST)
    here, there = (b.buffer(r, chunks=1, chunk_bytes=64, window=1) for r in (0, 1))
    channel = b.channel(0, 1, depth=2)
    load = b.lane(0, unit=Unit.COPY).copy((host, 0), (here, 0))
    sender = b.lane(0, repeat=3)
    sender.send(channel, here, 0, after=[load])
    receiver, user = b.lane(1, repeat=3), b.lane(1, unit=Unit.HOST, repeat=3)
    got = receiver.recv(channel, there, 0)
    used = user.compute(b.op("F", graph="g"), after=[got])
    receiver.wait(got.position, (used, 1))
    end = b.lane(1)
    end.nop(after=[used])
    end.compute(b.op("last", graph="g"))
    program = b.build()
    traces = to_chakra(program, np.full(len(program.steps), 0.5))
    one, two = ([(n.type.name, n.data_deps) for n in t.nodes] for t in traces.traces)
    assert one[0] == ("MEM_LOAD", ()) and [x[0] for x in one].count("COMM_SEND") == 3
    assert [x[0] for x in two].count("COMM_RECV") == 3 and [x[0] for x in two].count("INVALID") == 1
    fabric = load_fabric("laptop:2")
    again = plan_of_chakra(traces, fabric)
    assert again.prediction is not None
    first = simulate_program(program, fabric, [d.name for d in fabric.devices], durations_s=np.full(len(program.steps), 0.5))
    assert again.prediction.time_s == pytest.approx(first.makespan_s, rel=1e-6)
    assert summarise(traces)[0].nodes == {"MEM_LOAD": 1, "COMM_SEND": 3, "COMP": 3}  # what a message costs its sender is a node


# ---- refusals ----------------------------------------------------------------------------------------------------------
def node(number: int, kind: NodeType = NodeType.COMP, deps: tuple[int, ...] = (), **attr: object) -> ChakraNode:
    kinds = {int: "int64_val", str: "string_val", bool: "bool_val", float: "double_val"}
    return ChakraNode(id=number, name="n", type=kind, data_deps=deps, attr=tuple(Attribute(k, kinds[type(v)], v) for k, v in attr.items()))  # type: ignore[arg-type]


def message(number: int, src: int, dst: int, size: int = 8, *, sends: bool, tag: int = 0, deps: tuple[int, ...] = ()) -> ChakraNode:
    kind = NodeType.COMM_SEND if sends else NodeType.COMM_RECV
    return node(number, kind, deps, comm_src=src, comm_dst=dst, comm_size=size, comm_tag=tag)


def traces(*ranks: list[ChakraNode], groups: dict[str, tuple[int, ...]] | None = None) -> ChakraSet:
    return ChakraSet(traces=tuple(ChakraTrace(nodes=tuple(nodes)) for nodes in ranks), groups=groups or {})


def coll(number: int, kind: int = 0, size: int = 64, group: str = "", deps: tuple[int, ...] = ()) -> ChakraNode:
    return node(number, NodeType.COMM_COLL, deps, comm_type=kind, comm_size=size, pg_name=group)


COLL = NodeType.COMM_COLL


def test_control_dependencies_that_name_callers_are_no_waits() -> None:
    """As in MLCommons' `chakra.0.et`, converted from a trace of PyTorch: callers are not in the file, merged into their callees, or wait for them."""
    calls = [replace(node(3, deps=(1,)), ctrl_deps=(9,)), replace(node(1, deps=()), ctrl_deps=(3,)), replace(node(4, deps=(3,)), ctrl_deps=(4,))]
    assert [n.id for n in ordered(ChakraTrace(nodes=tuple(calls)), "there")] == [1, 3, 4]
    with pytest.raises(FormatError, match=r"node 4 .* waits for node 7"):
        ordered(ChakraTrace(nodes=(*calls[:2], node(4, deps=(7,)))), "there")
    waits = [replace(node(3), ctrl_deps=(1,)), replace(node(1), ctrl_deps=())]
    assert [n.id for n in ordered(ChakraTrace(nodes=tuple(waits)), "there")] == [1, 3], "where all are there, they are waits"
    host = node(1, COLL, is_cpu_op=True)
    found = summarise(traces([host, node(2, COLL, (1,), is_cpu_op=False, comm_type=0, comm_size=64)]))
    assert found[0].nodes == {"COMP": 1, "COMM_COLL": 1} and found[0].collective_bytes == {"ALL_REDUCE": 64}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (traces([node(1), node(1)]), "rank 0: nodes 0 and 1 both have the id 1"),
        (traces([node(1, deps=(1,))]), "waits for itself"),
        (traces([node(1, deps=(5,))]), "waits for node 5, which is not in the file"),
        (traces([node(0), node(1, deps=(3, 0)), node(2, deps=(1,)), node(3, deps=(2,)), node(4, deps=(3,))]), "each other: 1 -> 3 -> 2 -> 1"),
        (traces([message(1, 0, 1, sends=True)], []), "1 messages from rank 0 to rank 1 under tag 0 are sent, 0 received"),
        (traces([], [message(1, 0, 1, sends=False)]), "0 messages from rank 0 to rank 1 under tag 0 are sent, 1 received"),
        (traces([message(1, 0, 1, sends=True)], [message(2, 0, 1, 9, sends=False)]), "node 1 sends 8 bytes, node 2 receives 9"),
        (traces([message(1, 0, 1, sends=True)], [message(2, 0, 1, sends=False, tag=1)]), "under tag 0 are sent, 0 received"),
        (traces([message(1, 0, 2, sends=True)], []), "is a message from rank 0 to rank 2 of 2"),
        (traces([message(1, 1, 0, sends=True)], []), "is a message from rank 1 to rank 0"),
        (traces([message(1, 0, 0, sends=True)], []), "is a message from rank 0 to rank 0"),
        (traces([node(1, NodeType.COMM_SEND, comm_dst=1)], []), "comm_size is missing"),
        (traces([node(1, NodeType.COMM_SEND, comm_dst=1, comm_size=-1)], []), "comm_size must be a whole number >= 0, got '-1'"),
        (traces([node(1, NodeType.COMM_SEND, comm_dst=1, comm_size=1.5)], []), "comm_size must be a whole number >= 0, got '1.5'"),
        (traces([coll(1)], []), "as its collective 0 among ranks 0, 1 this rank has nothing, rank 0 has ALL_REDUCE of 64 bytes"),
        (traces([coll(1), coll(2, 2)], [coll(1), coll(2, 7)]), "as its collective 1 among ranks 0, 1 this rank has REDUCE_SCATTER of 64"),
        (traces([coll(1, 10)], [coll(1, 10)]), "comm_type 10 is no collective"),
        (traces([coll(1, group="4")], [coll(1)]), "names the group '4', which no file describes"),
        (traces([coll(1, group="4")], [coll(1)], groups={"4": (1,)}), "of which this rank is no member"),
        (traces([node(1, COLL, comm_type=0, comm_size=8, pg_name=3)], []), "pg_name must be a text, got '3'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(made: ChakraSet, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        plan_of_chakra(made, load_fabric("laptop:2"))
    assert says in str(caught.value)


def test_what_has_no_schedule_is_refused() -> None:
    with pytest.raises(Unsupported, match="node 1 is a broadcast: a trace does not say who its root is"):
        plan_of_chakra(traces([coll(1, 5)], [coll(1, 5)]), load_fabric("laptop:2"))
    with pytest.raises(UsageError, match="2 traces, but fabric 'laptop:1' has 1 device"):
        plan_of_chakra(traces([], []), load_fabric("laptop:1"))


def test_what_has_no_word_is_refused() -> None:
    b = ProgramBuilder(ranks=1, switches=1)
    with pytest.raises(Unsupported, match="no word for switches"):
        to_chakra(b.build(), np.zeros(0))
    plan = PLANS["two replicas"]()
    silent = {name: replace(p, contracts=()) if name != plan.cycle[0].program else p for name, p in plan.programs.items()}
    with pytest.raises(Unsupported, match="no word for a call of a program without a contract"):
        to_chakra(plan.main, np.zeros(len(plan.main.steps)), programs=silent)


def test_groups_barriers_and_all_types_of_nodes_are_read() -> None:
    odd = [node(2, NodeType.METADATA), node(3, NodeType.MEM_LOAD, (2,), tensor_size=100), node(4, NodeType.STORAGE, (3,))]
    odd.append(node(5, NodeType.INVALID, (4,)))
    one = [*odd, coll(6, 9, deps=(5,)), coll(7, 0, 1000, "7", (6,)), node(8, num_ops=10**9, tensor_size=10, deps=(7,)), node(9, is_cpu_op=True)]
    other = [coll(1, 9), coll(2, 0, 1000, "7", (1,))]
    third = [coll(1, 9), coll(2, 2, 1000, "8", (1,))]
    made = plan_of_chakra(traces(one, other, third, groups={"7": (0, 1), "8": (2,)}), load_fabric("laptop:3"))
    assert made.prediction is not None and made.prediction.time_s > 0
    assert set(made.job["works"]) == {"n#1|op", "n|load"}  # the second price of a node called n


def test_unordered_messages_of_one_tag_get_channels_of_their_own() -> None:
    one = [message(k, 0, 1, sends=True) for k in (1, 2, 3)]
    other = [message(k, 0, 1, sends=False) for k in (1, 2, 3)]
    program = from_chakra(traces(one, other), lambda *_: pytest.fail("nothing is called")).program
    assert len(program.channels) == 3 and len(program.lanes) == 6
    chain = [message(k, 0, 1, sends=True, deps=(k - 1,) if k > 1 else ()) for k in (1, 2, 3)]
    into = [message(k, 0, 1, sends=False, deps=(k - 1,) if k > 1 else ()) for k in (1, 2, 3)]
    program = from_chakra(traces(chain, into), lambda *_: pytest.fail("nothing is called")).program
    assert len(program.channels) == 1 and len(program.lanes) == 2 and int(program.channels.depth[0]) == 3


def test_order_takes_the_first_of_the_file_that_may_come() -> None:
    trace = ChakraTrace(nodes=(node(5, deps=(9,)), node(1), node(9, deps=(1,)), node(2)))
    assert [n.id for n in ordered(trace, "x")] == [1, 9, 5, 2]


def test_summary() -> None:
    made = traces([replace(node(1), duration_micros=5), replace(node(2, deps=(1,)), duration_micros=7), message(3, 0, 1, sends=True), coll(4, 2, 10)],
                  [message(3, 0, 1, sends=False), replace(node(4), duration_micros=3)])  # fmt: skip
    first, second = summarise(made)
    assert first.nodes == {"COMP": 2, "COMM_SEND": 1, "COMM_COLL": 1} and first.compute_micros == first.longest_micros == 12
    assert first.sent_bytes == second.received_bytes == 8 and first.collective_bytes == {"ALL_GATHER": 10} and second.longest_micros == 3
