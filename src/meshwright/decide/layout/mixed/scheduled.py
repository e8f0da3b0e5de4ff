"""Candidates with other pipeline schedules than 1F1B: interleaved, breadth-first, zero-bubble, V-shaped, on the degrees that others proposed.

Cite: Narayanan et al., SC 2021 (degrees and interleaving together). Left open there: which degrees are worth it, and schedules that came later.
Our answer: every schedule of the pipeline decision, by its orders and a layout's own seconds; the most promising first. Degrees wait in a queue by
what no schedule on them goes below (`schedule_bounds`); when it is their turn they are cut into every schedule's pieces so that the longest piece is
as short as can be, and each of these waits by what no order of its pieces goes below. What comes to the front is priced. The queue is done when its
front is no longer near the best found so far. Per degrees and choice the fastest that fits is proposed.
Cost: O(actions) per evaluation, compiled; evaluations are counted and bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np

from ....cite import Cite
from ....profile.layer_profile import Entry
from ....profile.layer_table import LayerChoice
from ....profile.network import MAX_PASSES, ProfiledLayout, ProfiledSchedule, ProfiledStage
from ..grid import CITE as GRID_CITE
from .candidate import Candidate, Demands, Estimate, Judged, LayersStrategy, Problem
from .proposals import with_best_choices
from .schedule_bounds import cannot_fit, least_time_s, pieces_time_s
from .schedules import Variant
from .split import split_layers

__all__ = ["Scheduled"]

Layers = tuple[int, ...]
# Share of time by which a schedule must be faster to be preferred to one that needs less memory: less than the closed form is off.
MIN_GAIN = 0.002


@dataclass(frozen=True, kw_only=True)
class Scheduled(LayersStrategy):
    """Options. slack: degrees are looked at while no schedule's least time is above this many times the best time found; evaluations: at most;
    per_layer: candidates, fastest first, whose layers then choose recomputation and sharding one by one."""

    name: ClassVar[str] = "schedules"
    cite: ClassVar[Cite] = GRID_CITE
    refines: ClassVar[bool] = True

    slack: float = 1.05
    evaluations: int = 4_000
    per_layer: int = 6

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        if problem.schedules is None:
            return
        best_s = min((j.estimate.time_s for j in judged if j.estimate.over_bytes <= 0), default=float("inf"))
        bases, cuts = _bases(problem, judged), dict[tuple[object, ...], Layers]()
        waiting: list[tuple[float, int, int, Candidate]] = [(least_s, i, -1, base) for i, (least_s, base) in enumerate(bases)]
        fitting: dict[int, tuple[Estimate, Candidate]] = {}
        settled: set[tuple[object, ...]] = set()  # fits with less recomputation
        left = self.evaluations
        while waiting and left > 0 and waiting[0][0] <= self.slack * best_s:
            least_s, i, number, c = heapq.heappop(waiting)
            if number < 0:
                for k, (made, split) in enumerate(_on_schedules(problem, c, cuts)):
                    if not cannot_fit(problem, made):
                        heapq.heappush(waiting, (max(least_s, pieces_time_s(problem, made, split=split)), i, k, made))
                continue
            if i in fitting and fitting[i][0].time_s <= (1 + MIN_GAIN) * least_s:
                continue  # no other schedule gains more
            key = (*_degrees(c), c.choices[0].sharding, number)
            if key in settled:
                continue
            e = problem.estimate(c)
            left -= 1
            if e.over_bytes <= 0 and np.isfinite(e.time_s):
                settled.add(key)
                best_s = min(best_s, e.time_s)
                if i not in fitting or _better(e, fitting[i][0]):
                    fitting[i] = (e, c)
        found = [(e.time_s, c) for e, c in fitting.values()]
        found.sort(key=lambda x: x[0])
        for _, c in found[: self.per_layer]:
            chosen = with_best_choices(problem, c, problem.choices_of(c), self.name)
            if chosen is not None:
                yield chosen
        yield from (c for _, c in found)


def _better(a: Estimate, b: Estimate) -> bool:
    if abs(a.time_s - b.time_s) <= MIN_GAIN * min(a.time_s, b.time_s):
        return max(a.memory_bytes) < max(b.memory_bytes)
    return a.time_s < b.time_s


def _degrees(c: Candidate) -> tuple[object, ...]:
    return (tuple(s.replicas[0] for s in c.layout.stages), c.layout.microbatch, c.layout.microbatches[0], c.layout.context)


def _bases(problem: Problem, judged: Sequence[Judged]) -> list[tuple[float, Candidate]]:
    """Pipelines that are alike, with the same choice in all layers, whose state fits somehow, and the least time of any schedule on them."""
    found: dict[tuple[object, ...], tuple[float, Candidate]] = {}
    for j in judged:
        c, layout = j.candidate, j.candidate.layout
        alike = all(s.replicas.count(s.replicas[0]) == layout.data for s in layout.stages) and len(set(layout.microbatches)) == 1
        if len(layout.stages) == 1 or not alike or layout.schedule is not None or len(set(c.choices)) > 1:
            continue
        key = (*_degrees(c), c.choices[0])
        if key not in found and not cannot_fit(problem, c):
            found[key] = (least_time_s(problem, c), c)
    return sorted(found.values(), key=lambda x: (x[0], x[1].layout.name, x[1].choices[0]))


def _on_schedules(problem: Problem, base: Candidate, known: dict[tuple[object, ...], Layers]) -> Iterator[tuple[Candidate, bool]]:
    """On every schedule, and whether that parts the backward."""
    assert problem.schedules is not None
    layout, layers = base.layout, problem.table.layers
    for variant in problem.schedules.variants(len(layout.stages), layout.microbatches[0], layers):
        if len(variant.stage_of) <= layers and len(variant.stage_of) * layout.microbatches[0] * layout.data <= MAX_PASSES:
            yield replace(base, layout=_cut(problem, layout, variant, base.choices[0], known), source=Scheduled.name), variant.split


def _cut(problem: Problem, layout: ProfiledLayout, variant: Variant, choice: LayerChoice, known: dict[tuple[object, ...], Layers]) -> ProfiledLayout:
    """Cut by the times of layers whose state is not sharded: messages of sharding are a few layers' affair, and many choices share the cut."""
    column = tuple(s.replicas[0] for s in layout.stages)
    key = (column, layout.microbatch, choice.recompute, choice.tensor, choice.context, variant.stage_of)
    if key not in known:
        times = {}
        for r in dict.fromkeys(column):
            a = problem.table.priced(Entry(r.device, layout.microbatch, r.tensor), choice._replace(sharding=0), layout.data)
            times[r] = a["forward_s"] + a["backward_s"]
        known[key] = split_layers([times[column[s]] for s in variant.stage_of])
    pieces = known[key]
    held = np.bincount(variant.stage_of, pieces, len(layout.stages))
    stages = tuple(ProfiledStage(layers=int(n), replicas=s.replicas) for n, s in zip(held, layout.stages, strict=True))
    schedule = ProfiledSchedule(name=variant.label, layers=pieces, stage_of=variant.stage_of)
    return msgspec.structs.replace(layout, stages=stages, schedule=schedule, name=f"{layout.name} {variant.label}")
