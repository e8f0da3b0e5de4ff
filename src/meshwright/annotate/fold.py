"""From labelled slices to a tree of times: step, stage, module, operator. Whole ns only, so that every level adds up to the one above, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from ..trace.trace import I64, Trace
from ..trace.vocabulary import EVALUATE
from .labels import Evidence, Labels, Stage
from .result import Node
from .segments import Segments
from .slices import Units
from .spans import ModuleSpans
from .stages import annotated_stage, stage_at

__all__ = ["fold"]

KINDS = ("operator", "recomputed", "communication", "python", "idle")
_OPERATOR, _RECOMPUTED, _COMMUNICATION, _PYTHON, _IDLE = range(len(KINDS))
_OUTSIDE = {_PYTHON: "outside operators", _IDLE: "idle"}


class _Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """Segments with everything that decides their leaf; equal-length columns."""

    step: I64
    stage: I64
    module: I64
    kind: I64
    name: I64
    evidence: I64
    head: I64
    estimated: NDArray[np.bool_]
    device: NDArray[np.bool_]
    length_ns: I64
    start_ns: I64
    end_ns: I64


def fold(
    trace: Trace, units: Units, labels: Labels, cut: Segments, tree: ModuleTree | None, spans: ModuleSpans | None, step_numbers: Sequence[int],
    device_track: NDArray[np.bool_],
) -> Node:  # fmt: skip
    """The tree of all segments. `step_numbers[i]`: the profiler's number of step i (empty: steps are counted)."""
    pieces = _shared(_pieces(trace, units, labels, cut, spans, device_track), labels)
    keys = [pieces.step + 1, pieces.stage, pieces.module + 1, pieces.kind, pieces.name + 1, pieces.evidence]
    # Equal keys next to each other: a leaf is a run, and its sums are one `reduceat` each.
    order = np.lexsort(keys[::-1])
    new = np.zeros(len(order), bool)
    if len(order):
        new[0] = True
    for key in keys:
        new[1:] |= key[order][1:] != key[order][:-1]
    first = np.flatnonzero(new)
    root = Node(name=trace.source, kind="trace")
    if not len(first):
        return root
    host = np.where(pieces.device, 0, pieces.length_ns)[order]
    sums = [np.add.reduceat(x, first) for x in (host, pieces.length_ns[order] - host, np.where(pieces.estimated, pieces.length_ns, 0)[order])]
    starts, ends = np.minimum.reduceat(pieces.start_ns[order], first), np.maximum.reduceat(pieces.end_ns[order], first)
    counts = np.add.reduceat(_firsts(pieces.head)[order], first)
    columns = [key[order][first].tolist() for key in keys]
    builder = _Builder(trace, tree, step_numbers, root)
    for step, stage, module, kind, name, evidence, host_ns, device_ns, estimated, count, start, end in zip(
        *columns, *(s.tolist() for s in (*sums, counts, starts, ends)), strict=True
    ):
        leaf = builder.leaf(step - 1, stage, module - 1, kind, name - 1)
        leaf.start_ns = min(leaf.start_ns, start) if leaf.count or leaf.end_ns else start
        leaf.end_ns = max(leaf.end_ns, end)
        leaf.host_ns += host_ns
        leaf.device_ns += device_ns
        leaf.estimated_ns += estimated
        leaf.count += count
        here = leaf.evidence_ns
        leaf.evidence_ns = (*here[:evidence], here[evidence] + host_ns + device_ns, *here[evidence + 1 :])
    _roll_up(root)
    return root


def _roll_up(node: Node) -> None:
    """A node's figures are the sums of its children's."""
    for child in node.children:
        _roll_up(child)
        node.host_ns += child.host_ns
        node.device_ns += child.device_ns
        node.estimated_ns += child.estimated_ns
        node.count += child.count
        node.evidence_ns = tuple(map(add, node.evidence_ns, child.evidence_ns))
    if node.children:
        node.start_ns = min(child.start_ns for child in node.children)
        node.end_ns = max(child.end_ns for child in node.children)


