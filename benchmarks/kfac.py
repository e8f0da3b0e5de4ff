"""Steps that K-FAC and Adam need on real data: scikit-learn's digits, batch 256, the best of equal grids, the median of 5 seeds.

Run: `pip install --no-deps scikit-learn scipy joblib threadpoolctl cloudpickle loky narwhals`, then `python benchmarks/kfac.py` (a few minutes on
one core; prints and writes benchmarks/results/kfac.json). Network 64-256-256-10 in float64, all 1797 images, loss over all of them
after each step; the first step at or below a target counts. Both optimizers get grids of 12 settings; a setting's value is the median over seeds,
a run that does not get there counts as the most steps.
K-FAC renews its inverses at each of the first 8 steps, then at every 4th; its factors are collected at every step.
It counts steps, not time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from statistics import median
from typing import Any

import machine
import torch
from torch import nn

from meshwright.errors import RunError
from meshwright.second_order import KFAC, Refresh

TARGETS = (0.05, 0.01)
SHARES = {0.05: 0.60, 0.01: 0.70}  # of Adam's steps, at most
ADAM = [{"lr": lr, "betas": (b1, 0.999)} for lr, b1 in itertools.product((2e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2), (0.9, 0.8))]
KFACS = [{"lr": lr, "damping": d, "momentum": m} for lr, d, m in itertools.product((0.03, 0.1, 0.3), (1e-2, 3e-2), (0.0, 0.5))]
SEEDS = (0, 1, 2, 3, 4)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """[1797, 64] in 0..1 and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float64), torch.tensor(data.target)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).double()


def optimizer(net: nn.Module, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(net.parameters(), **options)
    base = torch.optim.SGD(net.parameters(), lr=options["lr"], momentum=options["momentum"])
    return KFAC(net, base, damping=options["damping"], decay=0.95, inverses=Refresh(every=4, first=8))


def steps_needed(name: str, options: dict[str, Any], seed: int, most: int, data: tuple[torch.Tensor, torch.Tensor]) -> dict[float, int]:
    """Target -> first step after which the loss over all images is at or below it; `most` when it never is."""
    x, y = data
    net, order = network(seed), torch.Generator().manual_seed(1000 + seed)
    chosen = optimizer(net, name, options)
    found: dict[float, int] = {}
    queue: list[int] = []
    for step in range(1, most + 1):
        if len(queue) < 256:
            queue = torch.randperm(len(x), generator=order).tolist()
        rows, queue = queue[:256], queue[256:]
        chosen.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        try:
            chosen.step()
        except RunError:  # diverged: its curvature overflowed
            break
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(x), y))
        for target in TARGETS:
            if loss <= target:
                found.setdefault(target, step)
        if len(found) == len(TARGETS) or loss != loss or loss > 1e6:
            break
    return {t: found.get(t, most) for t in TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-steps", type=int, default=150)
    most = parser.parse_args().most_steps
    torch.set_num_threads(1)
    data = digits()
    best: dict[tuple[str, float], tuple[float, dict[str, Any], list[int]]] = {}
    raw = []
    for name, grid in (("adam", ADAM), ("kfac", KFACS)):
        for options in grid:
            runs = [steps_needed(name, options, seed, most, data) for seed in SEEDS]
            for target in TARGETS:
                steps = [r[target] for r in runs]
                raw.append({"optimizer": name, "options": options, "target": target, "steps": steps, "median": median(steps)})
                if (name, target) not in best or median(steps) < best[name, target][0]:
                    best[name, target] = (median(steps), options, steps)
    rows = []
    for target in TARGETS:
        (adam, o_a, s_a), (kfac, o_k, s_k) = best["adam", target], best["kfac", target]
        rows.append({
            "what": f"digits, loss {target}: K-FAC's share of Adam's steps", "value": round(kfac / adam, 4), "unit": "of Adam's steps",
            "limit": SHARES[target],
            "adam_steps": adam, "adam_options": o_a, "adam_seeds": s_a, "kfac_steps": kfac, "kfac_options": o_k, "kfac_seeds": s_k,
        })  # fmt: skip
    print(json.dumps(machine.record("kfac", rows, raw=raw, command=f"python benchmarks/kfac.py --most-steps {most}")["rows"], indent=1))


if __name__ == "__main__":
    main()
