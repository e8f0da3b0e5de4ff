"""The decision on the pipeline schedule of a training job, together with depth, micro-batch, interleaving and sharding level.

The search over degrees and sharding judges 1F1B. Where that chose a pipeline by itself, the other schedules with whole backwards and one copy of
the weights are tried on its degrees, and the fastest is taken. With `auto` the layouts that did best with it, of every depth, are tried. They are
cut into the stages that other schedules ask for; every schedule orders them by the planners' clock, and those that come out best (and, where
nothing fits, those that keep least) are lowered, simulated and judged as all layouts are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...cite import Cite
from ...decide.layout.data_sharding import DataSharding
from ...decide.layout.problem import Degrees, LayoutCandidate
from ...decide.layout.unlike_devices import EVEN, Division
from ...decide.pipeline import CITES, STRATEGIES, OneFOneB, PipelineProblem, PipelineStrategy, strategy
from ...decide.pipeline.orders import kept_peak_bytes, times
from ...decide.strategies import cite_of
from ...errors import Infeasible, MeshwrightError, Unsupported, UsageError
from ...plan.context import layout_exchanges
from ...plan.plan import Plan
from ..pipeline.pipelines import Wanted, default_candidates, make_strategy, schedule_label
from .context import Context, Decision, Found, Looks
from .evaluated import Evaluated
from .pairs import exchanges_s, pairs_of
from .schedules import actions_of, layout_problem, scheduled
from .sharding import ShardingWanted, as_wanted
from .wishes import LayoutWanted

__all__ = ["PipelineWanted", "Schedule", "candidates", "schedule_asked", "schedule_does_not_fit"]

# Combinations of degrees and sharding that are tried with other schedules, best with 1F1B first.
MAX_AUTO_LAYOUTS = 4
# Combinations that are tried where one schedule is asked for.
MAX_ASKED_LAYOUTS = 8
# Schedules simulated per layout, best by the planners' clock first.
MAX_FAST_SCHEDULES = 5
# Schedules simulated besides where none of these fits: those that keep least.
MAX_LEAN_SCHEDULES = 3
# Stages per device that are tried where a schedule has the choice.
CHUNKS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class PipelineWanted:
    """`name`: a schedule, `auto`, or nothing: 1F1B, and where the search chose a pipeline whatever is fastest on its degrees; `options` of that
    schedule. Raises: UsageError for one that does not exist."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in ("", "auto"):
            if self.options:
                raise UsageError("options belong to one schedule", where="--pipeline-option", hint="name it with --pipeline")
            return
        strategy(self.name, where="--pipeline")
        made = make_strategy(self.name, self.options)
        object.__setattr__(self, "options", {key: getattr(made, key) for key in self.options})  # typed

    @property
    def one(self) -> bool:
        """One schedule is asked for that layouts must be cut for."""
        return self.name not in ("", "auto", OneFOneB.name)


def candidates(devices: int, microbatches: int, *, plain: bool = False) -> list[Wanted]:
    """Every schedule but 1F1B that is worth trying on so many devices; those that do not exist there say so when they are planned.

    One replica: how several sum is the decision on sharding. Nothing in parts of a micro-batch, which models are not run in. `plain`: with whole
    backwards and one copy of the weights.
    """
    worth = default_candidates(PipelineProblem.of(devices, microbatches), chunks=CHUNKS)
    others = [(name, options, make_strategy(name, options).traits) for name, options in worth if name != OneFOneB.name]
    return [(name, options) for name, options, t in others if t.parts == 1 and not (plain and (t.split_backward or t.copies > 1))]


