"""Chakra execution traces: what one rank computes and sends, as a graph of nodes. The interchange format of ASTRA-sim and its kin.

After the schema `et_def.proto` of MLCommons Chakra (nodes, attributes, dependencies); field names are kept. `io.chakra.et` reads and writes
its files, `interop.to_chakra` and `interop.from_chakra` go to and from a `Program`. Units: `*_micros` are whole microseconds, `comm_size` is bytes
of one
rank's input, `tensor_size` is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ..errors import FormatError
from ..notebook_repr import repr_html

__all__ = ["SCHEMA_VERSION", "Attribute", "ChakraNode", "ChakraSet", "ChakraTrace", "CollectiveType", "IoInfo", "NodeType"]

SCHEMA_VERSION = "0.0.4"

Scalar = int | float | bool | str | bytes


class NodeType(IntEnum):
    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7
    STORAGE = 8
    BATCH = 9
    CHECKPOINT = 10


class CollectiveType(IntEnum):
    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True)
class Attribute:
    """`kind` is the schema's: `int64_val`, `bool_list`, ...; "" where no value is set. Lists are tuples."""

    name: str
    kind: str
    value: Scalar | tuple[Scalar, ...]
    doc: str = ""


@dataclass(frozen=True, slots=True)
class IoInfo:
    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraNode:
    """`unknown`: fields of a newer schema, as they stood."""

    id: int
    name: str = ""
    type: NodeType = NodeType.INVALID
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_time_micros: int = 0
    duration_micros: int = 0
    inputs: IoInfo | None = None
    outputs: IoInfo | None = None
    attr: tuple[Attribute, ...] = ()
    unknown: bytes = b""

    @property
    def deps(self) -> tuple[int, ...]:
        """Everything it waits for, each once."""
        return tuple(dict.fromkeys((*self.ctrl_deps, *self.data_deps)))

    def get(self, name: str) -> Scalar | tuple[Scalar, ...] | None:
        """The attribute's value; the last, where it is given twice."""
        return next((a.value for a in reversed(self.attr) if a.name == name), None)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number >= 0, whatever integer type it was written as. Raises: FormatError."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None or isinstance(value, bool) or not isinstance(value, int) or value < 0:
            said = "is missing" if value is None else f"must be a whole number >= 0, got {str(value)[:40]!r}"
            raise FormatError(f"{name} {said}", where=f"node {self.id} ({self.name[:60]!r})", hint="see the attributes that ASTRA-sim reads")
        return value

    def string(self, name: str, default: str = "") -> str:
        """Raises: FormatError for an attribute that is no text."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise FormatError(f"{name} must be a text, got {str(value)[:40]!r}", where=f"node {self.id} ({self.name[:60]!r})")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraTrace:
    """One rank's file."""

    version: str = SCHEMA_VERSION
    attr: tuple[Attribute, ...] = ()
    nodes: tuple[ChakraNode, ...] = ()
    unknown: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ChakraSet:
    """A trace per rank, and the members of every process group by its name (a number as text); the empty name means all ranks.

    `names`: of the files, for messages.
    """

    traces: tuple[ChakraTrace, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = field(default=(), compare=False)
    _repr_html_ = repr_html

    def name(self, rank: int) -> str:
        return self.names[rank] if self.names else f"rank {rank}"
