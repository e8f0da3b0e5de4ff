"""What a plan needs that does not depend on its bytes: logical topology, chunks, symmetries, the routing problem of every phase; and size classes.

Sizes of one class share routes, orders and lowered programs. A class spans a factor of four in the bytes of a chunk; all sizes whose bytes take
no more than MAX_BYTES_TIME_SHARE of the latency that no plan can avoid are one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from ....cost import Transport
from ....errors import UsageError
from ....sketch import Sketch
from ..bounds.bandwidth import bandwidth_bound
from ..bounds.latency import latency_bound
from ..problem import CollectiveProblem
from .chunks import REDUCES, chunks_in_all, chunks_of, image_of_chunks
from .routing_problem import Hints, Routes, RoutingProblem, transfers_of
from .schedule import Timing, Transfer
from .topology import LogicalTopology, default_symmetries, logical_topology, sketch_symmetries

__all__ = ["Setup", "SizeClass", "chunkup_of", "given_routes", "joint_transfers"]

MAX_MOVES = 4_000_000  # chunks times logical links; a problem with more is refused
FEW_SOURCES = ("broadcast", "reduce", "scatter", "permute")  # no sender is derived for each rank: few ranks send
WHOLE = ("broadcast", "reduce", "permute")  # operations whose buffer is one block
MAX_WAYS = 8  # chunks that a single large block is cut into without a sketch, so that it may take several ways
MIN_WAY_BYTES = 4096  # such a chunk is not smaller
MAX_BYTES_TIME_SHARE = 0.05  # sizes whose bytes take no more than this share of the unavoidable latency are one class


def chunkup_of(problem: CollectiveProblem, sketch: Sketch | None) -> int:
    """The sketch's as long as chunks are whole elements; without one, enough for a single large block to take several ways."""
    whole = problem.op in WHOLE
    blocks = 1 if whole else len(problem.ranks)
    if sketch is not None:
        return max(1, min(sketch.chunkup, problem.size_bytes // problem.element_bytes // blocks))
    return max(1, min(MAX_WAYS, len(problem.ranks), problem.size_bytes // MIN_WAY_BYTES)) if whole else 1


@dataclass(frozen=True)
class SizeClass:
    """`chunk_bytes`: of an uncut chunk, for which the class is planned; `least_bytes`: the smallest such chunk of the class."""

    chunk_bytes: float
    least_bytes: float


class Setup:
    """`phases`: the topology of every routing phase; a reduction is a gather on the reversed topology, read backwards."""

    def __init__(self, problem: CollectiveProblem, sketch: Sketch | None, chunkup: int) -> None:
        """Args: `problem`: its size is not looked at. Raises: Disconnected, Unsupported (far too many chunks), UsageError (sketch)."""
        some = len(problem.ranks) * problem.element_bytes << 20  # whole elements everywhere, so that bounds are proportional to bytes
        self.problem, self.sketch, self.chunkup = replace(problem, size_bytes=some, shard_bytes=None), sketch, chunkup
        # Chunks are counted before they are made, and links are found up to what so many chunks allow: among thousands of ranks both take seconds.
        most_links = MAX_MOVES // max(1, chunks_in_all(problem, chunkup))
        self.topology = logical_topology(problem.fabric, problem.ranks, sketch, rooted=problem.op in FEW_SOURCES, most_links=most_links)
        self.chunks, self.per_buffer = chunks_of(problem, chunkup)
        if problem.op == "all-reduce":
            self.phases: tuple[LogicalTopology, ...] = (self.topology.reversed(), self.topology)
        else:
            self.phases = (self.topology.reversed() if problem.op in REDUCES else self.topology,)

    def exact_bytes(self, size_bytes: int) -> float:
        """Of an uncut chunk, before it is rounded up to whole elements."""
        return size_bytes / self.per_buffer / self.chunkup

    def chunk_bytes(self, size_bytes: int, instances: int) -> int:
        elements = -(-size_bytes // self.problem.element_bytes)
        return -(-elements // (self.per_buffer * self.chunkup * instances)) * self.problem.element_bytes

    def size_class(self, size_bytes: int, transport: Transport | None) -> SizeClass:
        exact = max(self.exact_bytes(size_bytes), 1.0)
        # Classes are powers of four, rounded to the nearest: a class spans from half to twice its own bytes.
        number = int(np.floor(np.log2(exact) / 2 + 0.5))
        cost = transport or Transport()
        unavoidable_s = float(latency_bound(self.problem)) + cost.per_message_s + cost.per_step_s
        per_byte_s = self.floor_s(1.0) + cost.per_byte_s
        small = MAX_BYTES_TIME_SHARE * unavoidable_s / per_byte_s if per_byte_s > 0 else 0.0
        lowest = int(np.floor(np.log2(small) / 2)) if small >= 1 else 0
        return SizeClass(4.0 ** max(number, lowest), 1.0 if number <= lowest else 4.0**number / 2)

    @cached_property
    def _floor_s_per_byte(self) -> Fraction:
        gather = replace(self.problem, op="all-gather") if self.problem.op == "all-reduce" else self.problem
        return bandwidth_bound(gather).exact / gather.size_bytes * self.per_buffer * self.chunkup

    def floor_s(self, chunk_bytes: float) -> float:
        """What no routing of a phase can beat, from bytes alone."""
        return float(self._floor_s_per_byte * Fraction(chunk_bytes))

    @cached_property
    def _routings(self) -> tuple[RoutingProblem, ...]:
        return tuple(self._bare(t) for t in self.phases)

    def routing(self, phase: int, chunk_bytes: float, transport: Transport | None) -> RoutingProblem:
        """The routing problem of a phase for chunks of `chunk_bytes`."""
        return self._routings[phase].at(Timing.of(self.phases[phase], chunk_bytes, transport), self.floor_s(chunk_bytes))

    def _bare(self, topology: LogicalTopology) -> RoutingProblem:
        symmetries = sketch_symmetries(topology, self.sketch) if self.sketch is not None else default_symmetries(topology)
        found = []
        for s in symmetries:
            image = image_of_chunks(self.chunks, s.rank)
            if image is not None:
                found.append((image, s.link, s.resource, s.rank))
            elif self.sketch is not None:
                text = f"the {self.problem.op} is not symmetric under the sketch's offsets"
                raise UsageError(text, where="sketch.symmetry", hint="leave symmetry_offsets out for operations with a root")
        return RoutingProblem(
            len(self.problem.ranks), topology.box, tuple((x.src, x.dst, x.remote) for x in topology.links), topology.carriers, topology.relayed,
            tuple(self.chunks), Timing.of(topology, 1.0, None), tuple(found), self._hints(topology),
        )  # fmt: skip

    def _hints(self, topology: LogicalTopology) -> Hints:
        if self.sketch is None:
            return Hints()
        used: dict[int, int] = {}
        size = len(self.problem.ranks) // self.sketch.nnodes
        for gpus, wish in zip(self.sketch.switches, self.sketch.hyperedges, strict=False):
            for i, x in enumerate(topology.links):
                if not x.remote and x.src % size in gpus and x.dst % size in gpus:
                    used[i] = 1 if wish == "uc-min" else -1
        balance = self.sketch.intranode if self.sketch.intranode in ("minmax", "maxmin") else "none"
        return Hints(tuple(used.items()), balance, self.sketch.enforce_ordering)

    @property
    def symmetries(self) -> int:
        return len(self._routings[0].symmetries)

    @cached_property
    def mirrored(self) -> bool:
        """Whether the reversed topology has the same links with the same times and shares: then routes of a gather serve the reduction too."""
        if len(self.phases) < 2:
            return False
        one, two = (self._routings[0], self._routings[1])
        place = two.link_of
        if one.carriers != two.carriers or set(place) != set(one.link_of) or one.hints != two.hints:
            return False
        image: dict[int, int] = {}
        back: dict[int, int] = {}
        for (a, b), i in one.link_of.items():
            j = place[a, b]
            if one.links[i] != two.links[j] or one.timing.delay_s[i] != two.timing.delay_s[j]:
                return False
            if one.timing.hold_s[i] != two.timing.hold_s[j] or one.timing.offset_s[i] != two.timing.offset_s[j]:
                return False
            for r, s in zip(one.timing.resources[i], two.timing.resources[j], strict=True):
                if image.setdefault(r, s) != s or back.setdefault(s, r) != r:
                    return False
        return True


def given_routes(problems: Sequence[RoutingProblem], routes: Sequence[Sequence[Sequence[tuple[int, int]]]]) -> list[Routes]:
    """Routes from the options, as links. Raises: UsageError when they do not fit."""
    if len(routes) != len(problems):
        raise UsageError(f"{len(routes)} phases of routes for {len(problems)}", where="taccl.routes")
    out = []
    for number, (p, phase) in enumerate(zip(problems, routes, strict=True)):
        if len(phase) != len(p.chunks):
            raise UsageError(f"routes for {len(phase)} chunks, there are {len(p.chunks)}", where=f"taccl.routes[{number}]")
        found = []
        for c, pairs in enumerate(phase):
            here, where = {p.chunks[c].source}, f"taccl.routes[{number}][{c}]"
            for a, b in pairs:
                if (a, b) not in p.link_of or a not in here or b in here:
                    raise UsageError(f"chunk {c} cannot go from {a} to {b} there", where=where, hint="plan without routes")
                here.add(b)
            if not p.chunks[c].dests <= here:
                raise UsageError(f"chunk {c} does not reach all its destinations", where=where, hint="plan without routes")
            found.append(tuple(p.link_of[a, b] for a, b in pairs))
        out.append(tuple(found))
    return out


def joint_transfers(setup: Setup, problems: Sequence[RoutingProblem], phases: Sequence[Routes], instances: int) -> list[Transfer]:
    """All transfers on the forward topology's links; the gather of an all-reduce waits for the chunk's sum."""
    out: list[Transfer] = []
    op, links, chunks = setup.problem.op, setup.topology.links, setup.chunks
    if op in REDUCES:
        out = _backwards(transfers_of(problems[0], phases[0], instances))
    if op not in REDUCES or op == "all-reduce":
        sums: dict[int, list[int]] = {}
        for t, x in enumerate(out):
            if links[x.link].dst == chunks[x.chunk // instances].source:
                sums.setdefault(x.chunk, []).append(t)
        first = len(out)
        for x in transfers_of(problems[-1], phases[-1], instances):
            out.append(Transfer(x.chunk, x.link, tuple(first + b for b in x.after) or tuple(sums.get(x.chunk, ()))))
        if setup.sketch is not None and setup.sketch.enforce_ordering:
            out[first:] = _own_first(setup, out, first, instances)
    return out


def _own_first(setup: Setup, transfers: Sequence[Transfer], first: int, instances: int) -> list[Transfer]:
    """On links between boxes, what a sender forwards goes behind its own."""
    own: dict[int, list[int]] = {}
    links = setup.topology.links

    def mine(x: Transfer) -> bool:
        return setup.chunks[x.chunk // instances].source == links[x.link].src

    for t in range(first, len(transfers)):
        if links[transfers[t].link].remote and mine(transfers[t]):
            own.setdefault(transfers[t].link, []).append(t)
    return [x if mine(x) else replace(x, behind=tuple(own.get(x.link, ()))) for x in transfers[first:]]


def _backwards(transfers: Sequence[Transfer]) -> list[Transfer]:
    """A gather's transfers as the reduction's: each waits for those that waited for it, and adds."""
    waiting: list[list[int]] = [[] for _ in transfers]
    for t, x in enumerate(transfers):
        for b in x.after:
            waiting[b].append(t)
    # A tree read backwards: where copies fanned out, sums come together, so what waited is now waited for.
    return [Transfer(x.chunk, x.link, tuple(waiting[t]), adds=True) for t, x in enumerate(transfers)]
