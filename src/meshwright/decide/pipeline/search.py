"""Search: the fastest orders that can be found under the memory cap, from every published schedule's orders, and how far from the best they can be.

Cite: see CITE (the problem as a job shop, and its exact form as an integer programme).
Left open there: everything but the problem. Our answer: on each placement (straight, in rounds, V, both ways) the published schedules are improved by
    annealing (`improve`), under the cap in bytes or in stage activations; with `effort`, exact search (`exact`) goes on from the best one. What is
    proved stands in the schedule's notes.
Invariant: never slower, by our clock, than the published schedules that fit and from which it starts.
Cost: `tries` schedules per start, and `effort` looks of a solver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ...cite import Cite
from ...errors import Infeasible, Unsupported, UsageError
from ...kernels.effort import time_is_up
from .bound import schedule_bound
from .chimera import Chimera
from .exact import exact_search
from .improve import improved
from .interleaved import Interleaved
from .judge import judge
from .onefoneb import OneFOneB
from .orders import activation_bytes, kept_peak_bytes, times, weight_bytes
from .problem import PipelineProblem, PipelineStrategy, Schedule, Traits
from .vschedules import ZBV, VHalf, VMin
from .zerobubble import ZB1P, ZB2P, InterleavedZB

__all__ = ["CITE", "PLACEMENTS", "Search"]

CITE = Cite(
    key="qi2024zerobubble", title="Zero Bubble Pipeline Parallelism", year=2024, venue="ICLR", authors="Penghui Qi, Xinyi Wan, et al.",
    url="https://arxiv.org/abs/2401.10241",
)  # fmt: skip
BACKWARDS = ("either", "split", "whole")
PLACEMENTS = ("straight", "looped", "vee", "both-ways")
# Searches per start: each asks for less where the simulated memory of the one before was over the cap; what does not fit then is given up.
MAX_FITTINGS = 3


@dataclass(frozen=True, kw_only=True)
class Search(PipelineStrategy):
    """`placement`: auto tries all; `cap`: stage activations per device, 0: the problem's memory; `tries`: schedules per start; `effort`: of exact
    search afterwards, 0: none; about 0.1 s each (`kernels.highs.Looks`). `backward`: split, whole, or either. `copies`: of every stage, at most,
    where pipelines run both ways (even; each holds weights of its own)."""

    name: ClassVar[str] = "search"
    cite: ClassVar[Cite] = CITE

    placement: str = "auto"
    cap: int = 0
    tries: int = 3000
    effort: int = 0
    backward: str = "either"
    copies: int = 2

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        return (cls(effort=effort),) if effort else ()

    @property
    def traits(self) -> Traits:
        """Its backward is split or not, as in the schedule that it starts from; only both ways there are copies."""
        rounds = 2 if self.placement in ("looped", "vee") else 1
        return Traits(stages_per_device=rounds, copies=2 if self.placement == "both-ways" else 1)

    def settled(self) -> Self:
        return replace(self, placement="straight") if self.placement == "auto" else self

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        if self.placement not in ("auto", *PLACEMENTS) or self.cap < 0 or self.tries < 0 or self.effort < 0:
            raise UsageError("no such placement, or a number below 0", where="search", hint=f"placements: auto, {', '.join(PLACEMENTS)}")
        if self.backward not in BACKWARDS or self.copies < 2 or self.copies % 2:
            raise UsageError(
                f"no such backward, or no even number of copies: {self.backward}, {self.copies}", where="search",
                hint=f"backward: {', '.join(BACKWARDS)}; copies: 2, 4, ...",
            )  # fmt: skip
        if self.placement == "both-ways" and problem.devices % 2:
            raise Unsupported("pipelines in both directions need an even number of stages", where="placement", hint="use straight or vee")
        seed = int(rng.integers(1 << 30)) if rng is not None else 0
        best: Schedule | None = None
        room: _Room | None = None
        for start in self._starts(problem):
            if best is not None and time_is_up():
                break
            limit = _Room(problem, start, self.cap)
            found = limit.improve(start, self.tries, seed)
            if found is not None and (best is None or times(problem, found).makespan_s < times(problem, best).makespan_s):
                best, room = found, limit
        if best is None or room is None:
            raise Infeasible(
                "no orders were found within the memory cap on any placement", where="memory_cap_bytes",
                hint="raise the cap, use smaller micro-batches or more stages", data={"limit": "memory"},
            )  # fmt: skip
        notes: tuple[str, ...] = (f"every device holds {best.copies} stages: there are {best.copies} copies of the weights",) * (best.copies > 1)
        if self.effort:
            proof = exact_search(room.problem, best, cap_bytes=room.total, effort=self.effort)
            better = proof.schedule is not best and not any(room.over(proof.schedule))
            best = proof.schedule if better else best
            least = float(proof.least_s)
            gap = times(problem, best).makespan_s / least - 1
            what = "these orders are optimal" if gap <= 1e-7 else f"exact search was cut off, these orders are {100 * gap:.1f} % above the bound"
            notes += (f"{what}: none on this placement that keep no more activations take less than {least:.6g} s",)
        return replace(best, name=self.name, options=asdict(self), notes=notes, collectives=())

    def _starts(self, problem: PipelineProblem) -> Iterator[Schedule]:
        """Published schedules on the wanted placements; those that do not exist or fit here are left out."""
        cap, d = self.cap, problem.devices
        kinds: list[PipelineStrategy] = []
        if self.placement in ("auto", "straight"):
            kinds += [ZB1P(cap=cap, tries=0), ZB2P(cap=cap, tries=0), *([] if cap else [OneFOneB()])]
        if self.placement in ("auto", "looped"):
            kinds += [InterleavedZB(cap=cap, tries=0), *([] if cap else [Interleaved()])]
        if self.placement in ("auto", "vee"):
            kinds += [ZBV(cap=cap, tries=0), VHalf(tries=0), VMin(tries=0)]
        if self.placement in ("auto", "both-ways") and d % 2 == 0:
            pairs = [f for f in range(1, d // 2 + 1) if d // 2 % f == 0 and 2 * f <= self.copies]
            kinds += [Chimera(pipes=f, split=split) for f in pairs for split in (True, False) if split or not cap]
        # with a cap of its own the search leaves out 1F1B and plain interleaving, which take none
        if cap and self.backward == "whole":
            raise Unsupported("a cap of one's own counts activations to the end of W", where="cap", hint="give memory_cap_bytes, or split backward")
        for kind in kinds:
            if self.backward != "either" and kind.traits.split_backward != (self.backward == "split"):
                continue
            try:
                yield kind.plan(problem)
            except (Infeasible, Unsupported):
                continue


class _Room:
    """What devices may keep of activations, in bytes or (with `cap`) in stage activations; `problem` counts in the same unit."""

    def __init__(self, problem: PipelineProblem, start: Schedule, cap: int) -> None:
        self.real = self.problem = problem
        self.weights = [weight_bytes(problem, start, d) for d in range(problem.devices)]
        if cap:
            self.problem = replace(problem, activation_bytes=(start.chunks * start.parts,) * problem.devices)
            self.total: tuple[int, ...] = (cap,) * problem.devices
        else:
            self.total = tuple(max(1, c - w) if c else 0 for c, w in zip(problem.memory_cap_bytes, self.weights, strict=False))
        self.sizes = [max(1, activation_bytes(self.problem, start, s)) for s in range(start.stages)]

    def improve(self, start: Schedule, tries: int, seed: int) -> Schedule | None:
        """The best orders found that fit; None when there are none.

        Activations received and not yet used depend on times: where they do not fit, orders are sought for so much less.
        """
        if any(c and w >= c for c, w in zip(self.real.memory_cap_bytes, self.weights, strict=False)):
            return None
        least = float(schedule_bound(self.real, start))
        for _ in range(MAX_FITTINGS):
            found = improved(self.real, start, self._shares(start), tries=tries, seed=seed, least_s=least, sizes=self.sizes)
            # over the cap by the order alone: `improved` found nothing within it, and asking for less will not help
            kept = kept_peak_bytes(self.problem, found)
            if self.total and any(k > c > 0 for k, c in zip(kept, self.total, strict=True)):
                return None
            over = self.over(found)
            if not any(over):
                return found
            # over only by what arrives early, which depends on times: ask for so much less
            self.total = tuple(max(1, c - x) if c else 0 for c, x in zip(self.total, over, strict=True))
        return None

    def over(self, schedule: Schedule) -> list[int]:
        """Simulated bytes beyond the problem's cap per device, 0 where they fit."""
        caps = self.real.memory_cap_bytes
        if not caps:
            return [0] * schedule.devices
        memory = judge(replace(self.real, gradient_bytes=(0,) * schedule.devices), replace(schedule, collectives=())).memory_bytes
        return [max(0, m - c) if c else 0 for m, c in zip(memory, caps, strict=True)]

    def _shares(self, start: Schedule) -> list[list[int]]:
        """Per device and copy: the cap in the proportion in which the copies use it."""
        free = max(self.sizes) * start.microbatches * start.chunks  # no order can hold more, so it is no limit
        rows = []
        for d in range(start.devices):
            total = self.total[d] if self.total and self.total[d] else 0
            used = [sum(self.sizes[s] for c, s in start.hosted(d) if c == copy) for copy in range(start.copies)]
            rows.append([total * u // max(1, sum(used)) if total else free for u in used])
        return rows
