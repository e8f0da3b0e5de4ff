"""The least core-hours of any strategy that cannot see the future, by rate of violations, beside the curves of `benchmarks/resize.py`.

Run: `python benchmarks/resize_bound.py` (seven minutes of processor time). Before it decides about the next window, the strategy is told base, wave,
the bursts that last and how long, and the noise of this window; it may change by any number of steps. What it is not told is what does not exist
yet: the next step of the noise (normal, deviation NOISE) and whether a burst begins (with a known chance, of a height drawn evenly). For a price of
a violation the best whole number of cores per tenant and window is found by trying all, with the exact chance of a violation. That Lagrangian is a
lower bound on expected cores at every rate. The second bound is for a strategy that is told the next step of the noise, too. The third is for
strategies without foresight under the rules that all have (a step at a time, two after a violation): the optimum by dynamic programming
(`resize_steps`), and what it reaches in the simulator. Demands, days and seeds are those of `benchmarks/resize.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import machine
import numpy as np
import resize_steps
from resize import DAYS, RATES, SEEDS, TENANTS, at, lower_envelope

from meshwright.cluster import demand as made
from meshwright.cluster.demand import BURST_LEAST, BURST_MOST, BURST_WINDOWS, BURSTS, DAY_WINDOWS, synthetic_demand
from meshwright.cluster.resize import Rules
from meshwright.decide.cluster.resize import Resizer
from meshwright.decide.cluster.resize.problem import toward
from meshwright.simulate.resize import simulate_resizing

PRICES = np.geomspace(60, 6000, 16)  # cores for a violation; the best ones for these rates lie within
STEP_PRICES = (350.0, 600.0, 800.0, 1050.0, 1500.0)  # the same, by the steps that all have
CHUNK = 64  # windows at a time
TAIL_AT = np.linspace(-8, 8, 6401)
TAIL = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in TAIL_AT])  # of the normal distribution
HEIGHTS = BURST_LEAST + (BURST_MOST - BURST_LEAST) * (np.arange(12) + 0.5) / 12  # of a new burst; the middles of equal parts


def known(seed: int) -> tuple[np.ndarray, ...]:
    """[windows, tenants]: cores without noise and bursts; the height of the burst that still lasts from earlier windows; noise, its steps summed up;
    the height of the burst in effect, and how many windows it has left. From the same random numbers, which is asserted on the whole demand."""
    windows = DAYS * DAY_WINDOWS
    tenants, whole = synthetic_demand(TENANTS, windows, seed=seed)
    rng = np.random.default_rng(seed)
    base = np.clip(rng.lognormal(np.log(made.MEDIAN_STEPS), made.SPREAD, TENANTS), made.LEAST_STEPS, made.MOST_STEPS)
    amplitude, phase = rng.uniform(made.WAVE_LEAST, made.WAVE_MOST, TENANTS), rng.uniform(0, 2 * np.pi, TENANTS)
    noise = rng.normal(0, made.NOISE, (windows, TENANTS))
    for t in range(1, windows):
        noise[t] += made.NOISE_KEPT * noise[t - 1]
    begins = rng.random((windows, TENANTS)) < BURSTS
    more = np.where(begins, rng.uniform(BURST_LEAST, BURST_MOST, (windows, TENANTS)), 0.0)
    lasting, burst, left = np.zeros_like(more), more.copy(), np.where(begins, BURST_WINDOWS - 1, 0)
    for late in range(1, BURST_WINDOWS):
        np.maximum(lasting[late:], more[:-late], out=lasting[late:])
        left[late:] = np.where(more[:-late] > burst[late:], BURST_WINDOWS - 1 - late, left[late:])
        np.maximum(burst[late:], more[:-late], out=burst[late:])
    wave = base * (1 + amplitude * np.sin(2 * np.pi * np.arange(windows)[:, None] / DAY_WINDOWS + phase))
    assert np.allclose(wave * np.maximum(1 + noise, 0.01) * (1 + burst), whole) and len(tenants.names) == TENANTS
    return wave, lasting, noise, burst, left


def beyond(cores: np.ndarray, wave: np.ndarray, burst: np.ndarray | float, expected: np.ndarray, knows_noise: bool) -> np.ndarray:
    """Chance that more is wanted, at a height of bursts. `expected`: of the noise."""
    spare = cores / (wave * (1 + burst)) - 1 - expected
    return (spare < 0).astype(np.float64) if knows_noise else np.interp(spare / made.NOISE, TAIL_AT, TAIL)


def best(seed: int, knows_noise: bool) -> tuple[np.ndarray, np.ndarray]:
    """[prices, windows, tenants], without the first day: the cores that minimise cores plus price times the chance of a violation; that chance."""
    wave, lasting, noise, _, _ = known(seed)
    expected = noise if knows_noise else np.concatenate([np.zeros((1, TENANTS)), made.NOISE_KEPT * noise[:-1]])
    cores, chances = [], []
    for begin in range(DAY_WINDOWS, len(wave), CHUNK):
        w, b, e = (x[begin : begin + CHUNK] for x in (wave, lasting, expected))
        most = w * (1 + np.maximum(b, BURST_MOST)) * (1 + e + 4 * made.NOISE)
        shape = (len(PRICES), *w.shape)
        value, found, chance = np.full(shape, np.inf), np.zeros(shape, np.int16), np.zeros(shape)
        for a in range(1, int(np.ceil(most.max())) + 1):
            here = np.flatnonzero((most > a - 1).any(0))  # more is waste for the others
            wx, bx, ex = w[:, here], b[:, here], e[:, here]
            new = np.mean([beyond(np.float64(a), wx, np.maximum(bx, h), ex, knows_noise) for h in HEIGHTS], axis=0)
            p = (1 - BURSTS) * beyond(np.float64(a), wx, bx, ex, knows_noise) + BURSTS * new
            costs = a + PRICES[:, None, None] * p
            better = costs < value[:, :, here]
            for kept, this in ((value, costs), (found, a), (chance, p)):
                kept[:, :, here] = np.where(better, this, kept[:, :, here])
        cores.append(found)
        chances.append(chance)
    return np.concatenate(cores, 1), np.concatenate(chances, 1)


class Following:
    """Has these cores, window by window."""

    def __init__(self, path: np.ndarray) -> None:
        self.path = path

    def probabilities(self, seen: Any, allowed: Any) -> Any:
        return toward(self.path[min(seen.window + 1, len(self.path) - 1)].astype(np.float64), seen, allowed)


def by_steps(seed: int) -> np.ndarray:
    """[prices, (cores, rate, cost)]: of the optimum by the steps that all have, from the second day on; cost of a window as its grids expect it."""
    wave, _, noise, burst, left = known(seed)
    tenants, demand = synthetic_demand(TENANTS, DAYS * DAY_WINDOWS, seed=seed)
    found = []
    for price in STEP_PRICES:
        each = [resize_steps.path(wave[:, i], noise[:, i], burst[:, i], left[:, i], tenants.most[i], price) for i in range(TENANTS)]
        path = np.stack([p for p, _ in each], 1)
        run = simulate_resizing(tenants, demand, Resizer(tenants, Rules(), Following(path), seed=seed), start=path[0])
        assert (run.allocated == path.sum(1)).all()  # the rules allow every step of it
        found.append((run.allocated[DAY_WINDOWS:].mean(), run.rate(DAY_WINDOWS), sum(v for _, v in each)))
    return np.array(found)


def main() -> list[dict[str, Any]]:
    hulls: dict[bool, Any] = {False: 0.0, True: 0.0}
    steps: Any = 0.0
    for seed in range(SEEDS):
        for told in (False, True):
            cores, chance = best(seed, told)
            hulls[told] = hulls[told] + np.stack([cores.sum(2, dtype=np.float64).mean(1), chance.mean((1, 2))], 1) / SEEDS
        steps = steps + by_steps(seed) / SEEDS
        print(seed, steps.tolist(), flush=True)
    walked = lower_envelope([(r, c) for c, r, _ in steps.tolist()])
    raw = json.loads((Path(__file__).parent / "results" / "resize.json").read_text())["rows"]
    curves = {name: lower_envelope([(r["violations"], r["value"]) for r in raw if r["what"] == name]) for name in ("linucb", "threshold")}
    rows: list[dict[str, Any]] = []
    for rate in RATES:
        # The Lagrangian at each price bounds the cores at this rate; windows times tenants make a rate a number of violations.
        bound, knows = (max(float(c + p * TENANTS * (r - rate)) for p, (c, r) in zip(PRICES, hulls[k], strict=True)) for k in (False, True))
        stepped = max(float(cost - p * TENANTS * rate) for p, (_, _, cost) in zip(STEP_PRICES, steps, strict=True))
        ours, peer = at(curves["linucb"], rate), at(curves["threshold"], rate)
        assert ours is not None and peer is not None and knows <= bound <= ours
        rows.append({
            "what": f"least cores without foresight at {rate:.2%} of windows violated", "value": bound, "unit": "mean cores",
            "linucb": ours, "threshold": peer, "best_below_threshold": 1 - bound / peer, "ours_below_threshold": 1 - ours / peer,
            "best_below_threshold_that_knows_noise": 1 - knows / peer, "least_cores_by_the_same_steps": stepped,
            "best_below_threshold_by_the_same_steps": 1 - stepped / peer, "reached_by_the_same_steps": at(walked, rate),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    machine.record("resize_bound", main(), command="python benchmarks/resize_bound.py")
