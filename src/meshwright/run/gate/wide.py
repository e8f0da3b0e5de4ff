"""A plan's step in double precision: the same segments, shards, messages and orders, with every float32 as a float64.

Rounding is then so small that a difference from the owner's step is a difference of what is trained. Not every plan has such a twin: whole steps
planned by storage, codecs and models of several precisions say how wide their numbers are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from ...plan.plan import TrainingLayout
from ...program.program import Program
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo

__all__ = ["can_widen", "wide_graph", "wide_layout", "wide_program"]

NARROW, WIDE = "float32", "float64"
FILLS = ("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "logspace", "scalar_tensor")
WHOLE_VALUES = ("act", "grad", "actsum", "actall", "actagain", "remade", "remadesum", "remadeall", "gradall", "gradpart")


def can_widen(layout: TrainingLayout, graph: ForwardGraph, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether float32 is the only floating-point type of the model, its inputs and the values between segments, and no byte is planned otherwise."""
    kinds = {str(x.dtype).removeprefix("torch.") for x in tensors} | {v.dtype for v in layout.values} | {x.dtype for x in graph.inputs}
    kinds |= {c.dtype for c in graph.constants.values()} | {o.dtype for n in graph.nodes for o in n.outputs if o is not None}
    kinds |= set(_dtypes([n.args for n in graph.nodes])) | set(_dtypes([n.kwargs for n in graph.nodes]))
    floating = {k for k in kinds if getattr(torch, k).is_floating_point or getattr(torch, k).is_complex}
    planned = any(s.step is not None for s in layout.segments) or any(b.codec for b in layout.buckets)
    return floating <= {NARROW} and not planned


def wide_layout(layout: TrainingLayout) -> TrainingLayout:
    values = tuple(msgspec.structs.replace(v, dtype=WIDE, size_bytes=2 * v.size_bytes) if v.dtype == NARROW else v for v in layout.values)
    return msgspec.structs.replace(layout, values=values)


def wide_program(program: Program, layout: TrainingLayout) -> Program:
    """An inlined program with chunks twice as large, but for buffers of values that are not floating-point."""
    kept = {v.name for v in layout.values if v.dtype != NARROW}
    b = program.buffers
    twice = np.ones(len(b.actor), bool)
    for i, name in enumerate(b.name):
        kind, _, rest = name.partition(":")
        if kind == "norm" or (kind in WHOLE_VALUES and any(rest.startswith(f"{v}:") for v in kept)):  # sums of squares, in double precision anyway
            twice[i] = False
    chunk_bytes = np.where(twice, 2 * b.chunk_bytes, b.chunk_bytes)
    offsets = np.where(twice, 2 * b.alias_offset_bytes, b.alias_offset_bytes)
    return replace(program, buffers=replace(b, chunk_bytes=chunk_bytes, alias_offset_bytes=offsets))


def wide_graph(graph: ForwardGraph) -> ForwardGraph:
    def info(x: TensorInfo | None) -> TensorInfo | None:
        return TensorInfo(x.shape, WIDE) if x is not None and x.dtype == NARROW else x

    def node(n: ForwardNode) -> ForwardNode:
        kwargs = _wide(n.kwargs)
        if n.target.split(".")[1:2] and n.target.split(".")[1] in FILLS and n.outputs[0] is not None and n.outputs[0].dtype == NARROW:
            kwargs["dtype"] = {"dtype": WIDE}  # where none was named, it is torch's default
        return msgspec.structs.replace(n, args=_wide(n.args), kwargs=kwargs, outputs=tuple(map(info, n.outputs)))

    constants = {k: msgspec.structs.replace(c, dtype=WIDE) if c.dtype == NARROW else c for k, c in graph.constants.items()}
    inputs, whole_inputs = (tuple(TensorInfo(x.shape, WIDE if x.dtype == NARROW else x.dtype) for x in y) for y in (graph.inputs, graph.whole_inputs))
    nodes, whole = (tuple(map(node, y)) for y in (graph.nodes, graph.whole))
    return msgspec.structs.replace(graph, nodes=nodes, inputs=inputs, constants=constants, whole=whole, whole_inputs=whole_inputs)


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(v) for v in value]
    if isinstance(value, dict):
        return {"dtype": WIDE} if value == {"dtype": NARROW} else {k: _wide(v) for k, v in value.items()}
    return value


def _dtypes(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        if isinstance(value.get("dtype"), str):
            yield value["dtype"]
        else:
            for v in value.values():
                yield from _dtypes(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _dtypes(v)
