"""Layers that need not run forward again: of a layout whose layers all do, since it does not fit otherwise, as many keep their values as fit.

The last layers of a rank keep theirs first: these live shortest. How many, follows from what a layer's values take by the layout, corrected by what
the layouts tried need in their worst order.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ...errors import TimeLimit
from ...kernels.effort import look
from ...plan.forward_again import remade_values
from ...plan.plan import TrainingLayout
from .context import Context
from .evaluated import Evaluated, Policy
from .stage_steps import peaks_in_flight

__all__ = ["with_fewer_layers"]

# Layouts judged: a guess, and two that what was learned of it gives.
MAX_TRIED = 3


@dataclass
class _Stage:
    """Of a pipeline index, with all stages that it holds. `groups`: its layers, in order; `layer_bytes`: of what each keeps, by the layout; `kept`:
    so many layers fit, `too_many` do not; `scale`: bytes that a tried layout needed more, by those expected."""

    groups: list[tuple[str, ...]]
    layer_bytes: list[int]
    room_bytes: int
    too_many: int
    kept: int = 0
    scale: float = 1.0

    def more_bytes(self, layers: int) -> int:
        return sum(self.layer_bytes[len(self.groups) - layers :])

    def guess(self) -> int:
        """More than are known to fit, fewer than are known not to; as many as fit where there is nothing between."""
        most = max((n for n in range(self.too_many) if self.scale * self.more_bytes(n) <= self.room_bytes), default=0)
        between = self.kept < most < self.too_many
        return most if between else (self.kept + self.too_many) // 2 if self.too_many <= len(self.groups) else self.kept


def with_fewer_layers(best: Evaluated, context: Context) -> list[Evaluated]:
    """What was tried; nothing where stages have copies, or share ranks without pairs, or devices do not say what they have."""
    layout = best.layout
    limits = [context.fabric.device(d).memory_bytes for d in best.placement]
    shared = len(layout.stages) != layout.pipeline and not any(best.candidate.pairs)
    if len(layout.placement) > 1 or shared or not all(limits):
        return []
    needs, stages, tried = _needs_bytes(best), _stages(best), list[Evaluated]()
    for p, stage in enumerate(stages):
        stage.room_bytes = min(limits[r] - needs[r] for r in range(layout.ranks) if layout.coordinates(r)[0] == p)
    for _ in range(MAX_TRIED):
        guess = [stage.guess() for stage in stages]
        if guess == [stage.kept for stage in stages]:
            break
        again = tuple(group for stage, n in zip(stages, guess, strict=True) for group in stage.groups[: len(stage.groups) - n])
        of = sum(len(stage.groups) for stage in stages)
        why = f"does not fit otherwise; {len(again)} of {of} layers, messages among them"
        made = _judged(best, msgspec.structs.replace(layout, forward_again=again or msgspec.UNSET), Policy("layers", {}, why), context)
        if made is None or made.timeline is None:
            break
        tried.append(made)
        now = _needs_bytes(made)
        for p, (stage, n) in enumerate(zip(stages, guess, strict=True)):
            mine = [r for r in range(layout.ranks) if layout.coordinates(r)[0] == p]
            if expected := stage.more_bytes(n):
                stage.scale = max(max(now[r] - needs[r] for r in mine) / expected, 1e-3)
            if all(now[r] <= limits[r] for r in mine):
                stage.kept = max(stage.kept, n)
            else:
                stage.too_many = min(stage.too_many, n)
    return tried


def _judged(best: Evaluated, layout: TrainingLayout, policy: Policy, context: Context) -> Evaluated | None:
    """With all its micro-batches where it fits, as the winner; None where it does not fit with all. Raises: TimeLimit where the clock cuts."""
    made = context.evaluator.again(best, layout, policy)
    try:
        return context.evaluator.whole(made) if made.fits else made
    except TimeLimit:
        look()  # a program of few micro-batches is no plan, whoever stopped the one of all
        return None


def _needs_bytes(e: Evaluated) -> tuple[int, ...]:
    """By rank, in the worst order."""
    from ...check.program.memory import worst_order_peaks

    return e.worst_order_bytes or tuple(worst_order_peaks(e.inlined.program))


def _stages(best: Evaluated) -> list[_Stage]:
    layout, remade = best.layout, remade_values(best.layout)
    flight, segment = peaks_in_flight(layout, best.candidate.orders), {s.key: s for s in layout.segments}
    size = {v.name: v.size_bytes // (layout.tensor if v.split is not None else 1) for v in layout.values}
    found = []
    for p in range(layout.pipeline):
        mine = [k for k, _ in layout.hosted(p)]
        groups = [g for g in layout.forward_again or () if segment[g[0]].stage in mine]
        layer_bytes = []
        for group in groups:
            kept = {v for key in group for v in remade[key]}
            layer_bytes.append(flight[segment[group[0]].stage] * (sum(segment[key].saved_bytes for key in group) + sum(size[v] for v in kept)))
        found.append(_Stage(groups, layer_bytes, 0, len(groups) + 1))
    return found
