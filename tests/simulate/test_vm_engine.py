"""Machines on hosts in virtual time: a plain twin places the same, moves and resizes keep every host within itself, figures are of the time after
warm-up."""

from __future__ import annotations

import numpy as np
import pytest

from effort import few
from meshwright.check.vms import check_vm_placement
from meshwright.cluster.forecast import Forecast
from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.vms import Resize, VmHosts, VmTrace
from meshwright.decide.cluster.vms import forecast, strategy
from meshwright.drive.vms import place_vms
from meshwright.errors import UsageError
from meshwright.kernels.vm_fleet import BEST, FIRST, LEAST, MOST, NILAS, Rule
from meshwright.simulate.vms import simulate_vms

HOUR_S = 3600.0


def trace_of(rows, resizes=(), shapes=(0.5, 0.25, 0.75), until_s=100 * HOUR_S, low=()):
    """Rows of (arrival, end, shape), in hours."""
    a, b, s = zip(*rows, strict=True)
    return VmTrace(
        name="t", resources=("cores",), kinds=("host",), shapes=tuple(map(str, shapes)), size=np.array(shapes)[:, None, None], shape=np.array(s,
            np.int32),
        arrival_s=HOUR_S * np.array(a, float), end_s=HOUR_S * np.array(b, float), owner=np.zeros(len(rows), np.int32),
        low=np.isin(np.arange(len(rows)), low), since_s=0.0, until_s=until_s, resizes=tuple(resizes),
    )  # fmt: skip


def truth(trace):
    return forecast("perfect", trace)


def hosts_of(run):
    return dict(zip(run.stays["vm"].tolist(), run.stays["host"].tolist(), strict=True))


def twin(trace, hosts, method, bucket_s=1800.0):
    """The rules once more, in plain Python, with true ends: a host for every machine."""
    size, on, free = trace.billionths, {}, np.full((hosts, trace.size.shape[2]), 10**9)
    found = {}
    for v in np.lexsort((np.arange(len(trace)), trace.arrival_s)).tolist():
        now = max(trace.arrival_s[v], trace.since_s)
        for gone in [u for u in on if trace.end_s[u] <= now]:
            free[on.pop(gone)] += size[trace.shape[gone], 0]
        if trace.end_s[v] <= now or now > trace.until_s:
            continue
        keys = []
        for h in range(hosts):
            rest = free[h] - size[trace.shape[v], 0]
            if (rest < 0).any():
                continue
            best = float(rest.sum())
            if method == FIRST:
                key = (0.0,)
            elif method == BEST:
                key = (best,)
            elif method == MOST:
                key = (float(-(sum(int(100 * (10**9 - x)) // 10**9 for x in rest.tolist()) // len(rest))),)
            elif method == LEAST:
                key = (float(-(sum(int(100 * x) // 10**9 for x in rest.tolist()) // len(rest))),)
            else:
                end = max((trace.end_s[u] for u in on if on[u] == h), default=now)
                later = max(0.0, trace.end_s[v] - max(end, now))
                limits = [1.0, bucket_s, *(bucket_s * 2**k for k in range(1, 9))]
                key = (float(sum(later > x for x in limits)), best)
            keys.append((*key, h))
        if keys:
            on[v] = found[v] = min(keys)[-1]
            free[on[v]] -= size[trace.shape[v], 0]
    return found


@pytest.mark.parametrize("method", [FIRST, BEST, MOST, LEAST, NILAS])
def test_a_plain_twin_places_the_same(method):
    for seed in range(few(5, least=2)):
        trace = synthetic_vms(5, days=2, before_days=0.5, load=0.6, owners=12, warm_days=0.5, seed=seed)
        run = simulate_vms(trace, VmHosts.of([5]), Rule(method), truth(trace), from_s=0.0)
        assert hosts_of(run) == twin(trace, 5, method)


def test_a_function_may_decide_and_is_held_to_what_is_free():
    trace = trace_of([(0, 9, 0), (1, 5, 0), (2, 4, 2), (3, 6, 2)])
    seen = []

    def ask(vm, now_s, free):
        seen.append((vm, now_s / HOUR_S, free[:, 0].tolist()))
        return {0: 0, 1: 0, 2: 1, 3: -1}[vm]

    run = simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), truth(trace), from_s=0.0, ask=ask)
    assert hosts_of(run) == {0: 0, 1: 0, 2: 1} and run.measures.refused == 1
    assert seen[2] == (2, 2.0, [0, 10**9]) and seen[3][2] == [0, 25 * 10**7]
    for answer, says in ((0, "without room"), (7, "sent to host 7")):
        with pytest.raises(UsageError, match=says):
            simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), truth(trace), from_s=0.0, ask=lambda vm, now_s, free, a=answer: a if vm == 2 else 0)


def test_figures_are_of_the_time_after_the_warm_up():
    trace = trace_of([(0, 10, 0), (4, 6, 2)], until_s=20 * HOUR_S)
    run = simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), truth(trace), from_s=5 * HOUR_S)
    assert run.measures.used_host_s == pytest.approx((5 + 1) * HOUR_S)  # machine 0 until 10 h, machine 1, on the other host, until 6 h
    assert run.measures.load[0] == pytest.approx((0.5 * 5 + 0.75 * 1) / 30) and run.measures.density[0] == pytest.approx((2.5 + 0.75) / 6)
    assert run.measures.empty_share == pytest.approx(1 - 6 / 30)
    line = run.timeline()
    assert line.spans.rank.tolist() == [0, 1] and line.makespan_s == 20 * HOUR_S and set(line.counters) >= {"hosts in use", "cores"}
    for wrong in (-1.0, 20 * HOUR_S):
        with pytest.raises(UsageError, match="warm-up"):
            simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), truth(trace), from_s=wrong)
    nothing = Forecast(name="f", row=np.zeros(1, np.int32), left_s=np.zeros((1, 2)), alive=np.zeros((1, 2)), end_s=np.zeros(1))
    with pytest.raises(UsageError, match="forecast of 1"):
        simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), nothing, from_s=0.0)


