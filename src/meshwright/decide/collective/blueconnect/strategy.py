"""One collective as a product of small ones: a stage per level of the network's hierarchy, each with the primitive that suits it.

Cite: BlueConnect (MLSys 2019).
Left open by the paper: which factorisation, order and primitives for which size (our answer: all of them are priced by a table that counts the
load of every link, the cheapest few are simulated), how many slices (searched on the simulator), servers of different sizes (their shares are
overlaid), where a rank's part lies for reduce-scatter and all-gather (in rank order as the contract says; pieces are strided instead).
Deviations: hierarchies come from the fabric's servers and routes unless given; a level may be split into factors or joined with its
neighbour; broadcast, reduce, scatter, gather and all-to-all run on the same grid; rings of the gathering half turn the other way round.
Invariant: after stage i of the reducing half a rank holds sums over all ranks that differ from it in the first i digits only; every server
of H sends and receives 2 (H - 1) / H of the message in an all-reduce whose stages inside servers come first.
Cost: O(plans · ranks · factors) for the table, O(ranks · sum of factors · slices) steps per program, some twenty simulations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Disconnected, Unsupported, UsageError
from ....program.program import Program
from ..blink.three_phase import port_shares
from ..bounds.collective import collective_bound
from ..classic.hierarchical import servers_of
from ..classic.ring import ring_order
from ..memo import in_pieces, remember
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of, require_operation
from ..program_time import simulated_time_s
from ..rates import rate_graph
from .cost import CostTable, ranked_plans
from .grid import GridPlan, grid_program, in_rank_order
from .levels import Hierarchy, find_hierarchy, given_hierarchy
from .overlay import OverlayPlan, overlay_program
from .stages import PRIMITIVES, halves

__all__ = ["CITE", "DEVIATIONS", "BlueConnect"]

CITE = Cite(
    key="cho2019blueconnect",
    title="BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy",
    authors="M. Cho, U. Finkler, D. Kung, H. Hunter",
    year=2019,
    venue="MLSys 2019",
)
DEVIATIONS = (
    "the table counts the load of every link instead of taking a sharing factor per level",
    "parts lie in rank order where the contract says so; pieces are strided",
    "servers of different sizes are planned for by overlaying their shares",
    "rings of the gathering half turn the other way round",
)
OPS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "scatter", "gather", "all-to-all")
MAX_RANKS = 512  # the table looks at the route of every message of every stage of every plan
MAX_EXPLICIT_STEPS = 60_000  # executed steps up to which slices are written out; beyond, lanes repeat
MAX_BUILT_STEPS = 60_000  # stored steps of all candidates that are simulated; the first is simulated whatever it has


@dataclass(frozen=True)
class _Candidate:
    """A plan, whether its shares follow ports, the table's seconds (None: not in the table) and slices to begin with."""

    plan: GridPlan | OverlayPlan
    weighted: bool
    table_s: float | None
    slices: int


@dataclass(frozen=True)
class _Judged:
    candidate: _Candidate
    slices: int
    time_s: float
    steps: int  # executed
    built: int


