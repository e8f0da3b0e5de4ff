"""Resizing: learners against their formulas and numpy, off-policy estimates against enumeration, all against the best sequence of actions."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from meshwright.cluster.demand import synthetic_demand
from meshwright.cluster.resize import ACTIONS, Rules, Seen, Tenants
from meshwright.decide.cluster.resize import NAMES, Resizer
from meshwright.decide.cluster.resize.forecast import Seasonal
from meshwright.decide.cluster.resize.model import CAUTIOUS, KNOTS, Regression
from meshwright.drive.resize import evaluate_log, resize_simulated
from meshwright.errors import Unsupported, UsageError
from meshwright.kernels.offpolicy import off_policy
from meshwright.simulate.resize import simulate_resizing


def one(most: int = 8, **options) -> Tenants:
    return Tenants(resource="cpu", unit=1.0, names=("a",), least=(1,), most=(most,), **options)


def best_cost(demand: np.ndarray, most: int, waste: float) -> float:
    """Dynamic programme over allocations: the least waste x steps + violations of any actions, from the most."""
    worth = {most: waste * most + float(demand[0] > most)}
    for wanted in demand[1:]:
        after: dict[int, float] = {}
        for has, cost in worth.items():
            for step in ACTIONS:
                if 1 <= has + step <= most:
                    total = cost + waste * (has + step) + float(wanted > has + step)
                    after[has + step] = min(after.get(has + step, np.inf), total)
        worth = after
    return min(worth.values())


def test_nobody_beats_the_best_sequence_and_the_oracle_comes_near():
    tenants, demand = synthetic_demand(1, 200, seed=3, day_windows=100, median_steps=4)
    waste = 0.01
    best = best_cost(demand[:, 0], tenants.most[0], waste)
    cost = {}
    for name, kind in NAMES.items():
        run = resize_simulated(tenants, demand, kind()).run
        cost[name] = waste * run.allocated.sum() + run.violations.sum()
    assert min(cost.values()) >= best - 1e-9 and cost["oracle"] <= 1.3 * best < cost["static"], (best, cost)


def test_regression_is_least_squares_with_a_pull_to_caution():
    rng = np.random.default_rng(0)
    at, part, target = rng.integers(0, len(KNOTS) - 1, 300), rng.random(300), rng.random(300)
    model = Regression()
    model.add(at, part, target)
    model.fit()
    x = np.zeros((300, model.size))
    x[np.arange(300), at], x[np.arange(300), at + 1] = 1 - part, part
    fear = np.tile(np.clip((CAUTIOUS - np.array(KNOTS)) / (CAUTIOUS - 1), 0, 1), 2)
    weights = np.linalg.lstsq(np.vstack([x, np.eye(model.size)]), np.concatenate([target, fear]), rcond=None)[0]
    mean, unsure = model.at(at, part)
    assert np.allclose(model.weights, weights) and np.allclose(mean, x @ weights)
    assert np.allclose(unsure, np.sqrt(np.einsum("ij,jk,ik->i", x, np.linalg.inv(x.T @ x + np.eye(model.size)), x)))
    again = Regression(model.prior(), 1.0)
    assert np.allclose(again.weights, weights) and np.allclose(Regression(model.prior(), 0.0).weights, fear)


def test_linucb_takes_the_best_optimistic_action_and_squarecb_has_the_inverse_gaps():
    tenants, rules = one(critical=(False,)), Rules(explore=0.5)
    cost, unsure = np.array([[0.5, 0.4, 0.45, np.inf]]), np.array([[0.9, 0.1, 0.1, 0.1]])
    allowed = np.isfinite(cost)
    linucb = NAMES["linucb"](alpha=0.2, waste=0.1).plan(tenants, rules)
    assert linucb.chances(cost, unsure, allowed).tolist() == [[1, 0, 0, 0]] != linucb.chances(cost, 0 * unsure, allowed).tolist()
    gamma = 10 / 0.1
    square = NAMES["squarecb"](gamma=10, waste=0.1).plan(tenants, rules).chances(cost, unsure, allowed)[0]
    assert square[0] == pytest.approx(1 / (3 + gamma * 0.1)) and square[2] == pytest.approx(1 / (3 + gamma * 0.05))
    assert square[3] == 0 and square.sum() == pytest.approx(1) and square[1] > 0.7
    calm = NAMES["squarecb"](gamma=10, waste=0.1).plan(one(critical=(True,)), rules)
    assert calm.chances(cost, unsure, allowed).tolist() == [[0, 1, 0, 0]]


def test_doubly_robust_rows_are_unbiased():
    """Over the draw of the action, the mean of a row's target is the truth, whatever the model says."""
    tenants, rules = one(), Rules(explore=0.4)
    policy = NAMES["doubly-robust"]().plan(tenants, rules)
    allowed = np.array([[True, True, True, False]])
    before, chances = np.array([4]), np.array([[0.3, 0.6, 0.1, 0.0]])
    truth, added = np.array([1.0, 0.0, 0.0]), []
    policy.watched.expected = np.array([3.5])
    policy.model = SimpleNamespace(at=lambda at, part: (np.full(at.shape, 0.37), None), add=lambda at, part, y: added.append(y), fit=lambda: None)
    for action in range(3):
        policy.last = (allowed, chances, before)
        policy.learn(Seen(window=1, before=before + ACTIONS[action], used=np.array([3.0]), violated=truth[[action]] > 0))
    assert np.allclose(chances[0, :3] @ np.array(added), truth)


