"""Schedules on the V placement (device r holds stages r and 2p-1-r): ZBV, V-Half, V-Min.

Cite: see CITE (V-Half, V-Min), ZBV_CITE.
Left open by the papers: unequal times, and what remains of a repeating pattern at the ends of a step. Our answers: the pattern's order of F and I
    with W in its free slots, the same pulled together at both ends (`reorder`) and with W filled in by our clock, and orders built or listed under
    the pattern's activation peak; the fastest.
Patterns, period 6 slots, device i of p, slots of F(first), F(second), I(second), I(first): V-Min i, 2p-1-i,
    2p+δ+i, 4p+δ-1-i with δ = 2 if 3 | p else 0;
    V-Half 2i, 3p-2-i, 3p+δ+2i-1, 6p+δ-2-i with δ = 3 if p even else 0. ZBV has no pattern: built under 1F1B's cap of 2p stage activations.
Invariant: V-Half and V-Min keep no more activations than their patterns on any device, ZBV at most 2p.
Cost: O(styles · targets · actions), compiled; small steps O(rules · actions · log) besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...errors import Infeasible
from .bound import schedule_bound
from .improve import improved, is_large
from .listing import Rule, list_orders
from .orders import in_flight_peaks, times, vee
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule, Traits
from .reorder import reordered
from .zerobubble import built, fastest_listing, listed, split_base

__all__ = ["CITE", "ZBV", "ZBV_CITE", "VHalf", "VMin", "v_cap"]

CITE = Cite(
    key="qi2024controllable", title="Pipeline Parallelism with Controllable Memory", year=2024, venue="NeurIPS",
    authors="Penghui Qi, Xinyi Wan, et al.", url="https://arxiv.org/abs/2405.15362",
)  # fmt: skip
ZBV_CITE = Cite(
    key="qi2024zerobubble", title="Zero Bubble Pipeline Parallelism", year=2024, venue="ICLR", authors="Penghui Qi, Xinyi Wan, et al.",
    url="https://arxiv.org/abs/2401.10241",
)  # fmt: skip
# Slots between the same actions of two micro-batches: F, I and W of two stages on a device, of one slot each.
PERIOD_SLOTS = 6
ON_A_V = Traits(stages_per_device=2, split_backward=True)


@dataclass(frozen=True, kw_only=True)
class ZBV(PipelineStrategy):
    """`cap`: stage activations (half a device's share each) per device; 0: twice the devices. `tries`: see `improve`."""

    name: ClassVar[str] = "zbv"
    cite: ClassVar[Cite] = ZBV_CITE

    cap: int = 0
    tries: int = 1000

    @property
    def traits(self) -> Traits:
        return ON_A_V

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        base = split_base(problem, self.name, vee(problem.devices), asdict(self))
        return fastest_listing(problem, base, [self.cap or 2 * problem.devices] * problem.devices, self.tries)


@dataclass(frozen=True, kw_only=True)
class VHalf(PipelineStrategy):
    """About half of 1F1B's activations. `tries`: see `improve`; 0: the published pattern, squeezed."""

    name: ClassVar[str] = "v-half"
    cite: ClassVar[Cite] = CITE

    tries: int = 1000

    @property
    def traits(self) -> Traits:
        return ON_A_V

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        return _patterned(problem, self.name, self.tries)


@dataclass(frozen=True, kw_only=True)
class VMin(PipelineStrategy):
    """About a third of 1F1B's activations. `tries`: see `improve`; 0: the published pattern, squeezed."""

    name: ClassVar[str] = "v-min"
    cite: ClassVar[Cite] = CITE

    tries: int = 1000

    @property
    def traits(self) -> Traits:
        return ON_A_V

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        return _patterned(problem, self.name, self.tries)


def _offsets(name: str, devices: int, device: int) -> tuple[int, int, int, int]:
    """Slots of F(first), F(second), I(second), I(first) of micro-batch 0."""
    p, i = devices, device
    if name == "v-min":
        d = 2 if p % 3 == 0 else 0
        return i, 2 * p - 1 - i, 2 * p + d + i, 4 * p + d - 1 - i
    d = 3 if p % 2 == 0 else 0
    return 2 * i, 3 * p - 2 - i, 3 * p + d + 2 * i - 1, 6 * p + d - 2 - i


def v_cap(name: str, devices: int) -> int:
    """Most stage activations of any device under the endless pattern, W in the free slots: the cap that `v-half` or `v-min` stands for."""
    many = 4 * devices + 8  # a micro-batch stays for about p periods at most, so these show what the endless pattern holds
    return max(in_flight_peaks(_pattern(name, devices, many, ())))


def _pattern(name: str, devices: int, microbatches: int, options: object) -> Schedule:
    """The pattern's orders, W in the slots that it leaves free, oldest first."""
    orders = []
    for d in range(devices):
        work: dict[int, Action] = {}
        kinds = (("F", d), ("F", 2 * devices - 1 - d), ("I", 2 * devices - 1 - d), ("I", d))
        for m in range(microbatches):
            for (kind, stage), slot in zip(kinds, _offsets(name, devices, d), strict=True):
                work[slot + PERIOD_SLOTS * m] = Action(kind, stage, m)  # type: ignore[arg-type]
        order: list[Action] = []
        waiting: list[Action] = []
        for slot in range(max(work) + 1):
            if slot in work:
                order.append(work[slot])
                if work[slot].kind == "I":
                    waiting.append(work[slot]._replace(kind="W"))
            elif waiting:
                order.append(waiting.pop(0))
        orders.append(tuple(order + waiting))
    return Schedule(
        name=name, devices=devices, stages=2 * devices, placement=(vee(devices),), copy_of=(0,) * microbatches, orders=tuple(orders), split=True,
    )  # fmt: skip


def _reordered(name: str, pattern: Schedule) -> Schedule:
    devices = pattern.devices
    rows = reordered([_offsets(name, devices, d) for d in range(devices)], PERIOD_SLOTS, pattern.microbatches)
    orders = []
    for d, row in enumerate(rows):
        order, waiting = list[Action](), list[Action]()
        for t, m in row:
            if t < 4:
                order.append(Action("F" if t < 2 else "I", d if t in (0, 3) else 2 * devices - 1 - d, m))
                waiting += [order[-1]._replace(kind="W")] if t >= 2 else []
            else:
                order.append(waiting.pop(0))
        orders.append(tuple(order))
    return replace(pattern, orders=tuple(orders))


def _patterned(problem: PipelineProblem, name: str, tries: int) -> Schedule:
    pattern = _pattern(name, problem.devices, problem.microbatches, ())
    cap = [v_cap(name, problem.devices)] * problem.devices
    rows = [[c] for c in cap]
    found = [pattern] if is_large(pattern) else [pattern, _reordered(name, pattern)]
    # with F and I in the pattern's own order, only W free to move; and with every order that keeps the peak
    fixed = tuple(tuple(a for a in order if a.kind != "W") for order in pattern.orders)
    listing = () if is_large(pattern) else (1.0, 0.0)
    tried: list[Callable[[], Schedule]] = [
        *(partial(list_orders, problem, pattern, Rule("IFW", True, patience, fixed), rows) for patience in listing),
        partial(built, problem, pattern, cap),
    ]
    for make in tried:
        try:
            found.append(make())
        except Infeasible:  # this way paints itself into a corner; the pattern itself always stands
            continue
    found += listed(problem, pattern, rows) if tries else []
    # the pattern is the better start for annealing where list schedules happen to be as fast
    ways = sorted(found, key=lambda s: times(problem, s).makespan_s)
    if tries and not is_large(pattern):
        least = float(schedule_bound(problem, pattern))
        ways = [improved(problem, s, rows, tries=tries, least_s=least) for s in (ways[0], found[-1] if ways[0] is pattern else pattern)]
    return replace(min(ways, key=lambda s: times(problem, s).makespan_s), options={"tries": tries})
