"""Chakra execution traces as files: `NAME.0.et`, `NAME.1.et`, ... one per rank, and `NAME.comm_group.json` with the process groups.

A file is a row of messages of protocol buffers, each preceded by its length: `GlobalMetadata`, then one `Node` after the other. Field
numbers stand beside their use, from Chakra's `et_def.proto`. Reading is bounded: bytes, nodes, dependencies, attributes and lengths of texts;
fields of a newer schema are kept and written back, so what was read is written as it was. An empty message ends the file for other readers,
so it is refused. gzip is told by content.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import FormatError, UsageError
from ...interop.chakra import Attribute, ChakraNode, ChakraSet, ChakraTrace, IoInfo, NodeType, Scalar
from ..atomic import write_bytes
from ..protobuf import BYTES, FIXED32, FIXED64, VARINT, block, fields, number, read_varint, signed, text, varint
from ..strict_json import decode, read_document

__all__ = ["chakra_bytes", "parse_chakra", "read_chakra_set", "write_chakra_set"]

MAX_NODES = 4_000_000  # operators of one rank's file
MAX_DEPS = 32_000_000  # dependencies of one rank's file, over all nodes
MAX_ATTRIBUTES = 1024  # attributes of one node
MAX_VALUES = 1 << 20  # values of one list
MAX_TEXT_BYTES = 1 << 20  # bytes of one text
MAX_RANKS = 1 << 14  # files of one workload
_MAX_SHARED_ATTRIBUTES = 1 << 16  # attributes of which one object is made for all nodes that have it

_KINDS = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64", "bool",
          "string", "bytes")  # fmt: skip
_FIELD = {f"{kind}_{form}": 3 + 2 * i + j for i, kind in enumerate(_KINDS) for j, form in enumerate(("val", "list"))}
_KIND = {field: kind for kind, field in _FIELD.items()}
_PACKED = {"double": "<d", "float": "<f", "fixed32": "<I", "fixed64": "<Q", "sfixed32": "<i", "sfixed64": "<q"}
_WIRE = dict.fromkeys(_KINDS, VARINT) | {kind: FIXED64 if struct.calcsize(form) == 8 else FIXED32 for kind, form in _PACKED.items()}
_WIRE |= {"string": BYTES, "bytes": BYTES}
_LAST_TYPE = int(max(NodeType))
_BITS = {"int32": 32, "int64": 64, "uint32": 32, "sint32": 32}


# ---- writing -----------------------------------------------------------------------------------------------------------
def chakra_bytes(trace: ChakraTrace) -> bytes:
    """The file; equal traces give equal bytes."""
    # Each message stands behind its length: metadata first, then a node after the other. Fields of value 0 are left out, as protobuf writers
    # do.
    head = (text(1, trace.version) if trace.version else b"") + b"".join(block(2, _attribute(a)) for a in trace.attr) + trace.unknown
    out = bytearray(varint(len(head)) + head)
    for node in trace.nodes:
        message = _node(node)
        out += varint(len(message)) + message
    return bytes(out)


def _node(n: ChakraNode) -> bytes:
    """Node: id 1, name 2, type 3, ctrl_deps 4, data_deps 5, start 6, duration 7, inputs 8, outputs 9, attr 10."""
    out = (number(1, n.id) if n.id else b"") + (text(2, n.name) if n.name else b"") + (number(3, n.type) if n.type else b"")
    for field, deps in ((4, n.ctrl_deps), (5, n.data_deps)):
        out += block(field, b"".join(map(varint, deps))) if deps else b""
    out += number(6, n.start_time_micros) if n.start_time_micros else b""
    out += number(7, n.duration_micros) if n.duration_micros else b""
    for field, info in ((8, n.inputs), (9, n.outputs)):
        if info is not None:
            parts = ((1, info.values), (2, info.shapes), (3, info.types))
            out += block(field, b"".join(text(k, value) for k, value in parts if value))
    return out + b"".join(block(10, _attribute(a)) for a in n.attr) + n.unknown


def _attribute(a: Attribute) -> bytes:
    """AttributeProto: name 1, doc_string 2, then one of `_FIELD`; a list is a message whose values have the number 1."""
    out = (text(1, a.name) if a.name else b"") + (text(2, a.doc) if a.doc else b"")
    if not a.kind:
        return out
    kind, _, form = a.kind.rpartition("_")
    if form == "val":
        return out + _value(_FIELD[a.kind], kind, a.value)  # type: ignore[arg-type]
    assert isinstance(a.value, tuple)
    if _WIRE[kind] == BYTES:
        return out + block(_FIELD[a.kind], b"".join(_value(1, kind, v) for v in a.value))
    packed = b"".join(_raw(kind, v) for v in a.value)
    return out + block(_FIELD[a.kind], block(1, packed) if packed else b"")


def _value(field: int, kind: str, value: Scalar) -> bytes:
    raw = _raw(kind, value)
    return block(field, raw) if _WIRE[kind] == BYTES else varint(field << 3 | _WIRE[kind]) + raw


def _raw(kind: str, value: Scalar) -> bytes:
    if kind in _PACKED:
        return struct.pack(_PACKED[kind], value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    whole = int(value)
    return varint(whole << 1 ^ whole >> 63 if kind in ("sint32", "sint64") else whole)


# ---- reading -----------------------------------------------------------------------------------------------------------
def parse_chakra(data: bytes, where: str) -> ChakraTrace:
    """The trace in a file's bytes. Raises: FormatError, naming the node and the byte."""
    head: ChakraTrace | None = None
    nodes: list[ChakraNode] = []
    known: dict[bytes, Attribute] = {}
    at, deps = 0, 0
    while at < len(data):
        place = f"{where}: message {len(nodes) + (head is not None)}"
        length, start = read_varint(data, at, len(data), place)
        at = start + length
        if at > len(data):
            raise FormatError(f"says {length} bytes, {len(data) - start} are left", where=place, hint="the file is cut short, or not a Chakra trace")
        # Readers of the public tools take a length of 0 for the end of the file and would drop the rest.
        if not length:
            raise FormatError("is empty, where other readers stop", where=place)
        if head is None:
            head = _parse_head(data, start, at, place)
            continue
        nodes.append(_parse_node(data, start, at, place, known))
        deps += len(nodes[-1].ctrl_deps) + len(nodes[-1].data_deps)
        if len(nodes) > MAX_NODES or deps > MAX_DEPS:
            raise FormatError(f"more than {MAX_NODES} nodes or {MAX_DEPS} dependencies", where=where)
    if head is None:
        raise FormatError("is empty", where=where, hint="a trace begins with its metadata")
    return ChakraTrace(version=head.version, attr=head.attr, nodes=tuple(nodes), unknown=head.unknown)


