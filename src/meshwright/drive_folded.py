"""Layouts whose programs are too large to write out: one rank of every stage is lowered and simulated, the others being its images.

`lowering_folded` says which layouts have alike ranks. Collectives are rings in rank order, which symmetric ranks walk alike: the program of one is
independent of the devices, so it is planned once per operation, number of members and size. Where the fabric has not the layout's symmetry
(a data-parallel ring that leaves servers at some of its ranks only) a placement is refused, and another nesting of the axes may do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from .cost import Cost
from .decide.collective import Ring
from .decide.pipeline import one_f_one_b_order
from .drive_collectives import CollectivePlanner
from .fabric import Fabric
from .graph import OpGraph, Work
from .lowering import lower_training
from .lowering_folded import folded_works
from .plan import TrainingLayout
from .program import Program
from .program_calls import Callee
from .program_flat import represented_by
from .timeline import Timeline

__all__ = ["MAX_FOLDED_STEPS", "FoldedStep", "RankOrderRings", "folded_step", "with_microbatches", "worst_bytes"]

MAX_FOLDED_STEPS = 5_000_000  # of the representatives, calls written out


@dataclass(frozen=True, kw_only=True)
class FoldedStep:
    program: Program
    callees: dict[str, Program]
    works: dict[str, Work]
    timeline: Timeline
    needs_bytes: tuple[int, ...]  # per rank, an upper bound over every order


@dataclass
class RankOrderRings:
    """What lowering calls for a collective (`CollectivePlanner.for_placement`): rings in rank order. Planned collectives are entered in `planner`."""

    planner: CollectivePlanner
    placement: tuple[str, ...]
    known: dict[tuple[str, int, int], Callee] = field(default_factory=dict)

    def __call__(self, purpose: str, ranks: tuple[int, ...], size_bytes: int, op: str = "all-reduce") -> Callee:
        key = op, len(ranks), size_bytes
        if key not in self.known:
            ring = Ring(rings=1, slices=1, order=tuple(range(len(ranks))))
            self.known[key] = self.planner.collective(purpose, tuple(self.placement[r] for r in ranks), size_bytes, op, only=ring)
        return self.known[key]


def folded_step(
    graph: OpGraph, layout: TrainingLayout, fabric: Fabric, cost: Cost, placement: tuple[str, ...], planner: CollectivePlanner
) -> FoldedStep:
    """The layout lowered folded and simulated.

    Raises: Unsupported where ranks are not alike, or the fabric or the placement has not their symmetry.
    """
    from .simulate import simulate_folded

    program, callees = lower_training(graph, layout, one_f_one_b_order, RankOrderRings(planner, placement), folded=True)
    works = folded_works(graph, layout)
    timeline = simulate_folded(program, fabric, placement, cost, works=works, programs=callees)
    return FoldedStep(program=program, callees=callees, works=works, timeline=timeline, needs_bytes=worst_bytes(program, callees))


def with_microbatches(layout: TrainingLayout, microbatches: int) -> TrainingLayout:
    """The layout with so many micro-batches of the same size."""
    return msgspec.structs.replace(layout, microbatches=microbatches, global_batch=layout.data * layout.microbatch_size * microbatches)


def worst_bytes(program: Program, callees: dict[str, Program]) -> tuple[int, ...]:
    """Bytes per rank that a folded program can need in some order, at most."""
    from .check.memory import worst_order_memory
    from .check.order import Order
    from .check.shadow import shadow

    made = shadow(program, callees)
    worst = worst_order_memory(made.program, Order(made.program))
    needs: Any = np.array(worst.peak_bytes) + np.array(worst.staging_bytes) + made.staging_bytes + made.scratch_bytes
    return tuple(int(x) for x in needs[: program.ranks][represented_by(program)])
