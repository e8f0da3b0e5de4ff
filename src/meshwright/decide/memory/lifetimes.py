"""A step graph in columns, and plans from when each forward storage is held (see kernels/step_schedule.py).

What may run again: forward nodes that write nothing and read nothing that a node changes. Batch norm is an exception to the latter: it reads its
running statistics only to give new ones, and those of a second run go nowhere. Random nodes run again where the caller says that their
state is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...graph.step_graph import StepGraph, StepPlan
from ...kernels.step_schedule import IMPOSSIBLE, NEVER, ScheduleArrays, Scratch, evaluate, scratch_for
from .step import finished

__all__ = ["Lifetimes", "lifetimes_of"]

I32 = NDArray[np.int32]
COUNTS_BATCHES = ("aten._native_batch_norm_legit", "aten.native_batch_norm", "aten._batch_norm_with_update", "aten.cudnn_batch_norm")


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """`movable`: storages (made in forward) about which there is something to decide; the others are kept if backward reads them.

    `maker[s]`: the node that makes storage s, -1 for those that are there from the start. `stages`: backward nodes.
    """

    graph: StepGraph
    arrays: ScheduleArrays
    scratch: Scratch
    maker: I32
    movable: NDArray[np.bool_]
    read_backward: NDArray[np.bool_]  # storages that a backward node reads directly

    @property
    def stages(self) -> int:
        return len(self.graph.nodes) - self.graph.boundary

    def keep_all(self) -> I32:
        """`hold_from` of keeping everything that backward reads."""
        held = np.full(len(self.maker), NEVER, np.int32)
        held[~self.movable | self.read_backward] = 0
        return held

    def drop_all(self) -> I32:
        """`hold_from` of keeping nothing that can be computed again; what is computed again is held till its last use."""
        held = np.ones(len(self.maker), np.int32)
        held[~self.movable] = 0
        return held

    def lazy(self) -> I32:
        return np.arange(self.stages + 1, dtype=np.int32)

    def to_the_end(self) -> I32:
        return np.full(len(self.maker), NEVER, np.int32)

    def measure(self, hold_from: I32, hold_to: I32 | None = None, ahead: I32 | None = None) -> tuple[int, float]:
        """(peak bytes, seconds); (IMPOSSIBLE, inf) where something would run again that must not."""
        peak, seconds = evaluate(
            self.arrays, self.scratch, hold_from, self.to_the_end() if hold_to is None else hold_to, self.lazy() if ahead is None else ahead
        )
        return int(peak), float(seconds)

    def runs(self, hold_from: I32, hold_to: I32 | None = None, ahead: I32 | None = None) -> tuple[list[int], int] | None:
        """Nodes in the order they run, and how many of them are in forward; None where it is impossible."""
        if self.measure(hold_from, hold_to, ahead)[0] == IMPOSSIBLE:
            return None
        counts = self.scratch.counts
        return self.scratch.runs[: int(counts[0])].tolist(), int(counts[1])

    def plan(
        self, hold_from: I32, hold_to: I32 | None = None, ahead: I32 | None = None, *, strategy: str, options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> StepPlan | None:  # fmt: skip
        found = self.runs(hold_from, hold_to, ahead)
        if found is None:
            return None
        runs, boundary = found
        return finished(self.graph, [(x, -1) for x in runs], boundary, strategy=strategy, options=options, **fields)


def _columns(rows: Sequence[Sequence[int]]) -> tuple[I32, I32]:
    ptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(r) for r in rows], out=ptr[1:])
    return ptr, np.array([x for r in rows for x in r], np.int32)


def lifetimes_of(graph: StepGraph, *, replay_random: bool = True) -> Lifetimes:
    """`replay_random`: nodes that draw random numbers may run again, because whoever runs the plan restores the generator's state."""
    nodes, boundary = graph.nodes, graph.boundary
    made = [s.kind == "made" for s in graph.storages]
    changed = {s for n in nodes for s in n.writes}
    results = {*graph.results}
    wanted = results | {i for i, n in enumerate(nodes) if n.writes}
    forward = {i for i in wanted if i < boundary} | {i for i, n in enumerate(nodes[:boundary]) if n.random}
    # nodes stand in topological order: one pass from the end reaches everything that is needed
    for group, top in ((wanted, len(nodes)), (forward, boundary)):
        for i in range(top - 1, -1, -1):
            if i in group:
                group.update(nodes[i].inputs)
    forward &= wanted
    maker = np.full(len(graph.storages), -1, np.int32)
    for i, n in enumerate(nodes):
        maker[list(n.makes)] = i
    rerun = np.array([_may_run_again(graph, i, changed, replay_random) for i in range(len(nodes))], bool)
    input_ptr, inputs = _columns([n.inputs for n in nodes])
    place_ptr, places = _columns([[s for s in n.storages if made[s]] for n in nodes])
    make_ptr, makes = _columns([n.makes for n in nodes])
    backward_reads = np.zeros(len(nodes), bool)
    read = np.zeros(len(graph.storages), bool)
    for i in range(boundary, len(nodes)):
        if i in wanted:
            for x in nodes[i].inputs:
                backward_reads[x] = True
                read[list(nodes[x].storages)] = True
    movable = np.array([0 <= m < boundary and bool(rerun[m]) and not nodes[m].optional for m in maker], bool)
    for r in results:
        movable[list(nodes[r].storages)] = False
    movable[list(changed)] = False
    for i in range(boundary):  # what lies in the result of a node that runs once only stays as well
        if not rerun[i]:
            movable[list(nodes[i].storages)] = False
    arrays = ScheduleArrays(
        boundary=boundary, fixed_bytes=graph.fixed_bytes(), input_ptr=input_ptr, inputs=inputs, place_ptr=place_ptr, places=places, make_ptr=make_ptr,
        makes=makes, maker=maker, size=np.array([s.size_bytes for s in graph.storages], np.int64),
        time=np.array([n.time_s for n in nodes], np.float64),
        workspace=np.array([n.workspace_bytes for n in nodes], np.int64), given=np.array([n.phase == "input" for n in nodes], bool),
        result=_flags(results, len(nodes)), rerun=rerun, wanted=_flags(wanted, len(nodes)), forward_wanted=_flags(forward, len(nodes)),
        backward_reads=backward_reads, in_flight=graph.in_flight,
    )  # fmt: skip
    return Lifetimes(graph=graph, arrays=arrays, scratch=scratch_for(arrays), maker=maker, movable=movable, read_backward=read)


def _flags(members: set[int], n: int) -> NDArray[np.bool_]:
    flags = np.zeros(n, bool)
    flags[list(members)] = True
    return flags


def _may_run_again(graph: StepGraph, i: int, changed: set[int], replay_random: bool) -> bool:
    node = graph.nodes[i]
    if node.phase != "forward" or node.writes or (node.random and not replay_random):
        return False
    if node.target.startswith(COUNTS_BATCHES):
        return True
    return not any(s in changed for x in node.inputs for s in graph.nodes[x].storages)
