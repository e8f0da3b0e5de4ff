"""The decision on the pipeline schedule of a training job, together with depth, micro-batch, interleaving and sharding level.

The search over degrees and sharding judges 1F1B. Then the layouts that did best with it, of every depth, are cut into the stages that other
schedules ask for; every schedule orders them by the planners' clock, and those that come out best (and, where nothing fits, those that keep least)
are lowered, simulated and judged as all layouts are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .decide.layout.data_sharding import DataSharding
from .decide.layout.problem import Degrees, LayoutCandidate
from .decide.layout.unlike import EVEN, Division
from .decide.pipeline import CITES, NAMES
from .decide.pipeline.orders import kept_peak_bytes, times
from .drive_evaluated import Evaluated
from .drive_layouts import LayoutSearch
from .drive_pipelines import SPLIT, make_strategy, schedule_label
from .drive_placements import placements_of
from .drive_schedules import actions_of, chunks_of, layout_problem, scheduled
from .drive_sharding import ShardingWanted, as_wanted
from .errors import Infeasible, MeshwrightError, Unsupported, UsageError
from .plan import Plan

__all__ = ["PipelineWanted", "candidates", "choose_schedule", "pipeline_decision", "schedule_asked", "schedule_does_not_fit"]

LAYOUTS = 4  # combinations of degrees and sharding that are tried with other schedules, best with 1F1B first
ASKED = 8  # where one schedule is asked for
SIMULATED = 4  # schedules per layout, best by the planners' clock first
LEANEST = 3  # and where none of these fits, those that keep least

Wanted = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PipelineWanted:
    """`name`: a schedule, or `auto`; `options` of that schedule. Raises: UsageError for one that does not exist."""

    name: str = "1f1b"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "auto":
            if self.options:
                raise UsageError("options belong to one schedule", where="--pipeline-option", hint="name it with --pipeline")
            return
        if self.name not in NAMES:
            raise UsageError(f"there is no pipeline schedule {self.name!r}", where="--pipeline", hint=f"there are: auto, {', '.join(NAMES)}")
        made = make_strategy(self.name, self.options)
        object.__setattr__(self, "options", {key: getattr(made, key) for key in self.options})  # typed


def candidates(devices: int, microbatches: int) -> list[Wanted]:
    """Every schedule but 1F1B that is worth trying on so many devices; those that do not exist there say so when they are planned."""
    found: list[Wanted] = [("gpipe", {}), ("breadth-first", {"chunks": 2})]
    groups = [g for g in sorted({devices, 2 * devices, microbatches}) if g == devices or devices < g <= microbatches]
    found += [("interleaved", {"chunks": 2, "group": g}) for g in groups] + [("interleaved", {"chunks": 4}), ("breadth-first", {"chunks": 4})]
    half = devices // 2
    for f in [f for f in range(1, half + 1) if devices % 2 == 0 and half % f == 0 and f <= 2]:
        found += [("chimera", {"pipes": f}), ("chimera", {"pipes": f, "split": True})]
        found += [("chimera", {"pipes": f, "mode": "double"})] if microbatches > devices else []
    return found + [(name, {}) for name in SPLIT]


def choose_schedule(
    search: LayoutSearch, fixed: tuple[int | None, int | None, int | None, int | None], best: Evaluated | None, judged: list[Evaluated],
    wanted: PipelineWanted, sharding: ShardingWanted | None = None,
) -> tuple[Evaluated | None, list[Evaluated]]:  # fmt: skip
    """The fastest that fits, of what was judged and what other schedules make of it; with a schedule asked for, only layouts that have it.

    Raises: Infeasible when one schedule is asked for, and no layout has a pipeline or the schedule exists for none of them.
    """
    if wanted.name == "1f1b":
        return best, judged
    return _Chooser(search, fixed, wanted, sharding or ShardingWanted(), list(judged)).run(best)


class _Chooser:
    def __init__(
        self, search: LayoutSearch, fixed: Any, wanted: PipelineWanted, sharding: ShardingWanted, judged: list[Evaluated]
    ) -> None:
        self.search, self.wanted, self.sharding, self.judged = search, wanted, sharding, judged
        self.refused: list[MeshwrightError] = []
        self.until = time.monotonic() + search.time_limit_s / 2
        self.problem = search.problem(fixed)
        self.grid = search.grid()
        self.built: dict[tuple[Degrees, DataSharding, Division], LayoutCandidate] = {}
        self.lazily: dict[tuple[Degrees, int, str, Division], LayoutCandidate] = {}  # with copies that sum after backward, where that may be chosen

    def run(self, best: Evaluated | None) -> tuple[Evaluated | None, list[Evaluated]]:
        auto = self.wanted.name == "auto"
        bases = self.bases()
        if not bases and not auto:
            raise Infeasible(
                f"schedule {self.wanted.name} orders the stages of a pipeline, and no layout has one", where="--pipeline",
                hint="a pipeline degree of at least 2 (--pp), or --pipeline 1f1b", data={"schedule": self.wanted.name},
            )  # fmt: skip
        made: list[Evaluated] = []
        for base in bases[: LAYOUTS if auto else ASKED]:
            if made and time.monotonic() > self.until:
                break
            made += self.try_all(base) if auto else self.try_each(base, self.planned(base, [(self.wanted.name, self.wanted.options)])[:1])
        self.judged += made
        if not made and self.refused and not auto:
            first = self.refused[0]
            raise Infeasible(
                f"{self.wanted.name}: {first.message}", where="--pipeline", hint=first.hint,
                data={"schedule": self.wanted.name, "reasons": [x.message for x in self.refused[:32]]},
            )  # fmt: skip
        fitting = [e for e in made if e.timeline is not None and e.excess_bytes <= 0 and as_wanted(e, self.sharding)]
        if best is not None and auto:
            fitting.append(best)
        best = min(fitting, key=lambda e: (e.time_s, e.candidate.schedule, e.candidate.degrees, e.placement_name), default=None)
        return best, self.judged

    def bases(self) -> list[Evaluated]:
        """Layouts with a pipeline, once per degrees, sharding, and whether work is divided equally: those that fit with 1F1B first, then by time."""
        found: dict[Any, Evaluated] = {}
        order = sorted(
            (e for e in self.judged if e.candidate.layout is not None and e.candidate.degrees.pipeline > 1 and as_wanted(e, self.sharding)),
            key=lambda e: (e.timeline is None, e.excess_bytes > 0, e.time_s if e.timeline is not None else e.candidate.estimate_s),
        )
        for e in order:
            found.setdefault((e.candidate.degrees, e.candidate.sharding, e.candidate.division == EVEN), e)
        return list(found.values())

    def try_all(self, base: Evaluated) -> list[Evaluated]:
        """Of every schedule the best by the clock, and where none of these fits the leanest."""
        d = base.candidate.degrees
        assert base.candidate.layout is not None
        planned = self.planned(base, candidates(d.pipeline, base.candidate.layout.microbatches))
        made = self.try_each(base, planned[:SIMULATED])
        if not any(e.timeline is not None and e.excess_bytes <= 0 for e in made):
            made += self.try_each(base, sorted(planned[SIMULATED:], key=lambda x: x[1])[:LEANEST])
        return made

    def try_each(self, base: Evaluated, planned: list[tuple[LayoutCandidate, int]]) -> list[Evaluated]:
        made: list[Evaluated] = []
        for candidate, _ in planned:
            if made and time.monotonic() > self.until:
                break
            assert candidate.layout is not None
            name, placement = (base.placement_name, base.placement) if base.placement else next(placements_of(candidate.layout, self.search.fabric))
            lazy = self.lazily.get(_key(candidate)) if candidate.sharding.copied else None
            for c in (candidate, lazy):
                made += self.search.evaluate_with_recomputation(c, placement, name) if c is not None else []
        return made

    def planned(self, base: Evaluated, wanted: list[Wanted]) -> list[tuple[LayoutCandidate, int]]:
        """(candidate, most bytes that a device keeps) of the schedules that exist for the base, fastest by the planners' clock first."""
        found: list[tuple[LayoutCandidate, int]] = []
        for name, options in wanted:
            label = schedule_label(name, options)
            try:
                first, *others = [self.candidate(base, name, options, label, early=early) for early in self.ways(name, options)]
                found.append(first)
                for lazy, _ in others:
                    self.lazily[_key(lazy)] = lazy
            except (Unsupported, Infeasible) as refused:
                self.refused.append(refused)
                candidate = replace(base.candidate, layout=None, schedule=label)
                self.judged.append(Evaluated(candidate=candidate, why=refused.message))
        return sorted(found, key=lambda x: (x[0].estimate_s, x[0].schedule))

    def ways(self, name: str, options: Mapping[str, Any]) -> tuple[bool, ...]:
        """Whether copies of the stages sum gradients during backward: what is to be tried. Early sums overlap, and are more messages."""
        if not _copied(name, options):
            return (False,)
        if self.sharding.overlap is not None:
            return (self.sharding.overlap,)
        return (options["sync"] != "lazy",) if "sync" in options else (True, False)

    def candidate(self, base: Evaluated, name: str, options: Mapping[str, Any], label: str, *, early: bool) -> tuple[LayoutCandidate, int]:
        degrees, depth = base.candidate.degrees, base.candidate.degrees.pipeline
        sharding = base.candidate.sharding
        if early:
            sharding = replace(sharding, overlap=True, bucket_bytes=self.sharding.bucket_bytes, copied=True)
        elif _copied(name, options):
            sharding = replace(sharding, overlap=False)
        cut = self.stages(replace(degrees, pipeline=depth * chunks_of(name, options)), sharding, base.candidate.division)
        if cut.layout is None:
            raise Infeasible(cut.why, hint="fewer stages per rank (chunks), a smaller pipeline degree, or another schedule")
        search, graph = self.search, self.search.graph_at(degrees.microbatch_size)
        placement = base.placement or tuple(d.name for d in search.fabric.devices)
        problem = layout_problem(cut.layout, graph, search.fabric, search.cost, placement, devices=depth, prices=search.prices)
        options = {**options, "placement": "straight"} if name == "search" and options.get("placement", "auto") == "auto" else options
        schedule = make_strategy(name, options).plan(problem, rng=np.random.default_rng(search.job.seed))
        layout = scheduled(cut.layout, graph, schedule)
        made = replace(
            cut, degrees=degrees, layout=layout, estimate_s=times(problem, schedule).makespan_s, schedule=label, orders=actions_of(schedule),
        )  # fmt: skip
        return made, max(kept_peak_bytes(problem, schedule))

    def stages(self, degrees: Degrees, sharding: DataSharding, division: Division) -> LayoutCandidate:
        """The layout cut into so many stages, one per pipeline index."""
        if (degrees, sharding, division) not in self.built:
            self.built[degrees, sharding, division] = self.grid.sharded(self.problem, degrees, sharding, division)
        return self.built[degrees, sharding, division]


