"""Resizing in virtual time: demands of all tenants window by window, what they get, and what they lack.

The engine of `cluster` has events of single jobs; here all tenants change at once, at the ends of equal windows, so a loop over windows with arrays
of tenants is the whole engine. A tenant uses what it wants, up to what it has; wanting more is a violation.

Invariant: used = min(demand, allocation); an action acts in the next window. Cost: O(windows x tenants), and what the policy takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.resize import Choice, Seen, Tenants, Total, Window
from ..errors import UsageError
from ..timeline import Spans, Timeline

__all__ = ["ResizeRun", "simulate_resizing", "total_of"]


@dataclass(frozen=True, kw_only=True)
class ResizeRun:
    """Per window: `allocated` and `wanted` steps of all tenants, `violations` among them. `windows`: the log's rows, where they were recorded."""

    tenants: Tenants
    allocated: NDArray[np.int64]
    wanted: NDArray[np.float64]
    violations: NDArray[np.int64]
    windows: tuple[Window, ...] = ()

    def total(self, first: int = 0) -> Total:
        """Of the windows from `first` on."""
        return total_of(self.tenants, int(self.allocated[first:].sum()), int(self.violations[first:].sum()), len(self.allocated) - first)

    def rate(self, first: int = 0) -> float:
        """Share of windows of tenants that were violated."""
        total = self.total(first)
        return total.violations / total.windows

    def timeline(self) -> Timeline:
        """Counters of all tenants together."""
        at_s = np.arange(len(self.allocated), dtype=np.float64) * self.tenants.window_s
        none = np.zeros(0, np.int32)
        spans = Spans(rank=none, lane=none, step=none, iteration=none, start_s=np.zeros(0), end_s=np.zeros(0), name=[])
        counters: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {
            name: (at_s, np.asarray(getattr(self, name), np.float64)) for name in ("allocated", "wanted", "violations")
        }
        return Timeline(origin="simulated", run_fabric="", spans=spans, makespan_s=len(at_s) * self.tenants.window_s, counters=counters)


def total_of(tenants: Tenants, steps: int, violations: int, windows: int) -> Total:
    """`steps`: summed over windows and tenants; `windows`: of the run."""
    return Total(unit_hours=steps * tenants.unit * tenants.window_s / 3600, violations=violations, windows=windows * len(tenants.names))


def simulate_resizing(
    tenants: Tenants, demand: NDArray[np.float64], decide: Callable[[Seen], Choice], *, start: NDArray[np.int64] | None = None, ahead: bool = False,
    record: bool = False,
) -> ResizeRun:  # fmt: skip
    """`demand`: [windows, tenants] in steps. `start`: steps at the beginning, default the most. `ahead`: show the next window's demand, for oracles.

    Raises: UsageError for a demand of another shape, negative or not finite; a policy that gives what a tenant may not have."""
    if demand.ndim != 2 or demand.shape[1] != len(tenants.names) or not len(demand) or not np.isfinite(demand).all() or demand.min() < 0:
        raise UsageError(f"a demand of shape {demand.shape} for {len(tenants.names)} tenants", where="demand",
            hint="[windows, tenants], finite and at least 0")
    least, most = np.array(tenants.least, np.int64), np.array(tenants.most, np.int64)
    has = most.copy() if start is None else start.astype(np.int64)
    allocated, violations, windows = [], [], []
    for t, wanted in enumerate(demand):
        violated = wanted > has
        allocated.append(int(has.sum()))
        violations.append(int(violated.sum()))
        seen = Seen(window=t, before=has, used=np.minimum(wanted, has), violated=violated,
            ahead=demand[min(t + 1, len(demand) - 1)] if ahead else None)
        choice = decide(seen)
        if record:
            windows.append(Window.of(seen, choice))
        has = has + choice.steps
        if (has < least).any() or (has > most).any():
            worst = int(np.argmax((has < least) | (has > most)))
            raise UsageError(f"the policy gives {tenants.names[worst]} {has[worst]} steps", where=f"window {t}",
                hint=f"from {least[worst]} to {most[worst]}")
    return ResizeRun(
        tenants=tenants, allocated=np.array(allocated), wanted=demand.sum(1), violations=np.array(violations), windows=tuple(windows)
    )  # fmt: skip
