"""ZB1P, ZB2P and the interleaved form: split backward, weight gradients put where the device would wait.

Cite: see CITE.
Left open by the paper: its orders come from an integer programme or a heuristic on profiled times: forwards and backwards in turn, weight gradients
    into gaps that hold one, and into smaller ones where the device would otherwise fall further behind than any. Our answer: orders built so towards
    a makespan (`kernels.bubble_budget`), several styles and targets, the fastest by our clock, then annealed (`improve`).
Beyond the paper: several stages per device in rounds (`InterleavedZB`), which fills in a fraction of the time.
Caps in stage activations (F to the end of W) on every device: ZB1P the 1F1B peak `devices`, ZB2P 2·devices - 1, interleaved the peak of interleaved
    1F1B; `cap` overrides.
Invariant: no device keeps more than the cap. With F = I = W, free messages and a common start and end no schedule beats N·3·F + (devices-1)·F.
Cost: O(styles · targets · actions), compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ...cite import Cite
from ...errors import Infeasible, UsageError
from .bound import schedule_bound
from .improve import improved, is_large
from .late_messages import sturdiest
from .listing import RULES, list_orders, require_room
from .orders import action_s, border_delays, looped, times
from .problem import Action, Kind, PipelineProblem, PipelineStrategy, Schedule, Traits

__all__ = ["CITE", "ZB1P", "ZB2P", "InterleavedZB", "built", "fastest_listing", "listed", "split_base"]

MAX_LISTED_ACTIONS = 600  # up to which list schedules are tried besides: 0.1 s
KINDS: tuple[Kind, ...] = ("F", "I", "W")
CITE = Cite(
    key="qi2024zerobubble", title="Zero Bubble Pipeline Parallelism", year=2024, venue="ICLR", authors="Penghui Qi, Xinyi Wan, et al.",
    url="https://arxiv.org/abs/2401.10241",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ZB1P(PipelineStrategy):
    """`cap`: stage activations per device; 0: the number of devices. `tries`: see `improve`."""

    name: ClassVar[str] = "zb1p"
    cite: ClassVar[Cite] = CITE

    cap: int = 0
    tries: int = 1000

    @property
    def traits(self) -> Traits:
        return Traits(split_backward=True)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        return _straight(problem, self.name, self.cap or problem.devices, self.tries, asdict(self))


@dataclass(frozen=True, kw_only=True)
class ZB2P(PipelineStrategy):
    """`cap`: stage activations per device; 0: 2·devices - 1. `tries`: see `improve`."""

    name: ClassVar[str] = "zb2p"
    cite: ClassVar[Cite] = CITE

    cap: int = 0
    tries: int = 1000

    @property
    def traits(self) -> Traits:
        return Traits(split_backward=True)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        return _straight(problem, self.name, self.cap or 2 * problem.devices - 1, self.tries, asdict(self))


@dataclass(frozen=True, kw_only=True)
class InterleavedZB(PipelineStrategy):
    """`chunks`: stages per device. `cap`: stage activations per device; 0: 2·(devices - 1) + (chunks - 1)·devices + 1. `tries`: see `improve`."""

    name: ClassVar[str] = "interleaved-zb"
    cite: ClassVar[Cite] = CITE

    chunks: int = 2
    cap: int = 0
    tries: int = 1000

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        return tuple(cls(chunks=v) for v in chunks)

    @property
    def traits(self) -> Traits:
        return Traits(stages_per_device=self.chunks, split_backward=True)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        d, v = problem.devices, self.chunks
        if v < 2:
            raise UsageError(f"must be >= 2, got {v}", where="chunks", hint="with one stage per device use zb1p")
        base = split_base(problem, self.name, looped(d, v), asdict(self))
        return fastest_listing(problem, base, [self.cap or 2 * (d - 1) + (v - 1) * d + 1] * d, self.tries)


def _straight(problem: PipelineProblem, name: str, cap: int, tries: int, options: dict[str, object]) -> Schedule:
    base = split_base(problem, name, looped(problem.devices, 1), options)
    return fastest_listing(problem, base, [cap] * problem.devices, tries)


def split_base(problem: PipelineProblem, name: str, placement: tuple[int, ...], options: dict[str, object]) -> Schedule:
    """All work of a split backward on one copy, in no useful order: what list scheduling starts from."""
    n, devices = problem.microbatches, problem.devices
    orders = tuple(
        tuple(Action(k, s, m) for m in range(n) for s, d in enumerate(placement) if d == device for k in ("F", "I", "W"))
        for device in range(devices)
    )
    return Schedule(
        name=name, devices=devices, stages=len(placement), placement=(placement,), copy_of=(0,) * n, orders=orders, split=True, options=dict(options)
    )


def fastest_listing(problem: PipelineProblem, base: Schedule, cap: Sequence[int], tries: int = 0) -> Schedule:
    """The fastest of what is built towards a makespan (`kernels.bubble_budget`), then annealed for `tries` schedules; of about equal ones the
    sturdiest. `cap[device]`: stage activations.

    Raises: Infeasible when a cap is too small for one micro-batch.
    """
    rows = [[c] for c in cap]
    require_room(base, rows)
    best = built(problem, base, cap)
    if not tries or is_large(best):
        return best
    starts = [best, *sorted(listed(problem, base, rows), key=lambda s: times(problem, s).makespan_s)[:1]]

    def improve(asked: PipelineProblem, given: Schedule) -> Schedule:
        return improved(asked, given, rows, tries=tries, least_s=_least_s(asked, given, cap))

    return sturdiest(problem, min((improve(problem, s) for s in starts), key=lambda s: times(problem, s).makespan_s), improve)


def listed(problem: PipelineProblem, base: Schedule, rows: Sequence[Sequence[int]]) -> list[Schedule]:
    """List schedules by every rule, of small steps: there they are sometimes the better start for annealing. Rules that get stuck give none."""
    found: list[Schedule] = []
    if sum(map(len, base.orders)) <= MAX_LISTED_ACTIONS:
        for rule in RULES:
            with suppress(Infeasible):
                found.append(list_orders(problem, base, rule, rows))
    return found


def _least_s(problem: PipelineProblem, schedule: Schedule, cap: Sequence[int]) -> float:
    """No orders that keep at most so many stage activations per device take less."""
    counted = replace(problem, activation_bytes=(schedule.chunks * schedule.parts,) * problem.devices)  # so that a stage's activation is one byte
    return float(schedule_bound(counted, schedule, cap_bytes=cap))


def built(problem: PipelineProblem, base: Schedule, cap: Sequence[int]) -> Schedule:
    """`base` with the fastest orders that its forwards, input's and weights' gradients are built into; one copy of every stage, split backward.

    Raises: Infeasible where every construction got stuck, which needs a cap below what `require_room` asks.
    """
    from ...kernels.bubble_budget import Line, fastest_build

    stages, delay = range(base.stages), border_delays(problem, base)[0]
    line = Line(
        device=np.array(base.placement[0], np.int64),
        seconds=np.array([[action_s(problem, base, Action(k, s, 0)) for s in stages] for k in KINDS]),
        up_s=np.array([*(delay[s][0] for s in stages[:-1]), 0.0]), down_s=np.array([*(delay[s][1] for s in stages[:-1]), 0.0]),
        size=np.ones(base.stages, np.int64), cap=np.array(cap, np.int64), microbatches=base.microbatches,
    )  # fmt: skip
    span, orders = fastest_build(line, _least_s(problem, base, cap))
    if span == np.inf:
        raise Infeasible("no order within the memory cap was found", where="memory", hint="raise the memory cap", data={"cap": max(cap)})
    return replace(base, orders=tuple(tuple(Action(KINDS[k], s, m) for k, s, m in row) for row in orders))