def _copied(name: str, options: Mapping[str, Any]) -> bool:
    """The schedule has copies of the stages."""
    return name == "chimera" or options.get("placement") == "both-ways"


def _key(c: LayoutCandidate) -> tuple[Degrees, int, str, Division]:
    return c.degrees, c.sharding.level, c.schedule, c.division


def schedule_does_not_fit(
    search: LayoutSearch, fixed: tuple[int | None, int | None, int | None, int | None], judged: list[Evaluated], reason: Infeasible
) -> Infeasible:
    """`reason`, with the schedules that do fit."""
    _, tried = choose_schedule(search, fixed, None, [e for e in judged if not e.candidate.schedule], PipelineWanted(name="auto"))
    fitting = sorted((e for e in tried if e.timeline is not None and e.excess_bytes <= 0), key=lambda e: e.time_s)
    names = list(dict.fromkeys(f"{e.candidate.schedule or '1f1b'} ({e.candidate.degrees})" for e in fitting))
    hint = f"these fit, fastest first: {', '.join(names[:6])}" if names else reason.hint
    return Infeasible(reason.message, where=reason.where, hint=hint, data={**reason.data, "fit": names})


def schedule_asked(plan: Plan) -> PipelineWanted:
    """What the plan was asked to choose among."""
    options = plan.decisions.get("pipeline", {}).get("options", {})
    return PipelineWanted(name=str(options.get("asked", "1f1b")), options=dict(options.get("asked_options", {})))


