"""Reading what `torch.profiler.ExecutionTraceObserver` writes: JSON of schema 1.1 (PyTorch 2.3 and later) or 1.0 (before it), plain or gzipped.

They say the same of a node with other keys: 1.0 has `parent` where 1.1 has `ctrl_deps`, operands and attributes as keys of the node itself. What
PyTorch 2.3 wrote as `1.0.2-chakra.0.0.4` and `1.0.3-chakra.0.0.4` has the keys of 1.1.

Values of operands are read only as far as they say that something is a tensor, and how large. Fields that we do not know are passed over: the
format grows by them. Invariant: the nodes given back form a forest whose parents come first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError
from ...trace.execution_trace import ExecutionNode, ExecutionTrace, Shapes
from ..limits import MaxBytes
from ..strict_json import decode, read_document

__all__ = ["read_execution_trace"]

MAX_LIST_DEPTH = 4  # of lists of tensors in an operand
MAX_TENSOR_BYTES = 1 << 62  # bytes that elements and their size may multiply to: sums of two stay below 2^63
_OLD, _NEW = "1.0.", "1.1."
_NEW_KEYS = "-chakra."  # in the version of what has the keys of 1.1


class _Tensors(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _Node(msgspec.Struct):
    id: int
    name: str
    ctrl_deps: int
    inputs: _Tensors
    outputs: _Tensors
    attrs: list[_Attribute] = []


class _File(msgspec.Struct):
    schema: str
    nodes: list[_Node]
    pid: int = 0


class _OldNode(msgspec.Struct):
    """A node of schema 1.0."""

    id: int
    name: str
    parent: int
    inputs: list[Any] = []
    input_shapes: list[Any] = []
    outputs: list[Any] = []
    output_shapes: list[Any] = []
    op_schema: Any = ""
    tid: Any = 0

    def new(self) -> _Node:
        attrs = [_Attribute("op_schema", self.op_schema), _Attribute("tid", self.tid)]
        return _Node(self.id, self.name, self.parent, _Tensors(self.inputs, self.input_shapes), _Tensors(self.outputs, self.output_shapes), attrs)


class _OldFile(msgspec.Struct):
    schema: str
    nodes: list[_OldNode]
    pid: int = 0


class _Version(msgspec.Struct):
    schema: str


_FILE = msgspec.json.Decoder(_File)
_OLD_FILE = msgspec.json.Decoder(_OldFile)
_HEAD = msgspec.json.Decoder(_Version)


def read_execution_trace(path: str | os.PathLike[str]) -> ExecutionTrace:
    """Raises: UsageError if the file cannot be read, FormatError if it is too large, cut short or no such trace."""
    where = Path(path).name
    data = read_document(path, limit=MaxBytes.EXECUTION_TRACE)
    version = decode(data, _HEAD, where).schema
    if version.startswith(_NEW) or (version.startswith(_OLD) and _NEW_KEYS in version):
        file = decode(data, _FILE, where)
        pid, nodes = file.pid, file.nodes
    elif version.startswith(_OLD):
        old = decode(data, _OLD_FILE, where)
        pid, nodes = old.pid, [node.new() for node in old.nodes]
    else:
        hint = "write it with torch.profiler.ExecutionTraceObserver of PyTorch 2"
        raise FormatError(f"has schema {version[:40]!r}, expected {_OLD}* or {_NEW}*", where=where, hint=hint)
    rows = {node.id: node for node in nodes}
    if len(rows) != len(nodes):
        raise FormatError("two nodes have the same id", where=f"{where}: nodes")
    order = _parents_first(nodes, rows, where)
    index = {node.id: i for i, node in enumerate(order)}
    return ExecutionTrace(version=version, pid=pid, nodes=tuple(_node(n, index, where) for n in order))


def _parents_first(nodes: list[_Node], rows: dict[int, _Node], where: str) -> list[_Node]:
    """By id, which is the order of beginning; a child that has a smaller one goes after its parent. The root names itself."""
    order: list[_Node] = []
    done: set[int] = set()
    for node in sorted(nodes, key=lambda n: n.id):
        chain: list[_Node] = []
        seen: set[int] = set()
        above = node
        while above.id not in done:
            if above.id in seen:
                raise FormatError("is inside itself", where=f"{where}: node {node.id}")
            seen.add(above.id)
            chain.append(above)
            if above.ctrl_deps == above.id:
                break
            if above.ctrl_deps not in rows:
                raise FormatError(f"is inside node {above.ctrl_deps}, which does not exist", where=f"{where}: node {above.id}")
            above = rows[above.ctrl_deps]
        order += reversed(chain)
        done |= seen
    return order


def _node(node: _Node, index: dict[int, int], where: str) -> ExecutionNode:
    attributes = {a.name: a.value for a in node.attrs}
    schema, thread = attributes.get("op_schema", ""), attributes.get("tid", 0)
    if not isinstance(schema, str) or not isinstance(thread, int):
        raise FormatError("op_schema must be a text and tid a number", where=f"{where}: node {node.id}")
    shapes: list[tuple[int, ...]] = []
    sizes = [_bytes(x, node.id, where) for x in (node.inputs.values, node.outputs.values)]
    for value, shape in zip(node.inputs.values, node.inputs.shapes, strict=False):
        _shapes(value, shape, shapes)
    found: Shapes = tuple(shapes)
    return ExecutionNode(
        name=node.name, parent=index[node.ctrl_deps] if node.ctrl_deps != node.id else -1, schema=schema, thread=thread, shapes=found,
        input_bytes=sizes[0], output_bytes=sizes[1],
    )  # fmt: skip


def _is_tensor(value: Any) -> bool:
    """(tensor id, storage id, offset, elements, bytes of an element, device)"""
    return isinstance(value, list) and len(value) == 6 and isinstance(value[5], str) and all(type(x) is int for x in value[:5])


def _bytes(value: Any, node: int, where: str, depth: int = 0) -> int:
    if _is_tensor(value):
        size = value[3] * value[4]
        if value[3] < 0 or value[4] < 0 or size > MAX_TENSOR_BYTES:
            raise FormatError(f"a tensor of {value[3]} elements of {value[4]} bytes", where=f"{where}: node {node}")
        return int(size)
    if not isinstance(value, list) or depth > MAX_LIST_DEPTH:
        return 0
    return sum(_bytes(x, node, where, depth + 1) for x in value)


def _shapes(value: Any, shape: Any, found: list[tuple[int, ...]], depth: int = 0) -> None:
    """Shapes of the tensors among the operands; lists of tensors have lists of shapes."""
    if not isinstance(shape, list) or not isinstance(value, list) or depth > MAX_LIST_DEPTH:
        return
    if _is_tensor(value):
        if all(type(x) is int for x in shape):
            found.append(tuple(shape))
        return
    for v, s in zip(value, shape, strict=False):
        _shapes(v, s, found, depth + 1)
