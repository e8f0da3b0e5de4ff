"""Where a plan's step goes: seconds per stage and phase, bytes per stage and kind, what the critical path is made of, the bottleneck in one sentence.

All of it is counted on one simulated step of the plan: at every instant a rank is in one phase (see `breakdown`), so a stage's
phases and its idle time add up to the step. Memory is that of the rank with the highest peak of each stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from ..cost import Cost
from ..drive.plans import cost_of, fabric_of, works_of
from ..errors import UsageError
from ..evidence import evidence_of_timeline
from ..fabric.fabric import Fabric
from ..plan.forward_again import run_again
from ..plan.plan import Plan
from ..program.calls import InlinedProgram
from ..program.flat import flatten, represented_by
from ..program.phases import PHASES, phases
from ..program.program import BUFFER_ROLES
from ..timeline import Timeline
from ..trace.phases import phase_seconds

__all__ = ["Breakdown", "PathShare", "Simulated", "StageShare", "breakdown", "simulated"]

MIN_FULL_SHARE = 0.95  # of a device's memory that a stage must use for it to be said beside the bottleneck


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage, or the several stages `holds` of one pipeline index `stage`.

    `seconds`: mean over its ranks; `memory_bytes`: of its fullest rank, by kind, `peak` over all kinds at once.
    """

    stage: int
    ranks: tuple[int, ...]
    seconds: dict[str, float]
    memory_bytes: dict[str, int]
    fullest_rank: int
    limit_bytes: int  # 0: the device states none
    recompute_s: float = 0.0  # of the backward seconds: running calls again
    holds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"stages {'+'.join(map(str, self.holds))}" if len(self.holds) > 1 else f"stage {self.stage}"


class PathShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the critical path spends on one phase of one stage."""

    stage: int
    phase: str
    seconds: float
    share: float


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float
    stages: tuple[StageShare, ...]
    path: tuple[PathShare, ...]  # longest first
    bottleneck: str
    busiest_link: str
    busiest_link_share: float
    evidence: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A plan with the one step that all numbers are taken from."""

    plan: Plan
    fabric: Fabric
    cost: Cost
    inlined: InlinedProgram
    timeline: Timeline


def simulated(plan: Plan) -> Simulated:
    """Raises: UsageError for a plan that is not of a training step."""
    from ..simulate import simulate_stored

    if plan.layout is None:
        raise UsageError("the plan is not of a training step", hint="`meshwright collective` explains collectives")
    fabric, cost = fabric_of(plan), cost_of(plan)
    inlined = flatten(plan.main, plan.programs)
    timeline = simulate_stored(inlined.program, fabric, plan.placement, cost, works=works_of(plan), record=True)
    return Simulated(plan=plan, fabric=fabric, cost=cost, inlined=inlined, timeline=timeline)


def breakdown(run: Simulated) -> Breakdown:
    stages = _stages(run)
    path = _path(run)
    busiest = max(run.timeline.link_busy_s.items(), key=lambda x: (x[1], x[0]), default=("", 0.0))
    share = busiest[1] / run.timeline.makespan_s if run.timeline.makespan_s else 0.0
    return Breakdown(
        time_s=run.timeline.makespan_s, stages=stages, path=path, bottleneck=_sentence(path, stages, busiest[0], share),
        busiest_link=busiest[0], busiest_link_share=share,
        evidence=evidence_of_timeline(run.timeline, run.inlined.program, run.cost),
    )  # fmt: skip


def _members(run: Simulated) -> list[list[int]]:
    layout = run.plan.layout
    assert layout is not None
    found: list[list[int]] = [[] for _ in range(layout.pipeline)]
    for rank in range(run.plan.main.ranks):
        found[layout.coordinates(rank)[0]].append(rank)
    return found


def _stages(run: Simulated) -> tuple[StageShare, ...]:
    timeline, program = run.timeline, run.plan.main
    per_rank = phase_seconds(timeline.spans, phases(run.inlined), represented_by(program).tolist(), timeline.makespan_s)
    b = program.buffers
    sizes = b.chunks.astype(np.int64) * b.chunk_bytes * (b.alias_of < 0)
    found = []
    for stage, ranks in enumerate(_members(run)):
        seconds = {name: sum(per_rank[r][name] for r in ranks) / len(ranks) for name in per_rank[0]}
        full = max(ranks, key=lambda r: (timeline.memory_peak_bytes[r], -r))
        mine = (b.actor == full) & (b.persistent == 1)  # whole weights and gradients of a moment are temporaries
        kinds = {f"{role}s": int(sizes[mine & (b.role == BUFFER_ROLES.index(role))].sum()) for role in ("weight", "gradient", "state", "input")}
        peak = int(timeline.memory_peak_bytes[full])
        memory = {**kinds, "activations and temporaries": max(peak - sum(kinds.values()), 0), "peak": peak}
        limit = run.fabric.device(run.plan.placement[full]).memory_bytes
        found.append(StageShare(stage=stage, ranks=tuple(ranks), seconds=seconds, memory_bytes=memory, fullest_rank=full, limit_bytes=limit,
                                recompute_s=_recompute_s(run, stage, ranks[0]), holds=_holds(run, stage)))  # fmt: skip
    return tuple(found)


