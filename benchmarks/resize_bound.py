"""The least core-hours of any strategy that cannot foresee a burst, by rate of violations, beside the curves of `benchmarks/resize.py`.

Run: `python benchmarks/resize_bound.py` (a minute of processor time). The strategy is told all else of the next window before it decides: base, wave,
noise, bursts that last; it may change by any number of steps. A new burst begins with a known chance, of a height drawn evenly. For a price of a
violation the best whole number of cores per tenant and window is found by trying all. That Lagrangian is a lower bound on cores at every rate.
Demands, days and seeds are those of `benchmarks/resize.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine
import numpy as np
from resize import DAYS, RATES, SEEDS, TENANTS, at, lower_envelope

from meshwright.cluster import demand as made
from meshwright.cluster.demand import BURST_LEAST, BURST_MOST, BURST_WINDOWS, BURSTS, DAY_WINDOWS, synthetic_demand

PRICES = np.geomspace(60, 6000, 16)  # cores for a violation; the best ones for these rates lie within
CHUNK = 256  # windows at a time


def without_bursts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[windows, tenants]: cores that are wanted without any burst, and the height of the burst that still lasts from earlier windows; from the same
    random numbers, which is asserted on the whole demand."""
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
    plain = base * np.maximum(1 + noise, 0.01) * (1 + amplitude * np.sin(2 * np.pi * np.arange(windows)[:, None] / DAY_WINDOWS + phase))
    assert np.allclose(plain * (1 + np.maximum(lasting, more)), whole) and len(tenants.names) == TENANTS
    return plain[DAY_WINDOWS:], lasting[DAY_WINDOWS:]


def least(seed: int) -> np.ndarray:
    """[prices, 2]: mean cores of all tenants and rate of violations that minimise cores plus price times rate."""
    plain, lasting = without_bursts(seed)
    found = np.zeros((len(PRICES), 2))
    for begin in range(0, len(plain), CHUNK):
        c, b = plain[begin : begin + CHUNK], lasting[begin : begin + CHUNK]
        need = np.maximum(np.ceil(c * (1 + b)), 1.0)
        best = np.full((len(PRICES), *c.shape), np.inf)
        cores, rate = np.zeros_like(best), np.zeros_like(best)
        top = int(np.max(np.ceil(c * (1 + max(BURST_MOST, float(b.max())))) - need)) + 1
        for more in range(-1, top + 1):
            a = need + more if more >= 0 else np.ones_like(need)  # one core, and a violation where more is wanted
            high = np.clip((BURST_MOST - (a / c - 1)) / (BURST_MOST - BURST_LEAST), 0.0, 1.0)  # of a new burst that is too high
            chance = np.where(a >= c * (1 + b), BURSTS * high, 1.0)
            value = a + PRICES[:, None, None] * chance
            better = value < best
            best = np.where(better, value, best)
            cores, rate = np.where(better, a, cores), np.where(better, chance, rate)
        found[:, 0] += cores.sum((1, 2))
        found[:, 1] += rate.sum((1, 2))
    return found / np.array([len(plain), plain.size])


def main() -> list[dict[str, Any]]:
    hull = np.mean([least(seed) for seed in range(SEEDS)], axis=0)
    raw = json.loads((Path(__file__).parent / "results" / "resize.json").read_text())["rows"]
    curves = {name: lower_envelope([(r["violations"], r["value"]) for r in raw if r["what"] == name]) for name in ("linucb", "threshold")}
    rows: list[dict[str, Any]] = []
    for rate in RATES:
        # The Lagrangian at each price bounds the cores at this rate; windows times tenants make a rate a number of violations.
        bound = max(float(c + p * TENANTS * (r - rate)) for p, (c, r) in zip(PRICES, hull, strict=True))
        ours, peer = at(curves["linucb"], rate), at(curves["threshold"], rate)
        assert ours is not None and peer is not None and bound <= ours
        rows.append({
            "what": f"least cores without foresight of bursts at {rate:.2%} of windows violated", "value": bound, "unit": "mean cores",
            "linucb": ours, "threshold": peer, "best_below_threshold": 1 - bound / peer, "ours_below_threshold": 1 - ours / peer,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    machine.record("resize_bound", main(), command="python benchmarks/resize_bound.py")
