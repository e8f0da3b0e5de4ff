"""Machines on hosts in virtual time: they come, leave, are resized and moved; the queue engine's sibling (`simulate.cluster`), on the same heap.

A rule decides, compiled (`kernels.vm_fleet`), or a function that is asked at every arrival. The engine counts what hosts hold by itself. A moved
machine is on both hosts while it is copied. Who finds no host is refused and does not come again. What happens before the warm-up is over is in no
figure.

Invariant: no host holds more than it has of anything, or UsageError names it. Cost: O(log machines) per event, and what the rule takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.forecast import Forecast
from ..cluster.vms import VmHosts, VmTrace
from ..errors import UsageError
from ..kernels.vm_drain import make_drain
from ..kernels.vm_events import BUSY, DONE, INVERSIONS, MACHINE, MOVES, OVER, OVERFULL, REFUSED, RESIZE_TO, STAYS, TICKS, Events, advance, make_events
from ..kernels.vm_fleet import Outlook, Rule, make_fleet
from ..timeline import Spans, Timeline

__all__ = ["COPY_S", "TICK_S", "VmMeasures", "VmRun", "outlook_of", "simulate_vms"]

TICK_S = 600.0  # between looks at forecasts, deadlines and hosts to drain
COPY_S = 600.0  # a moved machine is on both hosts so long
COPIES = 4  # at a time
MAX_TICKS = 10_000_000
Ask = Callable[[int, float, NDArray[np.int64]], int]


@dataclass(frozen=True, kw_only=True)
class VmMeasures:
    """Time averages after the warm-up. `empty_share`: of hosts without a machine. `load`: used share of all hosts, per resource; `density`: of the
    hosts in use. `overdue_share`: of the load, mean over ticks, that lives three times longer than predicted; `deadlines`, `missed`: of LAVA's
    hosts. `packed_share`, `doubtful_share`: of the time that the guard left predictions aside, or trusted NILAS only. `inversions`: refused while
    one of lower priority ran."""

    empty_share: float
    load: tuple[float, ...]
    density: tuple[float, ...]
    used_host_s: float
    refused: int
    moves: int
    inversions: int
    resizes: int
    resizes_refused: int
    overdue_share: float
    deadlines: int
    missed: int
    doubtful_share: float
    packed_share: float


@dataclass(frozen=True, kw_only=True)
class VmRun:
    """`stays`: vm, host, from_s, to_s (not finite: still there). `resized`: which of the trace's resizes, by time, were done. `ticks`: a row each:
    time, hosts in use, machines, level of the guard, share overdue, loads."""

    trace: VmTrace
    hosts: VmHosts
    from_s: float
    stays: NDArray[np.void]
    resized: NDArray[np.bool_]
    ticks: NDArray[np.float64]
    measures: VmMeasures

    def timeline(self) -> Timeline:
        """Spans are of hosts (`rank`); lanes of a host hold one machine at a time. Counters of the whole cluster."""
        s = self.stays[np.lexsort((self.stays["from_s"], self.stays["host"]))]
        end_s = np.minimum(s["to_s"], self.trace.until_s)
        lane, busy, host = np.zeros(len(s), np.int32), list[float](), -1
        for i, (h, begin, end) in enumerate(zip(s["host"].tolist(), s["from_s"].tolist(), end_s.tolist(), strict=True)):
            busy, host = (busy, host) if h == host else ([], h)
            free = next((k for k, until in enumerate(busy) if until <= begin), len(busy))
            busy[free : free + 1] = [end]
            lane[i] = free
        minus = np.full(len(s), -1, np.int32)
        spans = Spans(rank=s["host"].astype(np.int32), lane=lane, step=minus, iteration=minus, start_s=s["from_s"].copy(), end_s=end_s,
            name=[f"vm {v}" for v in s["vm"].tolist()])
        names = ("hosts in use", "machines", "guard", "overdue", *self.trace.resources)
        counters = {name: (self.ticks[:, 0], self.ticks[:, 1 + k]) for k, name in enumerate(names)}
        return Timeline(origin="simulated", run_fabric=self.hosts.name, spans=spans, makespan_s=self.trace.until_s, counters=counters)


def outlook_of(forecast: Forecast) -> Outlook:
    """The forecast as the kernels take it."""
    exact = forecast.end_s is not None
    truth = np.zeros(len(forecast.row)) if forecast.end_s is None else np.where(np.isfinite(forecast.end_s), forecast.end_s, 1e12)
    return Outlook(forecast.row.astype(np.int32), np.ascontiguousarray(forecast.left_s, np.float64), np.ascontiguousarray(forecast.alive,
        np.float64), truth, exact)


def simulate_vms(
    trace: VmTrace, hosts: VmHosts, rule: Rule, forecast: Forecast, *, from_s: float, moves_per_day: float = 0.0, horizon_s: float = 0.0,
    tick_s: float = TICK_S, copy_s: float = COPY_S, ask: Ask | None = None,
) -> VmRun:  # fmt: skip
    """From the trace's beginning to its end; figures are of `from_s` on. `ask(vm, now_s, free)`: the host of each arrival, -1 for none, instead of
    the rule's; `free[host, resource]` in billionths. `moves_per_day`: budget of moves that empty hosts; machines that end within `horizon_s` are not
    moved.

    Raises: UsageError for an answer that a host has no room for, and for times that cannot be."""
    if not trace.since_s <= from_s < trace.until_s or tick_s <= 0 or copy_s <= 0 or (trace.until_s - trace.since_s) / tick_s > MAX_TICKS:
        raise UsageError(f"figures from {from_s:g} s on, ticks of {tick_s:g} s", where="simulation",
            hint="a warm-up that ends before the recording does")
    if len(forecast.row) != len(trace) or (len(hosts.kind) and hosts.kind.max() >= len(trace.kinds)):
        raise UsageError(f"a forecast of {len(forecast.row)} machines for {len(trace)}, hosts of {len(trace.kinds)} kinds", where="simulation")
    machines = np.zeros(len(trace), MACHINE)
    machines["arrival_s"], machines["end_s"], machines["shape"], machines["low"] = trace.arrival_s, trace.end_s, trace.shape, trace.low
    resizes = np.zeros(len(trace.resizes), RESIZE_TO)
    for i, r in enumerate(sorted(trace.resizes)):
        resizes[i] = (r.at_s, r.vm, r.shape, 0)
    days = (trace.until_s - trace.since_s) / 86_400
    e = make_events(
        machines, trace.billionths, hosts.kind, resizes, since_s=trace.since_s, from_s=from_s, until_s=trace.until_s, tick_s=tick_s, copy_s=copy_s,
        copies=COPIES, moves=int(min(moves_per_day * (days + 1), 4 * MAX_TICKS)), ask=ask is not None,
    )  # fmt: skip
    fleet = make_fleet(trace.billionths, hosts.kind, trace.shape, trace.arrival_s)
    outlook, drain = outlook_of(forecast), make_drain(moves_per_day, horizon_s, trace.since_s)
    found = int(advance(e, fleet, outlook, rule, drain, -1))
    while found >= 0:
        assert ask is not None
        answer = int(ask(found, float(e.sums[-1]), e.left.copy()))
        if not -1 <= answer < len(hosts):
            raise UsageError(f"machine {found} is sent to host {answer}", where=f"at {e.sums[-1]:g} s", hint="the number of a host, or -1")
        found = int(advance(e, fleet, outlook, rule, drain, answer))
    if found == OVERFULL:
        raise UsageError(f"machine {int(e.counts[OVER])} is sent to a host without room", where=f"at {e.sums[-1]:g} s", hint="look at what is free")
    assert found == DONE
    return VmRun(
        trace=trace, hosts=hosts, from_s=from_s, stays=e.stays[: int(e.counts[STAYS])].copy(), resized=e.resizes["done"].astype(np.bool_),
        ticks=e.ticks[: int(e.counts[TICKS])].copy(), measures=_measures(trace, hosts, e, fleet.told, from_s),
    )  # fmt: skip


def _measures(trace: VmTrace, hosts: VmHosts, e: Events, told: NDArray[np.float64], from_s: float) -> VmMeasures:
    span_s, used_s = float(e.sums[0]), float(e.sums[1])
    ticks = e.ticks[: int(e.counts[TICKS])]
    ticks = ticks[ticks[:, 0] >= from_s]
    loads = e.sums[2:-1]
    done = int(e.resizes["done"].sum())
    assert e.counts[BUSY] >= 0
    return VmMeasures(
        empty_share=1 - used_s / (span_s * len(hosts)), load=tuple((loads / (span_s * len(hosts))).tolist()),
        density=tuple((loads / max(used_s, 1e-300)).tolist()), used_host_s=used_s, refused=int(e.counts[REFUSED]), moves=int(e.counts[MOVES]),
        inversions=int(e.counts[INVERSIONS]), resizes=done, resizes_refused=len(e.resizes) - done,
        overdue_share=float(ticks[:, 4].mean()) if len(ticks) else 0.0, deadlines=int(told[2]), missed=int(told[3]),
        doubtful_share=float((ticks[:, 3] == 1).mean()) if len(ticks) else 0.0, packed_share=float((ticks[:, 3] == 2).mean()) if len(ticks) else 0.0,
    )  # fmt: skip
