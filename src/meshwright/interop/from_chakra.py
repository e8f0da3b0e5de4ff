"""Chakra execution traces as a `Program`, with what its steps cost.

Every node becomes a step: COMP a compute step, COMM_SEND and COMM_RECV a transfer, COMM_COLL a call of a collective that `plan_collective`
plans (an all-to-all: its messages), MEM_LOAD and MEM_STORE a compute step of the copy unit. A node's dependencies are `after` edges, and a
node that waits for the last one of a lane continues it, so lanes add no order that the trace does not have. The j-th send from a rank to
another under a tag is the j-th receive there.

What a trace does not say, and what stands for it: messages read and write memory of their own, alive only while they move, so memory figures
mean nothing; sends never wait for the receiver (channels are as deep as they have messages) unless `meshwright.depth` says otherwise;
collectives of one group run in the order of their nodes. Refused: what is above and does not fit together, and reduce, gather, scatter,
broadcast, of which traces do not say the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import FormatError, Unsupported
from ..graph.graph import Work
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.calls import Callee
from ..program.program import Program, Role, Unit
from .chakra import ChakraNode, ChakraSet, CollectiveType, NodeType
from .chakra_graph import collective_of, ordered

__all__ = ["ImportedChakra", "from_chakra"]

PlanCollective = Callable[[tuple[int, ...], int, str], Callee]  # (ranks, size in bytes as nccl-tests counts it, operation)

_CALLS = {CollectiveType.ALL_REDUCE: "all-reduce", CollectiveType.ALL_GATHER: "all-gather", CollectiveType.REDUCE_SCATTER: "reduce-scatter"}
_MEMORY = {NodeType.MEM_LOAD: "load", NodeType.MEM_STORE: "store"}
_BARRIER_BYTES = 4  # of a barrier whose node states no size


@dataclass(frozen=True, kw_only=True)
class ImportedChakra:
    """`seconds`: price per op key where the trace has a duration; `works`: operations and bytes where it has none."""

    program: Program
    callees: dict[str, Program]
    seconds: dict[str, float]
    works: dict[str, Work]


def from_chakra(traces: ChakraSet, plan_collective: PlanCollective, *, title: str = "") -> ImportedChakra:
    """The program of a set of traces; rank i is the i-th trace.

    Raises: FormatError (see `interop.chakra_graph.ordered`; sends without receives, sizes that differ, collectives that differ between ranks),
    Unsupported.
    """
    return _Importer(traces, plan_collective, title).run()


@dataclass
class _Lane:
    """Nodes of one rank, each waiting for the one before it."""

    kind: tuple[Role, int]
    nodes: list[ChakraNode] = field(default_factory=list)


@dataclass
class _Messages:
    """Nodes of one (source, destination, tag), in order, with their lanes."""

    nodes: list[ChakraNode] = field(default_factory=list)
    lanes: set[int] = field(default_factory=set)


class _Importer:
    def __init__(self, traces: ChakraSet, plan_collective: PlanCollective, title: str) -> None:
        self.ranks = len(traces.traces)
        self.traces, self.plan_collective, self.title = traces, plan_collective, title
        self.names = [traces.name(rank) for rank in range(self.ranks)]
        self.b = ProgramBuilder(ranks=self.ranks, name=title)
        self.nodes = [ordered(trace, self.names[r]) for r, trace in enumerate(traces.traces)]
        self.channel: dict[tuple[int, int, bool], int] = {}  # (rank, node id, sends) -> channel
        self.seconds: dict[str, float] = {}
        self.works: dict[str, Work] = {}
        self.priced: dict[tuple[str, str], list[tuple[float, Work]]] = {}
        self.callees: dict[str, Program] = {}
        self.comms: dict[tuple[int, ...], int] = {}
        self.called: dict[tuple[int, ...], dict[int, list[tuple[CollectiveType, int]]]] = {}

    def run(self) -> ImportedChakra:
        lanes = [_chains(nodes) for nodes in self.nodes]
        self._channels(lanes)
        self._agree()
        for rank in range(self.ranks):
            self._write(rank, lanes[rank])
        return ImportedChakra(program=self.b.build(), callees=self.callees, seconds=self.seconds, works=self.works)

    # ---- messages ----------------------------------------------------------------------------------------------
    def _channels(self, lanes: Sequence[Sequence[_Lane]]) -> None:
        """One channel per source, destination and tag where each end is one lane's, else one per message."""
        sends, receives = (self._ends(lanes, kind) for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV))
        for key in [*sends, *(k for k in receives if k not in sends)]:
            src, dst, tag = key
            out, into = sends.get(key, _Messages()), receives.get(key, _Messages())
            what = f"messages from rank {src} to rank {dst} under tag {tag}"
            if len(out.nodes) != len(into.nodes):
                raise FormatError(f"{len(out.nodes)} {what} are sent, {len(into.nodes)} received", where=self.names[src if src < self.ranks else dst])
            for one, other in zip(out.nodes, into.nodes, strict=True):
                sizes = one.integer("comm_size"), other.integer("comm_size")
                if sizes[0] != sizes[1]:
                    said = f"node {one.id} sends {sizes[0]} bytes, node {other.id} receives {sizes[1]}"
                    raise FormatError(f"of the {what} {said}", where=self.names[src])
            together = len(out.lanes) == 1 and len(into.lanes) == 1
            depth = max(1, out.nodes[0].integer("meshwright.depth", len(out.nodes)))
            channel = self.b.channel(src, dst, depth=depth) if together else -1
            for one, other in zip(out.nodes, into.nodes, strict=True):
                number = channel if together else self.b.channel(src, dst)
                self.channel[src, one.id, True] = self.channel[dst, other.id, False] = number

    def _ends(self, lanes: Sequence[Sequence[_Lane]], kind: NodeType) -> dict[tuple[int, int, int], _Messages]:
        found: dict[tuple[int, int, int], _Messages] = {}
        sends = kind is NodeType.COMM_SEND
        for rank in range(self.ranks):
            lane_of = {node.id: i for i, lane in enumerate(lanes[rank]) for node in lane.nodes if node.type is kind}
            for node in self.nodes[rank]:
                if node.type is not kind:
                    continue
                src, dst = (node.integer(name, rank if own else None) for name, own in (("comm_src", sends), ("comm_dst", not sends)))
                if max(src, dst) >= self.ranks or src == dst or (src if sends else dst) != rank:
                    raise FormatError(f"node {node.id} is a message from rank {src} to rank {dst} of {self.ranks}", where=self.names[rank])
                node.integer("comm_size")  # refused here, where its place is known
                here = found.setdefault((src, dst, node.integer("comm_tag", 0)), _Messages())
                here.nodes.append(node)
                here.lanes.add(lane_of[node.id])
        return found

    # ---- collectives -------------------------------------------------------------------------------------------
    def _group(self, node: ChakraNode, rank: int) -> tuple[int, ...]:
        name = node.string("pg_name")
        if name in self.traces.groups:
            members = self.traces.groups[name]
        elif name in ("", "0"):
            members = tuple(range(self.ranks))
        else:
            raise FormatError(f"node {node.id} names the group {name[:40]!r}, which no file describes", where=self.names[rank],
                              hint="give NAME.comm_group.json, e.g. with --groups")  # fmt: skip
        if rank not in members:
            raise FormatError(f"node {node.id} is a collective of group {name[:40]!r}, of which this rank is no member", where=self.names[rank])
        return members

    def _agree(self) -> None:
        """The k-th collective of a group is the same for all its members."""
        for rank, nodes in enumerate(self.nodes):
            for node in nodes:
                if node.type is NodeType.COMM_COLL:
                    op = collective_of(node)
                    size = node.integer("comm_size", _BARRIER_BYTES if op is CollectiveType.BARRIER else None)
                    self.called.setdefault(self._group(node, rank), {}).setdefault(rank, []).append((op, size))
        for members, rows in self.called.items():
            first = rows.get(members[0], [])
            for rank in members[1:]:
                mine = rows.get(rank, [])
                if mine != first:
                    at = next((k for k, (a, b) in enumerate(zip(first, mine, strict=False)) if a != b), min(len(first), len(mine)))
                    said = [f"{x[at][0].name} of {x[at][1]} bytes" if at < len(x) else "nothing" for x in (first, mine)]
                    raise FormatError(
                        f"as its collective {at} among ranks {_some(members)} this rank has {said[1]}, rank {members[0]} has {said[0]}",
                        where=self.names[rank], hint="all members call the same collectives in the same order",
                    )  # fmt: skip

    # ---- steps -------------------------------------------------------------------------------------------------
    def _write(self, rank: int, lanes: Sequence[_Lane]) -> None:
        builders: dict[int, LaneBuilder] = {}
        lane_of = {node.id: i for i, lane in enumerate(lanes) for node in lane.nodes}
        calls: dict[tuple[int, ...], LaneBuilder] = {}
        done: dict[int, tuple[StepRef, ...]] = {}
        for node in self.nodes[rank]:
            waits = tuple(dict.fromkeys(ref for dep in node.deps for ref in done[dep]))
            if node.type is NodeType.COMM_COLL:
                members = self._group(node, rank)
                done[node.id] = self._collective(node, rank, members, calls, waits)
                continue
            i = lane_of[node.id]
            if i not in builders:
                role, unit = lanes[i].kind
                builders[i] = self.b.lane(rank, unit=unit, role=role)
            lane = builders[i]
            after = [ref for ref in waits if not len(lane) or ref != lane.last]
            done[node.id] = (self._step(node, rank, lane, after),)

    def _step(self, node: ChakraNode, rank: int, lane: LaneBuilder, after: list[StepRef]) -> StepRef:
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            sends = node.type is NodeType.COMM_SEND
            return self._message(lane, rank, self.channel[rank, node.id, sends], node.integer("comm_size"), sends, after)
        if node.type in (NodeType.INVALID, NodeType.METADATA):
            return lane.nop(after=after)
        name = _MEMORY.get(node.type) or node.string("meshwright.op", "op")
        graph = node.string("meshwright.graph", node.name)
        microbatch = node.get("meshwright.microbatch")
        exact = node.get("meshwright.duration_s")
        given = isinstance(exact, float) and 0 <= exact < float("inf")
        seconds = exact if given and isinstance(exact, float) else node.duration_micros * 1e-6
        work = Work() if given else Work(flops=node.integer("num_ops", 0), bytes_read=node.integer("tensor_size", 0), calls=1)
        graph = self._priced(name, graph, seconds, work)
        op = self.b.op(name, graph=graph, microbatch=microbatch if isinstance(microbatch, int) and 0 <= microbatch < 1 << 31 else -1)
        return lane.compute(op, after=after)

    def _priced(self, name: str, graph: str, seconds: float, work: Work) -> str:
        """The graph key under which the op has this price: nodes of one name and different prices get numbers. No work: its seconds count."""
        known = self.priced.setdefault((name, graph), [])
        if (seconds, work) not in known:
            known.append((seconds, work))
        at = known.index((seconds, work))
        graph = f"{graph}#{at}" if at else graph
        if seconds or not (work.flops or work.bytes_read):
            self.seconds[f"{graph}|{name}"] = seconds
        else:
            self.works[f"{graph}|{name}"] = work
        return graph

    def _message(self, lane: LaneBuilder, rank: int, channel: int, size: int, sends: bool, after: Sequence[StepRef]) -> StepRef:
        buffer = self.b.buffer(rank, chunks=1, chunk_bytes=size, role="input" if sends else "scratch")
        ref = lane.send(channel, buffer, 0, after=after) if sends else lane.recv(channel, buffer, 0, after=after)
        self.b.dies_after(buffer, ref)
        return ref

    def _collective(
        self, node: ChakraNode, rank: int, members: tuple[int, ...], calls: dict[tuple[int, ...], LaneBuilder], waits: tuple[StepRef, ...]
    ) -> tuple[StepRef, ...]:  # fmt: skip
        op = collective_of(node)
        lane = calls.get(members)
        if lane is None:
            lane = calls[members] = self.b.lane(rank, role=Role.COMM)
        size = node.integer("comm_size", _BARRIER_BYTES if op is CollectiveType.BARRIER else None)
        after = [ref for ref in waits if not len(lane) or ref != lane.last]
        if len(members) == 1 or (not size and op is not CollectiveType.BARRIER):
            return (lane.nop(after=after),)
        if op not in _CALLS and op is not CollectiveType.BARRIER:
            raise Unsupported(f"node {node.id} is a {op.name.lower()}: a trace does not say who its root is, or it has no schedule here",
                              where=self.names[rank], hint="export it as sends and receives")  # fmt: skip
        name = _CALLS.get(op, "all-reduce")
        chosen = self.plan_collective(members, size * len(members) if name == "all-gather" else size, name)
        self.callees[chosen.name] = chosen.program
        whole = size * len(members) if name == "all-gather" else size
        buffer = self.b.buffer(rank, chunks=chosen.chunks, chunk_bytes=-(-whole // chosen.chunks), role="gradient")
        if members not in self.comms:
            self.comms[members] = self.b.comm(f"ranks {_some(members)}", members)
        ref = lane.call(self.b.call(self.comms[members], chosen.name, [(chosen.local[members.index(rank)], buffer, 0)]), after=after)
        self.b.dies_after(buffer, ref)
        return (ref,)


def _chains(nodes: Sequence[ChakraNode]) -> list[_Lane]:
    """Lanes: a node that waits for the last of one of its kind continues it, whoever names it in `ctrl_deps` before others.

    Collectives are in none of them.
    """
    heir = {dep: node.id for node in reversed(nodes) for dep in node.ctrl_deps}
    lanes: list[_Lane] = []
    last: dict[int, int] = {}  # id of a lane's last node -> lane
    for node in nodes:
        if node.type is NodeType.COMM_COLL:
            continue
        kind = _kind(node)
        mine = (dep for dep in node.deps if dep in last and heir.get(dep, node.id) == node.id and lanes[last[dep]].kind == kind)
        at = next((last[dep] for dep in mine), len(lanes))
        if at == len(lanes):
            lanes.append(_Lane(kind))
        else:
            del last[lanes[at].nodes[-1].id]
        lanes[at].nodes.append(node)
        last[node.id] = at
    return lanes


def _kind(node: ChakraNode) -> tuple[Role, int]:
    """Role and unit of the lane that a node belongs to."""
    if node.type in _MEMORY:
        return Role.COMPUTE, int(Unit.COPY)
    if node.type in (NodeType.COMP, NodeType.STORAGE, NodeType.BATCH, NodeType.CHECKPOINT):
        unit = node.get("meshwright.unit")
        if isinstance(unit, int) and unit in (-1, 0, 1, 2):
            return (Role.COMM if unit < 0 else Role.COMPUTE), unit
        host = node.type is not NodeType.COMP or node.get("is_cpu_op") is True
        return Role.COMPUTE, int(Unit.HOST if host else Unit.COMPUTE)
    return Role.COMM, int(Unit.NONE)


def _some(members: Sequence[int]) -> str:
    return ", ".join(map(str, members[:8])) + (f", ... ({len(members)})" if len(members) > 8 else "")
