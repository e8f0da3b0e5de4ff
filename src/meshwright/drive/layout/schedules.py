"""Pipeline schedules for the search over layouts: every schedule of the pipeline decision that models are run with, as arrays, planned once.

Orders are planned for equal stages (list-scheduled ones for the model's own ratio of forward, input's and weights' gradient, rounded), without the
annealing that a plan does, and priced with a layout's true seconds. Beyond some rounds of micro-batches a step grows by the same time per round: the
times of two shorter steps then stand for a longer one's, and so does what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decide.layout.mixed.schedules import Variant
from ...decide.pipeline import STRATEGIES, OneFOneB, PipelineProblem, PipelineStrategy
from ...decide.pipeline.clocked import ClockedOrders
from ...decide.strategies import options_given
from ...errors import Infeasible, Unsupported, UsageError
from ...kernels.effort import remembered
from ...profile.network import PieceOrder
from ..pipeline.pipelines import schedule_label

__all__ = ["LayoutSchedules", "StepForecast"]

F64 = NDArray[np.float64]
Parts = tuple[float, float, float]
# Pieces per stage that are tried where a schedule has the choice.
CHUNKS = (2, 3, 4, 6, 8, 12, 16)
LISTED_CHUNKS = (2, 4, 8)  # of those whose orders are list-scheduled
# Rounds (micro-batches over stages) of the longer of two steps that stand for one of more rounds; list-scheduled orders take longer to plan.
MAX_ROUNDS = 3
MAX_LISTED_ROUNDS = 4
# Actions of orders that are planned: of one step, and of list-scheduled ones in all.
MAX_ACTIONS = 100_000
MAX_LISTED_ACTIONS = 40_000
RATIO_STEPS = 4  # of a forward's seconds, to which the ratio for list scheduling is rounded


@dataclass(frozen=True)
class StepForecast:
    """`long` and, where the step has `more` times the micro-batches that it has beyond `short`, `short`."""

    long: ClockedOrders
    short: ClockedOrders | None = None
    more: float = 0.0

    def ends_s(self, forward_s: F64, backward_s: F64, weights_s: F64, delays_s: F64) -> F64:
        ends = self.long.ends_s(forward_s, backward_s, weights_s, delays_s)
        if self.short is None:
            return ends
        return ends + self.more * (ends - self.short.ends_s(forward_s, backward_s, weights_s, delays_s))

    def held_bytes(self, kept: F64, left: F64) -> F64:
        held = self.long.held_bytes(kept, left)
        return held if self.short is None else held + self.more * np.maximum(0.0, held - self.short.held_bytes(kept, left))


@dataclass
class LayoutSchedules:
    """`names`: of the schedules that may be used, none: all. Raises: UsageError for names that none has."""

    names: tuple[str, ...] = ()
    listed_actions: int = 0
    _known: dict[str, PipelineStrategy] = field(default_factory=dict)
    _variants: dict[tuple[int, int, int], tuple[Variant, ...]] = field(default_factory=dict)
    _places: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    _planned: dict[tuple[object, ...], ClockedOrders | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {kind.name for kind in STRATEGIES}
        if wrong := sorted(set(self.names) - known):
            raise UsageError(f"no schedule {', '.join(wrong)}", where="schedules", hint=f"there are {', '.join(sorted(known))}")

    def variants(self, stages: int, microbatches: int, layers: int) -> Sequence[Variant]:
        key = (stages, microbatches, layers)
        if key not in self._variants:
            self._variants[key] = tuple(self._worth(stages, microbatches, layers))
        return self._variants[key]

    def _worth(self, stages: int, microbatches: int, layers: int) -> list[Variant]:
        problem, found = PipelineProblem.of(stages, microbatches), list[Variant]()
        for kind in STRATEGIES:
            if kind is OneFOneB or (self.names and kind.name not in self.names) or not kind.applies(problem):
                continue
            for made in kind.variants(problem, chunks=CHUNKS):
                traits, label = made.traits, schedule_label(made.name, options_given(made, made.told))
                if traits.split_backward and traits.stages_per_device not in (1, *LISTED_CHUNKS):
                    continue
                if traits.copies > 1 or traits.parts > 1 or stages * traits.stages_per_device > layers:
                    continue
                self._known[label] = made
                where = self._placement(made, label, stages)
                if where:
                    found.append(Variant(label, where, traits.split_backward))
        return found

    def _placement(self, made: PipelineStrategy, label: str, stages: int) -> tuple[int, ...]:
        """Where pieces are does not depend on how many micro-batches pass, nor in which groups: as few as the schedule takes."""
        key = (made.name, made.traits, stages)
        if key not in self._places:
            few = (self._orders(label, stages, n, (1.0, 1.0, 1.0)) for n in (1, 2 * stages))
            self._places[key] = next((x.placement for x in few if x is not None), ())
        return self._places[key]

    def forecast(self, label: str, stages: int, microbatches: int, parts: Parts) -> StepForecast | None:
        rounds = MAX_LISTED_ROUNDS if self._known[label].traits.split_backward else MAX_ROUNDS
        group = getattr(self._known[label], "group", 0)
        period = stages * max(1, -(-group // stages)) if group < microbatches else stages
        if microbatches <= rounds * period:
            whole = self._orders(label, stages, microbatches, parts)
            return None if whole is None else StepForecast(whole)
        count = (rounds - 1) * period + microbatches % period
        long, short = (self._orders(label, stages, n, parts) for n in (count, count - period))
        return None if long is None or short is None else StepForecast(long, short, (microbatches - count) / period)

    def orders(self, label: str, stages: int, microbatches: int, parts: Parts) -> PieceOrder | None:
        found = self._orders(label, stages, microbatches, parts)
        return None if found is None else found.orders

    def _orders(self, label: str, stages: int, microbatches: int, parts: Parts) -> ClockedOrders | None:
        made: Any = self._known[label]
        if getattr(made, "group", 0) > microbatches:  # all of them at once, of however many
            made = replace(made, group=microbatches)
        listed = made.traits.split_backward
        ratio = tuple(max(1, round(RATIO_STEPS * x / parts[0])) for x in parts) if listed and parts[0] > 0 else (1, 1, 1)
        key = (made, stages, microbatches, ratio)
        if key not in self._planned:
            self._planned[key] = self._plan(made, stages, microbatches, ratio, listed)
        return self._planned[key]

    def _plan(self, made: Any, stages: int, microbatches: int, ratio: tuple[int, ...], listed: bool) -> ClockedOrders | None:
        actions = (3 if listed else 2) * stages * made.traits.stages_per_device * microbatches
        if actions > MAX_ACTIONS or (listed and self.listed_actions + actions > MAX_LISTED_ACTIONS):
            return None
        if listed:
            self.listed_actions += actions
        return _clocked(made, stages, microbatches, ratio)


@remembered
def _clocked(made: Any, stages: int, microbatches: int, ratio: tuple[int, ...]) -> ClockedOrders | None:
    """Kept from one search to the next: it depends on no layout, and list scheduling is most of a search's time."""
    annealed = any(f.name == "tries" for f in fields(made))
    quick = replace(made, tries=0) if annealed else made
    problem = PipelineProblem.of(stages, microbatches, forward_s=ratio[0], input_grad_s=ratio[1], weight_grad_s=ratio[2])
    try:
        return ClockedOrders.of(quick.plan(problem, rng=np.random.default_rng(0)))
    except (Infeasible, Unsupported):
        return None