@dataclass(frozen=True, kw_only=True)
class BlueConnect(CollectiveStrategy):
    """Options.

    levels: ranks per part of each level, innermost first, for ranks in `grid` order; None = found from servers and routes.
    grid: rank at every position, positions counted through the innermost level first; None = as found.
    factors, order, primitives: the stages: sizes of the digits (fastest first), the digit of each stage, and how each stage exchanges ("ring",
        "direct", "halving-doubling"); None = the fastest on the simulator among the `judged` cheapest by the table.
    overlay: servers' shares overlaid (needs several servers), with `primitives` inside and across; None = tried where servers differ in size.
    weighted: overlaid shares follow the ranks' share of their server's ports; None = both tried.
    parts: slices of the message that follow each other through the stages; None = searched on the simulator, at most `max_parts`.
    reverse: rings of the gathering half turn the other way. unroll: slices as explicit chunks, or as iterations of repeated
        lanes; None = explicit unless the program gets large.
    """

    name: ClassVar[str] = "blueconnect"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS
    searches: ClassVar[bool] = True

    levels: tuple[int, ...] | None = None
    grid: tuple[int, ...] | None = None
    factors: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    primitives: tuple[str, ...] | None = None
    overlay: bool | None = None
    weighted: bool | None = None
    parts: int | None = None
    max_parts: int = 32
    reverse: bool = True
    unroll: bool | None = None
    judged: int = 5

    @classmethod
    def applies(cls, problem: CollectiveProblem) -> bool:
        return problem.op in cls.operations and len(problem.ranks) <= MAX_RANKS

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected; Unsupported (operation, more than 512 ranks, ranks that cannot all reach each other); UsageError (options)."""
        self._require_sense(len(problem.ranks))
        bound = collective_bound(problem)
        require_operation(problem, self.name, self.operations)
        if len(problem.ranks) > MAX_RANKS:
            raise Unsupported(f"at most {MAX_RANKS} ranks, got {len(problem.ranks)}", hint="use --strategy forestcoll", where="blueconnect")
        try:
            best, judged = self._search(problem, self._candidates(problem, rng))
        except Disconnected as error:  # the bound found no cut, so only some pair that a stage needs cannot talk
            text = f"stages need every rank to reach every other: {error.message}"
            raise Unsupported(text, hint="use --strategy forestcoll", data=error.data) from None
        plan, slices = best.candidate.plan, best.slices
        program = self._program(problem, plan, slices, self.unroll)
        unroll = self.unroll if self.unroll is not None else bool((program.lanes.repeat == 1).all())
        chosen = replace(self, parts=slices, unroll=unroll, overlay=isinstance(plan, OverlayPlan))
        if isinstance(plan, GridPlan):
            chosen = replace(chosen, grid=plan.grid, factors=plan.factors, order=plan.order, primitives=plan.primitives)
        else:
            chosen = replace(chosen, primitives=(plan.inside, plan.across), weighted=best.candidate.weighted)
        rows = [
            {"stages": _in_words(j.candidate.plan), "slices": j.slices, "table_s": j.candidate.table_s, "simulated_s": j.time_s} for j in judged
        ]
        notes = {"stages": _in_words(plan), "slices": slices, "judged": rows, "servers": [len(s) for s in servers_of(problem)]}
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes)

    def _require_sense(self, n: int) -> None:
        for option, value in (("parts", self.parts), ("max_parts", self.max_parts), ("judged", self.judged)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="blueconnect")
        for name in self.primitives or ():
            if name not in PRIMITIVES:
                raise UsageError(f"no primitive {name!r}", where="blueconnect", hint=f"primitives: {', '.join(PRIMITIVES)}")
        if self.factors is not None:
            if int(np.prod(self.factors, dtype=object)) != n or any(k < 2 for k in self.factors):
                raise UsageError(f"factors {tuple(self.factors)} must be >= 2 and multiply to {n}", where="blueconnect")
            if self.order is not None and sorted(self.order) != list(range(len(self.factors))):
                raise UsageError(f"order must hold every digit of 0..{len(self.factors) - 1} once, got {self.order}", where="blueconnect")
            if self.primitives is not None and len(self.primitives) != len(self.factors):
                raise UsageError(f"{len(self.primitives)} primitives for {len(self.factors)} stages", where="blueconnect")
            for k, name in zip([self.factors[j] for j in self.order or range(len(self.factors))], self.primitives or (), strict=False):
                if name == "halving-doubling" and not halves(k):
                    raise UsageError(f"halving-doubling needs a power of two above 2, the stage has {k}", where="blueconnect")
        elif self.order is not None:
            raise UsageError("order without factors", where="blueconnect", hint="state factors too")
        if self.grid is not None and sorted(self.grid) != list(range(n)):
            raise UsageError(f"grid must hold every rank of 0..{n - 1} once, got {self.grid}", where="blueconnect")

    # ---- candidates -------------------------------------------------------------------------------------------------------
    def _candidates(self, problem: CollectiveProblem, rng: np.random.Generator) -> list[_Candidate]:
        """What is worth simulating, with the table's prediction."""
        if self.levels:
            hierarchy = given_hierarchy(problem, self.levels, self.grid)
        else:
            hierarchy = remember(problem.fabric, ("blueconnect hierarchy", problem.ranks), lambda: find_hierarchy(problem))
        overlaid = self._overlays(problem, hierarchy)
        if self.overlay:
            return overlaid
        table = CostTable(problem)
        if self.factors is not None:
            order = tuple(self.order) if self.order is not None else tuple(range(len(self.factors)))
            names = tuple(self.primitives) if self.primitives is not None else ("direct",) * len(order)
            grid = tuple(self.grid) if self.grid is not None else hierarchy.grid
            return [_Candidate(GridPlan(grid, tuple(self.factors), order, names), False, None, 1)]
        hierarchies = [hierarchy]
        if self.grid is not None:
            hierarchies = [replace(hierarchy, grid=tuple(self.grid))]
        elif self.levels is None and (turned := _ring_grid(problem, hierarchy, rng)) is not None:
            hierarchies.append(replace(hierarchy, grid=turned))
        found = [_Candidate(plan, False, price, table.best(plan)[0]) for plan, price in ranked_plans(table, hierarchies, self.judged)]
        return [*overlaid, *found] if self.overlay is None and hierarchy.uneven else found

    def _overlays(self, problem: CollectiveProblem, hierarchy: Hierarchy) -> list[_Candidate]:
        """Overlays of the servers' shares that apply; none unless they are wanted or servers differ."""
        wanted = self.overlay if self.overlay is not None else hierarchy.uneven and self.factors is None
        if not wanted:
            return []
        if len(hierarchy.servers) < 2 or problem.op not in ("all-reduce", "reduce-scatter", "all-gather"):
            if self.overlay:
                raise Unsupported(
                    f"shares are overlaid for all-reduce, reduce-scatter and all-gather over several servers, not for this {problem.op}",
                    hint="leave `overlay` off",
                )
            return []
        pairs = [("direct", "direct"), ("ring", "direct"), ("ring", "ring"), ("direct", "ring")]
        if self.primitives is not None:
            pairs = [(self.primitives[0], self.primitives[-1])]
        weights = [False, True] if self.weighted is None and problem.op == "all-reduce" else [bool(self.weighted)]
        shares = {False: tuple(tuple(Fraction(1, len(s)) for _ in s) for s in hierarchy.servers)}
        if True in weights:
            shares[True] = _by_ports(problem, hierarchy)
            if shares[True] == shares[False] and self.weighted is None:
                weights = [False]
        return [_Candidate(OverlayPlan(hierarchy.servers, shares[w], inside, across), w, None, 4) for w in weights for inside, across in pairs]

    # ---- simulation -------------------------------------------------------------------------------------------------------
    def _search(self, problem: CollectiveProblem, candidates: list[_Candidate]) -> tuple[_Judged, list[_Judged]]:
        """Simulate every candidate in the table's number of slices, then the two fastest in more and fewer. (best, all)

        Stops when the steps built so far exceed MAX_BUILT_STEPS or the time is up; at least one candidate is always simulated.
        """
        deadline = problem.deadline()
        elements = problem.size_bytes // problem.element_bytes
        most = min(self.max_parts, max(1, elements // len(problem.ranks)))
        spent = 0
        first: list[_Judged] = []
        for candidate in candidates:
            if first and (spent > MAX_BUILT_STEPS or deadline.past or (candidate.table_s or 0.0) > 2 * min(j.time_s for j in first)):
                continue
            first.append(self._judge(problem, candidate, self.parts or min(candidate.slices, most)))
            spent += first[-1].built
        found = list(first)
        # The time over the number of slices falls and then rises, so walking on while it falls finds the best in that direction.
        for start in sorted(first, key=lambda j: (j.time_s, j.built))[:2] if self.parts is None else []:
            for double in (True, False):
                here = start
                while spent <= MAX_BUILT_STEPS and not deadline.past and 1 <= (slices := here.slices * 2 if double else here.slices // 2) <= most:
                    trial = self._judge(problem, start.candidate, slices)
                    spent += trial.built
                    found.append(trial)
                    if trial.time_s >= here.time_s:
                        break
                    here = trial
                if here is not start:
                    break
        return min(found, key=lambda j: (j.time_s, j.steps)), found

    def _judge(self, problem: CollectiveProblem, candidate: _Candidate, slices: int) -> _Judged:
        """Simulated with lanes that repeat where that is the same program step by step (chunks lie slice by slice), else written out."""
        if in_rank_order(problem.op):
            program = self._program(problem, candidate.plan, slices, self.unroll)
        else:
            program = self._lowered(problem, candidate.plan, slices, unroll=False)
        time_s = simulated_time_s(program, problem.fabric, problem.ranks, problem.transport)
        return _Judged(candidate, slices, time_s, program.executed_steps, len(program.steps))

    def _program(self, problem: CollectiveProblem, plan: GridPlan | OverlayPlan, slices: int, unroll: bool | None) -> Program:
        """The program; `unroll` None: written out unless that gets large."""
        if unroll is None:
            once = self._lowered(problem, plan, slices, unroll=False)
            if slices == 1 or once.executed_steps > MAX_EXPLICIT_STEPS:
                return once
        return self._lowered(problem, plan, slices, unroll=unroll is not False)

    def _lowered(self, problem: CollectiveProblem, plan: GridPlan | OverlayPlan, slices: int, *, unroll: bool) -> Program:
        """Lowered once for all sizes; how often lanes repeat and how long chunks are is written in afterwards."""
        make: Any = grid_program if isinstance(plan, GridPlan) else overlay_program
        shape = slices if unroll else min(slices, 2)
        key = "blueconnect program", problem.op, problem.ranks, problem.root, problem.element_bytes, plan, shape, unroll, self.reverse
        program = remember(problem.fabric, key, lambda: make(problem, plan, slices=shape, unroll=unroll, reverse=self.reverse))
        repeat = 1 if unroll else slices
        elements, chunks = -(-problem.size_bytes // problem.element_bytes), int(program.buffers.chunks[0])
        return in_pieces(program, repeat, -(-elements // (chunks * repeat)) * problem.element_bytes)


def _ring_grid(problem: CollectiveProblem, hierarchy: Hierarchy, rng: np.random.Generator) -> tuple[int, ...] | None:
    """Positions inside every server in the order of a good ring of the first one; None where that changes nothing or servers differ."""
    servers = hierarchy.servers
    if hierarchy.uneven or not 4 <= len(servers[0]) <= 16:
        return None
    names = tuple(problem.ranks[r] for r in servers[0])
    local = CollectiveProblem(fabric=problem.fabric, op="all-reduce", ranks=names, size_bytes=4)
    order = ring_order(local, rng)
    if order == tuple(range(len(order))):
        return None
    return tuple(server[i] for server in servers for i in order)


def _by_ports(problem: CollectiveProblem, hierarchy: Hierarchy) -> tuple[tuple[Fraction, ...], ...]:
    """Shares of every server's ranks by what their ports carry; ranks without a port of their own get nothing."""
    graph = rate_graph(problem.fabric, problem.ranks)
    found = []
    for members, shares in zip(hierarchy.servers, port_shares(problem, graph, [list(s) for s in hierarchy.servers]), strict=True):
        by_rank = dict(shares)
        found.append(tuple(by_rank.get(r, Fraction(0)) for r in members))
    return tuple(found)


def _in_words(plan: GridPlan | OverlayPlan) -> str:
    if isinstance(plan, OverlayPlan):
        return f"servers of {'+'.join(str(len(s)) for s in plan.servers)} overlaid, {plan.inside} inside, {plan.across} across"
    return " then ".join(f"{name} of {plan.factors[j]} (stride {plan.strides[j]})" for j, name in zip(plan.order, plan.primitives, strict=True))
