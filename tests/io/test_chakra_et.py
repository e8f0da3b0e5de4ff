"""Chakra files against protobuf's own runtime with the published schema, and against damage."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.interop.chakra import Attribute, ChakraNode, ChakraSet, ChakraTrace, IoInfo, NodeType
from meshwright.io.chakra import et as chakra_et
from meshwright.io.chakra.et import chakra_bytes, parse_chakra, read_chakra_set, write_chakra_set
from meshwright.io.protobuf import block, number, read_varint, text, varint

KINDS = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64", "bool",
         "string", "bytes")  # fmt: skip


def messages() -> tuple[Any, Any]:
    """(GlobalMetadata, Node) made by protobuf from the fields of `et_def.proto`, written down here a second time."""
    protobuf = pytest.importorskip("google.protobuf", reason="the package protobuf is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    assert protobuf is not None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto

    def add(message: Any, name: str, number: int, kind: str, *, repeated: bool = False, oneof: int | None = None) -> None:
        own = kind[0].isupper()
        field = message.field.add(name=name, number=number, label=3 if repeated else 1,
                                  type=types.TYPE_MESSAGE if own else getattr(types, f"TYPE_{kind.upper()}"))  # fmt: skip
        if own:
            field.type_name = f".ChakraProtoMsg.{kind}"
        if oneof is not None:
            field.oneof_index = oneof

    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    add(attribute, "name", 1, "string")
    add(attribute, "doc_string", 2, "string")
    for i, kind in enumerate(KINDS):
        listed = file.message_type.add(name=f"{kind.capitalize()}List")
        add(listed, "values", 1, kind, repeated=True)
        add(attribute, f"{kind}_val", 3 + 2 * i, kind, oneof=0)
        add(attribute, f"{kind}_list", 4 + 2 * i, f"{kind.capitalize()}List", oneof=0)
    head = file.message_type.add(name="GlobalMetadata")
    add(head, "version", 1, "string")
    add(head, "attr", 2, "AttributeProto", repeated=True)
    info = file.message_type.add(name="IOInfo")
    for i, name in enumerate(("values", "shapes", "types")):
        add(info, name, i + 1, "string")
    node = file.message_type.add(name="Node")
    for number_, (name, kind) in enumerate(
        [("id", "uint64"), ("name", "string"), ("type", "int32"), ("ctrl_deps", "uint64"), ("data_deps", "uint64"), ("start_time_micros", "uint64"),
         ("duration_micros", "uint64"), ("inputs", "IOInfo"), ("outputs", "IOInfo"), ("attr", "AttributeProto")], 1,
    ):  # fmt: skip
        add(node, name, number_, kind, repeated=name in ("ctrl_deps", "data_deps", "attr"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return tuple(message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{x}")) for x in ("GlobalMetadata", "Node"))  # type: ignore[return-value]


def into(message: Any, a: Attribute) -> None:
    """Set a protobuf attribute to ours."""
    message.name, message.doc_string = a.name, a.doc
    if a.kind.endswith("_list"):
        getattr(message, a.kind).SetInParent()
        getattr(message, a.kind).values.extend(a.value)
    elif a.kind:
        setattr(message, a.kind, a.value)


def by_protobuf(trace: ChakraTrace) -> bytes:
    head_type, node_type = messages()
    head = head_type(version=trace.version)
    for a in trace.attr:
        into(head.attr.add(), a)
    rows = [head]
    for n in trace.nodes:
        row = node_type(id=n.id, name=n.name, type=int(n.type), ctrl_deps=n.ctrl_deps, data_deps=n.data_deps,
                        start_time_micros=n.start_time_micros, duration_micros=n.duration_micros)  # fmt: skip
        for name, info in (("inputs", n.inputs), ("outputs", n.outputs)):
            if info is not None:
                getattr(row, name).SetInParent()
                for part in ("values", "shapes", "types"):
                    setattr(getattr(row, name), part, getattr(info, part))
        for a in n.attr:
            into(row.attr.add(), a)
        rows.append(row)
    out = b""
    for row in rows:
        data = row.SerializeToString()
        out += varint(len(data)) + data
    return out


def values(kind: str) -> st.SearchStrategy[Any]:
    if kind in ("double", "float"):
        return st.floats(allow_nan=False, width=64 if kind == "double" else 32)
    if kind == "bool":
        return st.booleans()
    if kind in ("string", "bytes"):
        return st.text(max_size=6) if kind == "string" else st.binary(max_size=6)
    bits = 32 if "32" in kind else 64
    return st.integers(0, 2**bits - 1) if kind[0] in "uf" else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@st.composite
def attributes(draw: st.DrawFn) -> Attribute:
    kind, form = draw(st.sampled_from(KINDS)), draw(st.sampled_from(["val", "list"]))
    value = draw(values(kind)) if form == "val" else tuple(draw(st.lists(values(kind), max_size=3)))
    return Attribute(draw(st.text(max_size=5)), f"{kind}_{form}", value, draw(st.text(max_size=3)))


ids = st.integers(0, 2**64 - 1)
infos = st.none() | st.builds(IoInfo, st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
nodes = st.builds(
    ChakraNode, id=ids, name=st.text(max_size=8), type=st.sampled_from([t for t in NodeType if t]), ctrl_deps=st.lists(ids, max_size=3).map(tuple),
    data_deps=st.lists(ids, max_size=3).map(tuple), start_time_micros=ids, duration_micros=ids, inputs=infos, outputs=infos,
    attr=st.lists(attributes(), max_size=3).map(tuple),
)  # fmt: skip
traces = st.builds(ChakraTrace, version=st.text(min_size=1, max_size=6), attr=st.lists(attributes(), max_size=2).map(tuple),
                   nodes=st.lists(nodes, max_size=4).map(tuple))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(traces)
def test_bytes_are_those_of_protobuf_and_read_back_equal(trace: ChakraTrace) -> None:
    data = chakra_bytes(trace)
    assert data == by_protobuf(trace)
    assert parse_chakra(data, "x.et") == trace


@settings(max_examples=60, deadline=None)
@given(traces, st.data())
def test_every_damage_is_a_format_error_or_another_trace(trace: ChakraTrace, data: st.DataObject) -> None:
    whole = bytearray(chakra_bytes(trace))
    for cut in range(len(whole)):
        with_cut = bytes(whole[:cut])
        try:
            assert parse_chakra(with_cut, "x.et").nodes == trace.nodes[: len(parse_chakra(with_cut, "x.et").nodes)]
        except FormatError as error:
            assert error.where.startswith("x.et")
    for _ in range(5):
        at = data.draw(st.integers(0, len(whole) - 1))
        kept, whole[at] = whole[at], data.draw(st.integers(0, 255))
        try:
            parse_chakra(bytes(whole), "x.et")
        except FormatError:
            pass
        whole[at] = kept


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_noise(data: bytes) -> None:
    try:
        parse_chakra(data, "x.et")
    except FormatError as error:
        assert str(error)


HEAD = varint(3) + text(1, "1")


def one(message: bytes) -> bytes:
    return HEAD + varint(len(message)) + message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "x.et: is empty"),
        (b"\x00", "x.et: message 0: is empty"),
        (HEAD + b"\x00", "message 1: is empty, where other readers stop"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "says 9223372036854775807 bytes, 0 are left"),
        (b"\xff" * 12, "more than 10 bytes"),
        (b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        (b"\x80", "ends inside a number"),
        (one(b"\x0a\x05ab"), "field 1 at byte 5 says 5 bytes, 2 are left"),
        (one(text(1, "x")), "field 1: has wire type 2, 0 is due"),
        (one(number(2, 5)), r"name: has wire type 0, 2 is due"),
        (one(number(8, 5)), "field 8: has wire type 0, 2 is due"),
        (one(b"\x0b"), "wire type 3 at byte 5 is not used"),
        (one(b"\x00"), "no field has the number 0"),
        (one(number(3, 11)), "node type 11 is not known"),
        (one(block(2, b"\xff")), "a text is not UTF-8"),
        (one(block(10, b"") + number(10, 4)), "attr: has wire type 0, 2 is due"),
        (one(block(10, block(3, b"12345678"))), "double_val: has wire type 2, 1 is due"),
        (one(block(10, block(4, block(1, b"123")))), "3 bytes are no list of double"),
        (one(block(10, block(8, b"\x0d1234"))), "int32_list: has wire type 5, 2 is due"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_chakra(data, "x.et")
    assert says in str(caught.value)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ChakraTrace(nodes=tuple(ChakraNode(id=i, type=NodeType.COMP, data_deps=(1, 2), attr=(Attribute("a", "int64_list", (1, 2)),) * 2)
                                    for i in range(3)))  # fmt: skip
    data = chakra_bytes(trace)
    assert parse_chakra(data, "x") == trace
    for name, limit, says in (
        ("MAX_NODES", 2, "more than 2 nodes"), ("MAX_DEPS", 5, "5 dependencies"), ("MAX_ATTRIBUTES", 1, "more than 1 attributes"),
        ("MAX_VALUES", 1, "more than 1 values"), ("MAX_TEXT_BYTES", 4, "a text of 5 bytes"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(chakra_et, name, limit)
            with pytest.raises(FormatError, match=says):
                parse_chakra(data, "x")


def test_fields_of_a_newer_schema_are_written_back() -> None:
    node = number(1, 7) + number(3, 8) + block(11, number(1, 3) + text(10, "x")) + number(4, 9) + number(99, 5)
    head = text(1, "9.9") + number(7, 1)
    data = varint(len(head)) + head + varint(len(node)) + node
    trace = parse_chakra(data, "x")
    assert trace.nodes[0].ctrl_deps == (9,)  # not packed
    assert trace.nodes[0].unknown == block(11, number(1, 3) + text(10, "x")) + number(99, 5) and trace.unknown == number(7, 1)
    assert parse_chakra(chakra_bytes(trace), "x") == trace


@given(st.integers(-(2**63), 2**64 - 1))
def test_varints(value: int) -> None:
    data = varint(value)
    assert read_varint(data, 0, len(data), "x") == (value & (2**64 - 1), len(data))


def test_sets_of_files(tmp_path: Path) -> None:
    both = ChakraSet(traces=(ChakraTrace(), ChakraTrace(nodes=(ChakraNode(id=1, type=NodeType.COMP),))), groups={"1": (1, 0), "10": (1,)})
    assert write_chakra_set(tmp_path, "step", both) == ["step.0.et", "step.1.et", "step.comm_group.json"]
    assert read_chakra_set(tmp_path) == both == read_chakra_set(tmp_path / "step")
    (tmp_path / "step.1.et").write_bytes(gzip.compress((tmp_path / "step.1.et").read_bytes()))
    assert read_chakra_set(tmp_path).traces == both.traces
    one = read_chakra_set(tmp_path / "step.1.et")
    assert one.traces == both.traces[1:] and one.groups == both.groups and one.names == ("step.1.et",)
    (tmp_path / "step.comm_group.json").write_text('{"1": [0, 2]}')
    with pytest.raises(FormatError, match=r"step.comm_group.json: '1': must be different ranks below 2"):
        read_chakra_set(tmp_path)
    (tmp_path / "step.comm_group.json").unlink()
    (tmp_path / "mine.json").write_text('{"3": [0]}')
    assert read_chakra_set(tmp_path, groups=tmp_path / "mine.json").groups == {"3": (0,)}
    (tmp_path / "other.0.et").write_bytes(chakra_bytes(ChakraTrace()))
    for path, says in ((tmp_path, "holds 2 sets of traces: other, step"), (tmp_path / "none", "no file PREFIX.0.et")):
        with pytest.raises(UsageError, match=says):
            read_chakra_set(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no file NAME\.0\.et"):
        read_chakra_set(tmp_path / "empty")
