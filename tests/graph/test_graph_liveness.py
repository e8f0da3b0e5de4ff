"""Liveness of hand-made and random joint graphs against a plain simulation that frees what nobody will read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UsageError
from meshwright.graph.graph import GraphValue, JointNode, OpGraph, OpNode, Parameter, Storage
from meshwright.graph.liveness import Liveness, held_bytes, kept_storages, peak_bytes, segment_workspace


def build(calls: list[tuple[str, str, str, list[str], int | str]], gradients: dict[str, str] | None = None) -> OpGraph:
    """Calls are (name, phase, forward node, operands, size of a new result or the name of the value it is a view of)."""
    storages = [Storage(size_bytes=1000, owner="input:0"), Storage(size_bytes=100, owner="param:w")]
    of = {"input:0": 0, "param:w": 1}
    joint = []
    for name, phase, node, inputs, result in calls:
        if isinstance(result, str):
            of[name] = of[result]
        else:
            of[name] = len(storages)
            storages.append(Storage(size_bytes=result, owner=name))
        output = GraphValue(shape=(), dtype="uint8", storage=of[name])
        joint.append(JointNode(name=name, target="t", phase=phase, node=node, module="", inputs=tuple(inputs), outputs=(output,)))  # type: ignore[arg-type]
    names = dict.fromkeys(node for _, _, node, _, _ in calls)
    return OpGraph(
        model="m:f", method="export", batch_size=1, loss="output", inputs=(GraphValue(shape=(1000,), dtype="uint8", storage=0),),
        parameters=(Parameter(name="w", shape=(100,), dtype="uint8", size_bytes=100),),
        nodes=tuple(OpNode(name=n, target="t", module="", inputs=()) for n in names), joint=tuple(joint), joint_storages=tuple(storages),
        storages=(Storage(size_bytes=1000, owner="input:0"),), gradients=gradients or {},
    )  # fmt: skip


CHAIN = [
    ("a", "forward", "A", ["input:0", "param:w"], 10),
    ("a_view", "forward", "A", ["a"], "a"),
    ("b", "forward", "B", ["a_view"], 20),
    ("t", "forward", "B", ["b"], 7),
    ("c", "forward", "B", ["t"], 30),
    ("gc", "backward", "B", ["c"], 30),
    ("gt", "backward", "B", ["gc"], 5),
    ("ga", "backward", "B", ["gt", "a_view"], 10),
    ("gw", "backward", "A", ["ga", "input:0"], 100),
]


def test_a_chain_by_hand() -> None:
    graph = build(CHAIN, {"w": "gw"})
    assert held_bytes(graph) == 1100
    # a 10 | a+b 30 | a+b+t 37 | a+t+c 47 | a+c+gc 70 | a+gc+gt 45 | a+gt+ga 25 | ga+gw 110
    assert peak_bytes(graph) == 1100 + 110
    assert segment_workspace(graph, ["A"]) == (0, 100)  # a is read by B; gw lives until it is added to the parameter's gradient
    # forward: c stays, t is there beside it; backward: c, gc and gt at once, less c (saved) and ga (handed on)
    assert segment_workspace(graph, ["B"]) == (7, 65 - 40)
    # a and c stay; when ga and gw are there, both are released: 110 less 40; gc, gt, a and c need only 75
    assert segment_workspace(graph, ["A", "B"]) == (7, 110 - 40)
    assert Liveness(graph).segment_workspace([]) == (0, 0)


def test_a_gradient_stays_and_a_view_keeps_its_storage() -> None:
    early = [("gw", "backward", "A", ["input:0"], 50), ("x", "backward", "A", ["input:0"], 60), ("y", "backward", "A", ["x"], 70)]
    assert peak_bytes(build(early, {"w": "gw"})) == 1100 + 50 + 60 + 70
    assert peak_bytes(build(early)) == 1100 + 60 + 70
    view = [("a", "forward", "A", [], 50), ("v", "forward", "A", ["a"], "a"), ("b", "forward", "A", [], 60), ("c", "forward", "A", ["v"], 70)]
    assert peak_bytes(build(view)) == 1100 + 50 + 70
    of_parameter = [("t", "forward", "A", ["param:w"], "param:w"), ("a", "forward", "A", ["t"], 5)]
    assert peak_bytes(build(of_parameter)) == 1100 + 5


def test_unknown_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="no node 'Z'"):
        segment_workspace(build(CHAIN), ["A", "Z"])


@st.composite
def programs(draw: st.DrawFn) -> OpGraph:
    count = draw(st.integers(1, 12))
    forward = draw(st.integers(0, count))
    calls: list[tuple[str, str, str, list[str], int | str]] = []
    known = ["input:0", "param:w"]
    for i in range(count):
        inputs = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        view = bool(inputs) and draw(st.booleans())
        result: int | str = inputs[0] if view else draw(st.integers(0, 50))
        calls.append((f"v{i}", "forward" if i < forward else "backward", draw(st.sampled_from("ABC")), inputs, result))
        known.append(f"v{i}")
    gradient = draw(st.sampled_from([f"v{i}" for i in range(count)]))
    return build(calls, {"w": gradient} if draw(st.booleans()) else {})


def _storage(graph: OpGraph, value: str) -> int:
    fixed = {"input:0": 0, "param:w": 1}
    return fixed[value] if value in fixed else next(j.outputs[0].storage for j in graph.joint if j.name == value)


@given(programs())
def test_peak_equals_a_plain_simulation(graph: OpGraph) -> None:
    forever = {_storage(graph, v) for v in graph.gradients.values()}
    alive: set[int] = set()
    peak = 0
    for i, call in enumerate(graph.joint):
        alive.add(call.outputs[0].storage)
        peak = max(peak, sum(graph.joint_storages[s].size_bytes for s in alive - {0, 1}))
        later = {_storage(graph, v) for c in graph.joint[i + 1 :] for v in (*c.inputs, c.name)}
        alive = {s for s in alive if s in later or s in forever}
    assert peak_bytes(graph) == 1100 + peak


@given(programs(), st.sets(st.sampled_from("ABC")))
def test_workspace_equals_a_plain_simulation(graph: OpGraph, names: set[str]) -> None:
    names &= {n.name for n in graph.nodes}
    size = {s: x.size_bytes for s, x in enumerate(graph.joint_storages)}
    gradients = {_storage(graph, v) for v in graph.gradients.values()}
    mine = [c for c in graph.joint if c.node in names]
    others = {_storage(graph, v) for c in graph.joint if c not in mine for v in (*c.inputs, c.name)}

    def made(calls: list[JointNode]) -> set[int]:
        return {c.outputs[0].storage for c in calls if graph.joint_storages[c.outputs[0].storage].owner == c.name}

    def touched(calls: list[JointNode]) -> set[int]:
        return {_storage(graph, v) for c in calls for v in (*c.inputs, c.name)}

    forward, backward = ([c for c in mine if c.phase == phase] for phase in ("forward", "backward"))
    stays = made(forward) & (others | touched(backward))
    peak = max((sum(size[s] for s in made(forward[: i + 1]) & (stays | touched(forward[i:]))) for i in range(len(forward))), default=0)
    expected_forward = peak - sum(size[s] for s in stays)
    saved = (made(forward) & touched(backward)) - others
    handed = (made(backward) & others) - gradients
    peak = 0
    for i in range(len(backward)):
        ahead = {c.node for c in backward[i:]}
        alive = made(backward[: i + 1]) & (handed | (touched(backward[i:]) - gradients))
        alive |= {c.outputs[0].storage for c in backward[: i + 1] if made([c]) & gradients and c.node in ahead}
        alive |= {s for s in saved if any(s in touched([c]) and c.node in ahead for c in backward)}
        peak = max(peak, sum(size[s] for s in alive))
    expected = max(0, peak - sum(size[s] for s in saved | handed))
    assert segment_workspace(graph, names) == (expected_forward, expected)


def test_what_a_node_keeps_is_found_beyond_the_first_saver() -> None:
    """x is saved first by A; B's backward reads it too, C's does not."""
    calls: list[tuple[str, str, str, list[str], int | str]] = [
        ("jx", "forward", "x", ["input:0"], 10), ("ja", "forward", "A", ["jx"], 1), ("jb", "forward", "B", ["jx"], 2),
        ("jc", "forward", "C", ["jx"], 3),
        ("gc", "backward", "C", ["jc"], 3), ("gb", "backward", "B", ["jx"], 2), ("ga", "backward", "A", ["jx"], 1),
    ]  # fmt: skip
    joint = build(calls)
    value = {n: (GraphValue(shape=(), dtype="uint8", storage=i + 1),) for i, n in enumerate("xABC")}
    nodes = tuple(
        OpNode(name=n, target="t", module="", inputs=() if n == "x" else ("x",), outputs=value[n], saved=(1,) if n == "A" else ()) for n in "xABC"
    )
    graph = msgspec.structs.replace(joint, nodes=nodes)
    assert kept_storages(graph) == {"x": set(), "A": {1}, "B": {1}, "C": {4}}
    # without a joint graph nobody can tell: every reader of what is saved anywhere keeps it
    assert kept_storages(msgspec.structs.replace(graph, joint=())) == {"x": set(), "A": {1}, "B": {1}, "C": {1}}
