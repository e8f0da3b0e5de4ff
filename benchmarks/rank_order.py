"""Rank orders: gain, distance from the bound and time of the search; simulated gain on shaped fabrics; prediction against simulation.

Run: `python benchmarks/rank_order.py` (raw output in benchmarks/results/rank_order.json). Searches are timed in processor seconds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from machine import record

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.classic.ring import Ring
from meshwright.decide.collective.cloudcollectives.cost import CostMatrix, model_of
from meshwright.decide.collective.cloudcollectives.strategy import CloudCollectives, order_ranks
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.io.fabric.name import load_fabric
from meshwright.probe.fabric.rank_order import local_agents, probe

SIZE = 64 << 20


def racks(hosts: int, count: int, seed: int) -> CostMatrix:
    """Hosts scattered over racks: 10 us and 10 Gbit/s inside, 100 us between, 10 Gbit/s uplinks that all share."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(hosts) % count)
    same = group[:, None] == group[None, :]
    alpha = np.where(same, 1e-5, 1e-4) * rng.uniform(0.95, 1.05, same.shape)
    np.fill_diagonal(alpha, 0)
    names = tuple(f"h{i}" for i in range(hosts))
    return CostMatrix(
        names=names, alpha_s=alpha, beta_s_per_byte=np.full((hosts, hosts), 8e-10), host=tuple(range(hosts)), group=tuple(int(g) for g in group),
        uplink_Bps=(1.25e9,) * count, source="made up",
    )  # fmt: skip


def search_rows() -> list[dict[str, Any]]:
    rows = []
    for hosts, count in ((8, 2), (12, 3), (32, 4), (64, 4)):
        for algorithm in ("ring", "halving-doubling", "double-tree"):
            matrix = racks(hosts, count, 1)
            start = time.process_time()
            found = order_ranks(matrix, algorithm, "all-reduce", SIZE, rng=np.random.default_rng(0))
            seconds = time.process_time() - start
            what = f"{hosts} hosts in {count} racks, {algorithm}: predicted time in the order found against the given one"
            rows.append({
                "what": what, "value": found.after.time_s, "unit": "s", "peer": found.before.time_s, "bound_s": found.bound_s, "proof": found.proof,
                "evaluated": found.evaluated, "search_cpu_s": seconds,
            })  # fmt: skip
    return rows


def simulated_rows() -> list[dict[str, Any]]:
    """Two islands, ranks scattered: what the simulator says of the strategy's order and of the given one."""
    rows = []
    for devices in (4, 8):
        fabric = load_fabric(f"two-islands:{devices}")
        for algorithm in ("ring", "halving-doubling", "double-tree"):
            ranks = tuple(fabric.devices[i].name for i in np.random.default_rng(3).permutation(len(fabric.devices)))
            problem = CollectiveProblem(fabric=fabric, op="all-reduce", ranks=ranks, size_bytes=1 << 22)
            times = []
            for order in (None, tuple(range(len(ranks)))):
                plan = CloudCollectives(algorithm=algorithm, order=order).plan(problem, rng=np.random.default_rng(0))
                times.append(simulated_time_s(plan.program, fabric, ranks, None))
            what = f"two-islands:{devices}, {algorithm}, 4 MiB, scattered ranks: simulated, ordered against given"
            rows.append({"what": what, "value": times[0], "unit": "s", "peer": times[1]})
    return rows


def correlation_row() -> dict[str, Any]:
    """Spearman's rank correlation of predicted and simulated ring times over 20 random orders."""
    fabric = load_fabric("two-islands:4")
    ranks = tuple(d.name for d in fabric.devices)
    model = model_of(CostMatrix.of_fabric(fabric, ranks), "ring", "all-reduce", 1 << 22)
    problem = CollectiveProblem(fabric=fabric, op="all-reduce", ranks=ranks, size_bytes=1 << 22)
    predicted, simulated = [], []
    for seed in range(20):
        order = tuple(int(x) for x in np.random.default_rng(seed).permutation(8))
        predicted.append(round(model(order).time_s, 9))
        plan = Ring(order=order, rings=1).plan(problem, rng=np.random.default_rng(0))
        simulated.append(round(simulated_time_s(plan.program, fabric, ranks, None), 9))

    def places(values: list[float]) -> np.ndarray:
        _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[where]

    rho = float(np.corrcoef(places(predicted), places(simulated))[0, 1])
    what = "ring times of 20 random orders on two-islands:4: rank correlation of prediction and simulation (at least)"
    return {"what": what, "value": rho, "unit": "", "peer": 0.9}


def probe_row() -> dict[str, Any]:
    """Eight agents on this machine: wall seconds of a full probe in both directions (loopback, so only the method is tested)."""
    with local_agents(8) as (endpoints, token):
        found = probe(endpoints, token, echoes=50, bursts=2)
    off = ~np.eye(8, dtype=bool)
    alpha = found.matrix.alpha_s[off]
    return {
        "what": "probe of 8 local agents, 56 ways, 50 echoes and 2 bursts each", "value": found.seconds, "unit": "wall s",
        "one_way_s": [float(alpha.min()), float(np.median(alpha)), float(alpha.max())], "groups": len(set(found.matrix.group)),
    }  # fmt: skip


def main() -> None:
    document = record("rank_order", [*search_rows(), *simulated_rows(), correlation_row(), probe_row()])
    for row in document["rows"]:
        print(f"{row['what']}: {row['value']:.6g} {row['unit']}" + (f" (ratio {row['ratio']})" if "ratio" in row else ""))


if __name__ == "__main__":
    main()
