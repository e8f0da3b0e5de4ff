"""Traces of machines, the seeded generator, and curves of lifetimes."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cluster.forecast import AGES_S, FINE_S, Forecast, curves
from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.vms import WHOLE, Resize, VmHosts, VmTrace
from meshwright.errors import UsageError

HALF = {
    "name": "t", "resources": ("cores",), "kinds": ("host",), "shapes": ("half", "third"), "size": np.array([[[0.5]], [[1 / 3]]]),
    "shape": np.array([0, 1], np.int32), "arrival_s": np.array([0.0, 5.0]), "end_s": np.array([10.0, np.inf]), "owner": np.array([0, 0], np.int32),
    "low": np.zeros(2, bool), "since_s": 0.0, "until_s": 100.0,
}  # fmt: skip


def test_three_thirds_fit_and_infinite_sizes_do_not():
    trace = VmTrace(**HALF)
    assert 3 * trace.billionths[1, 0, 0] <= WHOLE and len(trace) == 2 and trace.seen.tolist() == [True, False]
    nowhere = VmTrace(**HALF | {"size": np.array([[[np.inf]], [[0.25]]])})
    assert nowhere.billionths[0, 0, 0] == 2 * WHOLE
    assert trace.load(VmHosts.of([2]), 0.0, 100.0)[0] == pytest.approx((0.5 * 10 + 95 / 3) / 200)


@pytest.mark.parametrize(("change", "says"), [
    ({"end_s": np.array([10.0, 5.0])}, "leaves later"), ({"owner": np.array([0], np.int32)}, "owner"), ({"shape": np.array([0, 2], np.int32)},
        "shape"),
    ({"size": np.array([[[-0.5]], [[0.1]]])}, "from 0 on"), ({"size": np.zeros((1, 1, 1))}, "every shape"), ({"until_s": 0.0}, "recording"),
    ({"resizes": (Resize(200.0, 0, 1),)}, "resize"), ({"features": np.zeros((1, 1)), "feature_names": ("x",)}, "feature"),
    ({"truth": np.zeros((0, 2))}, "every owner"), ({"arrival_s": np.array([0.0, np.nan])}, "comes at"),
])  # fmt: skip
def test_traces_that_are_refused(change, says):
    with pytest.raises(UsageError, match=says):
        VmTrace(**HALF | change)


def test_hosts_that_are_refused():
    assert VmHosts.of([1, 2]).kind.tolist() == [0, 1, 1]
    for wrong in ([], [0], [-1, 3]):
        with pytest.raises(UsageError, match="hosts"):
            VmHosts.of(wrong)
    with pytest.raises(UsageError, match="hosts"):
        VmHosts(kind=np.array([-1], np.int32))


def test_the_generator_makes_what_it_says():
    made, again, other = (synthetic_vms(40, days=7, before_days=7, load=0.6, seed=s) for s in (3, 3, 4))
    assert np.array_equal(made.end_s, again.end_s) and np.array_equal(made.features, again.features) and len(made) != len(other)
    life = made.end_s - made.arrival_s
    work = life * made.size[made.shape, 0, 0]
    assert (life < 3600).mean() >= 0.85 and work[life < 3600].sum() <= 0.05 * work.sum()
    assert made.load(VmHosts.of([40]), 3 * 86_400.0, 7 * 86_400.0)[0] == pytest.approx(0.6, abs=0.03)
    one = np.array([name == "1c2g" for name in made.shapes])[made.shape]
    assert 0.6 < one.mean() < 0.73 and (np.diff(made.arrival_s) >= 0).all()
    for wrong in ({"load": 0.0}, {"load": 1.5}, {"warm_days": 14.0}, {"hint": -1.0}, {"long": 1.0}):
        with pytest.raises(UsageError, match=r"synthetic|warm-up"):
            synthetic_vms(**wrong)
    with pytest.raises(UsageError, match="more than"):
        synthetic_vms(100_000, days=300.0)


def test_what_is_left_follows_from_the_curve():
    """Exponential lives never grow older; uniform ones up to a day have half of what is missing left."""
    mean_s, day_s = 7200.0, 86_400.0
    flat, share = curves(np.exp(-FINE_S / mean_s)[None], np.array([mean_s]))
    young = 6 * mean_s > AGES_S
    assert flat[0, young] == pytest.approx(mean_s, rel=0.02) and share[0, young] == pytest.approx(np.exp(-AGES_S[young] / mean_s), rel=0.02)
    uniform, _ = curves(np.clip(1 - FINE_S / day_s, 0, 1)[None], np.array([0.0]))
    young = 0.7 * day_s > AGES_S
    assert uniform[0, young] == pytest.approx((day_s - AGES_S[young]) / 2, rel=0.03)
    assert np.ptp(uniform[0, 2 * day_s < AGES_S]) == 0 < uniform[0, -1]  # nobody lives: the last mean stays


def test_forecasts_that_are_refused():
    left = np.ones((1, len(AGES_S)))
    for row, table, says in (([1], left, "does not exist"), ([0], left[:, 1:], "ages"), ([0], -left, "at least 0")):
        with pytest.raises(UsageError, match=says):
            Forecast(name="f", row=np.array(row, np.int32), left_s=table, alive=table)
