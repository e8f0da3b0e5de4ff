"""Whose work backward is: that of the forward operator which made the autograd node, by arrows and sequence numbers; exactly, not by name.

An arrow (`fwdbwd`) or an equal sequence number ties a node to the last forward operator that noted the number before the node ran
(operators note the number that the next node will get). AccumulateGrad has no forward operator: it runs right after the node that made
the gradient, and belongs to the owner of the parameter, which the captured sequence knows; without one it belongs to that node's module.
Forward operators that run again inside backward (checkpointing) are aligned with the captured sequence near the node that waits for
them, unless module slices are around them.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace
from ..trace.vocabulary import EVALUATE, NODE
from .captured import CapturedSequence, owners_of
from .compiled import CompiledSequence
from .labels import Evidence, Labels, Stage
from .slices import Units, around, names_like
from .spans import ModuleSpans

__all__ = ["ACCUMULATES", "forward_of", "label_backward"]

ACCUMULATES = "AccumulateGrad"
I64 = NDArray[np.int64]


def label_backward(trace: Trace, units: Units, labels: Labels, tree: ModuleTree | None, spans: ModuleSpans | None) -> None:
    """Label every node of the autograd graph, and what runs forward once more inside it."""
    rows = np.flatnonzero(units.evaluate)
    if not len(rows):
        return
    made_by = forward_of(trace, units, rows)
    _link(trace, units, labels, rows, made_by, tree, spans)
    recomputed = np.flatnonzero(units.recompute)
    # Checkpointing runs forward again inside a backward node; nodes that this makes are linked in a second pass.
    if len(recomputed):
        _recomputed(trace, units, labels, recomputed, tree, spans)
        _link(trace, units, labels, rows, made_by, tree, spans)  # nodes that the repeated operators made


def _link(trace: Trace, units: Units, labels: Labels, rows: I64, made_by: I64, tree: ModuleTree | None, spans: ModuleSpans | None) -> None:
    """Label nodes as the forward slices that made them (-1: unknown), what compiled graphs run in them, and the accumulations after them."""
    accumulates = np.array([ACCUMULATES in n for n in trace.names], bool)[trace.name[rows]]
    linked = made_by >= 0
    maker = np.where(linked, units.head[made_by], -1)
    known = maker >= 0
    maker = np.where(known, maker, 0)
    labels.give(rows, stage=Stage.BACKWARD, evidence=Evidence.NONE)
    labels.module[rows] = np.where(known, labels.module[maker], -1)
    labels.evidence[rows] = np.where(known, labels.evidence[maker], Evidence.NONE)
    labels.operator[rows] = np.where(known, labels.operator[maker], -1)
    for i in np.flatnonzero(linked & ~known).tolist():
        _as_function(trace, units, labels, int(rows[i]), int(made_by[i]), tree, spans)
    compiled = np.flatnonzero(units.compiled & (around(trace, units.evaluate) >= 0))
    if tree is not None and len(compiled):
        # One node for a whole graph: it and the gradients it hands out are the model's, not those of the graph's first operator.
        nodes = np.unique(around(trace, units.evaluate)[compiled])
        labels.module[nodes], labels.evidence[nodes], labels.operator[nodes] = 0, Evidence.STRUCTURAL, -1
    _accumulations(trace, labels, rows, accumulates, tree)
    _unlinked(labels, rows, accumulates)
    if len(compiled):
        _compiled(trace, units, labels, compiled, tree)


def _as_function(
    trace: Trace, units: Units, labels: Labels, row: int, made_by: int, tree: ModuleTree | None, spans: ModuleSpans | None
) -> None:  # fmt: skip
    """Label the node of a user's own autograd function, a slice around operators: as the module that called it, else the one around them all."""
    if spans is not None and spans.module[made_by] >= 0:
        labels.module[row], labels.evidence[row] = spans.module[made_by], Evidence.EXACT
        return
    rows = trace.rows(int(trace.track[made_by]))
    end = rows.start + int(np.searchsorted(trace.start_ns[rows], trace.end_ns[made_by]))
    inside = np.arange(made_by + 1, end)
    inside = inside[(units.head[inside] == inside) & (labels.module[inside] >= 0)]
    if tree is not None and len(inside):
        labels.module[row] = reduce(tree.common, np.unique(labels.module[inside]).tolist())
        labels.evidence[row] = Evidence.STRUCTURAL
        labels.operator[row] = labels.operator[inside].max()


