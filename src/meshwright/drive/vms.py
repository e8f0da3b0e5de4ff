"""Machines on hosts: a strategy and a predictor composed into a checked placement beside its bound; strategies compared; one decision at a time,
online."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.forecast import Forecast
from ..cluster.vm_placement import Stay, VmPlacement
from ..cluster.vms import WHOLE, VmHosts, VmTrace
from ..decide.cluster.vms import VmProblem, VmStrategy, forecast, used_hosts_bound
from ..errors import UsageError
from ..kernels.effort import Budget
from ..kernels.stages import stage
from ..kernels.vm_fleet import choose, expected_left, leave, make_fleet, put, review
from ..simulate.vms import TICK_S, VmRun, outlook_of, simulate_vms

__all__ = ["DAY_S", "Compared", "Placer", "compare_vms", "hosts_needed", "place_vms", "run_vms", "stranded"]

DAY_S = 86_400.0
SNAPSHOTS = 5  # moments at which stranding is measured
MAX_MIX = 100_000  # machines that are added until nothing fits


@stage("placing machines")
def run_vms(trace: VmTrace, hosts: VmHosts, strategy: VmStrategy, predicted: Forecast, *, from_s: float, seed: int = 0) -> VmRun:
    """In virtual time; figures are of `from_s` on. Raises: as the strategy and `simulate_vms`."""
    placing = strategy.plan(VmProblem(trace=trace, hosts=hosts, forecast=predicted), rng=np.random.default_rng(seed))
    return simulate_vms(
        trace, hosts, placing.rule, predicted, from_s=from_s, moves_per_day=placing.moves_per_day, horizon_s=placing.horizon_s, ask=placing.ask
    )


def place_vms(trace: VmTrace, hosts: VmHosts, strategy: VmStrategy, predicted: Forecast, *, from_s: float, seed: int = 0) -> tuple[VmPlacement,
    VmRun]:
    """The placement of a whole trace, checked, with its bound. Raises: CheckFailed; as `run_vms`."""
    from ..check.vms import check_vm_placement

    run = run_vms(trace, hosts, strategy, predicted, from_s=from_s, seed=seed)
    came = (trace.arrival_s <= trace.until_s) & (trace.end_s > np.maximum(trace.arrival_s, trace.since_s))
    placed = np.zeros(len(trace), np.bool_)
    placed[run.stays["vm"]] = True
    stays = [
        Stay(vm, host, begin, end if end < np.inf else None)
        for vm, host, begin, end in zip(*(run.stays[name].tolist() for name in ("vm", "host", "from_s", "to_s")), strict=True)
    ]  # fmt: skip
    made = VmPlacement(
        strategy=strategy.name, predictor=predicted.name, trace=trace.name, hosts=tuple(np.bincount(hosts.kind, minlength=len(trace.kinds)).tolist()),
        from_s=from_s, stays=tuple(stays), used_host_s=run.measures.used_host_s, refused=tuple(np.flatnonzero(came & ~placed).tolist()),
        resized=tuple(np.flatnonzero(run.resized).tolist()), bound=used_hosts_bound(trace, placed, run.resized, from_s=from_s, until_s=trace.until_s),
    )  # fmt: skip
    check_vm_placement(made, trace, hosts).raise_if_wrong()
    return made, run


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row of a comparison. `most_empty_share`: no placement of what this run placed leaves more hosts empty."""

    strategy: str
    predictor: str
    run: VmRun
    most_empty_share: float


def compare_vms(
    trace: VmTrace, hosts: VmHosts, strategies: Sequence[VmStrategy], predictors: Sequence[str], *, from_s: float, learn_s: float, seed: int = 0,
    budget: Budget | None = None,
) -> list[Compared]:
    """Every strategy under every predictor; those that look at no forecast once. What ends the `budget` leaves the rows so far.

    Raises: as `forecast` and `run_vms`."""
    predictors = predictors if any(s.forecasts for s in strategies) else ["perfect"]  # which needs no past
    rows, forecasts = [], {name: forecast(name, trace, at_s=learn_s, seed=seed) for name in predictors}
    bounds: dict[bytes, float] = {}
    pairs = [(strategy, name) for strategy in strategies for name in (predictors if strategy.forecasts else predictors[:1])]
    budget = budget or Budget(len(pairs))
    with stage("strategies and predictors", of=len(pairs)):
        for strategy, name in pairs:
            if not budget.spend():
                break
            with budget.net():
                run = run_vms(trace, hosts, strategy, forecasts[name], from_s=from_s, seed=seed)
            placed = np.zeros(len(trace), np.bool_)
            placed[run.stays["vm"]] = True
            key = placed.tobytes() + run.resized.tobytes()
            if key not in bounds:
                bounds[key] = float(used_hosts_bound(trace, placed, run.resized, from_s=from_s, until_s=trace.until_s))
            most = 1 - bounds[key] / ((trace.until_s - from_s) * len(hosts))
            rows.append(Compared(strategy=strategy.name, predictor=name if strategy.forecasts else "", run=run, most_empty_share=most))
    return rows