def _parse_head(data: bytes, at: int, end: int, where: str) -> ChakraTrace:
    version, attr, unknown = "", [], bytearray()
    for field, wire, value, start, after in fields(data, at, end, where):
        if field == 1:
            version = _text(data, wire, value, after, f"{where}.version")
        elif field == 2:
            attr.append(_parse_attribute(data, *_inside(wire, value, after, f"{where}.attr")))
            _few(attr, where)
        else:
            unknown += data[start:after]
    return ChakraTrace(version=version, attr=tuple(attr), unknown=bytes(unknown))


def _parse_node(data: bytes, at: int, end: int, where: str, known: dict[bytes, Attribute]) -> ChakraNode:
    whole = {1: 0, 3: 0, 6: 0, 7: 0}
    name, unknown = "", bytearray()
    deps: dict[int, list[int]] = {4: [], 5: []}
    info: dict[int, IoInfo | None] = {8: None, 9: None}
    attr: list[Attribute] = []
    for field, wire, value, start, after in fields(data, at, end, where):
        if field in whole:
            _expect(wire, VARINT, f"{where}.field {field}")
            whole[field] = value
        elif field == 2:
            name = _text(data, wire, value, after, f"{where}.name")
        elif field in deps:
            # A repeated number may stand alone, or packed into one block with others: readers must take both.
            deps[field] += [value] if wire == VARINT else _varints(data, *_inside(wire, value, after, f"{where}.field {field}"))
        elif field in info:
            info[field] = _parse_info(data, *_inside(wire, value, after, f"{where}.field {field}"))
        elif field == 10:
            raw = data[value:after] if wire == BYTES else b""
            # Nodes of one trace repeat their attributes byte for byte; one object serves for all of them.
            made = known.get(raw) if wire == BYTES else None
            if made is None:
                made = _parse_attribute(data, *_inside(wire, value, after, f"{where}.attr"))
                if len(known) < _MAX_SHARED_ATTRIBUTES:
                    known[raw] = made
            attr.append(made)
            _few(attr, where)
        else:
            unknown += data[start:after]
    if whole[3] > _LAST_TYPE:
        raise FormatError(f"node type {whole[3]} is not known", where=where)
    return ChakraNode(
        id=whole[1], name=name, type=NodeType(whole[3]), ctrl_deps=tuple(deps[4]), data_deps=tuple(deps[5]), start_time_micros=whole[6],
        duration_micros=whole[7], inputs=info[8], outputs=info[9], attr=tuple(attr), unknown=bytes(unknown),
    )  # fmt: skip


