"""The least core-hours of any strategy that cannot see the future, by rate of violations, beside the curves of `benchmarks/resize.py`.

Run: `python benchmarks/resize_bound.py` (three minutes of processor time). Before it decides about the next window, the strategy is told base, wave,
the bursts that last and how long, and the noise of this window; it may change by any number of steps. What it is not told is what does not exist
yet: the next step of the noise (normal, deviation NOISE) and whether a burst begins (with a known chance, of a height drawn evenly). For a price of
a violation the best whole number of cores per tenant and window is found by trying all, with the exact chance of a violation. That Lagrangian is a
lower bound on expected cores at every rate. The second bound is for a strategy that is told the next step of the noise, too. Beside them: the
strategy of the first bound under the rules that all strategies have (a step at a time, two after a violation), simulated. Demands, days and seeds
are those of `benchmarks/resize.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import machine
import numpy as np
from resize import DAYS, RATES, SEEDS, TENANTS, at, lower_envelope

from meshwright.cluster import demand as made
from meshwright.cluster.demand import BURST_LEAST, BURST_MOST, BURST_WINDOWS, BURSTS, DAY_WINDOWS, synthetic_demand
from meshwright.cluster.resize import Rules
from meshwright.decide.cluster.resize import Resizer
from meshwright.decide.cluster.resize.problem import toward
from meshwright.simulate.resize import simulate_resizing

PRICES = np.geomspace(60, 6000, 16)  # cores for a violation; the best ones for these rates lie within
CHUNK = 64  # windows at a time
TAIL_AT = np.linspace(-8, 8, 6401)
TAIL = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in TAIL_AT])  # of the normal distribution
HEIGHTS = BURST_LEAST + (BURST_MOST - BURST_LEAST) * (np.arange(12) + 0.5) / 12  # of a new burst; the middles of equal parts


def known(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[windows, tenants]: cores without noise and bursts; the height of the burst that still lasts from earlier windows; noise, its steps summed up.
    From the same random numbers, which is asserted on the whole demand."""
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
    lasting = np.zeros_like(more)
    for late in range(1, BURST_WINDOWS):
        np.maximum(lasting[late:], more[:-late], out=lasting[late:])
    wave = base * (1 + amplitude * np.sin(2 * np.pi * np.arange(windows)[:, None] / DAY_WINDOWS + phase))
    assert np.allclose(wave * np.maximum(1 + noise, 0.01) * (1 + np.maximum(lasting, more)), whole) and len(tenants.names) == TENANTS
    return wave, lasting, noise


def beyond(cores: np.ndarray, wave: np.ndarray, burst: np.ndarray | float, expected: np.ndarray, knows_noise: bool) -> np.ndarray:
    """Chance that more is wanted, at a height of bursts. `expected`: of the noise."""
    spare = cores / (wave * (1 + burst)) - 1 - expected
    return (spare < 0).astype(np.float64) if knows_noise else np.interp(spare / made.NOISE, TAIL_AT, TAIL)


def best(seed: int, knows_noise: bool) -> tuple[np.ndarray, np.ndarray]:
    """[prices, windows, tenants], without the first day: the cores that minimise cores plus price times the chance of a violation; that chance."""
    wave, lasting, noise = known(seed)
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


class Knowing:
    """Goes toward the best cores of the next window, by the steps that all strategies have."""

    def __init__(self, wanted: np.ndarray) -> None:
        self.wanted = wanted

    def probabilities(self, seen: Any, allowed: Any) -> Any:
        return toward(self.wanted[min(seen.window + 1, len(self.wanted) - 1)].astype(np.float64), seen, allowed)


def reached(seed: int, wanted: np.ndarray) -> list[tuple[float, float]]:
    """(rate, mean cores) by price, in the simulator of `resize.py`, from the second day on."""
    tenants, demand = synthetic_demand(TENANTS, DAYS * DAY_WINDOWS, seed=seed)
    found = []
    for cores in wanted:
        start = np.clip(cores[0].astype(np.int64), tenants.least, tenants.most)
        run = simulate_resizing(tenants, demand[DAY_WINDOWS:], Resizer(tenants, Rules(), Knowing(cores), seed=seed), start=start)
        found.append((run.rate(), float(run.allocated.mean())))
    return found


def main() -> list[dict[str, Any]]:
    hulls: dict[bool, Any] = {False: 0.0, True: 0.0}
    walked: Any = 0.0
    for seed in range(SEEDS):
        for told in (False, True):
            cores, chance = best(seed, told)
            hulls[told] = hulls[told] + np.stack([cores.sum(2, dtype=np.float64).mean(1), chance.mean((1, 2))], 1) / SEEDS
            walked = walked if told else walked + np.array(reached(seed, cores)) / SEEDS
    steps = lower_envelope([(r, c) for r, c in walked.tolist()])
    raw = json.loads((Path(__file__).parent / "results" / "resize.json").read_text())["rows"]
    curves = {name: lower_envelope([(r["violations"], r["value"]) for r in raw if r["what"] == name]) for name in ("linucb", "threshold")}
    rows: list[dict[str, Any]] = []
    for rate in RATES:
        # The Lagrangian at each price bounds the cores at this rate; windows times tenants make a rate a number of violations.
        bound, knows = (max(float(c + p * TENANTS * (r - rate)) for p, (c, r) in zip(PRICES, hulls[k], strict=True)) for k in (False, True))
        ours, peer = at(curves["linucb"], rate), at(curves["threshold"], rate)
        assert ours is not None and peer is not None and knows <= bound <= ours
        rows.append({
            "what": f"least cores without foresight at {rate:.2%} of windows violated", "value": bound, "unit": "mean cores",
            "linucb": ours, "threshold": peer, "best_below_threshold": 1 - bound / peer, "ours_below_threshold": 1 - ours / peer,
            "best_below_threshold_that_knows_noise": 1 - knows / peer, "same_knowledge_by_the_same_steps": at(steps, rate),
            "steps_below_threshold": None if at(steps, rate) is None else 1 - at(steps, rate) / peer,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    machine.record("resize_bound", main(), command="python benchmarks/resize_bound.py")