def test_resizes_stay_move_or_are_refused():
    resizes = [Resize(2 * HOUR_S, 0, 0), Resize(3 * HOUR_S, 1, 2), Resize(4 * HOUR_S, 1, 0), Resize(60 * HOUR_S, 0, 2)]
    trace = trace_of([(0, 50, 1), (0, 50, 0), (1, 40, 2)], resizes)
    made, run = place_vms(trace, VmHosts.of([2]), strategy("first-fit")(), truth(trace), from_s=0.0)
    # 0: a quarter becomes a half where it is. 1: three quarters fit nowhere. 1: it stays a half. The last is of a machine that is gone.
    assert run.resized.tolist() == [True, False, True, False] and made.resized == (0, 2) and run.measures.resizes_refused == 2
    assert sorted((s.vm, s.host) for s in made.stays) == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1)]
    moved = trace_of([(0, 50, 0), (0, 50, 0)], [Resize(HOUR_S, 0, 2)])
    made, run = place_vms(moved, VmHosts.of([2]), strategy("best-fit")(), truth(moved), from_s=0.0)
    assert [(s.vm, s.host) for s in made.stays] == [(0, 0), (1, 0), (0, 1)] and run.resized.all()


def test_low_priority_that_stays_while_high_is_refused_is_counted():
    rows = [(0, 9, 2), (1, 9, 2), (2, 9, 0)]
    for low, expected in (([0], 1), ([2], 0), ([], 0)):
        trace = trace_of(rows, low=low)
        run = simulate_vms(trace, VmHosts.of([2]), Rule(FIRST), truth(trace), from_s=0.0)
        assert (run.measures.refused, run.measures.inversions) == (1, expected)


def test_lars_empties_a_host_and_the_copies_are_counted_twice():
    """Two hosts hold a long machine each after the others left; one of the two moves over."""
    rows = [(0, 90, 1), (0, 3, 2), (1, 80, 1), (1, 3, 1), (1, 3, 0)]
    trace = trace_of(rows)
    still, _ = place_vms(trace, VmHosts.of([2]), strategy("nilas")(), truth(trace), from_s=0.0)
    made, run = place_vms(trace, VmHosts.of([2]), strategy("lars")(moves_per_day=24, horizon_s=2 * HOUR_S), truth(trace), from_s=0.0)
    assert run.measures.moves == 1 and made.used_host_s < still.used_host_s - 50 * HOUR_S
    twice = [s for s in made.stays if s.vm == next(v for v in (0, 2) if sum(s.vm == v for s in made.stays) == 2)]
    assert twice[0].to_s == twice[1].from_s + 600.0 and twice[0].host != twice[1].host


def test_machines_that_were_there_before_come_first_and_ended_ones_do_not():
    trace = trace_of([(-5, 3, 0), (-9, -1, 0), (-2, 4, 0), (0, 2, 1)])
    made, run = place_vms(trace, VmHosts.of([2]), strategy("first-fit")(), truth(trace), from_s=0.0)
    assert hosts_of(run) == {0: 0, 2: 0, 3: 1} and check_vm_placement(made, trace, VmHosts.of([2])).ok


def test_ticks_count_what_is_there():
    """A row for every tick, with the hosts in use, the machines and their load in hosts at that time, as the stays say."""
    trace = trace_of([(0.5, 9.25, 0), (1.25, 4.5, 2), (2.75, np.inf, 1), (3.25, 8.75, 2)], until_s=10 * HOUR_S)
    run = simulate_vms(trace, VmHosts.of([3]), Rule(FIRST), truth(trace), from_s=0.0, tick_s=HOUR_S)
    times = run.ticks[:, 0]
    assert len(times) >= 9 and (np.diff(times) == HOUR_S).all() and times[-1] <= trace.until_s
    for at_s, in_use, machines, _, _, load in run.ticks:
        there = run.stays[(run.stays["from_s"] <= at_s) & (run.stays["to_s"] > at_s)]
        assert (in_use, machines) == (len(set(there["host"].tolist())), len(there))
        assert load == pytest.approx(sum(trace.size[trace.shape[v], 0, 0] for v in there["vm"]))
