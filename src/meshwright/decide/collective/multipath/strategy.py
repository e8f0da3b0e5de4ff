"""Permutations and all-to-alls whose pairs use many paths at once, through ranks that pass on: the optimum of the fabric, pipelined.

Cite: P. Basu and others, "Efficient All-to-All Collective Communication Schedules for Direct-Connect Topologies", HPDC 2024 (arXiv 2309.13541):
the multi-commodity flow of all pairs, cut into paths.
Left open by the paper: how paths become equal messages, and how they share links. Our answer: a pair's block is so many equal units (`flow`), each
unit of a path a chain of lanes of its own, because links share their rate evenly between messages; pieces of units follow each other down the chains.
Deviations: permutations too; switches and devices outside the collective forward; path shares are rounded to units.
Invariant: every unit of every block travels one path from its source to its destination; no link is loaded by more than `flow.fullest_s` says.
Cost: two linear programs of sources · links columns; steps: hops of all units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....cost import Transport
from ....errors import Disconnected, Infeasible, Unsupported, UsageError
from ....kernels.effort import count_work
from ....program.builder import ProgramBuilder
from ....program.program import Contract, Program
from ..bounds.collective import collective_bound
from ..bounds.flow import Wanted, demands
from ..memo import remember
from ..problem import MIN_PIECE_BYTES, CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of, require_operation
from ..rates import RateGraph, pinned_route, rate_graph, with_relays
from .flow import Paths, fullest_s, in_units, shares_of

__all__ = ["CITE", "DEVIATIONS", "Multipath"]

CITE = Cite(
    key="basu2024efficient",
    title="Efficient All-to-All Collective Communication Schedules for Direct-Connect Topologies",
    authors="P. Basu and others",
    year=2024,
    venue="HPDC, arXiv 2309.13541",
    url="https://arxiv.org/abs/2309.13541",
)
DEVIATIONS = ("permutations too", "switches and devices outside the collective forward", "shares of paths are rounded to equal units")
OPERATIONS = ("all-to-all", "permute")
MAX_UNITS = 24  # equal parts of a pair's block that are tried
MAX_LANES = 40_000  # lanes of a program, one per unit and rank that it passes; more are refused
MAX_EXPLICIT_STEPS = 20_000  # steps: larger programs have pieces as iterations of repeated lanes
MAX_RUN_STEPS = 400_000  # executed steps, about, up to which more pieces are chosen
RELAY_SLOTS = 2  # chunks that a passing rank holds per unit: one is filled while the other is sent
MAX_DEPTH = 16  # messages that a channel may hold unless told otherwise; pieces are no more than outlast a hop's latency with so many
WORK_PER_LOWERED_LANE_S = 2e-5  # counted work (`kernels.effort`) of lowering a lane, in seconds of a quiet core

Path = tuple[int, ...]


@dataclass(frozen=True)
class _Routed:
    """Units per pair, and every pair's paths with whole units of them."""

    graph: RateGraph
    relay: bool
    units: int
    paths: Paths

    def stops(self, path: Path) -> list[int]:
        """Places in the path that are ranks; between them data only passes."""
        return [i for i, v in enumerate(path) if v < self.graph.ranks]

    @property
    def hops(self) -> int:
        return max((len(self.stops(p)) - 1 for own in self.paths.values() for p, _ in own), default=0)

    @property
    def lanes(self) -> int:
        return sum(len(self.stops(p)) * n for own in self.paths.values() for p, n in own)


