"""An annotated trace: a tree of steps, stages, modules and operators with every ns of every track in exactly one leaf."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace
from .labels import Labels
from .slices import Units

__all__ = ["Annotation", "Node"]


class Node(msgspec.Struct, kw_only=True):
    """Times in ns, on the host's threads and on devices' streams; they include the children's. `evidence_ns[tier]` adds up to both times."""

    name: str
    kind: str  # "trace" | "step" | "stage" | "module" | "operator" | "communication" | "python" | "idle"
    module: int = -1
    module_kind: str = ""
    host_ns: int = 0
    device_ns: int = 0
    estimated_ns: int = 0  # of work that several modules share in one kernel, divided by an estimate
    count: int = 0  # units of work
    start_ns: int = 0
    end_ns: int = 0
    evidence_ns: tuple[int, ...] = (0, 0, 0, 0, 0)
    children: list[Node] = msgspec.field(default_factory=list)


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """`root` covers all tracks; `track_ns[t]` is the window of track t (first start to last end), whose sum is the root's time, to the ns."""

    trace: Trace
    tree: ModuleTree | None
    units: Units
    labels: Labels
    root: Node
    track_ns: Mapping[int, int]
    notes: tuple[str, ...] = ()
