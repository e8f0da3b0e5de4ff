"""A program as Chakra execution traces, one per rank, for simulators that read them (ASTRA-sim).

A compute step becomes a COMP node with its duration, operations and bytes; a send or receive a COMM_SEND or COMM_RECV node whose `comm_tag`
is the channel's number; a call a COMM_COLL node, or, inlined, the sends and receives of our schedule. A fused step becomes a chain: receive,
what it adds or copies (a COMP node of its own, if there is something), send. Repeats are unrolled. A copy between host and device is a
MEM_LOAD or MEM_STORE node.

`data_deps` holds everything a node waits for, since simulators look at nothing else; `ctrl_deps` repeats the one before it in its lane, which
is how `interop.from_chakra` finds lanes again. What Chakra has no field for stands in attributes `meshwright.*`; times are whole microseconds there
and exact in `meshwright.duration_s`. Ids follow the simulated order where times are given: simulators issue small ids first.
Not kept: buffers and what they hold, depths of channels (an attribute says them: Chakra's sends never wait for the receiver).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from ..graph.graph import Work
from ..program.program import Kind, Part, Program, Space, Unit
from ..program.tables import Csr
from .chakra import Attribute, ChakraNode, ChakraSet, ChakraTrace, CollectiveType, NodeType

__all__ = ["to_chakra"]

COLLECTIVE_TYPES = {
    "all-reduce": CollectiveType.ALL_REDUCE, "all-gather": CollectiveType.ALL_GATHER, "reduce-scatter": CollectiveType.REDUCE_SCATTER,
    "all-to-all": CollectiveType.ALL_TO_ALL, "broadcast": CollectiveType.BROADCAST, "reduce": CollectiveType.REDUCE,
    "gather": CollectiveType.GATHER, "scatter": CollectiveType.SCATTER,
}  # fmt: skip


@dataclass(frozen=True)
class _Draft:
    """A node before it has its final id; what it waits for are drafts of the same rank."""

    node: ChakraNode
    waits: tuple[int, ...]
    before: int  # the one before it in its lane, -1 none
    time_s: float


def to_chakra(
    program: Program, durations_s: NDArray[np.float64], *, programs: Mapping[str, Program] | None = None, works: Mapping[str, Work] | None = None,
    start_s: NDArray[np.float64] | None = None,
) -> ChakraSet:  # fmt: skip
    """Traces of `program`.

    Args:
        durations_s: seconds of every step.
        programs: callees by content hash; their contracts say what a call does.
        works: operations and bytes per op key.
        start_s: when every executed step starts in a simulation, step by step with its iterations together; orders the ids.

    Raises: Unsupported for folded programs, switches that compute, and calls of what Chakra has no word for.
    """
    if program.fold is not None:
        raise Unsupported("a folded program stores only some of its ranks", where=program.name, hint="expand it")
    if program.switches:
        raise Unsupported("a Chakra trace has no word for switches that compute", where=program.name, hint="plan without --in-network")
    made = _Writer(program, durations_s, programs or {}, works or {}, start_s)
    traces = tuple(made.rank(rank) for rank in range(program.ranks))
    return ChakraSet(traces=traces, groups=made.groups())


class _Writer:
    def __init__(
        self, p: Program, durations_s: NDArray[np.float64], programs: Mapping[str, Program], works: Mapping[str, Work],
        start_s: NDArray[np.float64] | None,
    ) -> None:  # fmt: skip
        self.p, self.programs, self.works = p, programs, works
        self.seconds = durations_s.tolist()
        self.bytes = p.message_bytes().tolist()
        self.lane_of = p.lane_of_step().tolist()
        repeat = p.lanes.repeat[p.lane_of_step()].astype(np.int64) if len(p.steps) else np.zeros(0, np.int64)
        self.at = (np.cumsum(repeat) - repeat).tolist()  # place of a step's first iteration in `start_s`
        self.start = start_s.tolist() if start_s is not None else None
        self.called: set[int] = set()
        self.group_of = {c: str(c + 1) for c in range(len(p.comms)) if sorted(p.comms.groups[c].tolist()) != list(range(p.ranks))}

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Groups of some ranks only, that were called: the empty name means all of them."""
        return {name: tuple(self.p.comms.groups[c].tolist()) for c, name in self.group_of.items() if c in self.called}

    def rank(self, rank: int) -> ChakraTrace:
        drafts: list[_Draft] = []
        done: dict[tuple[int, int], tuple[int, ...]] = {}  # (step, iteration) -> drafts whose end is its end
        pending = [int(lane) for lane in np.flatnonzero(self.p.lanes.actor == rank)]
        open_waits: list[tuple[int, list[tuple[int, int]]]] = []  # (draft, steps it waits for): they may be written later
        for lane in pending:
            before: tuple[int, ...] = ()
            for iteration in range(int(self.p.lanes.repeat[lane])):
                for step in range(int(self.p.lanes.start[lane]), int(self.p.lanes.end[lane])):
                    first, entry = len(drafts), before
                    before = self._step(drafts, step, iteration, before)
                    done[step, iteration] = before
                    edges = self._edges(step, iteration)
                    if len(drafts) > first:
                        open_waits += [(i, edges) for i in range(first, len(drafts)) if drafts[i].waits == entry]
                    elif edges:  # a step without a node of its own: whoever comes after it waits for all of that
                        drafts.append(_Draft(ChakraNode(id=0, name="join", type=NodeType.INVALID), before, before[-1] if before else -1, 0.0))
                        open_waits.append((first, edges))
                        before = done[step, iteration] = (first,)
        for draft, edges in open_waits:
            waits = [other for edge in edges for other in done[edge]]
            drafts[draft] = replace(drafts[draft], waits=tuple(dict.fromkeys((*drafts[draft].waits, *waits))))
        return ChakraTrace(nodes=tuple(_numbered(drafts)), attr=(Attribute("meshwright.program", "string_val", self.p.name),))

    def _edges(self, step: int, iteration: int) -> list[tuple[int, int]]:
        s = self.p.steps
        found = []
        for k in range(int(s.after_ptr[step]), int(s.after_ptr[step + 1])):
            other, at = int(s.after_step[k]), iteration - int(s.after_lag[k])
            if at >= 0:
                found.append((other, min(at, int(self.p.lanes.repeat[self.lane_of[other]]) - 1)))
        return found

    def _step(self, drafts: list[_Draft], step: int, iteration: int, before: tuple[int, ...]) -> tuple[int, ...]:
        """Write the nodes of a step, each after the one before it; returns those whose end is the step's end."""
        s = self.p.steps
        kind, parts = Kind(int(s.kind[step])), Part(int(s.parts[step]))
        time_s = self.start[self.at[step] + iteration] if self.start is not None else 0.0

        def put(node: ChakraNode, waits: tuple[int, ...]) -> tuple[int, ...]:
            drafts.append(_Draft(node, waits, waits[-1] if waits else -1, time_s))
            return (len(drafts) - 1,)

        if kind is Kind.COMPUTE:
            return put(self._compute(step), before)
        if kind is Kind.CALL:
            return put(self._call(step), before)
        if kind is Kind.NOP:
            return before
        if Part.RECV in parts:
            channels = _channels(self.p.channels.sets, int(s.chan_in[step]), Part.IN_SET in parts)
            before = tuple(put(self._message(step, c, NodeType.COMM_RECV), before)[0] for c in channels)
        local = self._local(step, parts)
        if local is not None:
            before = put(local, before)
        if Part.SEND in parts:
            channels = _channels(self.p.channels.sets, int(s.chan_out[step]), Part.OUT_SET in parts)
            before = tuple(put(self._message(step, c, NodeType.COMM_SEND), before)[0] for c in channels)
        return before

    def _compute(self, step: int) -> ChakraNode:
        ops, op = self.p.ops, int(self.p.steps.op[step])
        work = self.works.get(ops.key(op), Work())
        microbatch, unit = int(ops.microbatch[op]), int(self.p.lanes.unit[self.lane_of[step]])
        name = f"{ops.name[op]} {ops.graph[op]}".strip() + (f" micro-batch {microbatch}" if microbatch >= 0 else "")
        attr = [
            Attribute("is_cpu_op", "bool_val", unit == Unit.HOST), Attribute("num_ops", "int64_val", work.flops),
            Attribute("tensor_size", "uint64_val", work.bytes_read + work.bytes_written), Attribute("meshwright.unit", "int32_val", unit),
            Attribute("meshwright.op", "string_val", ops.name[op]), Attribute("meshwright.graph", "string_val", ops.graph[op]),
        ]  # fmt: skip
        attr += [Attribute("meshwright.microbatch", "int32_val", microbatch)] if microbatch >= 0 else []
        return self._timed(step, name, NodeType.COMP, attr)

    def _timed(self, step: int, name: str, kind: NodeType, attr: list[Attribute]) -> ChakraNode:
        seconds = self.seconds[step]
        attr = [*attr, Attribute("meshwright.duration_s", "double_val", seconds)]
        return ChakraNode(id=0, name=name, type=kind, duration_micros=round(seconds * 1e6), attr=tuple(attr))

    def _local(self, step: int, parts: Part) -> ChakraNode | None:
        """What a transfer does on its own rank: adding, copying, or only taking time."""
        s, b = self.p.steps, self.p.buffers
        copies = Part.READ in parts and Part.STORE in parts and Part.RECV not in parts
        if Part.ADD not in parts and not copies and not self.seconds[step]:
            return None
        name = "add" if Part.ADD in parts else "copy" if copies else "message"
        size = Attribute("tensor_size", "uint64_val", self.bytes[step])
        if copies and Part.ADD not in parts:
            spaces = [int(b.space[int(x)]) for x in (s.src_buffer[step], s.dst_buffer[step])]
            if spaces in ([Space.HOST, Space.DEVICE], [Space.DEVICE, Space.HOST]):
                kind = NodeType.MEM_LOAD if spaces[0] == Space.HOST else NodeType.MEM_STORE
                return self._timed(step, kind.name.lower(), kind, [Attribute("is_cpu_op", "bool_val", False), size])
        attr = [Attribute("is_cpu_op", "bool_val", False), Attribute("num_ops", "int64_val", 0), size,
                Attribute("meshwright.unit", "int32_val", int(Unit.NONE)), Attribute("meshwright.op", "string_val", name)]  # fmt: skip
        return self._timed(step, name, NodeType.COMP, attr)

    def _message(self, step: int, channel: int, kind: NodeType) -> ChakraNode:
        c = self.p.channels
        src, dst = int(c.src[channel]), int(c.dst[channel])
        sends = kind is NodeType.COMM_SEND
        attr = (
            Attribute("is_cpu_op", "bool_val", False), Attribute("comm_src", "int32_val", src), Attribute("comm_dst", "int32_val", dst),
            Attribute("comm_tag", "int32_val", channel), Attribute("comm_size", "int64_val", self.bytes[step]),
            Attribute("meshwright.depth", "int32_val", int(c.depth[channel])),
        )  # fmt: skip
        return ChakraNode(id=0, name=f"send to {dst}" if sends else f"receive from {src}", type=kind, attr=attr)

    def _call(self, step: int) -> ChakraNode:
        p, call = self.p, int(self.p.steps.op[step])
        name, comm = p.calls.names[int(p.calls.callee[call])], int(p.calls.comm[call])
        callee = self.programs.get(name)
        contract = callee.contract if callee is not None else None
        if callee is None or contract is None or contract.op not in COLLECTIVE_TYPES:
            what = contract.op if contract is not None else "a program without a contract"
            raise Unsupported(f"Chakra has no word for a call of {what}", where=p.describe(step), hint="inline the calls")
        members = p.comms.groups[comm].tolist()
        member = members.index(int(p.lanes.actor[self.lane_of[step]]))
        attr = [
            Attribute("is_cpu_op", "bool_val", False), Attribute("comm_type", "int64_val", int(COLLECTIVE_TYPES[contract.op])),
            Attribute("comm_size", "int64_val", self._input_bytes(callee, call, member)), Attribute("comm_priority", "int32_val", 0),
        ]  # fmt: skip
        self.called.add(comm)
        attr += [Attribute("pg_name", "string_val", self.group_of[comm])] if comm in self.group_of else []
        attr += [Attribute("meshwright.root", "int32_val", members[contract.root])] if contract.root >= 0 else []
        return ChakraNode(id=0, name=f"{contract.op} {p.comms.name[comm]}".strip(), type=NodeType.COMM_COLL, attr=tuple(attr))

    def _input_bytes(self, callee: Program, call: int, member: int) -> int:
        """Bytes of what the member puts in: its share of the callee's buffer, of which the call binds as many bytes to the caller's."""
        p, contract = self.p, callee.contract
        assert contract is not None
        buffer, _, count = contract.inputs[member]
        local = int((callee.buffers.actor[:buffer] == member).sum())
        for bound, ours, chunk in p.calls.binds[call].reshape(-1, 3).tolist():
            if bound == local:
                whole = (int(p.buffers.chunks[ours]) - chunk) * int(p.buffers.chunk_bytes[ours])
                return whole * count // int(callee.buffers.chunks[buffer])
        return count * int(callee.buffers.chunk_bytes[buffer])


def _channels(sets: Csr, channel: int, several: bool) -> list[int]:
    return sets[channel].tolist() if several else [channel]


def _numbered(drafts: list[_Draft]) -> list[ChakraNode]:
    """Nodes with ids from 1 on in an order that keeps every dependency, earliest simulated first."""
    followers: list[list[int]] = [[] for _ in drafts]
    waits = [len(d.waits) for d in drafts]
    for i, draft in enumerate(drafts):
        for other in draft.waits:
            followers[other].append(i)
    ready = [(drafts[i].time_s, i) for i, count in enumerate(waits) if not count]
    heapify(ready)
    number = [0] * len(drafts)
    order = []
    while ready:
        _, i = heappop(ready)
        order.append(i)
        number[i] = len(order)
        for other in followers[i]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, (drafts[other].time_s, other))
    return [
        replace(
            drafts[i].node, id=number[i], data_deps=tuple(sorted(number[w] for w in drafts[i].waits)),
            ctrl_deps=(number[drafts[i].before],) if drafts[i].before >= 0 else (),
        )
        for i in order
    ]  # fmt: skip
