"""Costs of lookups: batches as histograms say, what the nets learn, the floor, foreign and stale costs, exchanges between real processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from meshwright.cost_models.lookups import LookupCosts, assumed_costs
from meshwright.decide.tables import TableProblem
from meshwright.errors import UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.graph.embeddings import Shard, Table, Tables, histogram_of
from meshwright.io.fabric.name import load_fabric
from meshwright.probe.tables import compute, exchange
from meshwright.probe.tables.compute import ComputePoints, Meter, collect_compute, widths_of
from meshwright.probe.tables.exchange import ExchangeTask, exchange_tasks, measure_exchanges
from meshwright.probe.tables.fit import PlanMeasure, better_exchanges, fit_costs, machine_here, refuse_foreign
from meshwright.probe.tables.train import additive_errors, fit_compute, fit_exchange, fit_floor
from meshwright.run.tables.batches import indices_of

TABLES = Tables(
    tables=(
        Table(name="a", rows=300, dim=16, pooling=3.0), Table(name="b", rows=50, dim=4, pooling=0.5), Table(name="c", rows=9, dim=8, pooling=0.0),
    ),
    batch=32,
)  # fmt: skip


def test_batches_have_the_histogram_and_the_pooling_that_were_asked_for():
    shares = (0.5, 0.25, 0.125, 0.125, *[0.0] * 13)
    indices, offsets = indices_of(Table(name="t", rows=5000, dim=4, pooling=2.25, histogram=shares), 2000, np.random.default_rng(0))
    assert len(offsets) == 2001 and offsets[-1] == len(indices) == pytest.approx(4500, rel=0.03) and 0 <= indices.min() <= indices.max() < 5000
    assert np.abs(np.array(histogram_of(indices)) - shares).max() < 0.05
    assert len(indices_of(TABLES.tables[2], 32, np.random.default_rng(0))[0]) == 0


def replace_device(shard, device):
    return msgspec.structs.replace(shard, device=device)


def _made_up(points, rng):
    """Points of a cost that does not add up: the sum of lookups times columns, to the power 1.3."""
    one = lambda: (int(rng.integers(2)), 4) if rng.random() < 0.5 else (0, int(rng.choice([4, 8, 16])))  # noqa: E731
    drawn = [tuple(one() for _ in range(rng.integers(1, 9))) for _ in range(points)]
    times = [1e-5 * (1 + sum(TABLES.tables[t].pooling * w for t, w in p)) ** 1.3 for p in drawn]
    return ComputePoints(tuple(drawn), tuple(times))


def test_the_net_learns_what_no_additive_formula_does_and_nothing_is_below_the_floor():
    points = _made_up(600, np.random.default_rng(1))
    costs = fit_compute(TABLES, points, epochs=120)
    assert costs.errors["compute"] < additive_errors(TABLES, points)
    few = _made_up(30, np.random.default_rng(1))
    assert fit_compute(TABLES, few, epochs=2).errors == fit_compute(TABLES, few, epochs=2).errors, "equal seeds"
    below = 0
    for point, t in zip(points.points, points.time_s, strict=True):
        floor = sum(TABLES.batch * w * (costs.floor[0] * TABLES.tables[k].pooling + costs.floor[1]) + costs.overhead_s for k, w in point)
        below += floor > t * (1 + 1e-6)
    assert below <= 6
    assert costs.compute_s(np.zeros((2, 33))).tolist() == [0.0, 0.0], "a device without tables costs nothing, not what the net says of nothing"


def test_the_floor_is_exact_where_costs_add_up():
    r = np.random.default_rng(0)
    terms, members = r.uniform(1, 100, (200, 2)), r.integers(1, 9, 200).astype(float)
    floor, each = fit_floor(terms, members, terms @ np.array([3e-6, 1e-6]) + 2e-5 * members)
    assert floor == pytest.approx((3e-6, 1e-6), rel=1e-3) and each == pytest.approx(2e-5, rel=1e-2)


def test_exchange_nets_learn_the_wait_for_late_ones():
    r = np.random.default_rng(0)
    columns, starts = r.uniform(8, 200, (400, 2)), r.uniform(0, 0.01, (400, 2))
    starts -= starts.min(1, keepdims=True)
    back = columns * 1e-5
    fore = np.maximum(back, (starts + back)[:, ::-1] - starts) + 1e-4
    costs = fit_exchange(LookupCosts(batch=8, floor=(0.0, 0.0)), columns, starts, back, fore, fabric="f", epochs=60)
    assert costs.errors["backward"] < 0.1 and costs.errors["forward"] < 0.3 and (costs.fabric, costs.devices) == ("f", 2)
    late = costs.exchange_s(np.array([[50.0, 50.0]]), np.array([[0.0, 0.01]]))
    assert late[0, 0] > 3 * late[0, 1]
    fabric = replace(load_fabric("laptop:2"), name="f")
    costs = replace(costs, batch=TABLES.batch)
    problem = TableProblem(tables=TABLES, fabric=fabric, costs=(costs,))
    slow = better_exchanges(costs, TABLES, fabric, columns, starts, np.array([back, fore]))
    assert slow.forward is not None and slow.errors["backward by links"] > slow.errors["backward"], "links of the fabric say far less"
    exact = better_exchanges(costs, TABLES, fabric, columns, starts, np.array([problem.by_links(columns), problem.by_links(columns, starts)]))
    assert exact.forward is None and exact.errors["forward by links"] < 1e-9 and "forward" not in exact.errors


def test_foreign_and_stale_costs_are_refused_by_name():
    here = {"cpu": "mine", "cores": "2", "torch": "2.13", "operator": "fbgemm"}
    costs = replace(assumed_costs(8, 4, 0), machine=here)
    refuse_foreign(costs, "c.safetensors", here)
    with pytest.raises(UsageError, match=r"foreign: measured on cpu mine, here yours") as refused:
        refuse_foreign(costs, "c.safetensors", {**here, "cpu": "yours"})
    assert refused.value.where == "c.safetensors" and "--foreign" in refused.value.hint
    with pytest.raises(UsageError, match=r"stale: measured on torch 2\.13, here 3"):
        refuse_foreign(costs, "c.safetensors", {**here, "torch": "3"})
    assert set(machine_here()) == set(here)


def test_points_are_measured_here():
    meter = Meter(TABLES, operator="embedding_bag")
    found = collect_compute(meter, 4, np.random.default_rng(0))
    assert all(t > 0 for t in found.time_s) and all(w in widths_of(TABLES.tables[t]) for p in found.points for t, w in p)
    assert meter.time_s([]) == 0.0 and meter.time_s([(0, (100, 300), 8)]) > 0
    with pytest.raises(UsageError, match="cannot be measured here"):
        Meter(TABLES, most_bytes=64).time_s([(0, (0, 300), 16)])
    with pytest.raises(UsageError, match="points"):
        fit_costs(TABLES, load_fabric("laptop:2"), points=3, exchange_points=0)
    huge = Tables(tables=(Table(name="a", rows=1 << 34, dim=64, pooling=0.0),), batch=2)
    with pytest.raises(UsageError, match="none of the tables fits"):
        small = Meter(TABLES)
        small.tables = huge
        collect_compute(small, 1, np.random.default_rng(0))


def test_sets_of_tables_take_turns(monkeypatch):
    meter, seen = Meter(TABLES, operator="embedding_bag"), []
    monkeypatch.setattr(meter, "_runs_s", lambda part, runs: seen.append(part) or [float(len(seen))] * runs)
    assert meter.times_s(["a", "b"], runs=1, rounds=3) == [3.0, 4.0] and seen == ["a", "b"] * 3


def test_equal_devices_of_plans_are_measured_once_and_operators_are_kept(monkeypatch):
    made, measured = [], []
    meter, build, runs = Meter(TABLES, operator="embedding_bag"), Meter._lookup, Meter._runs_s
    monkeypatch.setattr(Meter, "_lookup", lambda self, part: made.append(part) or build(self, part))
    monkeypatch.setattr(Meter, "_runs_s", lambda self, part, n: measured.append(part) or runs(self, part, n))
    a, b = Shard(table="a", device="d0", rows=(0, 300), columns=(0, 16)), Shard(table="b", device="d1", rows=(0, 50), columns=(0, 4))
    plans = [[a, b], [replace_device(b, "d0"), replace_device(a, "d1")]]
    (one, two), again = meter.plans_s(plans, ["d0", "d1"], runs=1, rounds=1), meter.plans_s(plans, ["d0", "d1"], runs=1, rounds=2)
    assert one == two[::-1] and min(one) > 0 and len(again) == 2
    assert len(made) == 2 and len(measured) == 2 + 4, "made at the first look; each set once a round"
    meter.plans_s([[a] * 3], ["d0"], runs=1, rounds=1)
    assert len(meter._kept) == 1, "weights have moved to a larger buffer: what used the smaller one is let go"
    kept = meter._kept
    meter.plans_s([[a] * 2], ["d0"], runs=1, rounds=1)
    assert meter._kept is kept, "there is room to spare"
    monkeypatch.setattr(compute, "KEPT_BYTES", 0)
    full = Meter(TABLES, operator="embedding_bag")
    assert min(full.plans_s(plans, ["d0", "d1"], runs=1, rounds=1)[0]) > 0 and not full._kept, "what finds no room is made again"


def test_links_rest_until_their_buckets_are_full(monkeypatch):
    fabric = load_fabric("star:2?link=1MB/s")
    shaped = replace(fabric, links=tuple(replace(link, burst_bytes=2000) for link in fabric.links))
    asked = []
    monkeypatch.setattr(exchange, "answers", lambda request, *a, **k: asked.append(request.rest_s) or [])
    measure_exchanges([], 2, 4)
    measure_exchanges([], 2, 4, lab=SimpleNamespace(fabric=shaped))
    assert asked == [0.0, 0.004]


@pytest.mark.real
def test_exchanges_between_processes():
    tasks = exchange_tasks(TABLES, 2, 2, np.random.default_rng(0))
    assert all(len(t.columns) == len(t.start_s) == 2 and min(t.start_s) == 0 for t in tasks)
    given = [ExchangeTask(columns=[4, 4], start_s=[0.0, 0.01]), ExchangeTask(columns=[8, 0], compute_s=[0.0, 0.01]), *tasks]
    back, fore = measure_exchanges(given, 2, 32, runs=1)
    assert all(len(kind) == 4 and all(len(row) == 2 and min(row) > 0 for row in kind) for kind in (back, fore))


@pytest.mark.real
def test_plans_are_measured_as_the_driver_asks():
    from meshwright.decide.tables.classic import DimGreedy

    fabric: Fabric = load_fabric("laptop:2")
    problem = TableProblem(tables=TABLES, fabric=fabric, costs=(assumed_costs(32, 4, 0),))
    measure, plans = PlanMeasure(meter=Meter(TABLES), fabric=fabric, runs=1), [DimGreedy().plan(problem, rng=np.random.default_rng(0))]
    (found,) = measure(plans, measure.lookups_s(plans))
    assert len(found.compute_s) == 2 and found.total_s >= max(found.compute_s) > 0