def hosts_needed(
    trace: VmTrace, hosts: VmHosts, strategy: VmStrategy, predicted: Forecast, *, from_s: float, most_refused: float = 1e-4, seed: int = 0
) -> int:
    """The smallest number of hosts, the first of `hosts`, on which at most this share of the machines is refused: by bisection, as if more hosts
    never refused more. Raises: UsageError where all of them do not suffice; as `run_vms`."""

    def suffices(count: int) -> bool:
        run = run_vms(trace, VmHosts(kind=hosts.kind[:count], name=f"{count}"), strategy, predicted, from_s=from_s, seed=seed)
        return run.measures.refused <= most_refused * max(1, int(((trace.arrival_s >= from_s) & (trace.arrival_s <= trace.until_s)).sum()))

    if not suffices(len(hosts)):
        raise UsageError(f"{len(hosts)} hosts refuse more than {most_refused:g} of the machines", where="hosts", hint="more hosts")
    low, high = 0, len(hosts)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def stranded(run: VmRun, *, seed: int = 0) -> tuple[float, ...]:
    """Share of each resource that the trace's usual mix of shapes cannot use: at a few moments machines of it are added, first fit, until a shape of
    the mix has not fitted as often as there are shapes in a row; what is free then, over all there is, in the mean."""
    trace, hosts, rng = run.trace, run.hosts, np.random.default_rng(seed)
    size = trace.billionths
    rows = []
    for at_s in np.linspace(run.from_s, trace.until_s, SNAPSHOTS + 2)[1:-1].tolist():
        here = run.stays[(run.stays["from_s"] <= at_s) & (run.stays["to_s"] > at_s)]
        free = np.full((len(hosts), size.shape[2]), WHOLE, np.int64)
        np.subtract.at(free, here["host"], size[trace.shape[here["vm"]], hosts.kind[here["host"]]])
        passed = 0
        for v in rng.integers(len(trace), size=MAX_MIX).tolist():
            fits = np.flatnonzero((free >= size[trace.shape[v], hosts.kind]).all(1))
            if len(fits):
                free[fits[0]] -= size[trace.shape[v], hosts.kind[fits[0]]]
            passed = 0 if len(fits) else passed + 1
            if passed > len(trace.shapes):
                break
        rows.append(free.sum(0) / (WHOLE * len(hosts)))
    return tuple(np.mean(rows, 0).tolist())


class Placer:
    """One decision at a time: `arrive` says where a machine goes, `leave` that it is gone, `tick` every ten minutes. For a service that knows its
    machines' shapes and forecasts beforehand, as rows of `trace` and `forecast`; the simulator runs the same rules. LARS's moves are the simulator's
    only.

    Raises: UsageError for a strategy that is not compiled, and for machines that are there already, or not."""

    def __init__(self, trace: VmTrace, hosts: VmHosts, strategy: VmStrategy, predicted: Forecast) -> None:
        placing = strategy.plan(VmProblem(trace=trace, hosts=hosts, forecast=predicted), rng=np.random.default_rng(0))
        if placing.ask is not None:
            raise UsageError(f"{strategy.name} has no compiled rule", where="strategy", hint="call its function")
        self._rule, self._outlook = placing.rule, outlook_of(predicted)
        self._fleet = make_fleet(trace.billionths, hosts.kind, trace.shape, trace.arrival_s)
        self._ticked_s = float(trace.since_s)

    def arrive(self, vm: int, now_s: float) -> int:
        """Its host, -1 where it fits nowhere."""
        self._known(vm, there=False)
        self.tick(now_s)
        life_s = float(expected_left(self._fleet, self._outlook, vm, now_s))
        host = int(choose(self._fleet, self._outlook, self._rule, vm, now_s, life_s, False))
        if host >= 0:
            put(self._fleet, self._outlook, self._rule, vm, host, now_s)
        return host

    def leave(self, vm: int, now_s: float) -> None:
        self._known(vm, there=True)
        leave(self._fleet, self._outlook, self._rule, vm, now_s)

    def tick(self, now_s: float) -> None:
        """Forecasts are read again where ten minutes are over since the last time."""
        if now_s - self._ticked_s >= TICK_S:
            review(self._fleet, self._outlook, self._rule, now_s)
            self._ticked_s = now_s

    @property
    def free(self) -> NDArray[np.int64]:
        """[host, resource], in billionths."""
        return self._fleet.free.copy()

    def _known(self, vm: int, *, there: bool) -> None:
        machines = self._fleet.machines
        if not 0 <= vm < len(machines) or (machines["host"][vm] >= 0) != there:
            raise UsageError(f"machine {vm} is {'not ' if there else ''}there", where="placer", hint="arrive once, leave once")
