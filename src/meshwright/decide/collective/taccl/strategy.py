"""Routes, orders and times of chunks under a communication sketch, by integer programs that start from a greedy plan.

Cite: A. Shah and others, TACCL (NSDI 2023, arXiv 2111.04867).
Left open by the paper: a sketch when the user has none (our answer: derived from the fabric, see `topology`); how far the result is
from the best (the certified cut bound, which also stops the search); chunk counts (pipelined instances are tried in the same model, the
simulator decides).
Deviations: HiGHS instead of Gurobi; relay cuts, big-M from a known schedule, symmetric variables identified instead of equated; links of
the fabric are the resources, so switch hyperedges and shared NICs need no extra constraints; latency delays a chunk but does not occupy a
link, as in the simulator; besides the paper's greedy order an eager one, and both improved by scheduling backwards and forwards;
reductions run backwards on reversed links.
Invariant: every chunk reaches every destination on links of the sketch; it is sent only after it arrived; resources serve one chunk at a time.
Sizes: all that a plan shares with other sizes of its class (`setup`) is kept with the fabric; equal problems give equal plans either way.
Cost: greedy O(chunks · links · log), the programs are exponential in the worst case and limited by nodes and by time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ....kernels.effort import worked_s
from ....sketch import Sketch, sketch_of
from ..bounds.collective import collective_bound
from ..memo import remember
from ..problem import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, require_operation
from .routing_problem import RoutingProblem
from .schedule import Timing
from .setup import Setup, SizeClass, chunkup_of, given_routes
from .size_classes import Kept, Limits, kept_for, picked, routed, routed_phases

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


@dataclass(frozen=True, kw_only=True)
class Taccl(CollectiveStrategy):
    """Options.

    sketch: a `Sketch`, the plain data of one, or a published one's name; None = derived from the fabric.
    chunkup: chunks per block that are routed by themselves; None = the sketch's, or 1.
    instances: pipelined copies that every chunk is cut into after routing; None = chosen.
    binaries: largest routing program that is solved; larger ones keep the greedy routes. nodes: branch-and-bound nodes of each program.
    solver_work_s: counted work of each program, in seconds of a quiet core.
    merge: join neighbouring chunks into one message where that saves overhead (None and True); False: never.
    routes: links (source, destination) of every chunk, reductions first; given = no routing. unroll: there is no other form.
    """

    name: ClassVar[str] = "taccl"
    cite: ClassVar[Cite] = CITE
    searches: ClassVar[bool] = True

    sketch: Sketch | Mapping[str, Any] | str | None = None
    chunkup: int | None = None
    instances: int | None = None
    binaries: int = 6000
    nodes: int = 50
    solver_work_s: float = 20.0
    merge: bool | None = None
    routes: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] | None = None
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (uneven shards, far too many chunks), UsageError (options, a sketch that does not fit)."""
        for option, value in (("chunkup", self.chunkup), ("instances", self.instances), ("binaries", self.binaries + 1), ("nodes", self.nodes + 1)):
            if value is not None and value < 1:
                raise UsageError(f"{option} is too small: {value}", where="taccl")
        if self.solver_work_s <= 0:
            raise UsageError(f"solver_work_s must be > 0, got {self.solver_work_s}", where="taccl")
        bound = collective_bound(problem)
        require_operation(problem, self.name, OPERATIONS)
        if not self.unroll:
            raise Unsupported("taccl has no repeated form", hint="leave `unroll` on, or use --strategy forestcoll")
        options = replace(self, sketch=sketch_of(self.sketch), routes=_tuples(self.routes))
        planner = _Planner(problem, options)
        best, program = picked(planner.kept(), planner.setup, problem.size_bytes, problem.transport)
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=planner.chosen(best), notes=planner.notes(best))


def _tuples(routes: Any) -> Any:
    return None if routes is None else tuple(tuple(tuple((a, b) for a, b in links) for links in phase) for phase in routes)


class _Planner:
    """One problem; `setup` and `kept` are made once per fabric for all problems that share them."""

    def __init__(self, problem: CollectiveProblem, options: Taccl) -> None:
        assert options.sketch is None or isinstance(options.sketch, Sketch)
        self.problem, self.options = problem, options
        self.sketch: Sketch | None = options.sketch
        self.begin_s, self.clock_s = worked_s(), problem.deadline().clock_s
        chunkup = options.chunkup or chunkup_of(problem, self.sketch)
        self.same = ("taccl", problem.op, problem.ranks, problem.root, problem.peers, problem.element_bytes, self.sketch, chunkup)
        self.setup = remember(problem.fabric, self.same, lambda: Setup(problem, self.sketch, chunkup))

    def size_class(self) -> SizeClass:
        return self.setup.size_class(self.problem.size_bytes, self.problem.transport)

    def routings(self) -> list[RoutingProblem]:
        """The routing problem of every phase, for the bytes of the size class."""
        return [self.setup.routing(i, self.size_class().chunk_bytes, self.problem.transport) for i in range(len(self.setup.phases))]

    def kept(self) -> tuple[Kept, ...]:
        size_class = self.size_class()
        key = (*self.same, size_class, self.problem.transport, self.problem.budget_s, replace(self.options, chunkup=None))
        return remember(self.problem.fabric, key, lambda: self._make(size_class))

    def _make(self, size_class: SizeClass) -> tuple[Kept, ...]:
        problems, options = self.routings(), self.options
        if options.routes is not None:
            choices: Any = [[("given", r)] for r in given_routes(problems, options.routes)]
        else:
            # Phases with routes of their own have an equal part of the effort each; where one serves both, it has all.
            share_s = self.problem.budget_s / (1 if self.setup.mirrored else len(problems))
            choices = routed_phases(self.setup, problems, lambda p: routed(p, self._limits(worked_s(), share_s)))
        limits = self._limits(self.begin_s, self.problem.budget_s)
        return kept_for(self.setup, size_class, self.problem.transport, problems, choices, options.instances, limits)

    def _limits(self, begin_s: float, total_s: float) -> Limits:
        options = self.options
        return Limits(begin_s, total_s, self.clock_s, options.solver_work_s, options.nodes, options.binaries, options.merge is not False)

    def chosen(self, best: Kept) -> dict[str, Any]:
        """The options with all choices filled in."""
        links = [phase.links for phase in self.setup.phases]
        routes = tuple(
            tuple(tuple((of[k].src, of[k].dst) for k in route) for route in phase) for of, phase in zip(links, best.phases, strict=True)
        )
        chosen = replace(self.options, chunkup=self.setup.chunkup, instances=best.instances, routes=routes)
        plain = {f.name: getattr(chosen, f.name) for f in fields(chosen)}
        return plain | {"sketch": None if self.sketch is None else asdict(self.sketch)}

    def notes(self, best: Kept) -> dict[str, Any]:
        setup, problem = self.setup, self.problem
        timing = Timing.of(setup.topology, setup.chunk_bytes(problem.size_bytes, best.instances), problem.transport)
        return {
            "routing": list(best.how), "chunkup": setup.chunkup, "instances": best.instances, "transfers": len(best.transfers),
            "messages": len(best.runs), "schedule_s": best.schedule(timing).makespan_s, "symmetries": setup.symmetries,
            "logical_links": len(setup.topology.links), "sketch": "given" if self.sketch is not None else "derived from the fabric",
        }  # fmt: skip
