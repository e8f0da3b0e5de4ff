"""Recomputation as part of the search over layouts: the same candidate with a rule in every layer, or with as little as makes it fit.

`auto` keeps everything where that fits. Where it does not, every stage that is over its devices' memory recomputes the cheapest choice
(`decide.memory.regions`) that saves what is missing under the micro-batches in flight; the new layout is lowered and simulated, and what is
still missing in its worst order is asked for again, a few times at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as replace_record

from ...cite import Cite
from ...cost import Cost
from ...decide.memory.regions import Chosen, RegionChooser
from ...decide.memory.selective import CITE
from ...errors import Infeasible, UsageError
from ...fabric.fabric import Device
from ...graph.graph import OpGraph, OpNode, Work
from ...plan.on_schedule import on_schedule
from ...plan.plan import Segment, TrainingLayout
from ...plan.recompute import LayoutRegions, with_forward_again
from ...plan.sizes import backward_works
from .context import Context, Decision, Found
from .evaluated import Evaluated, Policy
from .fewer_layers import with_fewer_layers
from .stage_steps import StageSteps, peaks_in_flight

__all__ = ["POLICIES", "Recompute", "RecomputeWanted", "StageRecompute", "with_recomputation"]

POLICIES = ("auto", "none", "selective", "full", "layers", "optimal", "steps")
# Rounds of asking for more bytes; the last asks for all there is.
MAX_ROUNDS = 6
# How many times as many bytes are asked for where so many do not change the choice.
RAISE_FACTOR = 4
# Halvings of what was asked for beyond bytes that were too few, where that was a leap.
MAX_HALVINGS = 4
WORK = ("flops", "bytes_read", "bytes_written", "calls")
# A little more work is this part of a forward pass: so small that the roofline's slope there is that at the work itself.
LITTLE_PARTS = 1 << 20


@dataclass(frozen=True)
class RecomputeWanted:
    """`auto` (keep everything where it fits, else the cheapest choice per stage that fits, else whole layers), `none`, `selective` (core attention
    of every layer), `full` (every layer, between messages; where that does not fit, as `layers`), `layers` (every layer, messages among it),
    `optimal` (as auto, without another word), `steps` (whole stages by their step graphs). Raises: UsageError for another."""

    policy: str = "auto"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"no recomputation policy {self.policy!r}", hint=f"one of {', '.join(POLICIES)}")


@dataclass(frozen=True)
class Recompute(Decision):
    name = "recompute"

    def asks_first(self, context: Context) -> bool:
        return context.wish(RecomputeWanted).policy not in ("selective", "full", "layers")

    def fitted(self, found: list[Evaluated], context: Context, limit_s: float) -> list[Evaluated]:
        first, policy, judge = found[0], context.wish(RecomputeWanted).policy, context.evaluator
        if first.refused or policy in ("none", "steps") or (policy in ("auto", "optimal") and first.excess_bytes <= 0):
            return found
        graph, flight = judge.graph_for(first.layout), peaks_in_flight(first.layout, first.candidate.orders)
        device = context.fabric.device(first.placement[0])
        made, asked = list[Evaluated](), policy == "layers"
        if not asked:
            stages = StageRecompute(graph, first.layout, context.cost, device, judge.frontiers, flight)
            made = with_recomputation(policy, first, stages, lambda layout, chosen: judge.again(first, layout, chosen), limit_s)
            if policy == "selective" or made[-1].fits or made[-1].time_s >= limit_s:
                return made
            if 0 < device.memory_bytes < first.candidate.memory_floor_bytes:  # weights and state alone are more
                return made
        layered = _layered(first, context, graph)
        if layered is None:
            return made or [replace(first, why="no layer can run forward again")]
        why = f"{'asked for' if asked else 'does not fit otherwise'}; every layer, messages among it"
        made.append(judge.again(first, layered, Policy("layers", {}, why)))
        if made[-1].timeline is not None and not made[-1].fits:  # then calls of a layer run once more in its backward
            stages = StageRecompute(graph, layered, context.cost, device, judge.frontiers, flight)
            chosen = stages.rule("full")
            made.append(judge.again(first, stages.apply(chosen), Policy("layers", chosen, f"{why}, calls of each once more")))
        return made

    def refine(self, found: Found, context: Context) -> Found:
        """Where all layers of the winner run forward again, and nobody asked for all: fewer, as many as must."""
        best = found.winner
        if context.wish(RecomputeWanted).policy == "layers" or best.policy.name != "layers" or best.policy.stages:
            return found
        tried = with_fewer_layers(best, context)
        chosen = min((best, *(e for e in tried if e.fits)), key=lambda e: e.time_s)
        return replace(found, best=chosen, judged=[*found.judged, *tried])

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        """What every stage recomputes: fewer bytes kept per micro-batch, seconds of running calls again, how far that is from the linear bound."""
        best, chosen = found.winner, found.winner.policy.stages
        stages = _whole_layers(best, context) if best.layout.forward_again else [
            {"stage": i, "layers": len({layer for _, layer in c.again}), "calls": sum(map(len, c.again.values())), "saved_bytes": c.saved_bytes,
             "workspace_bytes": c.workspace_bytes, "time_s": c.time_s, "bound_s": c.bound_s}
            for i, c in sorted(chosen.items())
        ]  # fmt: skip
        options: dict[str, Any] = {"policy": context.wish(RecomputeWanted).policy, "stages": stages}
        if least := least_step_s(best):
            options["least_step_s"] = least
        why = best.policy.why or ("fits without" if best.excess_bytes <= 0 else "")
        strategy = best.policy.name if stages else "none"
        return {"recompute": {"strategy": strategy, "options": options, "why": why, "cite": [CITE.key] if stages else []}}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        return [(key, CITE)] if key == "recompute" and entry["cite"] else []


def _layered(first: Evaluated, context: Context, graph: OpGraph) -> TrainingLayout | None:
    """The same layout with segments that end with their layer, whose layers run forward again; None where none can."""
    asked, lay = first.candidate, first.layout
    degrees = replace(asked.degrees, pipeline=len(lay.stages))  # a schedule may put several stages on a rank
    built = replace(context.grid(), apart=True).sharded(context.problem, degrees, asked.sharding, asked.division).layout
    if built is None:
        return None
    if asked.schedule:
        where = lay.placement or (tuple(range(lay.pipeline)),)
        built = on_schedule(
            built, graph, name=lay.schedule, pipeline=lay.pipeline, placement=where, copy_of=lay.copy_of, split=lay.split_backward
        )  # fmt: skip
    made = with_forward_again(graph, built)
    return made if made.forward_again else None


def _whole_layers(best: Evaluated, context: Context) -> list[dict[str, Any]]:
    """By stage what of its layers is given up until they run forward again, and the seconds of that without messages."""
    device, by_key = context.fabric.device(best.placement[0]), {s.key: s for s in best.layout.segments}
    groups: dict[int, list[list[Segment]]] = {}
    for group in best.layout.forward_again or ():
        groups.setdefault(by_key[group[0]].stage, []).append([by_key[key] for key in group])
    found = []
    for stage, layers in sorted(groups.items()):
        saved = [sum(s.saved_bytes for s in layer) for layer in layers]
        time_s = sum(context.cost.price(f"{s.key}|R", s.forward, device).time_s for layer in layers for s in layer)
        chosen = best.policy.stages.get(stage)
        time_s += chosen.time_s if chosen is not None else 0.0
        found.append({
            "stage": stage, "layers": len(layers), "calls": sum(len(s.nodes) for layer in layers for s in layer),
            "saved_bytes": sum(saved) - max(saved), "workspace_bytes": max(saved), "time_s": time_s, "bound_s": time_s,
        })  # fmt: skip
    return found


class StageRecompute:
    """The choosers of a layout's stages. `frontiers` may be shared between layouts; `in_flight`: micro-batches by stage, empty: those of 1F1B."""

    def __init__(
        self, graph: OpGraph, layout: TrainingLayout, cost: Cost, device: Device, frontiers: dict[Any, Any] | None = None,
        in_flight: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.layout, self.name = layout, "optimal"
        self.in_flight = in_flight or peaks_in_flight(layout)
        self.regions = LayoutRegions(graph, layout)
        stage_of = {s.key: s.stage for s in layout.segments}

        def time_s(node: OpNode, segment: str) -> float:
            return cost.roofline(self.regions.work(node, segment), device).time_s if node.forward.calls else 0.0

        shared = frontiers if frontiers is not None else {}
        self.choosers = [
            RegionChooser([r for r in self.regions.regions if stage_of[r.segment] == stage.index], time_s, shared) for stage in layout.stages
        ]

    def rule(self, name: str) -> dict[int, Chosen]:
        found = {i: c.rule(name) for i, c in enumerate(self.choosers)}
        return {i: c for i, c in found.items() if c.again}

    def saving(self, need_bytes: Mapping[int, int]) -> dict[int, Chosen]:
        """Per stage the cheapest choice that saves so many bytes; what saves most where none does."""
        found = {}
        for stage, need in need_bytes.items():
            if need > 0:
                try:
                    found[stage] = self.choosers[stage].cheapest(need, self.in_flight[stage])
                except Infeasible:
                    found[stage] = self.choosers[stage].most_saved()
        return {i: c for i, c in found.items() if c.again}

    def apply(self, chosen: Mapping[int, Chosen]) -> TrainingLayout:
        return self.regions.apply({place: names for c in chosen.values() for place, names in c.again.items()})


def with_recomputation(
    policy: str, first: Evaluated, stages: StageRecompute | StageSteps, evaluate: Callable[[TrainingLayout, Policy], Evaluated],
    limit_s: float = float("inf"),
) -> list[Evaluated]:  # fmt: skip
    """`first` keeps everything; returns what the policy makes of it, all that count as candidates. Nothing more is recomputed of what takes `limit_s`
    and does not fit yet: that makes no step shorter."""
    if policy == "none" or first.refused or (policy in ("auto", "optimal", "steps") and first.excess_bytes <= 0):
        return [first]
    if policy in ("selective", "full") and isinstance(stages, StageRecompute):
        chosen = stages.rule(policy)
        if not chosen:
            return [replace(first, why=f"nothing to recompute by the rule {policy}")]
        return [evaluate(stages.apply(chosen), Policy(policy, chosen, f"asked for; every layer by the rule {policy}"))]

    def tried(need: Mapping[int, int], known: Evaluated) -> Evaluated | None:
        """None where nothing is chosen, or the same as known."""
        chosen = stages.saving(need)
        if not chosen or chosen == known.policy.stages:
            return None
        made = Policy(stages.name, chosen, "does not fit without; the cheapest choice per stage that does")
        return evaluate(stages.apply(chosen), made)

    need: dict[int, int] = {}
    few, found, best, more = need, first, first, 1
    for left in reversed(range(MAX_ROUNDS)):
        missing = _missing(found)
        everything = 1 << 60  # bytes, more than any stage has
        need = need | {stage: need.get(stage, 0) + more * over if left else everything for stage, over in missing.items() if over > 0}
        made = tried(need, found)
        if made is None:  # what a stage's plan leaves free of its own bytes, the program's worst order may need
            more *= RAISE_FACTOR
            continue
        if made.timeline is None:
            break
        if best is first or made.excess_bytes < best.excess_bytes:
            best = made
        if made.excess_bytes <= 0 or made.time_s >= limit_s:
            break
        few, found, more = need, made, 1
    if best.excess_bytes <= 0 and more > 1:
        best = _nearer(few, need, best, found, tried)
    return [first, best] if best is not first else [first]


def _missing(found: Evaluated) -> dict[int, int]:
    """Bytes by stage."""
    missing: dict[int, int] = {}
    for rank, over in enumerate(found.over_bytes):
        held = found.layout.hosted(found.layout.coordinates(rank)[0])
        for stage, _ in held:
            missing[stage] = max(missing.get(stage, 0), -(-over // len(held)))
    return missing


def _nearer(
    few: Mapping[int, int], enough: Mapping[int, int], best: Evaluated, failed: Evaluated,
    tried: Callable[[Mapping[int, int], Evaluated], Evaluated | None],
) -> Evaluated:  # fmt: skip
    """The fastest that fits between bytes that were too few and bytes that were enough, by halving."""
    for _ in range(MAX_HALVINGS):
        middle = {stage: (few.get(stage, 0) + most) // 2 for stage, most in enough.items()}
        made = tried(middle, failed)
        if made is None or made.timeline is None or made.excess_bytes > 0:
            few = middle
        else:
            enough, best = middle, min(best, made, key=lambda e: e.time_s)
    return best


def least_step_s(best: Evaluated) -> float:
    """No plans of whole stages that fit make a step of this layout shorter: a rank waits for its first forward, computes, and hands back.

    Everything once by the prices of the plan, and what stages run again at least (`Chosen.bound_s`) at the least price that a second of their graphs
    has anywhere in the stage. Messages, sums and updates are left out. 0 where stages do not run whole.
    """
    if best.policy.name != "steps" or best.cost is None or best.fabric is None:
        return 0.0
    lay, devices = best.layout, [best.fabric.device(d) for d in sorted({*best.placement})]
    forward, backward = [0.0] * len(lay.stages), [0.0] * len(lay.stages)
    rate = [float("inf")] * len(lay.stages)  # price of a second that is run again, at least
    for s in lay.segments:
        fewest = min(s.shares) / max(s.shares) if s.shares else 1.0  # of the rank with the smallest part; what does not shrink with it is more
        prices = [_prices(s, best.cost, d, split=lay.split_backward) for d in devices]
        once_s, back_s, again = (fewest * min(p[i] for p in prices) for i in range(3))
        forward[s.stage] += once_s
        backward[s.stage] += back_s
        rate[s.stage] = min(rate[s.stage], again)
    for i, c in best.policy.stages.items():
        backward[i] += c.bound_s * rate[i]
    least = 0.0
    for p in range(lay.pipeline):
        held = lay.hosted(p)
        busy = sum((forward[s] + backward[s]) * sum(lay.copy(m) == c for m in range(lay.microbatches)) for s, c in held)
        head = min(sum(forward[:s]) for s, _ in held)
        tail = 0.0 if lay.split_backward else min(sum(backward[:s]) for s, _ in held)
        least = max(least, head + busy + tail)
    return least


def _prices(s: Segment, cost: Cost, device: Device, *, split: bool) -> tuple[float, float, float]:
    """Of a segment's forward pass, of its backward pass without what runs again, and of a second of its graph that does, at least."""
    forward_s = cost.price(f"{s.key}|F", s.forward, device).time_s
    own_s = s.step.forward_s() if s.step is not None else 0.0
    backward_s = 0.0
    rate = float("inf")
    for phase, work in backward_works(replace_record(s, again=Work()), split=split):
        key = f"{s.key}|{phase}"
        if key in cost.table:  # seconds of forward, times the share of it that runs again
            again_s = forward_s * s.step.again_s() / own_s if s.step is not None and own_s and phase != "W" else 0.0
            backward_s += cost.price(key, None, device).time_s - again_s
            rate = min(rate, forward_s / own_s if own_s else 0.0)
        else:  # the roofline is convex in what is added: nowhere is more of it cheaper than the first little
            plain_s = cost.roofline(work, device).time_s
            backward_s += plain_s
            if phase != "W":
                # the slope, scaled up: (n works and one forward) less n works, so that nothing is lost to the rounding of a small difference
                many = Work(**{x: LITTLE_PARTS * getattr(work, x) for x in WORK}) + s.forward
                rate = min(rate, (cost.roofline(many, device).time_s - LITTLE_PARTS * plain_s) / own_s if own_s else 0.0)
    return forward_s, backward_s, max(0.0, rate)