def _pieces(trace: Trace, units: Units, labels: Labels, cut: Segments, spans: ModuleSpans | None, device_track: NDArray[np.bool_]) -> _Pieces:
    at = np.maximum(cut.row, 0)
    if not len(trace):
        at = at[:0]
    head = np.where(cut.row >= 0, units.head[at], -1).astype(np.int64)
    owned = head >= 0
    own = np.maximum(head, 0)
    stage, step = stage_at(trace, units, labels, cut.start_ns)
    module = np.full(len(head), -1, np.int64)
    if spans is not None:
        module = np.where(cut.row >= 0, spans.module[at], -1).astype(np.int64)
        # Python of a module is of the stage of the operators that follow in it; before a module's first operator another stage was under way.
        inside = np.flatnonzero(~owned & (module >= 0))
        following = stage_at(trace, units, labels, cut.start_ns[inside], until_ns=trace.end_ns[at[inside]])
        stage[inside], step[inside] = following
    # Waiting and Python inside an annotation (`enumerate(DataLoader)`) are of its stage, whatever ran before; of torch's optimizer likewise.
    told = np.where((cut.row >= 0) & ~owned, annotated_stage(trace, units)[at], -1)
    after = ~device_track[cut.track] & ~owned & (told < 0) & np.isin(stage, (Stage.LOAD, Stage.OPTIMIZER))
    stage = np.where(told >= 0, told, np.where(after, Stage.OTHER, stage))  # what follows loading or the optimizer is neither's
    kind = np.where(cut.row >= 0, _PYTHON, _IDLE)
    kind = np.where(owned, np.where(units.communication[own], _COMMUNICATION, np.where(labels.recompute[own], _RECOMPUTED, _OPERATOR)), kind)
    # Python inside a module's span or an annotation is known to be theirs; other Python and idle time is known by its place alone.
    evidence = np.where(owned, labels.evidence[own], np.where((module >= 0) | (told >= 0), Evidence.EXACT, Evidence.NONE))
    return _Pieces(
        step=np.where(owned, labels.step[own], step).astype(np.int64), stage=np.where(owned, labels.stage[own], stage).astype(np.int64),
        module=np.where(owned, np.where(units.communication[own], -1, labels.module[own]), module).astype(np.int64), kind=kind.astype(np.int64),
        name=np.where(owned, trace.name[own], -1).astype(np.int64), evidence=evidence.astype(np.int64), head=head,
        estimated=np.zeros(len(head), bool), device=device_track[cut.track], length_ns=cut.length_ns, start_ns=cut.start_ns, end_ns=cut.end_ns,
    )  # fmt: skip


def _shared(pieces: _Pieces, labels: Labels) -> _Pieces:
    """Pieces of shared work, once per module that shares it, in whole ns that add up to what was there."""
    if not labels.shares:
        return pieces
    sharing = np.array(sorted(labels.shares), np.int64)
    place = np.minimum(np.searchsorted(sharing, pieces.head), len(sharing) - 1)
    at = np.flatnonzero(sharing[place] == pieces.head)
    keep = np.ones(len(pieces.head), bool)
    keep[at] = False
    source, module, length = [], [], []
    for i in at.tolist():
        shares = labels.shares[int(pieces.head[i])]
        total, done, weight_done, whole = sum(w for _, w in shares), 0, 0, int(pieces.length_ns[i])
        for owner, weight in shares:
            weight_done += weight
            # Cumulative shares, rounded down: the last one ends at the whole, so nothing is lost to rounding.
            upto = whole * weight_done // total
            source.append(i)
            module.append(owner)
            length.append(upto - done)
            done = upto
    index = np.concatenate([np.flatnonzero(keep), np.array(source, np.int64)])
    taken = {name: getattr(pieces, name)[index] for name in pieces.__struct_fields__}
    taken["module"][keep.sum() :] = module
    taken["length_ns"][keep.sum() :] = length
    taken["estimated"][keep.sum() :] = True
    return _Pieces(**taken)


def _firsts(head: I64) -> I64:
    """1 at the first piece of every unit, so that units are counted once."""
    out = np.zeros(len(head), np.int64)
    owned = np.flatnonzero(head >= 0)
    _, first = np.unique(head[owned], return_index=True)
    out[owned[first]] = 1
    return out


class _Builder:
    """Finds or makes the leaves and the nodes around them."""

    def __init__(self, trace: Trace, tree: ModuleTree | None, step_numbers: Sequence[int], root: Node) -> None:
        self.trace, self.tree, self.step_numbers, self.root = trace, tree, step_numbers, root
        self.stages: dict[tuple[int, int], Node] = {}
        self.modules: dict[tuple[int, int, int], Node] = {}
        self.leaves: dict[tuple[int, int, int, int, str], Node] = {}
        self.texts = [name.removeprefix(EVALUATE) for name in trace.names]

    def leaf(self, step: int, stage: int, module: int, kind: int, name: int) -> Node:
        text = _OUTSIDE[kind] if kind in _OUTSIDE else self.texts[name]
        key = (step, stage, module, kind, text)
        if key not in self.leaves:
            around = self._stage(step, stage) if module < 0 or self.tree is None else self._module(step, stage, module, self.tree)
            self.leaves[key] = _added(around, Node(name=text, kind=KINDS[kind]))
        return self.leaves[key]

    def _stage(self, step: int, stage: int) -> Node:
        if (step, stage) not in self.stages:
            if (step, -1) not in self.stages:
                number = self.step_numbers[step] if 0 <= step < len(self.step_numbers) else step
                name = f"step {number}" if step >= 0 else "before the first step"
                self.stages[step, -1] = _added(self.root, Node(name=name, kind="step"))
            self.stages[step, stage] = _added(self.stages[step, -1], Node(name=Stage(stage).title, kind="stage"))
        return self.stages[step, stage]

    def _module(self, step: int, stage: int, module: int, tree: ModuleTree) -> Node:
        key = (step, stage, module)
        if key not in self.modules:
            node = tree.modules[module]
            around = self._module(step, stage, node.parent, tree) if node.parent >= 0 else self._stage(step, stage)
            name = node.path.rpartition(".")[2] if node.path else node.kind or "model"
            self.modules[key] = _added(around, Node(name=name, kind="module", module=module, module_kind=node.kind))
        return self.modules[key]


def _added(parent: Node, child: Node) -> Node:
    parent.children.append(child)
    return child