@dataclass(frozen=True)
class Schedule(Decision):
    name = "schedule"

    def choose(self, found: Found, context: Context) -> Found:
        """The fastest that fits, of what was judged and what other schedules make of it; with a schedule asked for, only layouts that have it.

        Raises: Infeasible when one schedule is asked for, and no layout has a pipeline or the schedule exists for none of them.
        """
        wanted = context.wish(PipelineWanted)
        if wanted.name == OneFOneB.name:
            return found
        if not wanted.name:
            return self.on_winner(found, context)
        chooser = _Chooser(context, wanted, list(found.judged))
        best = chooser.run(found.best)
        return replace(found, best=best, judged=chooser.judged).cut(self.name, chooser.looks.budget.cut)

    def on_winner(self, found: Found, context: Context) -> Found:
        """What other schedules make of the winner, where the search chose its pipeline: a degree given by hand keeps 1F1B, and so does a layout whose
        program is too large to write out: few micro-batches say how long all take under 1F1B alone, and each other schedule takes as long as a plan.

        Nobody asked for a backward in two parts: what splitting adds only a measurement says (README's job takes a fifth more processor time on two
        cores with zb2p than with 1F1B, and roofline costs see none of it). Nor for twice the weights. Both are `auto`'s.
        """
        best = found.best
        if best is None or best.layout.pipeline == 1 or context.wish(LayoutWanted).pipeline or context.evaluator.is_folded(best.layout):
            return found
        chooser = _Chooser(context, PipelineWanted(name="auto"), [best], plain=True)
        chosen = chooser.run(best)
        return replace(found, best=chosen, judged=[*found.judged, *chooser.judged[1:]]).cut(self.name, chooser.looks.budget.cut)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        """Which schedule and why, and what the same degrees do with others."""
        best, layout, wanted = found.winner, found.winner.layout, context.wish(PipelineWanted)
        words = best.candidate.schedule.split()
        name = words[0] if words else "onefoneb"
        asked = wanted.name or ("auto" if words else OneFOneB.name)
        options: dict[str, Any] = {"microbatches": layout.microbatches, "asked": asked, "asked_options": dict(wanted.options)}
        if words:
            options |= {"schedule": best.candidate.schedule, "stages": len(layout.stages), "split_backward": layout.split_backward}
            options |= {"copies": max(1, len(layout.placement))}
            options |= {"pairs": n} if (n := sum(map(len, best.candidate.pairs))) and layout_exchanges(layout) else {}
        if layout.pipeline == 1:
            return {"pipeline": {"strategy": name, "options": options, "why": "one stage: nothing to order", "cite": []}}
        why = _why(best, found.judged) if asked == "auto" else "as asked" if words else "the default"
        return {"pipeline": {"strategy": name, "options": options, "why": why, "cite": [CITES[name].key] if words else []}}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        cite = cite_of("pipeline", STRATEGIES, entry["strategy"]) if key == "pipeline" else None
        return [(key, cite)] if cite is not None else []


def _why(best: Evaluated, judged: list[Evaluated]) -> str:
    rivals = [e for e in judged if e.timeline is not None and e.candidate.degrees == best.candidate.degrees and e is not best]
    told: dict[str, Evaluated] = {}
    for e in sorted(rivals, key=lambda e: (e.excess_bytes > 0, e.time_s)):
        told.setdefault(e.candidate.schedule or "1f1b", e)
    told.pop(best.candidate.schedule or "1f1b", None)
    others = "".join(f"; {label} {e.time_s:.4g} s" + (", does not fit" if e.excess_bytes > 0 else "") for label, e in told.items())
    return f"{best.time_s:.4g} s{others}"