@dataclass(frozen=True, kw_only=True)
class Multipath(CollectiveStrategy):
    """Options.

    units: equal parts of a pair's block, each on one path; None = those of 1..24 that load the fullest link least.
    pieces: that follow each other down a path; None = chosen from hops and the cost of a message.
    relay: may devices outside the collective forward? None = only if the ranks are not connected otherwise.
    unroll: pieces as explicit chunks, or as iterations of repeated lanes; None = explicit unless the program gets large.
    depth: messages a channel may hold; None = 16, or as many as there are pieces.
    """

    name: ClassVar[str] = "multipath"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPERATIONS
    searches: ClassVar[bool] = True

    units: int | None = None
    pieces: int | None = None
    relay: bool | None = None
    unroll: bool | None = None
    depth: int | None = None

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (other operations, too many pairs or paths), UsageError (options)."""
        require_operation(problem, self.name, OPERATIONS)
        bound = collective_bound(problem)
        for option in ("units", "pieces", "depth"):
            if (value := getattr(self, option)) is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="multipath")
        routed = self._routed(problem)
        if routed.lanes > MAX_LANES:
            raise Unsupported(
                f"{routed.lanes} hops of all pairs' units make too large a program", where="multipath", hint="direct or taccl, or --option units=1"
            )  # fmt: skip
        wanted = demands(problem)
        time_s = float(fullest_s(routed.graph, wanted, routed.paths, routed.units))
        pieces = self.pieces or _pieces(problem, routed, wanted, time_s)
        unroll = self.unroll if self.unroll is not None else pieces * routed.lanes <= MAX_EXPLICIT_STEPS
        depth = self.depth or min(MAX_DEPTH, pieces)
        chosen = replace(self, units=routed.units, pieces=pieces, relay=routed.relay, unroll=unroll, depth=depth)
        program = _Lowering(problem, routed, pieces, unroll, depth).build()
        paths = sum(len(own) for own in routed.paths.values())
        notes = {"paths": paths, "hops": routed.hops, "pieces": pieces, "bandwidth_time_s": time_s}
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes)

    def _routed(self, problem: CollectiveProblem) -> _Routed:
        """Paths and units, remembered between sizes."""

        def make(relay: bool) -> _Routed:
            graph = rate_graph(problem.fabric, problem.ranks, relay=relay)
            wanted = {s: {t: d / problem.size_bytes for t, d in row.items()} for s, row in demands(problem).items()}  # the same for all sizes
            try:
                units, paths = in_units(graph, wanted, shares_of(graph, wanted), MAX_UNITS, units=self.units)
            except Infeasible as error:
                raise Disconnected("a pair has no path", where="multipath", hint="add links, or name a connected part of the devices") from error
            return _Routed(graph, relay, units, paths)

        key = "multipath", problem.op, problem.ranks, problem.peers, self.units, self.relay
        return remember(problem.fabric, key, lambda: with_relays(problem.fabric, problem.ranks, self.relay, make)[0])


def _pieces(problem: CollectiveProblem, routed: _Routed, wanted: Wanted, time_s: float) -> int:
    """Square-root rule: filling a pipeline of h hops costs h - 1 pieces' time, every further piece the overhead of a message per hop.

    The pieces that a channel holds must outlast the latency of a hop, there and back.
    """
    if routed.hops <= 1:
        return 1
    transport = problem.transport or Transport()
    overhead_s = 2 * transport.per_message_s + 2 * transport.per_step_s
    largest = max(float(d) for row in wanted.values() for d in row.values()) / routed.units
    most = max(1, min(int(largest // MIN_PIECE_BYTES), MAX_RUN_STEPS // routed.lanes))
    # No more pieces than let a channel's messages outlast a hop, there and back; else links idle while credits travel.
    latency_s = max(x.latency_s + x.library_latency_s for x in problem.fabric.links)
    if latency_s > 0:
        most = min(most, max(1, int((MAX_DEPTH - 0.5) / 2 * time_s / latency_s)))
    if overhead_s > 0:
        most = min(most, max(1, int(((routed.hops - 1) * time_s / overhead_s) ** 0.5)))
    return 1 << most.bit_length() - 1


class _Lowering:
    """Every unit of every path is a chain of lanes: its source sends, ranks on the way pass on, its destination stores."""

    def __init__(self, problem: CollectiveProblem, routed: _Routed, pieces: int, unroll: bool, depth: int) -> None:
        self.problem, self.routed, self.depth = problem, routed, depth
        self.stored, self.repeat = (pieces, 1) if unroll else (1, pieces)
        self.n = len(problem.ranks)
        self.block = routed.units * self.stored  # chunks of a pair
        self.chunks = self.block * (self.n if problem.op == "all-to-all" else 1)
        blocks = self.n if problem.op == "all-to-all" else 1
        per_block = -(-(problem.size_bytes // problem.element_bytes) // blocks)
        self.chunk_bytes = -(-per_block // (routed.units * pieces)) * problem.element_bytes
        self.b = ProgramBuilder(ranks=self.n, name=f"multipath {problem.op}")
        self.routes: dict[Path, tuple[str, ...] | None] = {}

    def build(self) -> Program:
        count_work(WORK_PER_LOWERED_LANE_S * self.routed.lanes * self.stored)
        b = self.b
        own = [b.buffer(r, chunks=self.chunks, chunk_bytes=self.chunk_bytes, role="input", name=f"in:{r}") for r in range(self.n)]
        out = [b.buffer(r, chunks=self.chunks, chunk_bytes=self.chunk_bytes, role="output", name=f"out:{r}") for r in range(self.n)]
        everyone = self.problem.op == "all-to-all"
        for r in range(self.n):
            if everyone or self.problem.peers[r] == r:
                at = r * self.block if everyone else 0
                b.lane(r, repeat=self.repeat).copy((own[r], at), (out[r], at), self.block)
        for (s, t), paths in sorted(self.routed.paths.items()):
            unit = 0
            source, target = (t * self.block, s * self.block) if everyone else (0, 0)
            for path, count in paths:
                for _ in range(count):
                    self._chain(path, own[s], source + unit * self.stored, out[t], target + unit * self.stored)
                    unit += 1
        b.contract = self._contract(own, out)
        return b.build()

    def _chain(self, path: Path, own: int, first: int, out: int, at: int) -> None:
        stops = self.routed.stops(path)
        hops = [path[i : j + 1] for i, j in pairwise(stops)]
        channels = [self.b.channel(h[0], h[-1], depth=self.depth, route=self._route(h)) for h in hops]
        lane = self.b.lane(path[0], repeat=self.repeat)
        for i in range(self.stored):
            lane.send(channels[0], own, first + i)
        for rank, into, onward in zip((path[i] for i in stops[1:-1]), channels, channels[1:], strict=False):
            slots = min(RELAY_SLOTS, self.repeat) if self.repeat > 1 else 0
            held = self.b.buffer(rank, chunks=min(RELAY_SLOTS, self.stored), chunk_bytes=self.chunk_bytes, window=slots, name=f"relay:{rank}:{into}")
            lane = self.b.lane(rank, repeat=self.repeat)
            for i in range(self.stored):
                lane.recv_send(into, onward, held, i % min(RELAY_SLOTS, self.stored))
        lane = self.b.lane(path[-1], repeat=self.repeat)
        for i in range(self.stored):
            lane.recv(channels[-1], out, at + i)

    def _route(self, hop: Path) -> tuple[str, ...] | None:
        if hop not in self.routes:
            self.routes[hop] = pinned_route(self.problem.fabric, tuple(self.routed.graph.names[v] for v in hop))
        return self.routes[hop]

    def _contract(self, own: list[int], out: list[int]) -> Contract:
        taken = [0 if self.problem.op == "permute" and self.problem.peers[r] < 0 else self.chunks for r in range(self.n)]
        inputs: Any = tuple((x, 0, self.chunks) for x in own)
        outputs: Any = tuple((x, 0, taken[r]) for r, x in enumerate(out))
        return Contract(op=self.problem.op, inputs=inputs, outputs=outputs, peers=self.problem.peers)
