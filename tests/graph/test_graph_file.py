"""Graph files: what goes in comes out; what is damaged or hostile is refused with the file and the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, MeshwrightError, UsageError
from meshwright.graph.graph import GraphValue, JointNode, OpGraph, OpNode, Parameter, Scaling, Storage, Work
from meshwright.io.model.graph import read_graph, write_graph


def sample() -> OpGraph:
    value = GraphValue(shape=(2, 3), dtype="float32", storage=1)
    node = OpNode(
        name="linear", target="aten.linear.default", module="layer", inputs=("input:0", "param:w"), args=[{"value": "input:0"}, None, -0.5],
        kwargs={"dtype": {"torch": "float32"}}, outputs=(value,), forward=Work(flops=36, bytes_read=60, bytes_written=24, calls=1), saved=(0,),
    )  # fmt: skip
    joint = (
        JointNode(name="mm", target="aten.mm.default", phase="forward", node="linear", module="a", inputs=("input:0", "param:w"), outputs=(value,)),
        JointNode(name="gw", target="aten.mm.default", phase="backward", node="linear", module="layer", inputs=("mm", "tangent")),
    )
    storages = (Storage(size_bytes=24, owner="input:0"), Storage(size_bytes=24, owner="linear"))
    return OpGraph(
        model="m:f", method="export", batch_size=2, loss="mse", inputs=(GraphValue(shape=(2, 3), dtype="float32", storage=0),),
        parameters=(Parameter(name="w", shape=(3, 3), dtype="float32", size_bytes=36, aliases=("v",)),), nodes=(node,), joint=joint,
        buffers=(Parameter(name="b", shape=(), dtype="int64", size_bytes=8, trainable=False),), storages=storages, joint_storages=storages,
        outputs=("linear",), gradients={"w": "gw"}, scaling=Scaling(integers=9, index=(1, 4), slope=(3, -2)), notes=("a note",),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_round_trip_and_equal_bytes(tmp_path: Path, name: str) -> None:
    write_graph(tmp_path / name, sample())
    first = (tmp_path / name).read_bytes()
    assert read_graph(tmp_path / name) == sample()
    write_graph(tmp_path / name, read_graph(tmp_path / name))
    assert (tmp_path / name).read_bytes() == first and (first[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def _set(*path: Any) -> Callable[[Any], None]:
    """An edit of the document: the last item is the new value."""

    def edit(document: Any) -> None:
        for key in path[:-2]:
            document = document[key]
        document[path[-2]] = path[-1]

    return edit


BAD = {
    "batch": (_set("batch_size", 0), "batch_size", "must be >= 1"),
    "type": (_set("batch_size", "2"), "batch_size", "Expected `int`"),
    "unknown field": (_set("color", 1), "", "unknown field `color`"),
    "schema": (_set("schema", "meshwright.plan"), "schema", "expected 'meshwright.graph'"),
    "version": (_set("version", 99), "version", "newer meshwright"),
    "method": (_set("method", "magic"), "method", "Invalid enum value"),
    "no nodes": (_set("nodes", []), "nodes", "is empty"),
    "storage of a value": (_set("nodes", 0, "outputs", 0, "storage", 2), "nodes[0].outputs[0].storage", "no storage 2"),
    "storage of a joint value": (_set("joint", 0, "outputs", 0, "storage", -2), "joint[0].outputs[0].storage", "no storage -2"),
    "storage of an input": (_set("inputs", 0, "storage", 7), "inputs[0].storage", "no storage 7"),
    "saved": (_set("nodes", 0, "saved", [9]), "nodes[0].saved", "no storage 9"),
    "size": (_set("storages", 0, "size_bytes", -1), "storages[0].size_bytes", "must be >= 0"),
    "shape": (_set("nodes", 0, "outputs", 0, "shape", [2, -3]), "nodes[0].outputs[0].shape", "negative"),
    "dimensions": (_set("nodes", 0, "outputs", 0, "shape", [1] * 65), "nodes[0].outputs[0].shape", "too many"),
    "forward work": (_set("nodes", 0, "forward", "flops", -1), "nodes[0].forward", "negative"),
    "backward work": (_set("nodes", 0, "backward", {"calls": -1}), "nodes[0].backward", "negative"),
    "joint work": (_set("joint", 0, "work", {"bytes_read": -1}), "joint[0].work", "negative"),
    "operand": (_set("nodes", 0, "inputs", ["nobody"]), "nodes[0].inputs", "not a value made before"),
    "operand of itself": (_set("nodes", 0, "inputs", ["linear"]), "nodes[0].inputs", "not a value made before"),
    "joint operand": (_set("joint", 0, "inputs", ["gw"]), "joint[0].inputs", "not a value made before"),
    "name": (_set("joint", 1, "name", "mm"), "joint[1].name", "taken"),
    "empty name": (_set("nodes", 0, "name", ""), "nodes[0].name", "empty"),
    "name of an input": (_set("nodes", 0, "name", "input:0"), "nodes[0].name", "taken"),
    "cause": (_set("joint", 0, "node", "relu"), "joint[0].node", "no forward node"),
    "output": (_set("outputs", ["relu"]), "outputs[0]", "no value"),
    "gradient": (_set("gradients", {"w": "nobody"}), "gradients", "not a parameter and a joint value"),
    "gradient of": (_set("gradients", {"x": "gw"}), "gradients", "not a parameter and a joint value"),
    "parameter size": (_set("parameters", 0, "size_bytes", 37), "parameters[0].size_bytes", "not the size"),
    "parameter shape": (_set("parameters", 0, "shape", [3, 4]), "parameters[0].size_bytes", "not the size"),
    "scaling": (_set("scaling", "slope", [1]), "scaling.slope", "1 entries for 2"),
    "scaling order": (_set("scaling", "index", [4, 1]), "scaling.index", "must rise"),
    "scaling range": (_set("scaling", "index", [1, 9]), "scaling.index", "must rise"),
    "large integer": (_set("batch_size", 2**70), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_point_at_the_field(tmp_path: Path, case: str) -> None:
    edit, field, says = BAD[case]
    document = msgspec.to_builtins(sample())
    document = json.loads(json.dumps(document))
    edit(document)
    path = tmp_path / "g.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        read_graph(path)
    assert caught.value.where.startswith("g.json") and field in caught.value.where and says in caught.value.message


def test_two_parameters_of_one_name(tmp_path: Path) -> None:
    graph = sample()
    write_graph(tmp_path / "g.json", msgspec.structs.replace(graph, parameters=graph.parameters * 2))
    with pytest.raises(FormatError, match="'w' is taken"):
        read_graph(tmp_path / "g.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b"{", b'{"schema": "meshwright.graph"}', b"\xff\xfe", b"[" * 100_000, b"\x1f\x8b",
     gzip.compress(b"{}", mtime=0)[:-3]],
)
def test_what_is_not_a_graph(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "g.json").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read_graph(tmp_path / "g.json")
    assert caught.value.where.startswith("g.json")


def test_a_gzip_bomb_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    (tmp_path / "g.json.gz").write_bytes(gzip.compress(b" " * (80 << 20)))
    with pytest.raises(FormatError, match="unpacks to more than"):
        read_graph(tmp_path / "g.json.gz")


def test_twice_the_same_key(tmp_path: Path) -> None:
    text = msgspec.json.encode(sample()).decode().replace('"batch_size":2', '"batch_size":2,"batch_size":2')
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(FormatError, match="occurs twice"):
        read_graph(tmp_path / "g.json")


def test_no_such_file_and_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_graph(tmp_path / "none.json")
    with pytest.raises(UsageError, match="does not exist"):
        write_graph(tmp_path / "none" / "g.json", sample())


def test_what_json_cannot_say_is_not_written(tmp_path: Path) -> None:
    for node in (
        msgspec.structs.replace(sample().nodes[0], args=[float("nan")]),
        msgspec.structs.replace(sample().nodes[0], kwargs={"value": [float("inf")]}),
    ):
        with pytest.raises(FormatError, match="cannot be written"):
            write_graph(tmp_path / "g.json", msgspec.structs.replace(sample(), nodes=(node,)))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_typed_errors_or_valid_graphs(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(msgspec.json.encode(sample()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        pieces = [b"", b"0", b"-", b"9999999999", b'"', b"]", b"}", b"null", b"\x00", b"1e999"]
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from(pieces))
    (tmp_path / "g.json").write_bytes(bytes(text))
    try:
        graph = read_graph(tmp_path / "g.json")
    except MeshwrightError as error:
        assert isinstance(error, FormatError)
    else:
        write_graph(tmp_path / "h.json", graph)
        assert read_graph(tmp_path / "h.json") == graph
