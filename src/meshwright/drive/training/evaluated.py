"""A layout candidate after judgement: its program, where it runs, what it takes and needs, or why it was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ...cost import Cost, Priced, RankThread
from ...decide.layout import LayoutCandidate
from ...decide.memory.regions import Chosen
from ...fabric.fabric import Fabric
from ...graph.graph import Work
from ...plan.plan import TrainingLayout
from ...program.calls import InlinedProgram
from ...program.flat import flatten, represented_by
from ...program.phases import phases
from ...program.program import Program
from ...timeline import Timeline
from ...trace.phases import phase_seconds
from .folded import Steady, steady_of

__all__ = ["KEEP_ALL", "Evaluated", "Policy", "fastest"]


@dataclass(frozen=True)
class Policy:
    """What a layout recomputes: the rule's name and the choice by stage; stages that recompute nothing are left out."""

    name: str = "none"
    stages: Mapping[int, Chosen] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        return f"recompute {self.name}" if self.name != "none" else ""


KEEP_ALL = Policy()


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A candidate after judgement; without `timeline` it was refused, `why` says why, or is not judged yet."""

    candidate: LayoutCandidate
    why: str = ""
    placement: tuple[str, ...] = ()
    placement_name: str = ""
    program: Program | None = None
    callees: dict[str, Program] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    timeline: Timeline | None = None
    excess_bytes: int = 0
    worst_rank: int = 0
    over_bytes: tuple[int, ...] = ()  # per rank: needed in the worst order less what its device has, 0 where it states none
    extrapolated_s: float = 0.0  # of a folded program of few micro-batches, whose timeline it is: a step of all of them
    worst_order_bytes: tuple[int, ...] = ()  # per rank: what it needs in the worst order (of a folded program, at most), where that was looked at
    lone_sums: bool = False  # folded, and each collective of its timeline takes as long as it does alone
    policy: Policy = KEEP_ALL  # what it recomputes
    codec_prices: Mapping[str, Priced] = field(default_factory=dict)  # of its encode and decode steps, by their keys
    fabric: Fabric | None = None
    cost: Cost | None = None

    @property
    def layout(self) -> TrainingLayout:
        assert self.candidate.layout is not None
        return self.candidate.layout

    @property
    def fits(self) -> bool:
        """It was simulated, and no rank needs more than its device has."""
        return self.timeline is not None and self.excess_bytes <= 0

    @property
    def refused(self) -> bool:
        """It was not simulated, and `why` says so; without a reason nobody has judged it yet."""
        return self.timeline is None and bool(self.why)

    @property
    def folded(self) -> bool:
        """Its program is one rank of every stage."""
        return self.program is not None and self.program.fold is not None

    @property
    def time_s(self) -> float:
        return self.extrapolated_s or (self.timeline.makespan_s if self.timeline is not None else float("inf"))

    @property
    def is_in_turns(self) -> bool:
        """Whether every rank is one thread of a processor, and the program small enough to be written out."""
        if self.timeline is None or self.fabric is None or self.folded:
            return False
        return all(self.fabric.device(name).kind == "cpu" for name in self.placement)

    @cached_property
    def in_turns_s(self) -> float:
        """The step where nothing overlaps of what such a rank computes, posts and adds: what decides how many messages pay."""
        if not self.is_in_turns or self.cost is None or self.fabric is None:
            return self.time_s
        from ...simulate import simulate_program

        cost = msgspec.structs.replace(self.cost, thread=RankThread()) if not self.cost.thread else self.cost
        flat = self.inlined.program
        return simulate_program(flat, self.fabric, self.placement, cost, works=self.works, record=False).makespan_s

    @property
    def peak_bytes(self) -> int:
        """Simulated, of the fullest rank."""
        return max(self.timeline.memory_peak_bytes) if self.timeline is not None else 0

    @property
    def worst_bytes(self) -> int:
        """What the rank that lacks most needs."""
        limit = self.fabric.device(self.placement[self.worst_rank]).memory_bytes if self.fabric is not None and self.placement else 0
        return limit + self.over_bytes[self.worst_rank] if self.over_bytes else 0

    @property
    def identity(self) -> tuple[object, ...]:
        c = self.candidate
        return (c.degrees, self.placement, c.sharding, str(self.policy), c.schedule, _divided(c.layout))

    @cached_property
    def inlined(self) -> InlinedProgram:
        assert self.program is not None
        return flatten(self.program, self.callees)

    @cached_property
    def steady(self) -> Steady:
        """What to simulate for its step at other rates."""
        assert self.program is not None
        return steady_of(self.program, self.callees, self.layout, None if self.program.fold is not None else self.inlined)

    def room_bytes(self) -> list[int]:
        """By pipeline index, what the ranks that have most are left beside what they hold throughout; empty where that is not known."""
        if self.fabric is None or self.program is None or self.program.fold is not None:
            return []
        limits = [self.fabric.device(d).memory_bytes for d in self.placement]
        b = self.inlined.program.buffers
        always = (b.persistent > 0) & (b.alias_of < 0)
        held = np.bincount(b.actor[always], weights=(b.chunks * b.chunk_bytes)[always], minlength=len(limits))
        found = [0] * self.layout.pipeline
        for rank, limit in enumerate(limits):
            p = self.layout.coordinates(rank)[0]
            found[p] = max(found[p], limit - int(held[rank]))
        return found if all(limits) else []

    def recorded(self) -> Timeline:
        """The timeline with all spans (the search keeps only totals)."""
        from ...simulate import simulate_stored

        assert self.program is not None and self.fabric is not None and self.cost is not None
        return simulate_stored(self.inlined.program, self.fabric, self.placement, self.cost, works=self.works, record=True)

    def phases(self, timeline: Timeline) -> list[dict[str, float]]:
        return phase_seconds(timeline.spans, phases(self.inlined), represented_by(self.inlined.program).tolist(), timeline.makespan_s)

    def evidence(self, timeline: Timeline) -> dict[str, float]:
        from ...evidence import evidence_of_timeline

        assert self.fabric is not None and self.cost is not None
        return evidence_of_timeline(timeline, self.inlined.program, self.cost)


def fastest(found: Iterable[Evaluated], then: Callable[[Evaluated], tuple[Any, ...]]) -> Evaluated | None:
    """Of those that fit; of equally fast ones the least by `then`."""
    return min((e for e in found if e.fits), key=lambda e: (e.time_s, *then(e)), default=None)


def _divided(layout: TrainingLayout | None) -> tuple[object, ...]:
    """What of a layout its degrees leave open: how its micro-batches, layers and split parameters are divided."""
    if layout is None:
        return ()
    first = {s.key: s.nodes[:1] for s in layout.segments}
    return layout.replica_microbatches, tuple(first[k] for s in layout.stages for k in s.segments[:1]), tuple(s.shares for s in layout.shards)
