"""DualPipe and DualPipe-V: a forward of one micro-batch beside a backward of another, from both ends of the pipeline or around a V.

Cite: see CITE.
Left open by the publication: nothing of the order; times other than equal ones. Our answer: the order alone is taken, times are simulated.
DualPipe: two copies of every stage in opposite directions (device r holds stage r of the one and p-1-r of the other), half of the micro-batches
through each. DualPipe-V: its half, on the V placement. Both run the same eight phases; a device of DualPipe counts from its nearer end.
`overlap`: the forwards and backwards that the publication runs at once are pairs (`Action.beside`), where the problem says what a pair takes; in the
    middle of the pipeline all but the first. Else they stand one after the other, which is the faster of both where nothing is hidden.
Where the publication runs a whole backward, I is followed by its W.
Invariant: F, I, W each of one time on all stages, free messages: a device idles (p/2 - 1)·(F&B + B - 3W), p the stages, B = I + W, F&B a pair's
    time, and keeps p + 1 stage activations (published table). Cost: O(actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...errors import Unsupported
from .chimera import chimera_placement
from .orders import vee
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule, Traits
from .sync import synchronisation

__all__ = ["CITE", "DualPipe", "DualPipeV"]

CITE = Cite(
    key="deepseek2024v3", title="DeepSeek-V3 Technical Report", year=2024, venue="arXiv:2412.19437", authors="DeepSeek-AI",
    url="https://github.com/deepseek-ai/DualPipe",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DualPipe(PipelineStrategy):
    """`overlap`: forwards and backwards in pairs, where the problem says what a pair takes (`pair_s`, `pair_overlap`)."""

    name: ClassVar[str] = "dualpipe"
    cite: ClassVar[Cite] = CITE

    overlap: bool = True

    @classmethod
    def applies(cls, problem: PipelineProblem) -> bool:
        n, p = problem.microbatches, problem.devices
        return p % 2 == 0 and n % 2 == 0 and n >= 2 * p

    @property
    def traits(self) -> Traits:
        return Traits(split_backward=True, copies=2, pairs=self.overlap)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n = problem.devices, problem.microbatches
        if p % 2:
            raise Unsupported(f"DualPipe needs an even number of stages, got {p}", where="devices", hint="use dualpipe-v or zbv, or an even depth")
        if not self.applies(problem):
            raise Unsupported(
                f"DualPipe needs an even number of micro-batches, at least twice as many as devices: {n}, {2 * p}", where="microbatches",
                hint=f"use {2 * p} micro-batches, or an even number above, or chimera or zb1p", data={"least": 2 * p},
            )  # fmt: skip
        copy_of = (0,) * (n // 2) + (1,) * (n // 2)
        orders, pairs = [], self.overlap and _pairs(problem)
        for d in range(p):
            # own direction first: down for the first half of the devices, up for the second
            near = ((d, 0, 0), (p - 1 - d, n // 2, 1))
            orders.append(tuple(_Phases(p // 2, n // 2, min(d, p - 1 - d), near if d < p // 2 else near[::-1], pairs).run()))
        schedule = Schedule(
            name=self.name, devices=p, stages=p, placement=chimera_placement(p, 1), copy_of=copy_of, orders=tuple(orders), split=True,
            options=asdict(self),
        )  # fmt: skip
        return replace(schedule, collectives=synchronisation(schedule, "eager-opt"))


@dataclass(frozen=True, kw_only=True)
class DualPipeV(PipelineStrategy):
    """`overlap`: forwards and backwards in pairs, where the problem says what a pair takes (`pair_s`, `pair_overlap`)."""

    name: ClassVar[str] = "dualpipe-v"
    cite: ClassVar[Cite] = CITE

    overlap: bool = True

    @classmethod
    def applies(cls, problem: PipelineProblem) -> bool:
        return problem.microbatches >= 2 * problem.devices

    @property
    def traits(self) -> Traits:
        return Traits(stages_per_device=2, split_backward=True, pairs=self.overlap)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n = problem.devices, problem.microbatches
        if not self.applies(problem):
            raise Unsupported(
                f"DualPipe-V needs at least twice as many micro-batches as devices: {n} < {2 * p}", where="microbatches",
                hint=f"use {2 * p} micro-batches or more, or zbv", data={"least": 2 * p},
            )  # fmt: skip
        pairs = self.overlap and _pairs(problem)
        orders = tuple(tuple(_Phases(p, n, d, ((d, 0, 0), (2 * p - 1 - d, 0, 0)), pairs).run()) for d in range(p))
        return Schedule(
            name=self.name, devices=p, stages=2 * p, placement=(vee(p),), copy_of=(0,) * n, orders=orders, split=True, options=asdict(self)
        )


def _pairs(problem: PipelineProblem) -> bool:
    """Where a pair takes what its halves take one after the other, it only keeps the first one's result back."""
    return bool(problem.pair_s) or problem.pair_overlap > 0


class _Phases:
    """The eight phases of one device, `d` of `p` from the end. `held`: (stage, first micro-batch, copy) of both chunks, its own direction first."""

    def __init__(self, p: int, n: int, d: int, held: Sequence[tuple[int, int, int]], overlap: bool) -> None:
        self.p, self.n, self.d, self.overlap = p, n, d, overlap
        self.held = held
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.order: list[Action] = []
        self.waiting: list[Action] = []

    def action(self, kind: str, chunk: int, turn: int, beside: int) -> Action:
        stage, first, copy = self.held[chunk]
        return Action(kind, stage, first + turn, copy, beside=-1 if beside < 0 else self.held[beside][0])  # type: ignore[arg-type]

    def forward(self, chunk: int, *, beside: int = -1) -> None:
        self.order.append(self.action("F", chunk, self.forwards[chunk], beside))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, *, later: bool = False, beside: int = -1) -> None:
        """I, and W at once or `later`."""
        a = self.action("I", chunk, self.backwards[chunk], beside)
        self.backwards[chunk] += 1
        self.order.append(a)
        (self.waiting if later else self.order).append(a._replace(kind="W"))

    def pair(self, forward: int, backward: int) -> None:
        self.forward(forward, beside=backward if self.overlap else -1)
        self.backward(backward, beside=forward if self.overlap else -1)

    def weight(self) -> None:
        self.order.append(self.waiting.pop(0))

    def run(self) -> list[Action]:
        p, n, d = self.p, self.n, self.d
        # fill: the outer devices run ahead by the way to the middle and back
        for _ in range(2 * (p - 1 - d)):
            self.forward(0)
        for _ in range(d + 1):
            self.forward(0)
            self.forward(1)
        # the first backwards, each with its W right behind
        for _ in range(p - 1 - d):
            self.backward(1, later=True)
            self.weight()
            self.forward(1)
        # steady state: one forward and one backward of either stage in turn
        for i in range(n - 2 * p + d + 1):
            if i == 0 and d == p - 1:
                self.forward(0)
                self.backward(1)
            else:
                self.pair(0, 1)
            self.pair(1, 0)
        for _ in range(p - 1 - d):
            self.backward(1)
            self.pair(1, 0)
        # drain: from the middle on backwards leave their W, which fill the gaps of the two phases below
        for i in range(d + 1):
            late = i >= (d + 1) // 2
            odd = d % 2 == 1
            self.backward(1, later=late and (odd or i > (d + 1) // 2))
            self.backward(0, later=late)
        for _ in range(p - 1 - d):
            self.weight()
            self.backward(0, later=True)
        for _ in range(d + 1):
            self.weight()
        return self.order
