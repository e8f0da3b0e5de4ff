"""Resizing: core-hours at equal rates of violations, for learners, thresholds, the VPA's recommender, a forecast and the next window's oracle.

Run: `python benchmarks/resize.py` (about six minutes of processor time). Demands of `cluster.demand`: 300 tenants, ten days of five-minute windows,
cores as steps, five seeds; the first day is not counted. A strategy has a knob, so it is a curve of core-hours over violations; two strategies are
compared where both curves reach, by linear interpolation. The VPA runs as it is (nothing grows because of a violation) and under the rules that all
others have (two steps after a violation). Transfer: cost of the first day from a mixed start, with and without a prior from another seed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import machine
import numpy as np

from meshwright.cluster.demand import DAY_WINDOWS, synthetic_demand
from meshwright.cluster.resize import Rules
from meshwright.decide.cluster.resize import NAMES, Resizer
from meshwright.simulate.resize import simulate_resizing

TENANTS, DAYS, SEEDS = 300, 10, 5
WASTE = (0.0003, 0.0005, 0.0007, 0.001, 0.0013, 0.0017, 0.0025, 0.005, 0.015, 0.05)
WASTE_OF_OTHERS = (0.0005, 0.001, 0.0017, 0.005, 0.05)
ADD, REMOVE = (0.7, 0.8, 0.9, 0.95), (0.3, 0.35, 0.4, 0.45, 0.5)
LEFT = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
AS_IT_IS = Rules(recover_steps=0, calm_windows=0)
# Fewer core-hours that are asked for. The other forms of the two peers are better than the usual ones.
PEERS = {"vpa as it is": 0.20, "vpa with growth after violations": None, "threshold": 0.07, "threshold of what would be left": None}
RATES = (0.0004, 0.0006, 0.0008, 0.001, 0.0014)  # at which curves are compared; the VPA at its own
WEIGHTS = (0.01, 0.1)  # of the prior's rows


def curves() -> dict[str, list[tuple[str, dict[str, Any], Rules]]]:
    vpa = [{"percentile": 0.9, "margin": m} for m in (0.05, 0.15, 0.3, 0.45)]
    knobs = {"linucb": WASTE, "squarecb": WASTE_OF_OTHERS, "doubly-robust": WASTE_OF_OTHERS}
    learners = {name: [(name, {"waste": w}, Rules()) for w in wastes] for name, wastes in knobs.items()}
    return {
        **learners,
        "threshold": [("threshold", {"add": a, "remove": r}, Rules()) for a in ADD for r in REMOVE],
        "threshold of what would be left": [("threshold", {"add": max(0.9, r), "remove": r, "left": True}, Rules()) for r in LEFT],
        "vpa as it is": [("vpa", o, AS_IT_IS) for o in vpa],
        "vpa with growth after violations": [("vpa", o, Rules()) for o in vpa],
        "forecast": [("forecast", {"margin": m}, Rules()) for m in (1.1, 1.2, 1.4, 1.7)],
        "static": [("static", {}, Rules())], "oracle": [("oracle", {}, Rules())],
    }  # fmt: skip


def measured(name: str, options: dict[str, Any], rules: Rules, seed: int) -> tuple[float, float, float]:
    """Mean cores of all tenants, share of windows violated, processor seconds."""
    tenants, demand = synthetic_demand(TENANTS, DAYS * DAY_WINDOWS, seed=seed)
    strategy = NAMES[name](**options)
    begin = time.process_time()
    run = simulate_resizing(tenants, demand, Resizer(tenants, rules, strategy.plan(tenants, rules), seed=seed), ahead=strategy.ahead)
    took = time.process_time() - begin
    return run.total(DAY_WINDOWS).unit_hours / (24 * (DAYS - 1)), run.rate(DAY_WINDOWS), took


def lower_envelope(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(rate, cores) by growing rate, without points that another beats in both."""
    kept: list[tuple[float, float]] = []
    for rate, cores in sorted(points):
        if not kept or cores < kept[-1][1]:
            kept.append((rate, cores))
    return kept


def at(curve: list[tuple[float, float]], rate: float) -> float | None:
    if not curve[0][0] <= rate <= curve[-1][0]:
        return None
    return float(np.interp(rate, [r for r, _ in curve], [c for _, c in curve]))


def transfer() -> list[dict[str, Any]]:
    """Of the first day: waste of idle steps plus violations, over the same without a prior; every tenant begins at random between least and most."""
    rows = []
    for weight in WEIGHTS:
        ratios = []
        for seed in range(SEEDS):
            other, demand = synthetic_demand(TENANTS, 3 * DAY_WINDOWS, seed=100 + seed)
            plan = NAMES["linucb"](prior_weight=weight)
            teacher = plan.plan(other, Rules())
            simulate_resizing(other, demand, Resizer(other, Rules(), teacher, seed=seed))
            tenants, demand = synthetic_demand(TENANTS, DAY_WINDOWS, seed=seed)
            start = np.random.default_rng(seed).integers(1, np.array(tenants.most) + 1)
            costs = []
            for prior in (teacher.prior(), None):
                run = simulate_resizing(tenants, demand, Resizer(tenants, Rules(), plan.plan(tenants, Rules(), prior=prior), seed=seed), start=start)
                costs.append(plan.waste * (run.allocated.sum() - run.wanted.sum()) + run.violations.sum())
            ratios.append(float(costs[0] / costs[1]))
        rows.append({"what": f"first day's cost with a prior of weight {weight}, over that without", "value": float(np.median(ratios)), "unit": "",
            "seeds": ratios})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float]]] = {}
    rows: list[dict[str, Any]] = []
    for label, points in curves().items():
        for name, options, rules in points:
            each = [measured(name, options, rules, seed) for seed in range(SEEDS)]
            cores, rate = (float(np.mean([e[k] for e in each])) for k in (0, 1))
            found.setdefault(label, []).append((rate, cores))
            rows.append({
                "what": label, "options": options, "value": cores, "unit": "mean cores", "violations": rate,
                "cpu_s": float(np.mean([e[2] for e in each])), "seeds": [[e[0], e[1]] for e in each],
            })  # fmt: skip
            print(f"{label:<34} {options!s:<50} {cores:8.1f} cores {rate:9.4%}", flush=True)
    envelopes = {label: lower_envelope(points) for label, points in found.items()}
    for label in ("linucb", "squarecb", "doubly-robust"):
        for peer, asked in PEERS.items():
            points = found[peer] if peer.startswith("vpa") else [(r, at(envelopes[peer], r)) for r in RATES]
            for rate, cores in points:
                ours = at(envelopes[label], rate)
                if ours is not None and cores is not None:
                    rows.append({"what": f"{label}: fewer core-hours than {peer}", "value": 1 - ours / cores, "unit": "share", "violations": rate,
                        "asked": asked, "cores": ours, "peer": cores})  # fmt: skip
                    print(f"{label} beside {peer} at {rate:.4%}: {1 - ours / cores:.1%} fewer", flush=True)
    return rows + transfer()


if __name__ == "__main__":
    machine.record("resize", main(), command="python benchmarks/resize.py " + " ".join(sys.argv[1:]))
