"""What would make an infeasible training job feasible: the nearest changes, each found by planning the job with it.

Tried, the least invasive first: leaving open what was fixed (a degree, the micro-batch); memory per device, of the layout that needs least, exactly;
a smaller global batch; more devices like the last one. A change is only named when a plan with it was found to fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from ...decide.layout.problem import Fixed
from ...errors import Infeasible, MeshwrightError
from ...fabric.fabric import Fabric
from .changes import more_devices
from .context import Context, Found, Looks
from .evaluated import Evaluated
from .layout import Layout
from .memory import MemoryWanted, leanest, leanest_fitting
from .wishes import LayoutWanted

__all__ = ["NearestChange", "nearest_changes", "with_nearest_changes"]

DEGREES = ("--dp", "--tp", "--pp")
NAMES = (*DEGREES, "--microbatch")
# Devices that are tried, as a multiple of those there are.
MAX_DEVICES_FACTOR = 8
# Searches for a layout; one change of each kind takes a few.
MAX_CHANGES = 40
# Counted work of one of these searches, in seconds of a quiet core.
MAX_CHANGE_WORK_S = 10.0
# Counted work of all of them.
MAX_CHANGES_WORK_S = 30.0


class NearestChange(msgspec.Struct, frozen=True, kw_only=True):
    """`layout`: one that fits then; `needed_bytes`: the most that a device needs with it."""

    kind: str  # "open" | "memory" | "batch" | "devices"
    what: str
    layout: str
    needed_bytes: int = 0
    devices: int = 0
    global_batch: int = 0


class _Planner:
    """Plans variations of one job."""

    def __init__(self, context: Context) -> None:
        self.context, self.looks = context, Looks(MAX_CHANGES, MAX_CHANGES_WORK_S)
        self.fabric, self.global_batch, self.fixed = context.fabric, context.job.global_batch, context.wish(LayoutWanted).fixed

    def fitting(self, fabric: Fabric, batch: int, fixed: Fixed) -> Evaluated | None:
        """A layout that fits; None for none, and where no more is looked at."""
        data, tensor, pipeline, microbatch = fixed
        wanted = replace(self.context.wish(LayoutWanted), data=data, tensor=tensor, pipeline=pipeline, microbatch=microbatch)
        # without step graphs: planning whole stages costs seconds for each, and what fits without them fits
        there = self.context.on(fabric, batch, MAX_CHANGE_WORK_S).wishing(wanted, MemoryWanted())
        fitting: list[Evaluated | None] = []

        def search() -> None:
            found = Layout().choose(Found(), there)
            fitting.append(found.best or leanest_fitting(there, found.judged))

        with suppress(MeshwrightError):
            self.looks.at(search)
        return fitting[0] if fitting else None

    def change(self, kind: str, what: str, best: Evaluated, *, devices: int = 0, global_batch: int = 0) -> NearestChange:
        return NearestChange(
            kind=kind, what=what, layout=str(best.candidate.degrees), needed_bytes=need_of(best), devices=devices or len(self.fabric.devices),
            global_batch=global_batch or self.global_batch,
        )  # fmt: skip

    # ---- the changes, the first of a kind that fits --------------------------------------------------------------------
    def opened(self) -> Iterator[NearestChange]:
        """One fixed decision left open, else all. Of three fixed degrees each follows from the others: one alone is not open."""
        given = [i for i, x in enumerate(self.fixed) if x is not None]
        settled = None not in self.fixed[:3] and self.context.wish(LayoutWanted).context is not None
        one = [[i] for i in given if not (settled and i < len(DEGREES))]
        for chosen in one if len(given) < 2 else [*one, given]:
            free = tuple(None if i in chosen else x for i, x in enumerate(self.fixed))
            if (best := self.fitting(self.fabric, self.global_batch, free)) is not None:  # type: ignore[arg-type]
                yield self.change("open", "without " + " and ".join(f"{NAMES[i]} {self.fixed[i]}" for i in chosen), best)

    def memory(self, judged: list[Evaluated]) -> Iterator[NearestChange]:
        """The least that the fullest device needs in the worst order, over the layouts with the least state."""
        best = min(leanest(self.context.on(_boundless(self.fabric)), judged), key=need_of, default=None)
        if best is not None:
            yield self.change("memory", f"devices with {need_of(best)} bytes", best)

    def batch(self) -> Iterator[NearestChange]:
        """The largest of batch/2, batch/4, ... that fits."""
        batch = self.global_batch
        while batch % 2 == 0:
            batch //= 2
            if (best := self.fitting(self.fabric, batch, self.fixed)) is not None:
                yield self.change("batch", f"a global batch of {batch}", best, global_batch=batch)

    def devices(self) -> Iterator[NearestChange]:
        """The fewest devices that fit, to within what was tried: one by one up to twice as many, then doubled."""
        n = len(self.fabric.devices)
        sizes = [*range(n + 1, min(2 * n, n + 8) + 1), *(n * k for k in (2, 4, MAX_DEVICES_FACTOR))]
        free: Fixed = (None, *self.fixed[1:])  # more devices are more replicas or stages
        for size in sorted(set(sizes)):
            if self.looks.spent:
                return
            if (best := self.fitting(more_devices(self.fabric, size - n), self.global_batch, free)) is not None:
                yield self.change("devices", f"{size} devices like {self.fabric.devices[-1].name} instead of {n}", best, devices=size)


def _boundless(fabric: Fabric) -> Fabric:
    """With a limit of one byte on every device: what a layout exceeds it by is what it needs."""
    return replace(fabric, devices=tuple(replace(d, memory_bytes=1) for d in fabric.devices))


def need_of(found: Evaluated) -> int:
    """Bytes that the fullest device may need. The search's figure where the layout exceeds its device, else the simulated peak."""
    assert found.fabric is not None and found.timeline is not None
    if found.excess_bytes > 0:
        return found.fabric.device(found.placement[found.worst_rank]).memory_bytes + found.excess_bytes
    return max(found.timeline.memory_peak_bytes)


def nearest_changes(context: Context, judged: list[Evaluated]) -> list[NearestChange]:
    planner = _Planner(context)
    with context.clock.net():
        over = any(e.excess_bytes > 0 for e in judged)
        kinds = (planner.opened(), planner.memory(judged), planner.batch() if over else iter(()), planner.devices())
        return [change for kind in kinds for change in islice(kind, 1)]


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
