"""What each slice of a trace is, by category and name, and the units of work that get one owner: an operator that no other operator called, one
node of the autograd graph in backward, one collective, one kernel; with everything inside them.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kernels.nesting import nearest_ancestors
from ..trace.trace import I32, Trace
from ..trace.vocabulary import DEVICE, EVALUATE, NODE, OPERATOR_NAME, RUNTIME

__all__ = ["ANNOTATION_CATEGORY", "Units", "around", "names_like", "units"]

Flags = NDArray[np.bool_]

_COMPILED_GRAPH = re.compile(r"^## Call CompiledFxGraph")
# Work that exists only because there are several ranks: collectives, and what fills and empties their buffers.
_COMMUNICATION = re.compile(
    r"^(c10d::|_c10d_functional::|gloo:|nccl:|mpi:|ucc:|xccl:|fsdp::|record_param_comms$|ncclkernel|nccldevkernel|torch::distributed::reducer::|"
    r"distributeddataparallel\.(?!forward)|c10d_functional::|symm_mem::)|registerpostbackwardfunction|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
)  # of names in small letters: looking without regard to case takes three times as long
_PYTHON_CATEGORIES = ("python_function",)
_ASYNCHRONOUS = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):")
_ANNOTATIONS = ("user_annotation",)
ANNOTATION_CATEGORY = "meshwright annotation"  # of the slices that an annotated trace has more
# What speaks of the recording, or of work that other slices show: on a stream's track Kineto also draws the host's annotations around the kernels
# launched in them, and when the host called for a wait, which is no work of the device and lies anywhere over its kernels.
_ABOUT_THE_TRACE = ("trace", ANNOTATION_CATEGORY, "overhead", "gpu_user_annotation", "cuda_sync")


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """`head[i]` is the row that slice i belongs to (itself, if it is one), -1 for what is in no unit: Python, annotations, steps.

    `rows` are the heads in order of time; `outer[h]` is the unit around a head, or -1.
    """

    head: I32
    rows: NDArray[np.int64]
    outer: I32
    operator: Flags
    evaluate: Flags  # runs one node of the autograd graph
    recompute: Flags  # a forward operator that runs again inside backward
    communication: Flags
    kernel: Flags  # runs on a device's stream
    compiled: Flags  # lies in a graph that torch.compile made
    annotation: Flags
    runtime: Flags
    ignored: Flags  # shows no work of its own


def around(trace: Trace, wanted: Flags) -> I32:
    """The nearest slice around every slice that is wanted, or -1."""
    found = np.full(len(trace), -1, np.int32)
    nearest_ancestors(trace.parent, wanted, found)
    return found


def names_like(trace: Trace, pattern: re.Pattern[str]) -> Flags:
    return trace.where_name(np.array([pattern.search(name) is not None for name in trace.names], bool))


def _pending(trace: Trace, operator: Flags) -> Flags:
    """Slices of collectives under way on a thread that does other work meanwhile: they say that something is awaited, not what the thread does.

    A thread of the backend's own does nothing else: nothing there could be differentiated, and nothing lies outside such slices. What it copies
    belongs to the collective.
    """
    asynchronous = names_like(trace, _ASYNCHRONOUS) & trace.in_category(*_ANNOTATIONS)
    elsewhere = (trace.sequence >= 0) | ((trace.parent < 0) & ~asynchronous)
    asynchronous &= (np.bincount(trace.track, weights=elsewhere, minlength=len(trace.tracks)) > 0)[trace.track]
    found = np.zeros(len(trace), bool)
    outer = around(trace, asynchronous)
    level = _once(outer[operator & (outer >= 0)])
    while len(level):
        found[level] = True
        further = outer[level]
        level = _once(further[further >= 0])
    return found


def _once(rows: I32) -> NDArray[np.int64]:
    return np.flatnonzero(np.bincount(rows)) if len(rows) else np.zeros(0, np.int64)


def _bare_nodes(trace: Trace, operator: Flags, evaluate: Flags) -> Flags:
    """Nodes of the autograd graph without the engine's slice around them, which torch before 1.9 did not write: they are the evaluation."""
    nodes = operator & names_like(trace, NODE)
    bare = nodes & (around(trace, nodes | evaluate) < 0)
    return bare if not evaluate.any() else np.zeros(len(trace), bool)


def units(trace: Trace) -> Units:
    """Cost: O(slices + names)."""
    kernel = trace.in_category(*DEVICE)
    python = trace.in_category(*_PYTHON_CATEGORIES)
    annotation = trace.in_category(*_ANNOTATIONS, "gpu_user_annotation")
    runtime = trace.in_category(*RUNTIME)
    ignored = trace.in_category(*_ABOUT_THE_TRACE)
    on_host = ~(kernel | python | ignored)
    communication = trace.where_name(np.array([_COMMUNICATION.search(n.lower()) is not None for n in trace.names], bool)) & ~python & ~ignored
    declared = trace.in_category("cpu_op", "operator")
    operator = on_host & ~annotation & ~runtime & names_like(trace, OPERATOR_NAME) & (declared if declared.any() else np.ones(len(trace), bool))
    evaluate = operator & trace.where_name(np.array([n.startswith(EVALUATE) for n in trace.names], bool))
    evaluate |= _bare_nodes(trace, operator, evaluate)
    graph = operator & names_like(trace, _COMPILED_GRAPH)
    operator &= ~graph
    in_graph = around(trace, graph)
    node = evaluate | (operator & names_like(trace, NODE))
    inside = around(trace, operator)
    in_node = (inside >= 0) & node[inside]
    # Inside backward gradients are not recorded, so an operator with a sequence number there is a piece of forward run once more.
    recompute = operator & ~node & in_node & (trace.sequence >= 0) & (trace.forward_thread <= 0)
    communication &= (on_host | kernel) & ~_pending(trace, operator)
    in_communication = around(trace, communication)
    # What a compiled graph runs is looked at singly, also where the graph lies in one node of the autograd graph.
    compiled = operator & (in_graph >= 0) & (inside < in_graph)
    recompute &= ~compiled
    head = (operator & (inside < 0)) | compiled | evaluate | recompute | (communication & (in_communication < 0)) | kernel
    outer = around(trace, head)
    rows = np.flatnonzero(head)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    own = np.where(head, np.arange(len(trace), dtype=np.int32), outer).astype(np.int32)
    inherited = communication[np.maximum(own, 0)] & (own >= 0)
    return Units(
        head=own, rows=rows, outer=outer, operator=operator, evaluate=evaluate, recompute=recompute & ~inherited,
        communication=inherited & head, compiled=compiled, kernel=kernel, annotation=annotation, runtime=runtime, ignored=ignored,
    )  # fmt: skip