def test_forecast_follows_yesterday_and_knows_no_yesterday_at_first():
    day, seasonal = 48, Seasonal(season=48)
    wave = 5 + 2 * np.sin(2 * np.pi * np.arange(3 * day + 1) / day)
    found = [float(seasonal.next(np.array([x]))[0]) for x in wave[:-1]]
    assert found[:day] == wave[:day].tolist()
    late = slice(day + 12, None)
    # Smoothing over half a day flattens the wave, so its growth is only partly foreseen; still nearer than no change.
    assert np.abs(np.array(found[late]) - wave[1:][late]).max() < np.abs(wave[:-1][late] - wave[1:][late]).max()


def test_estimates_of_another_policy_are_unbiased_and_cover():
    """Two actions with means .2 and .7; logged with .75, .25; wanted: .1, .9."""
    means, logged, wanted = np.array([0.2, 0.7]), np.array([0.75, 0.25]), np.array([0.1, 0.9])
    truth, inside = float(means @ wanted), {"ips": 0, "snips": 0, "dr": 0}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        action = (rng.random(400) < logged[1]).astype(int)
        reward = (rng.random(400) < means[action]).astype(float)
        model = np.array([0.3, 0.5])
        for e in off_policy(reward, logged[action], wanted[action], model[action], np.full(400, float(model @ wanted))):
            inside[e.name] += e.low <= truth <= e.high
            assert abs(e.value - truth) < 0.35
    assert min(inside.values()) >= 88, inside
    exact = [off_policy(np.array([m]), np.array([p]), np.array([w]))[0].value * p for m, p, w in zip(means, logged, wanted, strict=True)]
    assert sum(exact) == pytest.approx(truth)
    for wrong in ((np.zeros(0),) * 3, (np.ones(2), np.zeros(2), np.ones(2)), (np.ones(2), np.full(2, 0.001), np.ones(2))):
        with pytest.raises(UsageError):
            off_policy(*wrong)


def test_vowpal_wabbit_estimates_the_same_value():
    """Its average loss of a fixed policy on our log (cb_adf with ips) is our IPS estimate's negative."""
    vw = pytest.importorskip("vowpalwabbit", reason="Vowpal Wabbit is not installed")
    rng = random.Random(1)
    rows = []
    for _ in range(300):
        kind = rng.randrange(2)
        p = (0.7, 0.3) if kind else (0.4, 0.6)
        action = 0 if rng.random() < p[0] else 1
        rows.append((kind, action, p[action], float(action == kind)))
    learner = vw.Workspace("--cb_explore_adf --cb_type ips --epsilon 0.2 --quiet -l 0.5 --random_seed 1")
    ours, theirs = [], 0.0
    for kind, action, p, reward in rows:
        cost = [f"0:{-reward}:{p}" if a == action else "" for a in range(2)]
        lines = [f"shared |s k{kind}", *(f"{c} |a a{a}k{kind}".strip() for a, c in enumerate(cost))]
        chances = learner.predict(["shared |s k" + str(kind), *(f"|a a{a}k{kind}" for a in range(2))])
        ours.append((reward, p, chances[action]))
        theirs += chances[action] / p * -reward
        learner.learn(lines)
    value = off_policy(*map(np.array, zip(*ours, strict=True)))[0].value
    said = -learner.get_sum_loss() / len(rows)
    learner.finish()
    # What it reports is progressive, on its own chances before each row; ours is the same sum.
    assert value == pytest.approx(-theirs / len(rows)) and value == pytest.approx(said, abs=1e-4)


def test_a_log_with_propensities_foretells_another_strategy():
    tenants, demand = synthetic_demand(40, 500, seed=1)
    log = resize_simulated(tenants, demand, NAMES["squarecb"](waste=0.002), rules=Rules(explore=0.2), record=True).log
    assert log is not None
    same = evaluate_log(log, NAMES["squarecb"](waste=0.002), waste=0.002)
    assert {e.name for e in same.estimates} == {"ips", "snips", "dr"} and same.of == 40 * 499
    by = {e.name: e for e in same.estimates}
    assert by["dr"].low <= same.logged <= by["dr"].high and by["dr"].high - by["dr"].low < by["ips"].high - by["ips"].low
    certain = resize_simulated(tenants, demand[:20], NAMES["static"](), record=True).log
    assert certain is not None
    with pytest.raises(UsageError, match="say nothing of forecast"):
        evaluate_log(msgspec.structs.replace(certain, windows=certain.windows[:1]), NAMES["forecast"]())


