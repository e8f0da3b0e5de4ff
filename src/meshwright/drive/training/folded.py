"""Layouts whose programs are too large to write out: one rank of every stage is lowered and simulated, the others being its images.

`lower.folded` says which layouts have alike ranks. Collectives are rings in rank order, which symmetric ranks walk alike: the program of one is
independent of the devices, so it is planned once per operation, number of members and size. Where the fabric has not the layout's symmetry
(a data-parallel ring that leaves servers at some of its ranks only) a placement is refused, and another nesting of the axes may do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ...cost import Cost, Priced
from ...decide.pipeline import one_f_one_b_order
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph, Work
from ...lower.folded import folded_works
from ...lower.training import lower_training
from ...plan.plan import TrainingLayout
from ...program.calls import Callee, InlinedProgram
from ...program.first_microbatches import first_microbatches
from ...program.flat import flatten, represented_by
from ...program.phases import phases
from ...program.program import Program
from ...timeline import Timeline
from ...trace.phases import phase_seconds
from .collectives import CollectivePlanner, rank_order_ring
from .schedules import Orders

__all__ = [
    "MAX_FOLDED_STEPS", "FoldedStep", "SCOUTED_MICROBATCHES", "RankOrderRings", "Steady", "folded_step", "steady", "steady_of",
    "step_of_lone_sums", "with_microbatches", "worst_bytes",
]  # fmt: skip

# Steps of a folded program's representatives, calls written out: larger candidates are not judged.
MAX_FOLDED_STEPS = 5_000_000
# Ranks from which on a ring is stored by one of its members: that of 1,024 ranks has 4 million steps, which took 80 s to write and to fold again.
MIN_FOLDED_RING = 256
# Micro-batches beyond the stages of the two programs from which the step of a folded one is extrapolated.
SCOUTED_MICROBATCHES = (4, 8)


@dataclass(frozen=True, kw_only=True)
class FoldedStep:
    program: Program
    callees: dict[str, Program]
    works: dict[str, Work]
    timeline: Timeline
    needs_bytes: tuple[int, ...]  # per rank, an upper bound over every order
    microbatches: int


@dataclass
class RankOrderRings:
    """What lowering calls for a collective (`CollectivePlanner.for_placement`): rings in rank order. Planned collectives are entered in `planner`."""

    planner: CollectivePlanner
    placement: tuple[str, ...]
    known: dict[tuple[str, int, int], Callee] = field(default_factory=dict)

    def __call__(self, purpose: str, ranks: tuple[int, ...], size_bytes: int, op: str = "all-reduce") -> Callee:
        key = op, len(ranks), size_bytes
        if key not in self.known:
            devices = tuple(self.placement[r] for r in ranks)
            only = rank_order_ring(len(ranks), folded=len(ranks) >= MIN_FOLDED_RING)
            self.known[key] = self.planner.collective(purpose, devices, size_bytes, op, only=only)
        return self.known[key]


def folded_step(
    graph: OpGraph, layout: TrainingLayout, fabric: Fabric, cost: Cost, placement: tuple[str, ...], planner: CollectivePlanner,
    orders: Orders = (),
) -> FoldedStep:  # fmt: skip
    """The layout lowered folded and simulated; `orders` as of `LayoutCandidate`.

    Raises: Unsupported where ranks are not alike, or the fabric or the placement has not their symmetry.
    """
    from ...simulate import simulate_folded

    program, callees = lower_training(graph, layout, one_f_one_b_order, RankOrderRings(planner, placement), folded=True, orders=orders)
    works = folded_works(graph, layout)
    timeline = simulate_folded(program, fabric, placement, cost, works=works, programs=callees)
    return FoldedStep(
        program=program, callees=callees, works=works, timeline=timeline, needs_bytes=worst_bytes(program, callees), microbatches=layout.microbatches
    )


def step_of_lone_sums(
    graph: OpGraph, layout: TrainingLayout, fabric: Fabric, cost: Cost, placement: tuple[str, ...], planner: CollectivePlanner,
    orders: Orders = (),
) -> FoldedStep:  # fmt: skip
    """The layout lowered folded and simulated with each collective as one step of its members, as long as it takes alone among the devices of the
    first of them: for scouts on placements that have not the layout's symmetry. It shares no link with others.

    Raises: Unsupported where ranks are not alike.
    """
    from ...check.folded.shadow import shadow
    from ...simulate import simulate_program

    program, callees = lower_training(graph, layout, one_f_one_b_order, planner.for_placement(placement), folded=True, orders=orders)
    works, made = folded_works(graph, layout), shadow(program, callees).program
    alone = {made.ops.key(op): Priced(planner.by_hash[name][1].time_s) for op, name in enumerate(made.ops.graph) if name in callees}
    timed = cost.with_table(alone, source=cost.source)
    found = simulate_program(made, fabric, placement, timed, works=works, record=False)
    peaks = np.array(found.memory_peak_bytes)[represented_by(program)]
    return FoldedStep(
        program=program, callees=callees, works=works, timeline=replace(found, memory_peak_bytes=tuple(peaks.tolist())),
        needs_bytes=worst_bytes(program, callees), microbatches=layout.microbatches,
    )  # fmt: skip


def steady(layout: TrainingLayout) -> bool:
    """Whether few micro-batches of a program say how long all take: 1F1B's, whose sums over replicas come once a step."""
    return layout.schedule == "1f1b" and layout.zero_level < 2