def pipeline_decision(best: Evaluated, judged: list[Evaluated], wanted: PipelineWanted) -> dict[str, Any]:
    """The plan's entry: which schedule and why, and what the same degrees do with others."""
    layout = best.layout
    words = best.candidate.schedule.split()
    name = words[0] if words else "onefoneb"
    options: dict[str, Any] = {"microbatches": layout.microbatches, "asked": wanted.name, "asked_options": dict(wanted.options)}
    if words:
        options |= {"schedule": best.candidate.schedule, "stages": len(layout.stages), "split_backward": layout.split_backward}
        options |= {"copies": max(1, len(layout.placement))}
    if layout.pipeline == 1:
        return {"strategy": name, "options": options, "why": "one stage: nothing to order", "cite": []}
    if wanted.name != "auto":
        why = "as asked" if words else "the default"
    else:
        why = f"{best.time_s:.4g} s"
        rivals = [e for e in judged if e.timeline is not None and e.candidate.degrees == best.candidate.degrees and e is not best]
        told: dict[str, Evaluated] = {}
        for e in sorted(rivals, key=lambda e: (e.excess_bytes > 0, e.time_s)):
            told.setdefault(e.candidate.schedule or "1f1b", e)
        told.pop(best.candidate.schedule or "1f1b", None)
        why += "".join(f"; {label} {e.time_s:.4g} s" + (", does not fit" if e.excess_bytes > 0 else "") for label, e in told.items())
    return {"strategy": name, "options": options, "why": why, "cite": [CITES[name].key] if words else []}
