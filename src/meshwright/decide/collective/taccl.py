"""Routes, orders and times of chunks under a communication sketch, by integer programs that start from a greedy plan.

Cite: A. Shah and others, TACCL (NSDI 2023, arXiv 2111.04867).
Left open by the paper: a sketch when the user has none (our answer: derived from the fabric, see `taccl_topology`); how far the result is
from the best (the certified cut bound, which also stops the search); chunk counts (pipelined instances are tried in the same model, the
simulator decides).
Deviations: HiGHS instead of Gurobi; relay cuts, big-M from a known schedule, symmetric variables identified instead of equated; links of
the fabric are the resources, so switch hyperedges and shared NICs need no extra constraints; latency delays a chunk but does not occupy a
link, as in the simulator; besides the paper's greedy order an eager one, and both improved by scheduling backwards and forwards;
reductions run backwards on reversed links.
Invariant: every chunk reaches every destination on links of the sketch; it is sent only after it arrived; resources serve one chunk at a time.
Cost: greedy O(chunks · links · log), the programs are exponential in the worst case and limited by nodes and by time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from time import monotonic
from typing import Any

import numpy as np

from ...bound import Bound
from ...cite import Cite
from ...errors import Unsupported, UsageError
from ...program import Program
from ...sketch import Sketch, sketch_of
from .bounds import bandwidth_bound, collective_bound
from .problem import OPERATIONS, CollectivePlan, CollectiveProblem, options_of, require_operation
from .taccl_chunks import REDUCES, chunks_of, image_of_chunks
from .taccl_contiguity import Runs, join_runs
from .taccl_lower import Layout, adjoining, lower_transfers
from .taccl_routing import route_exactly
from .taccl_schedule import Schedule, Timing, Transfer, improved
from .taccl_seed import Hints, Routes, RoutingProblem, greedy_routes, transfers_of
from .taccl_topology import LogicalTopology, default_symmetries, logical_topology, sketch_symmetries
from .value import simulated_time_s

__all__ = ["CITE", "DEVIATIONS", "Taccl"]

CITE = Cite(
    key="shah2023taccl",
    title="TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches",
    authors="A. Shah and others",
    year=2023,
    venue="NSDI",
    url="https://arxiv.org/abs/2111.04867",
)
DEVIATIONS = (
    "HiGHS, relay cuts, identified symmetric variables, horizon from a greedy schedule",
    "latency delays but does not occupy links",
    "neighbouring chunks are joined into messages inside boxes too",
    "an eager order and forward-backward improvement besides the paper's greedy order",
    "reductions are routed backwards on reversed links",
)
MOST_MOVES = 4_000_000  # chunks · links beyond which nothing is tried
MOST_TRANSFERS = 4_000  # of a schedule with instances
SMALLEST_BYTES = 64  # a chunk is not cut below; what many messages cost is in the model
MOST_INSTANCES = 16
FEW_SOURCES = ("broadcast", "reduce", "scatter", "permute")  # no sender is derived for each rank: few ranks send
MOST_WAYS, SMALLEST_WAY_BYTES = 8, 4096  # chunks that a broadcast takes apart, and what is too small for it
FAR = 1.1  # routes whose whole chunks take this much longer than others' are not pursued
SIMULATED = 5  # candidates that the simulator decides between


@dataclass(frozen=True, kw_only=True)
class Taccl:
    """Options.

    sketch: a `Sketch`, the plain data of one, or a published one's name; None = derived from the fabric.
    chunkup: chunks per block that are routed by themselves; None = the sketch's, or 1.
    instances: pipelined copies that every chunk is cut into after routing; None = chosen.
    binaries: largest routing program that is solved; larger ones keep the greedy routes. nodes: branch-and-bound nodes of each program.
    solver_time_s: clock limit of each program (a result at this limit may differ between runs; its routes are in the options).
    merge: join neighbouring chunks into one message where that saves overhead (None and True); False: never.
    routes: links (source, destination) of every chunk, reductions first; given = no routing. unroll: there is no other form.
    """

    sketch: Sketch | Mapping[str, Any] | str | None = None
    chunkup: int | None = None
    instances: int | None = None
    binaries: int = 6000
    nodes: int = 50
    solver_time_s: float = 20.0
    merge: bool | None = None
    routes: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] | None = None
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (uneven shards, far too many chunks), UsageError (options, a sketch that does not fit)."""
        for option, value in (("chunkup", self.chunkup), ("instances", self.instances), ("binaries", self.binaries + 1), ("nodes", self.nodes + 1)):
            if value is not None and value < 1:
                raise UsageError(f"{option} is too small: {value}", where="taccl")
        if self.solver_time_s <= 0:
            raise UsageError(f"solver_time_s must be > 0, got {self.solver_time_s}", where="taccl")
        bound = collective_bound(problem)
        require_operation(problem, "taccl", OPERATIONS)
        if not self.unroll:
            raise Unsupported("taccl has no repeated form", hint="leave `unroll` on, or use --strategy forestcoll")
        return _Planner(problem, replace(self, sketch=sketch_of(self.sketch)), bound).plan()