def _parse_info(data: bytes, at: int, end: int, where: str) -> IoInfo:
    found = {1: "", 2: "", 3: ""}
    for field, wire, value, _, after in fields(data, at, end, where):
        if field in found:
            found[field] = _text(data, wire, value, after, where)
    return IoInfo(found[1], found[2], found[3])


def _parse_attribute(data: bytes, at: int, end: int, where: str) -> Attribute:
    name = doc = kind = ""
    found: Scalar | tuple[Scalar, ...] = ()
    for field, wire, value, _, after in fields(data, at, end, where):
        if field == 1:
            name = _text(data, wire, value, after, where)
        elif field == 2:
            doc = _text(data, wire, value, after, where)
        elif field in _KIND:
            kind = _KIND[field]
            base, _, form = kind.rpartition("_")
            place = f"{where}.{kind}"
            if form == "val":
                _expect(wire, _WIRE[base], place)
                found = _scalar(data, base, value, after, place)
            else:
                found = _list(data, base, *_inside(wire, value, after, place))
    return Attribute(name, kind, found, doc)


def _list(data: bytes, kind: str, at: int, end: int, where: str) -> tuple[Scalar, ...]:
    """Values with the number 1, one by one or packed."""
    out: list[Scalar] = []
    for field, wire, value, _, after in fields(data, at, end, where):
        if field != 1:
            continue
        if wire == _WIRE[kind]:
            out.append(_scalar(data, kind, value, after, where))
        else:
            _expect(wire, BYTES, where)
            if kind in _PACKED:
                size = struct.calcsize(_PACKED[kind])
                if (after - value) % size:
                    raise FormatError(f"{after - value} bytes are no list of {kind}", where=where)
                out += [v for (v,) in struct.iter_unpack(_PACKED[kind], data[value:after])]
            else:
                out += [_whole(kind, v) for v in _varints(data, value, after, where)]
        if len(out) > MAX_VALUES:
            raise FormatError(f"more than {MAX_VALUES} values", where=where)
    return tuple(out)


def _scalar(data: bytes, kind: str, value: int, after: int, where: str) -> Scalar:
    if kind == "string":
        return _text(data, BYTES, value, after, where)
    if kind == "bytes":
        return data[value:after]
    if kind in _PACKED:
        out: int | float = struct.unpack_from(_PACKED[kind], data, value)[0]
        return out
    return _whole(kind, value)


def _whole(kind: str, value: int) -> int | bool:
    """What a varint means."""
    if kind == "bool":
        return bool(value)
    if kind in ("sint32", "sint64"):
        value = value & ((1 << 32) - 1) if kind == "sint32" else value
        # Zigzag: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
        return value >> 1 ^ -(value & 1)
    if kind in ("int32", "int64"):
        return signed(value, _BITS[kind])
    return value & ((1 << _BITS.get(kind, 64)) - 1)


def _varints(data: bytes, at: int, end: int, where: str) -> list[int]:
    out = []
    while at < end:
        value, at = read_varint(data, at, end, where)
        out.append(value)
    return out


