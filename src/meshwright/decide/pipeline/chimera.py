"""Chimera: 2f pipelines in opposite directions over the same devices, each device holding 2f stages.

Cite: see CITE.
Left open by the paper: micro-batches that are no multiple of the devices; uneven stages, for which the merge is no longer free of conflicts; the
    order inside a forward-doubled unit. Our answers: whole units, then one short unit whose micro-batches are split as evenly as possible; slots only
    give the order, times are simulated; a unit of pairs in the same slots, its two backwards one after the other, and beside it a list
    schedule with the same memory, whichever is faster.
Slots (unit forward = unit backward): micro-batch m of a pipe in unit u: F at 2m + s + 2D·u, B at 2m + D + (D-1-s) + 2D·u, s the stage of that pipe;
    a device runs its work by slot.
`mode`: concatenate (units one after the other, overlapping), double (two micro-batches per forward, twice the activations), halve (every
    micro-batch's backward in two halves). `split`: I takes the place of B and W fills gaps (not in the paper). `sync`: of a stage's copies: eager
    (as soon as its gradients are final), eager-opt (only where the device has work left afterwards), lazy (after all work).
Invariant: N = K·D, concatenate, F = B: 2N + D/f - 2 slots; between D - D/(2f) + 1 and D activations per device.
Cost: O(devices · f · microbatches · log).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ...cite import Cite
from ...errors import Unsupported, UsageError
from .improve import is_large
from .listing import Rule, list_orders
from .orders import times
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule, Traits
from .sync import SYNCS, synchronisation

__all__ = ["CITE", "MODES", "Chimera", "chimera_placement"]

CITE = Cite(
    key="li2021chimera", title="Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", year=2021, venue="SC",
    authors="Shigang Li, Torsten Hoefler", url="https://arxiv.org/abs/2107.06925",
)  # fmt: skip
DEEP_DEVICES, MAX_PAIRS_DEEP = 32, 4
MODES = ("concatenate", "double", "halve")


@dataclass(frozen=True, kw_only=True)
class Chimera(PipelineStrategy):
    """`pipes`: f, pairs of pipelines; divides devices/2."""

    name: ClassVar[str] = "chimera"
    cite: ClassVar[Cite] = CITE
    told: ClassVar[tuple[str, ...]] = ("pipes",)

    pipes: int = 1
    mode: str = "concatenate"
    split: bool = False
    sync: str = "eager-opt"

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        d, found = problem.devices, []
        # of deep pipelines few pairs: with many a device holds so much of the model that it is no pipeline any more
        for f in [f for f in _pairs(d) if d <= DEEP_DEVICES or f <= MAX_PAIRS_DEEP] or [1]:
            found += [cls(pipes=f), cls(pipes=f, split=True)]
            if problem.microbatches > d:
                found.append(cls(pipes=f, mode="double"))
            found.append(cls(pipes=f, mode="halve"))
        return tuple(found)

    @classmethod
    def applies(cls, problem: PipelineProblem) -> bool:
        return problem.devices % 2 == 0

    @property
    def traits(self) -> Traits:
        return Traits(split_backward=self.split, copies=2 * self.pipes, parts=2 if self.mode == "halve" else 1)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        self._require(problem)
        d, parts = problem.devices, 2 if self.mode == "halve" else 1
        n = problem.microbatches * parts
        pair = 1 if self.mode == "concatenate" else 2
        copy_of, slots = _unit_slots(d, n, self.pipes, pair)
        placement = chimera_placement(d, self.pipes)
        orders: list[list[tuple[int, int, Action]]] = [[] for _ in range(d)]
        for slot, back, a in slots:
            orders[placement[a.copy][a.stage]].append((slot, back, a))
        plain = tuple(tuple(a for _, _, a in sorted(rows, key=lambda r: (r[0], r[1], r[2].microbatch))) for rows in orders)
        schedule = Schedule(
            name=self.name, devices=d, stages=d, placement=placement, copy_of=copy_of, orders=plain, parts=parts, options=asdict(self),
        )  # fmt: skip
        if self.split:
            schedule = _split(problem, schedule)
        if pair == 2:
            schedule = _better(problem, schedule)
        return replace(schedule, collectives=synchronisation(schedule, self.sync))

    def _require(self, problem: PipelineProblem) -> None:
        d = problem.devices
        if self.mode not in MODES or self.sync not in SYNCS:
            raise UsageError(f"no such mode or sync: {self.mode}, {self.sync}", hint=f"modes: {', '.join(MODES)}; sync: {', '.join(SYNCS)}")
        if d % 2:
            raise Unsupported(f"Chimera needs an even number of stages, got {d}", where="devices", hint="use 1f1b, zb1p or zbv, or an even depth")
        if self.pipes < 1 or d // 2 % self.pipes:
            fit = _pairs(d)
            raise Unsupported(
                f"{self.pipes} pairs of pipelines do not divide {d // 2} = stages/2", where="pipes", hint=f"use one of: {', '.join(map(str, fit))}",
                data={"pipes": fit},
            )  # fmt: skip


def _pairs(devices: int) -> list[int]:
    """Numbers of pairs of pipelines that so many devices can hold."""
    return [f for f in range(1, devices // 2 + 1) if devices % 2 == 0 and devices // 2 % f == 0]


def chimera_placement(devices: int, pipes: int) -> tuple[tuple[int, ...], ...]:
    """Copies 0..f-1 run down, f..2f-1 up."""
    down = [tuple((i * devices // pipes + s) % devices for s in range(devices)) for i in range(pipes)]
    up = [tuple((i * devices // pipes + devices - 1 - s) % devices for s in range(devices)) for i in range(pipes)]
    return tuple(down + up)


def _unit_slots(devices: int, microbatches: int, pipes: int, pair: int) -> tuple[tuple[int, ...], list[tuple[int, int, Action]]]:
    """The copy of every micro-batch, and (slot, 1 for backwards, action) of all work; `pair` micro-batches per forward."""
    # a unit fills every device's slots; what does not fill one stands at the end, divided as evenly as can be
    unit, copies = devices * pair, 2 * pipes
    copy_of: list[int] = []
    found: list[tuple[int, int, Action]] = []
    for u, first in enumerate(range(0, microbatches, unit)):
        size = min(unit, microbatches - first)
        share = [size // copies + (c < size % copies) for c in range(copies)]
        for c, many in enumerate(share):
            begin = len(copy_of)
            copy_of += [c] * many
            for local, m in enumerate(range(begin, begin + many, pair)):
                count = min(pair, begin + many - m)
                for s in range(devices):
                    # a pipe begins a micro-batch every other slot; D is even, so on each device the pipe that comes the other way falls on the
                    # slots between. A device has 2D slots of work per unit, so units stand 2D apart.
                    slot = 2 * local + 2 * devices * u
                    found.append((slot + s, 0, Action("F", s, m, c, count)))
                    found += [(slot + 2 * devices - 1 - s, 1, Action("B", s, m + i, c)) for i in range(count)]
    return tuple(copy_of), found


def _split(problem: PipelineProblem, schedule: Schedule) -> Schedule:
    """I in the place of B, W in the gaps; no pipe keeps more activations on a device than it does in the unsplit schedule."""
    fixed = tuple(tuple(a._replace(kind="I") if a.kind == "B" else a for a in order) for order in schedule.orders)
    late = tuple(tuple(x for a in order for x in ((a, a._replace(kind="W")) if a.kind == "I" else (a,))) for order in fixed)
    base = replace(schedule, orders=late, split=True)
    cap = _peaks(schedule)
    found = [base]  # W right behind its I keeps what the unsplit schedule keeps, so it always stands
    for patience in () if is_large(base) else (1.0, 0.5, 0.0):
        found.append(list_orders(problem, base, Rule("IFW", True, patience, fixed), cap))
    return min(found, key=lambda s: times(problem, s).makespan_s)


def _better(problem: PipelineProblem, schedule: Schedule) -> Schedule:
    """The slot order, or a list schedule that keeps no more activations per copy, whichever is faster."""
    cap = _peaks(schedule)
    found = [schedule]
    for patience in () if is_large(schedule) else (1.0, 0.0):
        found.append(list_orders(problem, schedule, Rule("BIFW", True, patience), cap))
    return min(found, key=lambda s: times(problem, s).makespan_s)


def _peaks(schedule: Schedule) -> list[list[int]]:
    """[device][copy] -> most micro-batches whose activations are kept at once."""
    end = "W" if schedule.split else "B"
    found = []
    for order in schedule.orders:
        held, peak = [0] * schedule.copies, [0] * schedule.copies
        for a in order:
            held[a.copy] += a.count if a.kind == "F" else -a.count if a.kind == end else 0
            peak[a.copy] = max(peak[a.copy], held[a.copy])
        found.append(peak)
    return found
