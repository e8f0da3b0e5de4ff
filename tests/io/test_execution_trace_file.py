"""PyTorch's execution traces: counts against torch's own profiler of the same run, bytes against arithmetic, and no exception for any bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from meshwright.cli.frame import main
from meshwright.errors import FormatError, MeshwrightError
from meshwright.io.chakra.execution_trace import read_execution_trace
from meshwright.trace.execution_trace import ExecutionTrace, OperatorUse, operator_uses

NOTHING: dict[str, list[Any]] = {"values": [], "shapes": []}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A trace of two training steps, and how often torch's profiler saw each operator meanwhile."""
    path = tmp_path_factory.mktemp("et") / "et.json"
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.ones(3, 8)) + torch.cat([torch.ones(1, 4), torch.ones(2, 4)]), torch.tensor([0, 1, 2]))
            loss.backward()
            optimizer.step()
    observer.unregister_callback()
    return path, {e.key: e.count for e in profiler.key_averages() if e.key.startswith("aten::")}


def used(trace: ExecutionTrace) -> dict[str, OperatorUse]:
    return {u.name: u for u in operator_uses(trace)}


def test_counts_are_those_of_the_profiler_and_bytes_those_of_the_shapes(recorded: tuple[Path, dict[str, int]]) -> None:
    path, counts = recorded
    uses = used(read_execution_trace(path))
    assert {name: use.calls for name, use in uses.items() if name.startswith("aten::")} == counts
    linear, addmm, mm, cat = (uses[f"aten::{n}"] for n in ("linear", "addmm", "mm", "cat"))
    assert (linear.calls, linear.outermost, linear.backward) == (4, 4, 0) and (addmm.calls, addmm.outermost) == (4, 0)
    assert linear.output_bytes == 2 * 4 * (3 * 16 + 3 * 4)
    assert linear.input_bytes == 2 * 4 * (3 * 8 + 16 * 8 + 16 + 3 * 16 + 4 * 16 + 4)
    assert mm.backward == mm.calls == 6 and mm.outermost == 6  # the input of the first layer needs no gradient
    assert cat.shapes == ((1, 4), (2, 4)) and cat.input_bytes == cat.output_bytes == 2 * 4 * 12  # a list of tensors
    order = operator_uses(read_execution_trace(path))
    assert [not u.outermost for u in order] == sorted(not u.outermost for u in order)


