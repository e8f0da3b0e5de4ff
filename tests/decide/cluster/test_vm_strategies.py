"""Predictors against their definitions, strategies on cases worked by hand, the guard, and the bound against all placements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from effort import few
from meshwright.cluster.forecast import AGES_S, FINE_S, Forecast
from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.vms import VmHosts, VmTrace
from meshwright.decide.cluster.vms import PREDICTORS, forecast, strategy, used_hosts_bound
from meshwright.decide.cluster.vms.past import observed
from meshwright.decide.cluster.vms.predict import kaplan_meier
from meshwright.drive.vms import Placer, compare_vms, hosts_needed, place_vms, run_vms, stranded
from meshwright.errors import MissingExtra, UnknownName, UsageError

HOUR_S = 3600.0


def trace_of(rows, shapes=(0.5, 0.25, 0.75), until_s=100 * HOUR_S, owner=None):
    """Rows of (arrival, end, shape), in hours."""
    a, b, s = zip(*rows, strict=True)
    return VmTrace(
        name="t", resources=("cores",), kinds=("host",), shapes=tuple(map(str, shapes)), size=np.array(shapes)[:, None, None], shape=np.array(s,
            np.int32),
        arrival_s=HOUR_S * np.array(a, float), end_s=HOUR_S * np.array(b, float), owner=np.zeros(len(rows), np.int32) if owner is None else owner,
        low=np.zeros(len(rows), bool), since_s=0.0, until_s=until_s,
    )  # fmt: skip


def means(trace, hours):
    """A forecast that gives every machine this mean at every age: it may be wrong."""
    left = np.repeat(HOUR_S * np.array(hours, float)[:, None], len(AGES_S), 1)
    return Forecast(name="told", row=np.arange(len(trace), dtype=np.int32), left_s=left, alive=np.ones_like(left))


def placed(trace, name, predicted, hosts=2, **options):
    run = run_vms(trace, VmHosts.of([hosts]), strategy(name)(**options), predicted, from_s=0.0)
    return dict(zip(run.stays["vm"].tolist(), run.stays["host"].tolist(), strict=True))


def test_kaplan_meier_is_the_product_over_ends():
    rng = np.random.default_rng(1)
    for _ in range(few(8)):
        n = int(rng.integers(3, 40))
        entry = np.where(rng.random(n) < 0.3, rng.integers(0, 200, n), 0).astype(float)
        age = entry + rng.integers(1, 300, n)
        ended = rng.random(n) < 0.7
        found = kaplan_meier(entry, age, ended)
        for k, t in enumerate(FINE_S.tolist()):
            alive = 1.0
            for x in sorted({a for a, e in zip(age.tolist(), ended.tolist(), strict=True) if e and a <= t}):
                risk = sum(1 for i in range(n) if entry[i] < x <= age[i])
                dead = sum(1 for i in range(n) if ended[i] and age[i] == x)
                alive *= 1 - dead / risk
            assert found[k] == pytest.approx(alive, abs=1e-12)


def test_who_is_still_there_is_kept_and_who_was_there_before_enters_late():
    trace = trace_of([(-10, 5, 0), (1, 2, 0), (1, 90, 0), (60, 61, 0)])
    entry, age, ended, there = observed(trace, 20 * HOUR_S)
    assert (entry / HOUR_S).tolist() == [10, 0, 0] and (age / HOUR_S).tolist() == [15, 1, 19] and ended.tolist() == [True, True, False]
    assert there.tolist() == [True, True, True, False]
    kept = forecast("kaplan-meier", trace, at_s=20 * HOUR_S)
    dropped = forecast("kaplan-meier", trace_of([(-10, 5, 0), (1, 2, 0)]), at_s=20 * HOUR_S)
    assert kept.left_s[0, 0] > 1.5 * dropped.left_s[0, 0]  # dropping what is censored makes everything short


def test_owners_are_told_apart_and_forecasts_grow_with_age():
    trace = synthetic_vms(20, days=4, before_days=8, owners=20, warm_days=1, seed=2)
    found, true = (forecast(name, trace) for name in ("kaplan-meier", "owners"))
    counts = np.bincount(trace.owner[trace.arrival_s < 0], minlength=20)
    often = counts >= 100
    assert often.sum() >= 5
    assert np.abs(np.log(found.left_s[often, 0] / true.left_s[often, 0])).mean() < 1.0
    assert (true.left_s[:, 20] > true.left_s[:, 0]).mean() > 0.5  # heavy tails: the older, the more is left
    mixed = forecast("shuffled", trace, seed=1)
    assert sorted(mixed.row.tolist()) == sorted(true.row.tolist()) and (mixed.row != true.row).mean() > 0.5
    with pytest.raises(UsageError, match="no predictor"):
        forecast("oracle", trace)
    with pytest.raises(UsageError, match="does not know"):
        forecast("owners", trace_of([(0, 1, 0)]))
    with pytest.raises(UsageError, match="has ended"):
        forecast("kaplan-meier", trace_of([(5, 9, 0)]))


def test_hazards_learn_the_owners_too():
    trace = synthetic_vms(6, days=3, before_days=3, owners=20, warm_days=1, seed=2)
    try:
        found = PREDICTORS["hazards"](trace, 0.0, np.random.default_rng(0))
    except MissingExtra as error:
        assert "lightgbm" in error.message and "lifetimes" in error.hint
        pytest.skip("LightGBM is not installed")
    true = forecast("owners", trace)
    late = trace.arrival_s > 0
    told, meant = np.log(found.left_s[found.row[late], 0]), np.log(true.left_s[true.row[late], 0])
    assert np.corrcoef(told, meant)[0, 1] > 0.7
    with pytest.raises(UsageError, match="has ended"):
        PREDICTORS["hazards"](trace_of([(5, 9, 0)]), 0.0, np.random.default_rng(0))


def test_short_machines_go_where_they_extend_nothing():
    """Best fit fills the short host; alignment sends the long machine to the long host, and a short one to either."""
    rows = [(0, 3, 2), (0, 50, 0), (1, 50, 1), (1.1, 2, 1)]  # the host of the first is fuller, that of the second lives long
    trace = trace_of(rows)
    true = forecast("perfect", trace)
    assert placed(trace, "best-fit", true)[2] == 0
    for name in ("la", "nilas", "aligned"):
        assert placed(trace, name, true)[2] == 1, name
    assert placed(trace, "la-binary", true, short_s=4 * HOUR_S)[2] == 1
    assert placed(trace, "nilas", true)[3] == 0  # extends none: packing decides


def test_an_overdue_machine_does_not_make_a_host_look_empty_soon():
    """The first is told to live one hour and lives fifty. NILAS predicts again and thinks that it lives one more; LA-binary sees that it is long."""
    trace = trace_of([(0, 50, 2), (0, 9, 0), (3, 9, 1)], shapes=(0.6, 0.25, 0.75))
    told = means(trace, [1, 9, 6])
    assert placed(trace, "la-binary", told, short_s=7200.0)[2] == 0 and placed(trace, "nilas", told, guard=False)[2] == 1


def test_lava_recycles_a_full_host_for_shorter_machines():
    """Host 0 is full of machines of 40 hours; host 1 is open for those of 5. When one of the first leaves, a machine of 2 hours fills its gap with
    LAVA, and the fuller host with NILAS."""
    trace = trace_of([(0, 99, 0), (0, 10, 0), (1, 60, 2), (11, 13, 1)])
    told = means(trace, [40, 40, 5, 2])
    by_lava, by_nilas = (placed(trace, name, told, hosts=3, guard=False) for name in ("lava", "nilas"))
    assert (by_lava[0], by_lava[1], by_lava[2]) == (by_nilas[0], by_nilas[1], by_nilas[2]) == (0, 0, 1)
    assert by_lava[3] == 0 and by_nilas[3] == 1


def test_a_host_that_misses_its_deadline_counts_and_goes_up_a_class():
    """Told half an hour, so a deadline of 1.1 hours, missed at once, and that of the next class, 11 hours; then the machine leaves in time."""
    trace = trace_of([(0, 30, 0), (40, 40.5, 0)])
    run = run_vms(trace, VmHosts.of([1]), strategy("lava")(guard=False), means(trace, [0.5, 0.5]), from_s=0.0)
    assert (run.measures.deadlines, run.measures.missed) == (4, 2)


def test_bad_forecasts_are_seen_and_left_aside():
    trace = synthetic_vms(12, days=4, before_days=2, load=0.6, owners=40, warm_days=1, seed=5)
    hosts, bad, good = VmHosts.of([12]), forecast("shuffled", trace), forecast("owners", trace)
    rows = {}
    for name in ("best-fit", "nilas", "lava"):
        for guard in (True, False):
            made = strategy(name)(**({} if name == "best-fit" else {"guard": guard}))
            rows[name, guard] = run_vms(trace, hosts, made, bad, from_s=86_400.0).measures
    for name in ("nilas", "lava"):
        assert rows[name, True].packed_share > 0.9 and rows[name, True].overdue_share > 0.5 and rows[name, False].packed_share == 0
        assert run_vms(trace, hosts, strategy(name)(), good, from_s=86_400.0).measures.packed_share == 0
    assert rows["lava", True].empty_share >= rows["lava", False].empty_share


def test_the_bound_is_below_every_placement():
    """All placements of a few machines on three hosts: the least time in use is at least the bound, and is reached by no strategy from below."""
    rng = np.random.default_rng(7)
    for _ in range(few(8)):
        rows = sorted((float(a), float(a + b), int(s)) for a, b, s in zip(rng.uniform(0, 5, 5), rng.uniform(0.5, 8, 5), rng.integers(0, 3, 5),
            strict=True))
        trace = trace_of(rows, until_s=20 * HOUR_S)
        best = np.inf
        for hosts in product(range(3), repeat=len(rows)):
            used = 0.0
            for h in range(3):
                mine = [r for r, at in zip(rows, hosts, strict=True) if at == h]
                moments = sorted({x for r in mine for x in r[:2]})
                load = [sum((0.5, 0.25, 0.75)[s] for a, b, s in mine if a <= m < b) for m in moments]
                used += np.inf if any(x > 1 + 1e-9 for x in load) else sum(b - a for a, b, x in zip(moments, moments[1:], load,
                    strict=False) if x > 0)
            best = min(best, used * HOUR_S)
        everyone = np.ones(len(rows), bool)
        bound = float(used_hosts_bound(trace, everyone, np.zeros(0, bool), from_s=0.0, until_s=20 * HOUR_S))
        assert bound <= best * (1 + 1e-9)
        for name in ("best-fit", "nilas", "lava"):
            made, _ = place_vms(trace, VmHosts.of([3]), strategy(name)(), forecast("perfect", trace), from_s=0.0)
            assert not made.refused and made.used_host_s >= best * (1 - 1e-9)


def test_the_placer_decides_as_the_simulator_does():
    trace = synthetic_vms(6, days=2, before_days=0.5, load=0.5, owners=15, warm_days=0.5, seed=3)
    hosts, predicted, chosen = VmHosts.of([6]), forecast("owners", trace), strategy("best-fit")()
    run = run_vms(trace, hosts, chosen, predicted, from_s=0.0)
    placer, now = Placer(trace, hosts, chosen, predicted), []
    ends = [(float(trace.end_s[v]), 0, v) for v in run.stays["vm"].tolist() if trace.end_s[v] <= trace.until_s]
    for at_s, what, v in sorted(ends + [(float(trace.arrival_s[v]), 1, v) for v in range(len(trace)) if trace.arrival_s[v] <= trace.until_s]):
        if what:
            now.append((v, placer.arrive(v, at_s)))
        elif trace.end_s[v] > trace.since_s:
            placer.leave(v, at_s)
    assert dict(x for x in now if x[1] >= 0) == dict(zip(run.stays["vm"].tolist(), run.stays["host"].tolist(), strict=True))
    assert (placer.free >= 0).all()
    with pytest.raises(UsageError, match="placer"):
        placer.leave(len(trace) + 5, 0.0)


def test_hosts_needed_and_stranding():
    trace = trace_of([(0, 9, 2), (1, 9, 2), (2, 9, 2), (12, 90, 1)], until_s=40 * HOUR_S)
    true, chosen = forecast("perfect", trace), strategy("first-fit")()
    assert hosts_needed(trace, VmHosts.of([6]), chosen, true, from_s=0.0) == 3
    with pytest.raises(UsageError, match="2 hosts refuse"):
        hosts_needed(trace, VmHosts.of([2]), chosen, true, from_s=0.0)
    run = run_vms(trace_of([(0, 90, 2), (0, 90, 2)], until_s=40 * HOUR_S), VmHosts.of([2]), chosen, means(trace_of([(0, 9, 0)] * 2), [9, 9]),
        from_s=0.0)
    assert stranded(run) == (pytest.approx(0.25),)  # a quarter of each host is free, and only three quarters come


def test_comparisons_have_a_row_for_each_and_names_are_looked_up():
    trace = synthetic_vms(4, days=2, before_days=0.5, load=0.4, owners=10, warm_days=0.5, seed=3)
    rows = compare_vms(trace, VmHosts.of([4]), [strategy("best-fit")(), strategy("nilas")()], ["perfect", "shuffled"], from_s=0.0, learn_s=43_200.0)
    assert [(r.strategy, r.predictor) for r in rows] == [("best-fit", ""), ("nilas", "perfect"), ("nilas", "shuffled")]
    assert all(r.run.measures.empty_share <= r.most_empty_share for r in rows)
    with pytest.raises(UnknownName, match="no strategy 'magic'"):
        strategy("magic")
    for name, wrong in (("nilas", {"packing": "worst"}), ("la", {"bucket_s": 0.0}), ("lars", {"moves_per_day": 0}), ("la-binary", {"short_s": -1.0})):
        with pytest.raises(UsageError):
            run_vms(trace, VmHosts.of([4]), strategy(name)(**wrong), forecast("perfect", trace), from_s=0.0)


def test_wrong_factors_cost_little_by_little_and_the_guard_ends_it():
    """Lifetimes told too long or too short by a factor: small factors cost little, and no factor takes a strategy far below best fit."""
    trace = synthetic_vms(16, days=4, before_days=3, load=0.6, owners=60, warm_days=1, seed=8)
    hosts, true = VmHosts.of([16]), forecast("owners", trace)
    base = run_vms(trace, hosts, strategy("best-fit")(), true, from_s=86_400.0).measures.empty_share
    for factor in (0.01, 0.5, 1.0, 2.0, 100.0):
        told = Forecast(name="told", row=true.row, left_s=factor * true.left_s, alive=true.alive)
        for name in ("nilas", "aligned", "lava"):
            measures = run_vms(trace, hosts, strategy(name)(), told, from_s=86_400.0).measures
            assert measures.empty_share > base - 0.05, (name, factor)  # a host in twenty, on a cluster of sixteen
            assert (measures.packed_share > 0.9) == (factor == 0.01), (name, factor)