def with_microbatches(layout: TrainingLayout, microbatches: int) -> TrainingLayout:
    """The layout with so many micro-batches of the same size."""
    return msgspec.structs.replace(layout, microbatches=microbatches, global_batch=layout.data * layout.microbatch_size * microbatches)


def worst_bytes(program: Program, callees: dict[str, Program]) -> tuple[int, ...]:
    """Bytes per rank that a folded program can need in some order, at most."""
    from ...check.folded.fabric import folded_memory
    from ...check.folded.shadow import shadow

    return tuple(folded_memory(shadow(program, callees)).needed_bytes)


@dataclass(frozen=True)
class Steady:
    """Programs from which the step of a layout follows: the whole one, or those of two numbers of micro-batches, fewest first, in whose steady
    state every further one takes as long as the one before."""

    programs: tuple[tuple[int, InlinedProgram], ...]  # with their micro-batches
    microbatches: int  # of a step

    def time_s(self, fabric: Fabric, placement: tuple[str, ...], cost: Cost, works: Mapping[str, Work]) -> float:
        from ...simulate import simulate_stored

        return self._follow(lambda p: simulate_stored(p.program, fabric, placement, cost, works=works, record=False).makespan_s)

    def mean_phases_s(self, fabric: Fabric, placement: tuple[str, ...], cost: Cost, works: Mapping[str, Work]) -> dict[str, float]:
        """Seconds in each phase, and idle ones, of a step: the mean over its ranks."""
        from ...simulate import simulate_stored

        found: list[list[dict[str, float]]] = []
        for _, p in self.programs:
            t = simulate_stored(p.program, fabric, placement, cost, works=works, record=True)
            found.append(phase_seconds(t.spans, phases(p), represented_by(p.program).tolist(), t.makespan_s))
        rows = dict(zip((id(p) for _, p in self.programs), found, strict=True))
        return {name: self._follow(lambda p, name=name: sum(r[name] for r in rows[id(p)]) / len(rows[id(p)])) for name in found[0][0]}  # type: ignore[misc]

    def _follow(self, seconds: Callable[[InlinedProgram], float]) -> float:
        last, program = self.programs[-1]
        time_s = seconds(program)
        if last == self.microbatches:
            return time_s
        first, fewer = self.programs[0]
        return time_s + (self.microbatches - last) * (time_s - seconds(fewer)) / (last - first)


def steady_of(program: Program, programs: Mapping[str, Program], layout: TrainingLayout, flat: InlinedProgram | None = None) -> Steady:
    """`program` of all micro-batches of the layout, or of as many as are scouted; `flat`: it flattened, where that is at hand."""
    few, more = (layout.pipeline + extra for extra in SCOUTED_MICROBATCHES)
    if program.fold is None or layout.microbatches <= more or not steady(layout):
        return Steady(((layout.microbatches, flat or flatten(program, programs)),), layout.microbatches)
    return Steady(tuple((n, flatten(first_microbatches(program, n), programs)) for n in (few, more)), layout.microbatches)