@dataclass(frozen=True)
class _Candidate:
    """A schedule that could be lowered. `phases`: routes per phase."""

    phases: tuple[Routes, ...]
    how: tuple[str, ...]
    instances: int
    transfers: list[Transfer]
    schedule: Schedule


class _Planner:
    def __init__(self, problem: CollectiveProblem, options: Taccl, bound: Bound) -> None:
        assert options.sketch is None or isinstance(options.sketch, Sketch)
        self.problem, self.options, self.bound, self.sketch = problem, options, bound, options.sketch
        self.deadline = monotonic() + problem.time_limit_s
        self.topology = logical_topology(problem.fabric, problem.ranks, self.sketch, rooted=problem.op in FEW_SOURCES)
        self.chunkup = options.chunkup or self._chunkup()
        self.chunks, self.per_buffer = chunks_of(problem, self.chunkup)
        if len(self.chunks) * len(self.topology.links) > MOST_MOVES:
            text = f"{len(self.chunks)} chunks on {len(self.topology.links)} links are too many to route one by one"
            raise Unsupported(text, hint="use --strategy forestcoll, or a sketch with fewer links")
        self.notes: dict[str, Any] = {}

    def _chunkup(self) -> int:
        """The sketch's as long as chunks are whole elements; without one, enough for a single large block to take several ways."""
        whole = self.problem.op in ("broadcast", "reduce", "permute")
        blocks = 1 if whole else len(self.problem.ranks)
        if self.sketch is not None:
            return max(1, min(self.sketch.chunkup, self.problem.size_bytes // self.problem.element_bytes // blocks))
        return max(1, min(MOST_WAYS, len(self.problem.ranks), self.problem.size_bytes // SMALLEST_WAY_BYTES)) if whole else 1

    def chunk_bytes(self, instances: int) -> int:
        elements = -(-self.problem.size_bytes // self.problem.element_bytes)
        return -(-elements // (self.per_buffer * self.chunkup * instances)) * self.problem.element_bytes

    # ---- phases: a reduction is a gather on the reversed topology, read backwards ----
    def _phases(self) -> list[LogicalTopology]:
        op = self.problem.op
        if op == "all-reduce":
            return [self.topology.reversed(), self.topology]
        return [self.topology.reversed() if op in REDUCES else self.topology]

    def plan(self) -> CollectivePlan:
        problems = [self._routing(t) for t in self._phases()]
        limits = self._limits_s(len(problems))
        choices = self._given(problems) or [list(_routed(p, limits, self.options.nodes, self.options.binaries)) for p in problems]
        candidates = self._candidates(problems, choices)
        best, program, runs, schedule = self._decide(candidates)
        routes = tuple(tuple(tuple(problems[i].links[k][:2] for k in links) for links in phase) for i, phase in enumerate(best.phases))
        chosen = replace(self.options, chunkup=self.chunkup, instances=best.instances, routes=routes)
        notes = {
            "routing": list(best.how), "chunkup": self.chunkup, "instances": best.instances, "transfers": len(best.transfers), "messages": len(runs),
            "schedule_s": schedule.makespan_s, "symmetries": len(problems[0].symmetries), "logical_links": len(self.topology.links),
            "sketch": "given" if self.sketch is not None else "derived from the fabric",
        } | self.notes  # fmt: skip
        return CollectivePlan(program=program, bound=self.bound, strategy="taccl", options=options_of(chosen), notes=notes)

    def _limits_s(self, phases: int) -> tuple[float, float]:
        """Clock limits of the routing of a phase, greedy and exact: the same for neighbouring sizes, so that they share what is found."""
        share_s = self.problem.time_limit_s / phases
        return 0.7 * share_s, min(self.options.solver_time_s, 0.4 * share_s)

    def _routing(self, topology: LogicalTopology) -> RoutingProblem:
        exact = self.problem.size_bytes / self.per_buffer / self.chunkup
        size_class = 4.0 ** round(np.log2(max(exact, 1.0)) / 2)  # neighbouring sizes share their routes
        timing = Timing.of(topology, size_class, self.problem.transport)
        symmetries = sketch_symmetries(topology, self.sketch) if self.sketch is not None else default_symmetries(topology)
        found = []
        for s in symmetries:
            image = image_of_chunks(self.chunks, s.rank)
            if image is not None:
                found.append((image, s.link, s.resource, s.rank))
            elif self.sketch is not None:
                text = f"the {self.problem.op} is not symmetric under the sketch's offsets"
                raise UsageError(text, where="sketch.symmetry", hint="leave symmetry_offsets out for operations with a root")
        floor_s = self._floor_s(size_class)
        return RoutingProblem(
            len(self.problem.ranks), topology.box, tuple((x.src, x.dst, x.remote) for x in topology.links), topology.carriers, topology.relayed,
            tuple(self.chunks), timing, tuple(found), self._hints(topology), False, floor_s,
        )  # fmt: skip

    def _floor_s(self, class_bytes: float) -> float:
        """What no routing of a phase can beat, from bytes alone, for chunks of `class_bytes`; the same for all sizes of the class."""
        gather = replace(self.problem, op="all-gather") if self.problem.op == "all-reduce" else self.problem
        per_byte = bandwidth_bound(gather).exact / gather.size_bytes
        return float(per_byte * Fraction(class_bytes) * self.per_buffer * self.chunkup)

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

    def _given(self, problems: Sequence[RoutingProblem]) -> list[list[tuple[str, Routes]]] | None:
        """Routes from the options, checked."""
        if self.options.routes is None:
            return None
        if len(self.options.routes) != len(problems):
            raise UsageError(f"{len(self.options.routes)} phases of routes for {len(problems)}", where="taccl.routes")
        out = []
        for number, (p, phase) in enumerate(zip(problems, self.options.routes, strict=True)):
            of = {(a, b): i for i, (a, b, _) in enumerate(p.links)}
            if len(phase) != len(p.chunks):
                raise UsageError(f"routes for {len(phase)} chunks, there are {len(p.chunks)}", where=f"taccl.routes[{number}]")
            found = []
            for c, pairs in enumerate(phase):
                here, where = {p.chunks[c].source}, f"taccl.routes[{number}][{c}]"
                for a, b in pairs:
                    if (a, b) not in of or a not in here or b in here:
                        raise UsageError(f"chunk {c} cannot go from {a} to {b} there", where=where, hint="plan without routes")
                    here.add(b)
                if not p.chunks[c].dests <= here:
                    raise UsageError(f"chunk {c} does not reach all its destinations", where=where, hint="plan without routes")
                found.append(tuple(of[a, b] for a, b in pairs))
            out.append([("given", tuple(found))])
        return out

    # ---- orders and times ----
    def _candidates(self, problems: Sequence[RoutingProblem], choices: Sequence[Sequence[tuple[str, Routes]]]) -> list[_Candidate]:
        """Every choice of routes (the k-th of each phase together), first whole, then in more and more instances while that helps."""
        found: list[_Candidate] = []
        for k in range(max(map(len, choices))):
            picked = [c[min(k, len(c) - 1)] for c in choices]
            phases, how = tuple(r for _, r in picked), tuple(h for h, _ in picked)
            if any(phases == other.phases for other in found):
                continue
            mine: list[list[_Candidate]] = []
            for instances in self._instances(sum(len(links) for phase in phases for links in phase)):
                if mine and monotonic() > self.deadline - 0.6 * self.problem.time_limit_s:
                    break
                transfers = self._transfers(problems, phases, instances)
                timing = Timing.of(self.topology, self.chunk_bytes(instances), self.problem.transport)
                schedules = improved(transfers, timing, self._ties(transfers), self.deadline - 0.5 * self.problem.time_limit_s)
                mine.append([_Candidate(phases, how, instances, transfers, s) for s in schedules])
                best_s = mine[-1][0].schedule.makespan_s
                if found and len(mine) == 1 and best_s > FAR * found[0].schedule.makespan_s:
                    break
                if len(mine) > 2 and best_s >= 0.999 * mine[-3][0].schedule.makespan_s:
                    break
            found += [c for group in mine for c in group]
        return sorted(found, key=lambda c: (c.schedule.makespan_s, len(c.transfers)))

    def _instances(self, transfers: int) -> list[int]:
        if self.options.instances is not None:
            return [self.options.instances]
        exact = self.problem.size_bytes / self.per_buffer / self.chunkup
        most = min(MOST_INSTANCES, max(1, int(exact // SMALLEST_BYTES)), max(1, MOST_TRANSFERS // max(transfers, 1)))
        return [1 << i for i in range(most.bit_length())]

    def _ties(self, transfers: Sequence[Transfer]) -> list[int]:
        """Own-box chunks first, then near ranks, as in the paper."""
        n, links = len(self.problem.ranks), self.topology.links
        return [(n if links[x.link].remote else 0) + (links[x.link].src - links[x.link].dst) % n for x in transfers]

    def _transfers(self, problems: Sequence[RoutingProblem], phases: Sequence[Routes], instances: int) -> list[Transfer]:
        """All transfers on the forward topology's links; the gather of an all-reduce waits for the chunk's sum."""
        out: list[Transfer] = []
        if self.problem.op in REDUCES:
            out = _backwards(transfers_of(problems[0], phases[0], instances))
        if self.problem.op not in REDUCES or self.problem.op == "all-reduce":
            sums: dict[int, list[int]] = {}
            for t, x in enumerate(out):
                if self.topology.links[x.link].dst == self.chunks[x.chunk // instances].source:
                    sums.setdefault(x.chunk, []).append(t)
            first = len(out)
            for x in transfers_of(problems[-1], phases[-1], instances):
                out.append(replace(x, after=tuple(first + b for b in x.after) or tuple(sums.get(x.chunk, ()))))
            if self.sketch is not None and self.sketch.enforce_ordering:
                out[first:] = self._own_first(out, first, instances)
        return out

    def _own_first(self, transfers: Sequence[Transfer], first: int, instances: int) -> list[Transfer]:
        """On links between boxes, what a sender forwards goes behind its own."""
        own: dict[int, list[int]] = {}
        links = self.topology.links

        def mine(x: Transfer) -> bool:
            return self.chunks[x.chunk // instances].source == links[x.link].src

        for t in range(first, len(transfers)):
            if links[transfers[t].link].remote and mine(transfers[t]):
                own.setdefault(transfers[t].link, []).append(t)
        return [x if mine(x) else replace(x, behind=tuple(own.get(x.link, ()))) for x in transfers[first:]]

    # ---- the best, lowered ----
    def _decide(self, candidates: Sequence[_Candidate]) -> tuple[_Candidate, Program, Runs, Schedule]:
        """The fastest by simulation among about SIMULATED. All schedules of the same routes and instances are tried or none, so that the
        routes and instances in the options decide the rest again."""
        groups: dict[tuple[tuple[Routes, ...], int], list[_Candidate]] = {}
        for candidate in candidates:
            groups.setdefault((candidate.phases, candidate.instances), []).append(candidate)
        tried: list[tuple[float, int, _Candidate, Program, Runs, Schedule]] = []
        for group in groups.values():
            late = monotonic() > self.deadline - 0.2 * self.problem.time_limit_s
            if tried and (late or len(tried) >= SIMULATED or len(group[0].transfers) > MOST_TRANSFERS):
                break
            for candidate in group:
                program, runs, schedule = self._lowered(candidate)
                time_s = simulated_time_s(program, self.problem.fabric, self.problem.ranks, self.problem.transport) if len(candidates) > 1 else 0.0
                tried.append((time_s, len(tried), candidate, program, runs, schedule))
        _, _, best, program, runs, schedule = min(tried, key=lambda x: x[:2])
        return best, program, runs, schedule

    def _lowered(self, candidate: _Candidate) -> tuple[Program, Runs, Schedule]:
        k, transfers = candidate.instances, candidate.transfers
        chunk_bytes = self.chunk_bytes(k)
        timing = Timing.of(self.topology, chunk_bytes, self.problem.transport)
        layout = Layout.of(self.problem, self.topology, self.chunks, self.per_buffer, self.chunkup, k, transfers, candidate.schedule.order)

        def may_join(a: int, b: int) -> bool:
            return adjoining(layout, self.topology, transfers, a, b)

        runs: Runs = [(t,) for t in candidate.schedule.order]
        schedule = candidate.schedule
        if self.options.merge is not False:
            limit = min(self.deadline, monotonic() + 0.1 * self.problem.time_limit_s, monotonic() + self.options.solver_time_s)
            runs, schedule = join_runs(transfers, timing, schedule, may_join, deadline=limit, nodes=self.options.nodes)
        name = f"taccl {self.problem.op}"
        return lower_transfers(layout, self.topology, transfers, runs, schedule, chunk_bytes, name), runs, schedule


def _backwards(transfers: Sequence[Transfer]) -> list[Transfer]:
    """A gather's transfers as the reduction's: each waits for those that waited for it, and adds."""
    waiting: list[list[int]] = [[] for _ in transfers]
    for t, x in enumerate(transfers):
        for b in x.after:
            waiting[b].append(t)
    return [Transfer(x.chunk, x.link, tuple(waiting[t]), adds=True) for t, x in enumerate(transfers)]


def _greedy(problem: RoutingProblem, deadline: float) -> tuple[Routes, float]:
    """The better of the greedy routes and how long their schedule takes."""
    tried: list[tuple[float, bool, Routes]] = []
    begin = monotonic()
    for rare in (False, True):
        if rare and all(len(c.dests) == 1 for c in problem.chunks):
            break
        routes = greedy_routes(problem, deadline, rare=rare)
        transfers = transfers_of(problem, routes)
        tried.append((improved(transfers, problem.timing, [0] * len(transfers), deadline)[0].makespan_s, rare, routes))
        if len(transfers) > MOST_TRANSFERS or monotonic() > deadline - (deadline - begin) / 2:
            break
    horizon_s, _, routes = min(tried, key=lambda x: x[:2])
    return routes, horizon_s


@lru_cache(maxsize=64)
def _routed(problem: RoutingProblem, limits_s: tuple[float, float], nodes: int, binaries: int) -> tuple[tuple[str, Routes], ...]:
    """Routes to choose from, (how, routes): the integer program's and the greedy ones. Kept for the sizes to come; it depends on its arguments."""
    begin = monotonic()
    greedy, horizon_s = _greedy(problem, begin + limits_s[0])
    found: list[tuple[str, Routes]] = [("greedy", greedy)]
    size = sum(map(len, problem.allowed)) / max(1, len(problem.group))
    if size > binaries or not nodes:
        return tuple(found)
    if horizon_s <= problem.floor_s * (1 + 1e-9):
        return (("greedy, at the bound", greedy),)
    exact = route_exactly(problem, greedy, horizon_s, deadline=begin + limits_s[1], nodes=nodes)
    if exact is None:
        return tuple(found)
    gap = exact.time_s / exact.floor_s - 1 if exact.floor_s > 0 else float("inf")
    text = "optimal" if exact.optimal else f"within {100 * gap:.3g} %" if gap < float("inf") else "best found"
    return ((f"integer program: {text}", exact.routes), ("greedy", greedy))