def test_the_command(recorded: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, counts = recorded
    packed = tmp_path / "et.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert main(["program", "import", str(packed), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["format"], document["threads"]) == ("meshwright.program-import", "pytorch-execution-trace", 1)
    assert {o["name"]: o["calls"] for o in document["operators"] if o["name"] in counts} == counts
    assert main(["program", "import", str(path)]) == 0
    text = capsys.readouterr().out
    assert "aten::linear" in text and "no times" in text and f"and {len(document['operators']) - 20} more" in text
    assert main(["program", "import", str(path), "--fabric", "laptop:2"]) == 2
    assert "cannot become a plan" in capsys.readouterr().err
    assert main(["program", "import", str(tmp_path / "none.json")]) == 2


def node(number: int, parent: int, name: str = "aten::relu", **more: Any) -> dict[str, Any]:
    attributes = [{"name": "op_schema", "value": "aten::relu(Tensor self) -> Tensor"}, {"name": "tid", "value": 1}]
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": NOTHING, "outputs": NOTHING, "attrs": attributes, **more}


def written(folder: Path, nodes: object, schema: str = "1.1.1-chakra.0.0.4") -> Path:
    path = folder / "made.json"
    path.write_text(json.dumps({"schema": schema, "pid": 7, "nodes": nodes}))
    return path


def tensor(elements: int, size: int) -> list[Any]:
    return [1, 2, 0, elements, size, "cpu"]


def test_schema_1_0_says_the_same(recorded: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """The trace that this torch wrote, with the keys of schema 1.0 (as in traces of PyTorch 2.0: operands and attributes are keys of the node)."""
    new = json.loads(recorded[0].read_text())
    old = [
        {
            "name": n["name"], "id": n["id"], "parent": n["ctrl_deps"], "seq_id": -1, "scope": 0, "fw_tid": 0,
            **{a["name"]: a["value"] for a in n["attrs"] if a["name"] in ("op_schema", "tid")},
            "inputs": n["inputs"]["values"], "input_shapes": n["inputs"]["shapes"], "input_types": n["inputs"]["types"],
            "outputs": n["outputs"]["values"], "output_shapes": n["outputs"]["shapes"], "output_types": n["outputs"]["types"],
        }
        for n in new["nodes"]
    ]  # fmt: skip
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": new["pid"], "time": "2023-07-14 11:53:07", "nodes": old}))
    assert read_execution_trace(path).nodes == read_execution_trace(recorded[0]).nodes
    for version in ("1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4"):  # between the two: as MLCommons' and PARAM's traces of 2024, with the keys of 1.1
        path.write_text(json.dumps({**new, "schema": version}))
        assert read_execution_trace(path).nodes == read_execution_trace(recorded[0]).nodes


def test_what_is_no_such_trace_is_refused(tmp_path: Path) -> None:
    large = {"values": [tensor(1 << 40, 1 << 40)], "shapes": [[1 << 40]]}
    for nodes, said in (
        ([node(1, 1), node(1, 1)], "same id"), ([node(1, 9)], "does not exist"), ([node(1, 1), node(2, 3), node(3, 2)], "inside itself"),
        ([node(1, 1, inputs=large)], "a tensor of"), ([node(1, 1, outputs={"values": [tensor(-1, 4)]})], "a tensor of -1"),
        ([node(1, 1, attrs=[{"name": "op_schema", "value": 3}])], "must be a text"), ([{"id": 1}], "missing required field"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=said):
            read_execution_trace(written(tmp_path, nodes))
    with pytest.raises(FormatError, match="expected 1"):
        read_execution_trace(written(tmp_path, [], schema="2.0.2"))
    cut = written(tmp_path, [node(1, 1), node(2, 1)])
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(FormatError, match="not JSON"):
        read_execution_trace(cut)


def test_odd_nodes_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A child before its parent, deep nesting of calls and of operands, hostile names."""
    nest: list[Any] = [tensor(3, 4)]
    for _ in range(200):
        nest = [nest]
    chain = [node(i, i - 1) for i in range(4, 5000)]
    nodes = [
        node(1, 1, attrs=[]), node(2, 3, "\x1b[31m<script>"), node(3, 1, inputs={"values": [nest, tensor(2, 8)], "shapes": [[], [2]]}),
        *chain,
    ]  # fmt: skip
    path = written(tmp_path, nodes)
    uses = used(read_execution_trace(path))
    assert uses["aten::relu"].input_bytes == 16 and uses["aten::relu"].shapes == () and uses["aten::relu"].calls == 4997
    assert uses["\x1b[31m<script>"].outermost == 0
    assert main(["program", "import", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=3), lambda x: st.lists(x, max_size=6), max_leaves=9)
NODES = st.lists(
    st.fixed_dictionaries({
        "id": st.integers(0, 5), "name": st.text(max_size=4), "ctrl_deps": st.integers(0, 5), "inputs": st.fixed_dictionaries({
            "values": st.lists(VALUES, max_size=2), "shapes": st.lists(VALUES, max_size=2)}), "outputs": st.just(NOTHING),
        "attrs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["op_schema", "tid", "x"]), "value": VALUES}), max_size=2),
    }), max_size=6,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(nodes=NODES)
def test_any_nodes_are_read_or_refused(nodes: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp(), nodes)
    try:
        trace = read_execution_trace(path)
    except MeshwrightError:
        return
    assert len(trace.nodes) == len(nodes) and all(n.parent < i for i, n in enumerate(trace.nodes))
    assert sum(u.calls for u in operator_uses(trace)) == sum(bool(n.schema) for n in trace.nodes)