def forward_of(trace: Trace, units: Units, rows: I64) -> I64:
    """The forward slice that made the node of each evaluated row, -1 where nothing says."""
    found = np.full(len(trace), -1, np.int64)
    node = names_like(trace, NODE) & (units.head >= 0)
    number = np.full(len(trace), -1, np.int64)
    says = np.flatnonzero((units.evaluate | node) & (trace.sequence >= 0))
    # The number may stand at the engine's slice or at the node inside it; both mean the same evaluation.
    inner = np.where(units.evaluate[says], says, units.head[says])
    number[inner] = trace.sequence[says]
    forward = np.flatnonzero((trace.sequence >= 0) & ~node & ~units.evaluate & (trace.forward_thread <= 0))
    forward = forward[np.lexsort((trace.start_ns[forward], trace.sequence[forward]))]
    wanted = rows[number[rows] >= 0]
    # One sorted key of (sequence number, start): the last forward operator with that number which began before the node ran.
    span = int(trace.end_ns.max(initial=0)) + 1
    sequences, index = np.unique(np.concatenate([trace.sequence[forward], number[wanted]]), return_inverse=True)
    if len(sequences) * span < 2**62:
        key = index[: len(forward)].astype(np.int64) * span + trace.start_ns[forward]
        at = np.searchsorted(key, index[len(forward) :].astype(np.int64) * span + trace.start_ns[wanted]) - 1
        fits = (at >= 0) & (trace.sequence[forward[np.maximum(at, 0)]] == number[wanted]) if len(forward) else np.zeros(len(wanted), bool)
        found[wanted[fits]] = forward[at[fits]]
    # Arrows that the profiler drew itself beat the order of numbers.
    for source, target in (trace.flows[k] for k in ("fwdbwd",) if k in trace.flows):
        ends = units.head[target]
        both = (ends >= 0) & units.evaluate[np.maximum(ends, 0)]
        found[ends[both]] = source[both]
    return found[rows]


def _accumulations(trace: Trace, labels: Labels, rows: I64, accumulates: NDArray[np.bool_], tree: ModuleTree | None) -> None:
    """The k-th accumulation after a node is that of the k-th parameter the node hands a gradient to."""
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    track = trace.track[rows].tolist()
    for i, (row, accumulation, t) in enumerate(zip(rows.tolist(), accumulates.tolist(), track, strict=True)):
        if not accumulation:
            last[t], count[t] = i, 0
            continue
        if t not in last:
            continue
        node = int(rows[last[t]])
        module, operator = int(labels.module[node]), int(labels.operator[node])
        if tree is not None and operator >= 0:
            owners = owners_of(tree, operator, trace.name_of(node).removeprefix(EVALUATE))
            # More accumulations than parameters: they belong to the last one's module.
            module = owners[min(count[t], len(owners) - 1)] if owners else module
        labels.module[row], labels.evidence[row] = module, labels.evidence[node]
        count[t] += 1


def _unlinked(labels: Labels, rows: I64, accumulates: NDArray[np.bool_]) -> None:
    """A node without a forward operator (made by the engine, or the profiler began later) is of the module of the one before it, if that is known."""
    known = labels.evidence[rows] != Evidence.NONE
    last = np.maximum.accumulate(np.where(known, np.arange(len(rows)), -1))
    lacks = ~known & (last >= 0)
    labels.module[rows[lacks]], labels.evidence[rows[lacks]] = labels.module[rows[last[lacks]]], Evidence.FUZZY


def _compiled(trace: Trace, units: Units, labels: Labels, rows: I64, tree: ModuleTree | None) -> None:
    """What compiled graphs of backward run, each graph by itself; of a graph that nothing fits, as the node around it."""
    sequence = CompiledSequence(tree) if tree is not None and tree.operators else None
    node_of = around(trace, units.evaluate)[rows]
    for node in np.unique(node_of).tolist():
        part = rows[node_of == node]
        labels.give(part, stage=Stage.BACKWARD, evidence=Evidence(int(labels.evidence[node])), module=int(labels.module[node]))
        if sequence is not None:
            sequence.label(trace, part, labels, Stage.BACKWARD)


def _recomputed(trace: Trace, units: Units, labels: Labels, rows: I64, tree: ModuleTree | None, spans: ModuleSpans | None) -> None:
    captured = CapturedSequence(tree) if tree is not None and tree.operators else None
    node_of = around(trace, units.evaluate)[rows]
    labels.recompute[rows] = True
    for node in np.unique(node_of).tolist():
        part = rows[node_of == node]
        labels.give(part, stage=Stage.BACKWARD, evidence=Evidence.FUZZY, module=int(labels.module[node]))
        if spans is not None and (spans.module[part] >= 0).any():
            labels.give(part, stage=Stage.BACKWARD, evidence=Evidence.EXACT, module=spans.module[part])
        elif captured is not None and tree is not None:
            at = _occurrence(captured, captured.numbers([trace.name_of(r) for r in part.tolist()]), int(labels.operator[node]))
            if at >= 0:
                operator = np.arange(at, at + len(part), dtype=np.int32)
                module = np.array([tree.operators[o].module for o in operator.tolist()], np.int32)
                labels.give(part, stage=Stage.BACKWARD, evidence=Evidence.CAPTURED, module=module)
                labels.operator[part] = operator


def _occurrence(captured: CapturedSequence, names: NDArray[np.int32], near: int) -> int:
    """Where the captured sequence holds `names` without a break: around operator `near` if it is known, else the only place; -1 if nowhere."""
    size = len(names)
    if size > len(captured.names):
        return -1
    places = np.flatnonzero(captured.names[: len(captured.names) - size + 1] == names[0])
    places = places[[bool((captured.names[p : p + size] == names).all()) for p in places.tolist()]] if len(places) else places
    if near >= 0 and len(places):
        return int(places[np.abs(places + size / 2 - near).argmin()])
    return int(places[0]) if len(places) == 1 else -1
