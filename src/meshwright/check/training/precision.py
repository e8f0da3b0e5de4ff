"""Sizes of buffers beside the precision that a layout says it trains in (docs/formats.md): values, gradients, and what an optimizer keeps.

A value takes its elements times the width of its dtype, and its buffers no more; where the precision is narrow some value is. Gradients are as wide
as messages, beside weights. State is what the precision says of each weight that the rank updates, and of each gradient that it adds up in a wider
type than it sends. Parameters' own sizes are not in a plan: all three stand beside each other. Values that tensor ranks divide count whole here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ...plan.plan import TrainingLayout
from ...plan.precision import MASTER_BYTES, Precision
from ...program.program import Program
from ..verdict import Finding
from .data_groups import DataGroups

__all__ = ["check_precision"]

WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
PADDING_BYTES = 16  # of a chunk, at most: whole elements
MOMENTS = 2  # of the optimizer that `state.optimizer` speaks of


def check_precision(p: Program, layout: TrainingLayout) -> list[Finding]:
    """Nothing where the layout states no precision: it is then that of a graph that the plan does not hold."""
    if not layout.precision:
        return []
    return [*_values(layout, layout.precision), *_buffers_of_values(p, layout), *_parameters(p, layout, layout.precision)]


def _wrong(layout: TrainingLayout, text: str, **facts: object) -> Finding:
    said = layout.precision.torch_name if layout.precision else ""
    return Finding(check="plan", message=f"precision: the layout trains in {said}, and {text}", witness=facts)


def _values(layout: TrainingLayout, precision: Precision) -> Iterator[Finding]:
    for v in layout.values:
        if v.size_bytes > prod(v.shape) * WIDTHS.get(v.dtype, v.size_bytes):
            yield _wrong(layout, f"{v.name!r} of {v.dtype} {list(v.shape)} is said to take {v.size_bytes} bytes", value=v.name)
    kinds = {v.dtype for v in layout.values if "float" in v.dtype}
    if kinds and precision.torch_name not in kinds:
        yield _wrong(layout, f"its values are {', '.join(sorted(kinds))}", dtypes=sorted(kinds))


def _buffers_of_values(p: Program, layout: TrainingLayout) -> Iterator[Finding]:
    size = {v.name: v.size_bytes for v in layout.values}
    for b, name in enumerate(p.buffers.name):
        kind, _, rest = name.partition(":")
        value = rest.rpartition(":")[0]
        if kind not in ("act", "grad") or value not in size:
            continue
        chunks, have = int(p.buffers.chunks[b]), int(p.buffers.chunks[b]) * int(p.buffers.chunk_bytes[b])
        if have > size[value] + chunks * PADDING_BYTES:
            yield _wrong(layout, f"{p.buffer_name(b)} has {have} bytes for a value of {size[value]}", buffer=b)


def _parameters(p: Program, layout: TrainingLayout, precision: Precision) -> Iterator[Finding]:
    """Of every rank: gradients beside weights, group by group, and state beside all of them."""
    groups, level = DataGroups(p, layout), layout.zero_level
    each, copies = precision.state, layout.step_end.state_copies
    mine: dict[int, list[tuple[float, float, int]]] = {}  # by rank, of a group: bytes of weights that it updates, of all, chunks
    for (rank, kind, group), b in groups.held.items():
        if kind != ("gradients" if level < 2 else "gradshard") or p.buffers.alias_of[b] >= 0:
            continue
        have, chunks = int(p.buffers.chunks[b]) * int(p.buffers.chunk_bytes[b]), int(p.buffers.chunks[b])
        weights, owners = have * each.weight / each.message, groups.owner(rank, group)[1]
        beside = groups.held.get((rank, "shard" if level == 3 else "weights", group)) if level else None
        if beside is not None:
            parts = owners if level == 2 else 1
            there = int(p.buffers.chunks[beside]) * int(p.buffers.chunk_bytes[beside]) / parts
            if there != weights:
                text = f"{p.buffer_name(b)} has {have} bytes, {there:.0f} bytes of weights have gradients of {there * each.message / each.weight:.0f}"
                yield _wrong(layout, text, buffer=b)
        mine.setdefault(rank, []).append((weights / owners if level == 1 else weights, weights, chunks))
    kept, added = each.optimizer + MASTER_BYTES * (copies - MOMENTS), each.gradient - each.message
    for b, name in enumerate(p.buffers.name):
        rank = int(p.buffers.actor[b])
        if name != "state" or rank not in mine:
            continue
        have = int(p.buffers.chunks[b]) * int(p.buffers.chunk_bytes[b])
        want = sum(kept * own + added * held for own, held, _ in mine[rank]) / each.weight
        less = sum((kept + added) * chunks * PADDING_BYTES for *_, chunks in mine[rank]) / each.weight
        if not want - less - 1 <= have <= want + 1:
            yield _wrong(layout, f"{p.buffer_name(b)} has {have} bytes, its weights need {want:.0f}", buffer=b)
