"""ZB1P, ZB2P and the interleaved form: split backward, weight gradients put where the device would wait.

Cite: see CITE.
Left open by the paper: its orders come from an integer programme or a heuristic on profiled times. Our answer: list scheduling under the paper's caps
    on activations, several rules, the fastest by our clock, then annealed (`improve`).
Beyond the paper: several stages per device in rounds (`InterleavedZB`), which fills in a fraction of the time.
Caps in stage activations (F to the end of W) on every device: ZB1P the 1F1B peak `devices`, ZB2P 2·devices - 1, interleaved the peak of interleaved
    1F1B; `cap` overrides.
Invariant: no device keeps more than the cap. With F = I = W, free messages and a common start and end no schedule beats N·3·F + (devices-1)·F.
Cost: O(rules · actions · log).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...errors import UsageError
from .bound import schedule_bound
from .improve import improved
from .late_messages import sturdiest
from .listing import RULES, list_orders
from .orders import looped, times
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule, Traits

__all__ = ["CITE", "ZB1P", "ZB2P", "InterleavedZB", "fastest_listing", "split_base"]

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
    """The fastest list schedule over the rules, the first of equals, then annealed for `tries` schedules; of about equal ones the sturdiest."""
    rows = [[c] * base.copies for c in cap]
    best = min((list_orders(problem, base, rule, rows) for rule in RULES), key=lambda s: times(problem, s).makespan_s)
    if not tries:
        return best

    def improve(asked: PipelineProblem, given: Schedule) -> Schedule:
        return improved(asked, given, rows, tries=tries, least_s=float(schedule_bound(asked, given)))

    return sturdiest(problem, improve(problem, best), improve)
