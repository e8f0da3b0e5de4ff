"""Files of captured operator graphs: JSON, or gzipped JSON (told by content; written by the suffix `.gz`).

Reading is strict: unknown fields, wrong types and references to what is not there are refused with the path of the field, so that what
comes out can be planned with. Nothing in a file is executed. Equal graphs give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ...errors import FormatError
from ...graph.graph import SCHEMA, VERSION, GraphValue, JointNode, OpGraph, OpNode, Parameter, Storage, Work
from ..strict_json import check_finite, decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["MAX_CALLS", "read_graph", "write_graph"]

MAX_CALLS = 2_000_000  # forward and joint calls of one graph
_MAX_DIMS = 64  # dimensions of one tensor
_DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


def write_graph(path: str | os.PathLike[str], graph: OpGraph) -> None:
    """Writes all or nothing. Raises FormatError if an argument of a call holds NaN or an infinity, UsageError if the place is wrong."""
    for i, n in enumerate(graph.nodes):
        check_finite(n.args, f"nodes[{i}].args")
        check_finite(n.kwargs, f"nodes[{i}].kwargs")
    write_document(path, msgspec.json.encode(graph, order="deterministic"))


def read_graph(path: str | os.PathLike[str]) -> OpGraph:
    """The graph in a file. Raises UsageError if it cannot be read, FormatError naming the file and field if it is not a graph."""
    where = Path(path).name or str(path)
    data = read_document(path)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    graph = decode(data, msgspec.json.Decoder(OpGraph), where)
    refuse_ambiguous(data, where)
    _Check(where).graph(graph)
    return graph


class _Check:
    """Everything the types do not say: ranges, unique names, references that lead somewhere."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, field: str, message: str) -> FormatError:
        return FormatError(message, where=f"{self.where}: {field}", hint="capture the model again with `meshwright train capture`")

    def graph(self, g: OpGraph) -> None:
        if g.batch_size < 1:
            raise self.fail("batch_size", f"must be >= 1, got {g.batch_size}")
        if len(g.nodes) + len(g.joint) > MAX_CALLS:
            raise self.fail("joint", f"more than {MAX_CALLS} calls")
        if not g.nodes:
            raise self.fail("nodes", "is empty")
        self.storages("storages", g.storages)
        self.storages("joint_storages", g.joint_storages)
        self.parameters("parameters", g.parameters)
        self.parameters("buffers", g.buffers)
        for i, v in enumerate(g.inputs):
            self.value(f"inputs[{i}]", v, len(g.storages))
        outside = {f"param:{p.name}" for p in g.parameters} | {f"buffer:{b.name}" for b in g.buffers} | {f"input:{i}" for i in range(len(g.inputs))}
        names = self.calls("nodes", g.nodes, outside, len(g.storages))
        for i, n in enumerate(g.nodes):
            self.work(f"nodes[{i}].forward", n.forward)
            self.work(f"nodes[{i}].backward", n.backward)
            for s in n.saved:
                if not 0 <= s < len(g.storages):
                    raise self.fail(f"nodes[{i}].saved", f"there is no storage {s}")
        joint_names = self.calls("joint", g.joint, outside | {"tangent"}, len(g.joint_storages))
        for i, j in enumerate(g.joint):
            self.work(f"joint[{i}].work", j.work)
            if j.node and j.node not in names:
                raise self.fail(f"joint[{i}].node", f"there is no forward node {j.node[:64]!r}")
        for i, name in enumerate(g.outputs):
            if name not in names | outside:
                raise self.fail(f"outputs[{i}]", f"there is no value {name[:64]!r}")
        parameters = {p.name for p in g.parameters}
        for parameter, value in g.gradients.items():
            if parameter not in parameters or value not in joint_names | outside | {"tangent"}:
                raise self.fail("gradients", f"{parameter[:64]!r}: {value[:64]!r} is not a parameter and a joint value")
        self.scaling(g)

    def calls(self, field: str, calls: Sequence[OpNode | JointNode], outside: set[str], storages: int) -> set[str]:
        names: set[str] = set()
        for i, n in enumerate(calls):
            if not n.name or n.name in names or n.name in outside:
                raise self.fail(f"{field}[{i}].name", f"{n.name[:64]!r} is empty or taken")
            for name in n.inputs:
                if name not in names and name not in outside:
                    raise self.fail(f"{field}[{i}].inputs", f"{name[:64]!r} is not a value made before")
            for k, v in enumerate(n.outputs):
                self.value(f"{field}[{i}].outputs[{k}]", v, storages)
            names.add(n.name)
        return names

    def value(self, field: str, v: GraphValue, storages: int) -> None:
        if not -1 <= v.storage < storages:
            raise self.fail(f"{field}.storage", f"there is no storage {v.storage}")
        self.shape(field, v.shape)

    def shape(self, field: str, shape: Iterable[int]) -> None:
        dims = tuple(shape)
        if len(dims) > _MAX_DIMS or any(d < 0 for d in dims):
            raise self.fail(f"{field}.shape", "has negative or too many dimensions")

    def storages(self, field: str, storages: Iterable[Storage]) -> None:
        for i, s in enumerate(storages):
            if s.size_bytes < 0:
                raise self.fail(f"{field}[{i}].size_bytes", f"must be >= 0, got {s.size_bytes}")

    def work(self, field: str, w: Work) -> None:
        if min(w.flops, w.bytes_read, w.bytes_written, w.calls) < 0:
            raise self.fail(field, "must not be negative")

    def parameters(self, field: str, parameters: Iterable[Parameter]) -> None:
        seen: set[str] = set()
        for i, p in enumerate(parameters):
            if p.name in seen:
                raise self.fail(f"{field}[{i}].name", f"{p.name[:64]!r} is taken")
            seen.add(p.name)
            self.shape(f"{field}[{i}]", p.shape)
            numel = 1
            for d in p.shape:
                numel *= d
            if p.size_bytes < 0 or (p.dtype in _DTYPE_BYTES and p.size_bytes != numel * _DTYPE_BYTES[p.dtype]):
                raise self.fail(f"{field}[{i}].size_bytes", f"{p.size_bytes} is not the size of {p.dtype} {list(p.shape)[:8]}")

    def scaling(self, g: OpGraph) -> None:
        s = g.scaling
        if s is None:
            return
        for field, numbers in (("slope", s.slope), ("square", s.square or s.index)):
            if len(s.index) != len(numbers):
                raise self.fail(f"scaling.{field}", f"has {len(numbers)} entries for {len(s.index)} integers")
        if any(a >= b for a, b in zip(s.index, s.index[1:], strict=False)) or (s.index and not (s.index[0] >= 0 and s.index[-1] < s.integers)):
            raise self.fail("scaling.index", f"must rise within 0..{s.integers - 1}")
