"""Breadth-first pipelines: looped stages, every micro-batch through one local stage before the next; weights may be fully sharded.

Cite: see CITE.
Left open by the paper: the order of micro-batches in the backward pass, and groups for many micro-batches. Our answers: ascending, or descending as
    PyTorch runs them (`reverse`); `group` micro-batches pass forward and backward before the next ones do (0: all at once), which bounds
    the memory at the price of one fill per group.
Sharded (`sharded`, with data-parallel replicas): each device gathers a stage's weights before its forwards and again before its backwards and
    reduces its gradients after them, once per pass (so `group` cannot be used); at most
    two stages are resident, so a gather waits until the stage before the last one
    is done with. Unsharded replicas all-reduce a stage's gradients as soon as they are final, as with every schedule.
Invariant: equal stages, free messages, one group, N >= devices: (N + (devices-1)/chunks)·(F + B); N < devices adds
    (chunks-1)·(devices-N)·(F+B)/chunks.
    Every device keeps group·chunks stage activations.
Cost: O(devices · chunks · microbatches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

import numpy as np

from ...cite import Cite
from ...errors import Unsupported, UsageError
from .orders import looped
from .problem import Action, Collective, PipelineProblem, PipelineStrategy, Schedule, Traits

__all__ = ["CITE", "BreadthFirst"]

CITE = Cite(
    key="lamypoirier2023breadthfirst", title="Breadth-First Pipeline Parallelism", year=2023, venue="MLSys", authors="Joel Lamy-Poirier",
    url="https://arxiv.org/abs/2211.05953",
)  # fmt: skip
# Gathered stages that a device holds at once: the one that computes, and the next, whose gathering hides behind it.
RESIDENT_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class BreadthFirst(PipelineStrategy):
    """`chunks`: stages per device; `group`: micro-batches per pass, 0: all; `reverse`: order of backwards; `sharded`: weights over replicas."""

    name: ClassVar[str] = "breadth-first"
    cite: ClassVar[Cite] = CITE
    told: ClassVar[tuple[str, ...]] = ("chunks",)

    chunks: int = 2
    group: int = 0
    reverse: bool = False
    sharded: bool = False

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        found = []
        for v in chunks:
            found.append(cls(chunks=v))
            if problem.data > 1:
                found.append(cls(chunks=v, sharded=True))
            elif problem.microbatches >= 2 * problem.devices:
                found.append(cls(chunks=v, group=problem.devices))
        return tuple(found)

    @property
    def traits(self) -> Traits:
        return Traits(stages_per_device=self.chunks)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n, v = problem.devices, problem.microbatches, self.chunks
        if v < 1 or self.group < 0:
            raise UsageError(f"must be >= 1 stage and >= 0 micro-batches, got {v} and {self.group}", where="chunks, group")
        if self.sharded and problem.data < 2:
            raise UsageError("weights are sharded over data-parallel replicas, and there is one", where="sharded", hint="give data >= 2")
        if self.sharded and 0 < self.group < n:
            raise Unsupported("sharded gradients are reduced once per step", where="group", hint="leave out the group, or do not shard")
        passes = self._passes(n)
        orders, collectives = [], []
        for d in range(p):
            order: list[Action] = []
            runs: list[tuple[str, int, int, int]] = []  # (kind, stage, first place, last place)
            for group in passes:
                back = list(reversed(group)) if self.reverse else list(group)
                for kind, chunks, which in (("F", range(v), list(group)), ("B", reversed(range(v)), back)):
                    for c in chunks:
                        runs.append((kind, c * p + d, len(order), len(order) + len(which) - 1))
                        order += [Action(kind, c * p + d, m) for m in which]  # type: ignore[arg-type]
            orders.append(tuple(order))
            collectives.append(self._collectives(runs))
        return Schedule(
            name=self.name, devices=p, stages=p * v, placement=(looped(p, v),), copy_of=(0,) * n, orders=tuple(orders),
            collectives=tuple(collectives) if self.sharded else (), options=asdict(self),
        )  # fmt: skip

    def _passes(self, microbatches: int) -> list[range]:
        size = self.group or microbatches
        return [range(first, min(first + size, microbatches)) for first in range(0, microbatches, size)]

    def _collectives(self, runs: list[tuple[str, int, int, int]]) -> tuple[Collective, ...]:
        found: list[tuple[int, int, Collective]] = []
        for i, (kind, stage, first, end) in enumerate(runs):
            if not (i and runs[i - 1][1] == stage):  # still there from the pass before
                # its buffer is that of the run before the last one, so the gather waits for the end of that run
                freed = runs[i - RESIDENT_STAGES][3] if i >= RESIDENT_STAGES else -1
                found.append((freed, 0, Collective("gather", stage, 0, freed, first)))
            if kind == "B":
                found.append((end, 1, Collective("reduce", stage, 0, end)))
        return tuple(c for _, _, c in sorted(found, key=lambda x: (x[0], x[1], x[2].before)))