def _holds(run: Simulated, index: int) -> tuple[int, ...]:
    layout = run.plan.layout
    assert layout is not None
    return tuple(stage for stage, _ in layout.hosted(index))


def _recompute_s(run: Simulated, stage: int, rank: int) -> float:
    """Seconds of a step in which a stage's rank runs calls again: second forward passes, and of every backward step the share of its roofline, of its
    price."""
    layout, device = run.plan.layout, run.fabric.device(run.plan.placement[rank])
    assert layout is not None
    total, twice = 0.0, run_again(layout)
    mine = {key: copy for k, copy in layout.hosted(stage) for key in layout.stages[k].segments}
    for s in layout.segments:
        passes = sum(layout.copy(m) == mine[s.key] for m in range(layout.microbatches_of(layout.coordinates(rank)[1]))) if s.key in mine else 0
        if s.key in twice:
            total += run.cost.price(f"{s.key}|R", s.forward, device).time_s * passes
        if passes and (s.recompute or s.step is not None):
            whole = run.cost.roofline(s.backward + s.again, device).time_s
            extra = max(whole - run.cost.roofline(s.backward, device).time_s, 0.0)
            priced = run.cost.table.get(f"{s.key}|B")
            total += (extra * priced.time_s / whole if priced is not None and whole else extra) * passes
    return total


def _path(run: Simulated) -> tuple[PathShare, ...]:
    """The critical path's time by (stage, phase): every step from when the one before it on the path ended."""
    layout, spans = run.plan.layout, run.timeline.spans
    assert layout is not None
    codes = phases(run.inlined)
    path = np.array(run.timeline.critical_path, np.int64).reshape(-1, 2)
    iterations = 1 + int(max(path[:, 1].max(initial=0), spans.iteration.max(initial=0)))
    known = spans.step.astype(np.int64) * iterations + spans.iteration
    order = np.argsort(known, kind="stable")
    wanted = path[:, 0] * iterations + path[:, 1]
    at = np.minimum(np.searchsorted(known[order], wanted, side="right") - 1, len(order) - 1)  # the last span of a step is its end
    found = np.zeros(len(wanted), bool) if not len(order) else (at >= 0) & (known[order][at] == wanted)
    span = order[at[found]]
    reached = np.zeros(len(wanted))
    reached[found] = spans.end_s[span]
    reached = np.maximum.accumulate(reached)
    rank = np.zeros(len(wanted), np.int64)
    rank[found] = spans.rank[span]
    stage = np.where(rank < layout.ranks, rank // (layout.data * layout.tensor), 0)
    took = np.diff(reached, prepend=0.0)
    seconds: dict[tuple[int, str], float] = {}
    for number, code in {*zip(stage.tolist(), codes[path[:, 0]].tolist(), strict=True)}:
        chosen = (stage == number) & (codes[path[:, 0]] == code)
        key = (number, PHASES[code] or "other")
        seconds[key] = seconds.get(key, 0.0) + float(took[chosen].sum())
    whole = sum(seconds.values()) or 1.0
    shares = [PathShare(stage=stage, phase=phase, seconds=s, share=s / whole) for (stage, phase), s in seconds.items() if s > 0]
    return tuple(sorted(shares, key=lambda p: (-p.seconds, p.stage, p.phase)))


def _sentence(path: tuple[PathShare, ...], stages: tuple[StageShare, ...], link: str, link_share: float) -> str:
    """The bottleneck: the kind of work that most of the critical path is, on which stage most of all, and what it waits for."""
    if not path:
        return "The step takes no time."
    compute = ("forward", "backward", "optimizer")
    kinds: dict[str, float] = {}
    for p in path:
        kind = "compute" if p.phase in compute else f"{p.phase} communication"
        kinds[kind] = kinds.get(kind, 0.0) + p.share
    kind = max(kinds, key=lambda k: kinds[k])
    top = next(p for p in path if (p.phase in compute) == (kind == "compute") and (kind == "compute" or kind.startswith(p.phase)))
    names = {s.stage: s.name for s in stages}
    text = f"{kind.capitalize()} is the bottleneck, {100 * kinds[kind]:.0f} % of the critical path"
    text += f", most of it {top.phase} on {names[top.stage]} ({100 * top.share:.0f} %)"
    if kind != "compute" and link:
        text += f"; the busiest link, {link}, is in use {100 * link_share:.0f} % of the step"
    waits = sum(s.seconds["pipeline"] + s.seconds["idle"] for s in stages) / len(stages)
    whole = sum(sum(s.seconds.values()) for s in stages) / len(stages)
    if len(stages) > 1 and whole and waits / whole > 0.1:
        text += f"; stages wait for each other {100 * waits / whole:.0f} % of the time on average"
    full = [s for s in stages if s.limit_bytes and s.memory_bytes["peak"] > MIN_FULL_SHARE * s.limit_bytes]
    if full:
        text += f"; memory of {full[0].name} is nearly full, {100 * full[0].memory_bytes['peak'] / full[0].limit_bytes:.0f} %"
    return text + "."