def _text(data: bytes, wire: int, value: int, after: int, where: str) -> str:
    _expect(wire, BYTES, where)
    if after - value > MAX_TEXT_BYTES:
        raise FormatError(f"a text of {after - value} bytes, the limit is {MAX_TEXT_BYTES}", where=where)
    try:
        return data[value:after].decode()
    except UnicodeDecodeError as error:
        raise FormatError("a text is not UTF-8", where=where) from error


def _inside(wire: int, value: int, after: int, where: str) -> tuple[int, int, str]:
    _expect(wire, BYTES, where)
    return value, after, where


def _expect(wire: int, due: int, where: str) -> None:
    if wire != due:
        raise FormatError(f"has wire type {wire}, {due} is due", where=where, hint="not a Chakra trace, or one of another schema")


def _few(attr: list[Attribute], where: str) -> None:
    if len(attr) > MAX_ATTRIBUTES:
        raise FormatError(f"more than {MAX_ATTRIBUTES} attributes", where=where)


# ---- files of all ranks ------------------------------------------------------------------------------------------------
_Members = list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]]
_GROUPS: msgspec.json.Decoder[dict[str, list[int]]] = msgspec.json.Decoder(dict[str, _Members])


def write_chakra_set(folder: str | os.PathLike[str], name: str, traces: ChakraSet) -> list[str]:
    """Write `NAME.RANK.et` of every rank, and `NAME.comm_group.json` where there are groups; returns the files' names."""
    made = {f"{name}.{rank}.et": chakra_bytes(trace) for rank, trace in enumerate(traces.traces)}
    if traces.groups:
        groups = {key: list(members) for key, members in sorted(traces.groups.items(), key=lambda item: (len(item[0]), item[0]))}
        made[f"{name}.comm_group.json"] = msgspec.json.encode(groups) + b"\n"
    for file, data in made.items():
        write_bytes(Path(folder) / file, data)
    return list(made)


def read_chakra_set(path: str | os.PathLike[str], *, groups: str | os.PathLike[str] | None = None) -> ChakraSet:
    """The traces `PATH.0.et`, `PATH.1.et`, ..., those of the folder PATH, if there is one set in it, or one rank's trace, the file PATH itself.

    Args: groups: the file with the process groups; default `PATH.comm_group.json`, or `comm_group.json` beside it, where there is one.
    Raises: UsageError (no such files, several sets), FormatError.
    """
    single = Path(path).is_file()
    prefix = Path(re.sub(r"\.\d+\.et$", "", str(path))) if single else _prefix(Path(path))
    files = [Path(path)] if single else []
    while not single and (file := prefix.with_name(f"{prefix.name}.{len(files)}.et")).exists():
        files.append(file)
        if len(files) > MAX_RANKS:
            raise FormatError(f"more than {MAX_RANKS} ranks", where=str(path))
    if not files:
        raise UsageError("no file PREFIX.0.et", where=str(path), hint="name the prefix before `.0.et`, the folder, or one file")
    traces = tuple(parse_chakra(read_document(file), file.name) for file in files)
    beside = (prefix.with_name(f"{prefix.name}.comm_group.json"), prefix.with_name("comm_group.json"))
    chosen = Path(groups) if groups is not None else next((p for p in beside if p.exists()), None)
    ranks = MAX_RANKS if single else len(traces)  # one rank's groups name ranks that are not here
    return ChakraSet(traces=traces, groups=_groups(chosen, ranks) if chosen is not None else {}, names=tuple(file.name for file in files))


def _prefix(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted({match[1] for file in path.iterdir() if (match := re.fullmatch(r"(.*)\.\d+\.et", file.name))})
    if len(found) != 1:
        said = f"holds {len(found)} sets of traces: {', '.join(found[:8])}" if found else "holds no file NAME.0.et"
        raise UsageError(said, where=str(path), hint="name the prefix before `.0.et`")
    return path / found[0]


def _groups(path: Path, ranks: int) -> Mapping[str, tuple[int, ...]]:
    found = decode(read_document(path), _GROUPS, path.name)
    for name, members in found.items():
        if not members or len(set(members)) != len(members) or max(members) >= ranks:
            raise FormatError(f"must be different ranks below {ranks}, got {str(members)[:60]}", where=f"{path.name}: {name[:40]!r}")
    return {name: tuple(members) for name, members in found.items()}