def test_learned_sizes_beat_the_usual_ones_at_equal_violations():
    """One seed of the benchmark's demand, fewer tenants and days: the curve of linucb is below both peers' points."""
    tenants, demand = synthetic_demand(100, 4 * 288, seed=0)

    def point(name, rules=Rules(), **options):
        run = resize_simulated(tenants, demand, NAMES[name](**options), rules=rules).run
        return run.rate(288), run.total(288).unit_hours

    curve = sorted(point("linucb", waste=w) for w in (0.0005, 0.001, 0.05))
    rates, hours = zip(*curve, strict=True)
    for asked, (rate, peer) in ((0.15, point("vpa", Rules(recover_steps=0, calm_windows=0))), (0.0, point("threshold"))):
        assert rates[0] <= rate <= rates[-1] and np.interp(rate, rates, hours) <= (1 - asked) * peer


def test_a_prior_of_another_job_makes_the_first_day_cheaper():
    """From a mixed start, as idle steps and violations; medians are in the benchmark."""
    other, demand = synthetic_demand(60, 600, seed=9)
    prior = resize_simulated(other, demand, NAMES["linucb"]()).prior
    tenants, demand = synthetic_demand(60, 288, seed=2)
    start = np.random.default_rng(0).integers(1, np.array(tenants.most) + 1)
    cost = []
    for known in (prior, None):
        run = resize_simulated(tenants, demand, NAMES["linucb"](), prior=known, start=start).run
        cost.append(0.001 * (run.allocated.sum() - run.wanted.sum()) + run.violations.sum())
    assert prior is not None and prior.rows > 60 * 500 and cost[0] < cost[1]
    with pytest.raises(UsageError, match="other knots"):
        NAMES["linucb"]().plan(tenants, Rules(), prior=msgspec.structs.replace(prior, knots=(1.0,)))


def test_draws_have_the_frequencies_of_their_propensities():
    tenants = Tenants(resource="cpu", unit=1.0, names=tuple(map(str, range(4000))), least=(1,) * 4000, most=(9,) * 4000)
    chances = np.tile([0.2, 0.5, 0.3, 0.0], (4000, 1))
    resizer = Resizer(tenants, Rules(), SimpleNamespace(probabilities=lambda seen, allowed: chances), seed=1)
    full = np.full(4000, 5)
    chosen = resizer(Seen(window=0, before=full, used=full * 0.5, violated=full < 0)).chosen
    assert np.allclose(np.bincount(chosen, minlength=4) / 4000, chances[0], atol=0.03)


def test_refusals():
    for name, wrong in (("threshold", {"add": 0.2}), ("vpa", {"percentile": 0}), ("forecast", {"margin": 0}), ("linucb", {"waste": 0})):
        with pytest.raises(UsageError):
            NAMES[name](**wrong).plan(one(), Rules())
    with pytest.raises(Unsupported, match="oracle"):
        simulate_resizing(one(), np.ones((2, 1)), Resizer(one(), Rules(), NAMES["oracle"]().plan(one(), Rules())))
    far = SimpleNamespace(steps=np.array([9]), allowed=None)
    for demand, decide in ((np.ones((2, 2)), None), (-np.ones((2, 1)), None), (np.ones((2, 1)), lambda seen: far)):
        with pytest.raises(UsageError):
            simulate_resizing(one(), demand, decide)
    good = {"resource": "cpu", "unit": 1.0, "names": ("a",), "least": (1,), "most": (2,)}
    wrong = ({"resource": "disk"}, {"unit": 0.0}, {"names": ()}, {"least": (3,)}, {"most": ()}, {"capacity": (5,), "node": (1,)}, {"window_s": 0.0})
    for change in wrong:
        with pytest.raises(UsageError):
            Tenants(**(good | change))
    for change in ({"recover_steps": 3}, {"calm_windows": -1}, {"explore": 0.9}, {"hold_share": 0.5}):
        with pytest.raises(UsageError):
            Rules(**change)
    with pytest.raises(UsageError):
        synthetic_demand(0, 5)


def test_demands_are_those_of_the_card():
    tenants, demand = synthetic_demand(300, 2 * 288, seed=0)
    assert 880 < np.ceil(demand).sum(1).mean() < 930  # cores that the next window's oracle has: 910 on the card
    assert all(m >= d for m, d in itertools.islice(zip(tenants.most, demand[0], strict=True), 50))
    flat = synthetic_demand(50, 200, seed=0, wave=False)[1]
    assert (flat.max(0) / flat.min(0)).max() < 2
