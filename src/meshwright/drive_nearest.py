"""What would make an infeasible training job feasible: the nearest changes, each found by planning the job with it.

Tried, the least invasive first: leaving open what was fixed (a degree, the micro-batch); memory per device, of the layout that needs least, exactly;
a smaller global batch; more devices like the last one. A change is only named when a plan with it was found to fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .decide.layout.problem import Fixed
from .drive_evaluated import Evaluated
from .drive_layouts import MAX_PROGRAM_STEPS, LayoutSearch, expected_steps
from .errors import Infeasible, MeshwrightError
from .explain.changes import one_more_device
from .fabric import Fabric

__all__ = ["NearestChange", "leanest_fitting", "nearest_changes", "with_nearest_changes"]

NAMES = ("--dp", "--tp", "--pp", "--microbatch")
SMALLEST = 4  # combinations of degrees with the least weights and state whose exact need is worked out
MOST_TIMES = 8  # as many devices as this times those there are


class NearestChange(msgspec.Struct, frozen=True, kw_only=True):
    """`layout`: one that fits then; `needed_bytes`: the most that a device needs with it."""

    kind: str  # "open" | "memory" | "batch" | "devices"
    what: str
    layout: str
    needed_bytes: int = 0
    devices: int = 0
    global_batch: int = 0


@dataclass
class _Planner:
    """Plans variations of one job; `search_on(fabric, global_batch, time_limit_s)` makes the search."""

    search_on: Callable[[Fabric, int, float], LayoutSearch]
    fabric: Fabric
    global_batch: int
    fixed: Fixed
    until: float

    def fitting(self, fabric: Fabric, batch: int, fixed: Fixed) -> Evaluated | None:
        """A layout that fits; None for none, or when time is up."""
        left = self.until - time.monotonic()
        if left <= 0:
            return None
        try:
            search = self.search_on(fabric, batch, min(left, 10.0))
            search.steps = None  # planning whole stages costs seconds for each; what fits without them fits
            best, judged = search.best(fixed)
            return best or leanest_fitting(search, judged)
        except MeshwrightError:
            return None

    # ---- the changes ---------------------------------------------------------------------------------------------------
    def opened(self) -> Iterator[NearestChange]:
        """One fixed decision left open, else all."""
        given = [i for i, x in enumerate(self.fixed) if x is not None]
        for chosen in ([i] for i in given) if len(given) < 2 else [*([i] for i in given), given]:
            free = tuple(None if i in chosen else x for i, x in enumerate(self.fixed))
            best = self.fitting(self.fabric, self.global_batch, free)  # type: ignore[arg-type]
            if best is not None:
                what = "without " + " and ".join(f"{NAMES[i]} {self.fixed[i]}" for i in chosen)
                yield NearestChange(
                    kind="open", what=what, layout=str(best.candidate.degrees), needed_bytes=need_of(best), devices=len(self.fabric.devices),
                    global_batch=self.global_batch,
                )  # fmt: skip
                return

    def memory(self, judged: list[Evaluated]) -> Iterator[NearestChange]:
        """The least that the fullest device needs in the worst order, over the layouts with the least state."""
        search = self.search_on(_boundless(self.fabric), self.global_batch, 1.0)
        best = min(leanest(search, judged), key=need_of, default=None)
        if best is not None:
            yield NearestChange(
                kind="memory", what=f"devices with {need_of(best)} bytes", layout=str(best.candidate.degrees), needed_bytes=need_of(best),
                devices=len(self.fabric.devices), global_batch=self.global_batch,
            )  # fmt: skip

    def batch(self) -> Iterator[NearestChange]:
        """The largest of batch/2, batch/4, ... that fits."""
        batch = self.global_batch
        while batch % 2 == 0:
            batch //= 2
            best = self.fitting(self.fabric, batch, self.fixed)
            if best is not None:
                yield NearestChange(
                    kind="batch", what=f"a global batch of {batch}", layout=str(best.candidate.degrees), needed_bytes=need_of(best),
                    devices=len(self.fabric.devices), global_batch=batch,
                )  # fmt: skip
                return

    def devices(self) -> Iterator[NearestChange]:
        """The fewest devices that fit, to within what was tried: one by one up to twice as many, then doubled."""
        n = len(self.fabric.devices)
        fabric, sizes = self.fabric, [*range(n + 1, min(2 * n, n + 8) + 1), *(n * k for k in (2, 4, MOST_TIMES))]
        free: Fixed = (None, *self.fixed[1:])  # more devices are more replicas or stages
        for size in sorted(set(sizes)):
            while len(fabric.devices) < size:
                fabric = one_more_device(fabric)[1]
            best = self.fitting(fabric, self.global_batch, free)
            if best is not None:
                yield NearestChange(
                    kind="devices", what=f"{size} devices like {self.fabric.devices[-1].name} instead of {n}", layout=str(best.candidate.degrees),
                    needed_bytes=need_of(best), devices=size, global_batch=self.global_batch,
                )  # fmt: skip
                return


def leanest(search: LayoutSearch, judged: list[Evaluated]) -> list[Evaluated]:
    """Layouts that need little, simulated in device order: of each combination of degrees the smallest micro-batch, those with least state first.

    A search simulates the micro-batches that promise the shortest step; where none of them fits, a smaller one may.
    """
    first: dict[tuple[int, int, int, bool], Evaluated] = {}
    limit = max(d.memory_bytes for d in search.fabric.devices)
    possible = [e for e in judged if e.candidate.layout is not None and expected_steps(e.layout) <= MAX_PROGRAM_STEPS]
    for e in sorted(possible, key=lambda e: e.candidate.degrees):
        if 1 < limit < e.candidate.memory_floor_bytes:
            continue
        d = e.candidate.degrees
        first.setdefault((d.data, d.tensor, d.pipeline, d.sequence), e)
    found = []
    for e in sorted(first.values(), key=lambda e: (e.candidate.memory_floor_bytes, e.candidate.degrees))[:SMALLEST]:
        placement = tuple(d.name for d in search.fabric.devices[: e.layout.ranks])
        if search.steps is None:
            found.append(search.evaluate(e.candidate, placement, "device order", search.planner))
        else:  # what it can do with less counts, too
            tried = search.evaluate_with_recomputation(e.candidate, placement, "device order")
            found.append(min(tried, key=lambda x: x.excess_bytes if x.timeline is not None else 1 << 62))
    return [e for e in found if e.timeline is not None]


def leanest_fitting(search: LayoutSearch, judged: list[Evaluated]) -> Evaluated | None:
    """The fastest of `leanest` that fits."""
    fitting = [e for e in leanest(search, judged) if e.excess_bytes <= 0]
    return min(fitting, key=lambda e: (e.time_s, e.candidate.degrees), default=None)


def _boundless(fabric: Fabric) -> Fabric:
    """With a limit of one byte on every device: what a layout exceeds it by is what it needs."""
    return replace(fabric, devices=tuple(replace(d, memory_bytes=1) for d in fabric.devices))


def need_of(found: Evaluated) -> int:
    """Bytes that the fullest device may need. The search's figure where the layout exceeds its device, else the simulated peak."""
    assert found.fabric is not None and found.timeline is not None
    if found.excess_bytes > 0:
        return found.fabric.device(found.placement[found.worst_rank]).memory_bytes + found.excess_bytes
    return max(found.timeline.memory_peak_bytes)


def nearest_changes(
    search_on: Callable[[Fabric, int, float], LayoutSearch], fabric: Fabric, global_batch: int, fixed: Fixed, judged: list[Evaluated], *,
    time_limit_s: float = 30.0,
) -> list[NearestChange]:  # fmt: skip
    planner = _Planner(search_on, fabric, global_batch, fixed, time.monotonic() + time_limit_s)
    found = [*planner.opened(), *planner.memory(judged)]
    if any(e.excess_bytes > 0 for e in judged):
        found += planner.batch()
    return [*found, *planner.devices()]


def with_nearest_changes(error: Infeasible, changes: list[NearestChange]) -> Infeasible:
    """The same error, whose hint is what would make the job fit."""
    if not changes:
        return error
    hint = "; or ".join(f"{c.what} ({c.layout})" for c in changes)
    data: dict[str, Any] = {**error.data, "changes": [msgspec.to_builtins(c) for c in changes]}
    needed = [c.needed_bytes for c in changes if c.kind == "memory"]
    if needed:
        data["least_bytes"] = needed[0]
    return Infeasible(error.message, where=error.where, hint=f"nearest changes: {hint}", data=data)