class _Chooser:
    def __init__(self, context: Context, wanted: PipelineWanted, judged: list[Evaluated], *, plain: bool = False) -> None:
        self.context, self.wanted, self.judged, self.plain = context, wanted, judged, plain
        self.scouts = context.scouting()
        self.sharding = context.wish(ShardingWanted)
        self.refused: list[MeshwrightError] = []
        self.made: list[Evaluated] = []
        self.grid = context.grid()
        self.built: dict[tuple[Degrees, DataSharding, Division], LayoutCandidate] = {}
        self.lazily: dict[tuple[Degrees, int, str, Division], LayoutCandidate] = {}  # with copies that sum after backward, where that may be chosen

    def run(self, best: Evaluated | None) -> Evaluated | None:
        auto = self.wanted.name == "auto"
        bases = self.bases()
        if not bases and not auto:
            raise Infeasible(
                f"schedule {self.wanted.name} orders the stages of a pipeline, and no layout has one", where="--pipeline",
                hint="a pipeline degree of at least 2 (--pp), or --pipeline 1f1b", data={"schedule": self.wanted.name},
            )  # fmt: skip
        bases = bases[: MAX_AUTO_LAYOUTS if auto else MAX_ASKED_LAYOUTS]
        self.looks = Looks(len(bases), self.context.budget.work_s / 2)
        for base in bases:
            self.looks.at(partial(self.try_all if auto else self.try_asked, base))
        before, made = {id(e) for e in self.judged}, self.made  # ids of what is kept in `judged`
        self.judged += made
        if not made and self.refused and not auto:
            first = self.refused[0]
            raise Infeasible(
                f"{self.wanted.name}: {first.message}", where="--pipeline", hint=first.hint,
                data={"schedule": self.wanted.name, "reasons": [x.message for x in self.refused[:32]]},
            )  # fmt: skip

        def counts(e: Evaluated) -> bool:
            return (auto and e is best) or (id(e) not in before and as_wanted(e, self.sharding))

        return self.context.written_out(self.judged, lambda e: (e.candidate.schedule, e.candidate.degrees, e.placement_name), counts)

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

    def try_asked(self, base: Evaluated) -> None:
        self.try_each(base, self.planned(base, [(self.wanted.name, self.wanted.options)])[:1])

    def try_all(self, base: Evaluated) -> None:
        """Of every schedule the best by the clock, and where none of these fits the leanest."""
        d = base.candidate.degrees
        assert base.candidate.layout is not None
        planned = self.planned(base, candidates(d.pipeline, base.candidate.layout.microbatches, plain=self.plain))
        before = len(self.made)
        self.try_each(base, planned[:MAX_FAST_SCHEDULES])
        if not any(e.fits for e in self.made[before:]):
            self.try_each(base, sorted(planned[MAX_FAST_SCHEDULES:], key=lambda x: x[1])[:MAX_LEAN_SCHEDULES])

    def try_each(self, base: Evaluated, planned: list[tuple[LayoutCandidate, int]]) -> None:
        for candidate, _ in planned:
            assert candidate.layout is not None
            if self.looks.spent:
                self.made.append(Evaluated(candidate=candidate, why="not simulated: the work for schedules is done"))
                continue
            name, placement = (base.placement_name, base.placement) if base.placement else next(self.context.placements(candidate.layout))
            lazy = self.lazily.get(_key(candidate)) if candidate.sharding.copied else None
            # Links that both halves wait for may make a pair longer than its halves in a row, which costs little to look at in small programs.
            paired = any(candidate.pairs) and not self.context.is_large(candidate)
            row = replace(candidate, pairs=(), schedule=f"{candidate.schedule} overlap=False") if paired else None
            for c in (candidate, lazy, row):
                limit = min((e.time_s for e in (*self.judged, *self.made) if e.fits), default=float("inf"))
                self.made += self.scouts.judge(c, placement, name, limit) if c is not None else []

    def planned(self, base: Evaluated, wanted: list[Wanted]) -> list[tuple[LayoutCandidate, int]]:
        """(candidate, most bytes that a device keeps) of the schedules that exist for the base, fastest by the planners' clock first."""
        found: list[tuple[LayoutCandidate, int]] = []
        for name, options in wanted:
            label, chosen = schedule_label(name, options), make_strategy(name, options).settled()
            try:
                first, *others = [self.candidate(base, chosen, label, early=early) for early in self.ways(chosen, options)]
                found.append(first)
                for lazy, _ in others:
                    self.lazily[_key(lazy)] = lazy
            except (Unsupported, Infeasible) as refused:
                self.refused.append(refused)
                candidate = replace(base.candidate, layout=None, schedule=label)
                self.judged.append(Evaluated(candidate=candidate, why=refused.message))
        return sorted(found, key=lambda x: (x[0].estimate_s, x[0].schedule))

    def ways(self, made: PipelineStrategy, options: Mapping[str, Any]) -> tuple[bool, ...]:
        """Whether copies of the stages sum gradients during backward: what is to be tried. Early sums overlap, and are more messages."""
        if made.traits.copies == 1:
            return (False,)
        if self.sharding.overlap is not None:
            return (self.sharding.overlap,)
        return (options["sync"] != "lazy",) if "sync" in options else (True, False)

    def candidate(self, base: Evaluated, made: PipelineStrategy, label: str, *, early: bool) -> tuple[LayoutCandidate, int]:
        degrees, depth = base.candidate.degrees, base.candidate.degrees.pipeline
        sharding = base.candidate.sharding
        if early:
            sharding = replace(sharding, overlap=True, bucket_bytes=self.sharding.bucket_bytes, copied=True)
        elif made.traits.copies > 1:
            sharding = replace(sharding, overlap=False)
        cut = self.stages(replace(degrees, pipeline=depth * made.traits.stages_per_device), sharding, base.candidate.division)
        if cut.layout is None:
            raise Infeasible(cut.why, hint="fewer stages per rank (chunks), a smaller pipeline degree, or another schedule")
        context, graph = self.context, self.context.evaluator.graph_for(cut.layout)
        placement = base.placement or tuple(d.name for d in context.fabric.devices)
        posed = partial(layout_problem, cut.layout, graph, context.fabric, context.cost, placement, devices=depth, prices=context.evaluator.prices)
        problem = timed = posed()
        if layout_exchanges(cut.layout):  # clocked with them, and planned by them where pairs hide some
            timed = posed(exchange_s=exchanges_s(cut.layout, context.fabric, context.cost, placement, context.evaluator.exchanges))
            problem = timed if made.traits.pairs else problem
        schedule = made.plan(problem, rng=np.random.default_rng(context.job.seed))
        layout = scheduled(cut.layout, graph, schedule)
        candidate = replace(
            cut, degrees=degrees, layout=layout, estimate_s=times(timed, schedule).makespan_s, schedule=label, orders=actions_of(schedule),
            pairs=pairs_of(schedule),
        )  # fmt: skip
        return candidate, max(kept_peak_bytes(problem, schedule))

    def stages(self, degrees: Degrees, sharding: DataSharding, division: Division) -> LayoutCandidate:
        """The layout cut into so many stages, one per pipeline index."""
        if (degrees, sharding, division) not in self.built:
            self.built[degrees, sharding, division] = self.grid.sharded(self.context.problem, degrees, sharding, division)
        return self.built[degrees, sharding, division]


def _key(c: LayoutCandidate) -> tuple[Degrees, int, str, Division]:
    return c.degrees, c.sharding.level, c.schedule, c.division


def schedule_does_not_fit(context: Context, judged: list[Evaluated], reason: Infeasible) -> Infeasible:
    """`reason`, with the schedules that do fit."""
    plain = Found(None, [e for e in judged if not e.candidate.schedule])
    tried = Schedule().choose(plain, context.wishing(PipelineWanted(name="auto"), ShardingWanted()))
    fitting = sorted((e for e in tried.judged if e.fits), key=lambda e: e.time_s)
    names = list(dict.fromkeys(f"{e.candidate.schedule or '1f1b'} ({e.candidate.degrees})" for e in fitting))
    hint = f"these fit, fastest first: {', '.join(names[:6])}" if names else reason.hint
    return Infeasible(reason.message, where=reason.where, hint=hint, data={**reason.data, "fit": names})


def schedule_asked(plan: Plan) -> PipelineWanted:
    """What the plan was asked to choose among."""
    options = plan.decisions.get("pipeline", {}).get("options", {})
    return PipelineWanted(name=str(options.get("asked", "1f1b")), options=dict(options.get("asked_options", {})))
