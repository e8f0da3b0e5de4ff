"""Embedding tables of a made pool, planned by costs measured here, beside torchrec's planner and the classic rules: what the plans really take.

Run: `python benchmarks/tables.py` (root for the lab; with torchrec and fbgemm-gpu-cpu 1.8.0 for the peer; a quarter of an hour). Pool of 60 tables:
10^3 to 10^6 rows, 4 to 64 columns, pooling 1 to 30, Zipf 0.6 to 1.2; batch 1,024. Twenty tasks of 24 tables on 4 ranks, links of 1 Gbit/s. Cost of
a plan: the slowest rank's lookups (one rank at a time, one thread's processor time, caches evicted) and both exchanges in the lab (wall time).
"ours": the best of three finalists, measured beforehand, as `tables plan --measure 3` has it; its plan time counts that. Then all plans are measured
anew, so that no choice profits from its own measurement; a plan that two planners find is measured once. Raw: results/tables.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import machine
import numpy as np

from meshwright.cost_models.lookups import LookupCosts, assumed_costs
from meshwright.decide.tables import TableProblem
from meshwright.decide.tables.classic import DimGreedy, LookupGreedy, RandomTables, SizeLookupGreedy
from meshwright.decide.tables.neuroshard import NeuroShard
from meshwright.drive.table_finals import Measured, finals
from meshwright.drive.tables import compare_tables
from meshwright.fabric.fabric import Fabric
from meshwright.graph.embeddings import Shard, Table, Tables, histogram_of
from meshwright.io.costs.lookups import read_lookup_costs, write_lookup_costs
from meshwright.io.fabric.name import load_fabric
from meshwright.lab import Lab
from meshwright.probe.tables.compute import Meter
from meshwright.probe.tables.exchange import ExchangeTask, exchange_tasks, measure_exchanges
from meshwright.probe.tables.fit import PlanMeasure, better_exchanges, fit_costs
from meshwright.probe.tables.operator import operator_name
from meshwright.probe.tables.train import fit_exchange

FABRIC, RATE_BPS, BATCH = "star:4?link=125MB/s", 125_000_000, 1024
FINALISTS = 3
RUNS, JUDGED_RUNS = 25, 50  # of an exchange: of the points to learn from, and of the plans that are compared
LOOKUP_RUNS, LOOKUP_ROUNDS = 2, 8  # of the plans that are compared
ASKED = {"error": 0.07, "torchrec": 0.95, "torchrec worst": 1.05, "dim-greedy": 0.98, "plan_s": 10.0, "fit_s": 900.0}


def pool(seed: int = 0, count: int = 60) -> Tables:
    draw, found = np.random.default_rng(seed), []
    for i in range(count):
        rows, dim = int(10 ** draw.uniform(3, 6)), int(draw.choice([4, 8, 16, 32, 64]))
        pooling, skew = int(draw.integers(1, 31)), draw.uniform(0.6, 1.2)
        often = np.cumsum(np.arange(1, rows + 1) ** -skew)
        looked = np.searchsorted(often, draw.random(pooling * BATCH) * often[-1])
        found.append(Table(name=f"t{i}", rows=rows, dim=dim, pooling=float(pooling), histogram=histogram_of(looked)))
    return Tables(tables=tuple(found), batch=BATCH, name="pool")


def torchrec_shards(tables: Tables, fabric: Fabric) -> list[Shard]:
    """Its planner's answer: table- and column-wise, told the link rate and each table's pooling."""
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # type: ignore[import-not-found]
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # type: ignore[import-not-found]
    from torchrec.distributed.planner.types import ParameterConstraints  # type: ignore[import-not-found]
    from torchrec.modules.embedding_configs import EmbeddingBagConfig  # type: ignore[import-not-found]
    from torchrec.modules.embedding_modules import EmbeddingBagCollection  # type: ignore[import-not-found]

    configs = [EmbeddingBagConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=[t.name]) for t in tables.tables]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    devices = len(fabric.devices)
    rate = RATE_BPS / 1e3  # bytes per millisecond
    topology = Topology(
        world_size=devices, local_world_size=devices, compute_device="cpu", intra_host_bw=rate, inter_host_bw=rate, ddr_cap=1 << 36,
    )  # fmt: skip
    kinds = ["table_wise", "column_wise"]
    constraints = {t.name: ParameterConstraints(sharding_types=kinds, min_partition=4, pooling_factors=[t.pooling]) for t in tables.tables}
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH // devices, constraints=constraints)
    plan = planner.plan(module=module, sharders=[EmbeddingBagCollectionSharder()]).plan[""]
    names, found = [d.name for d in fabric.devices], []
    for t in tables.tables:
        for s in plan[t.name].sharding_spec.shards:
            left, width = s.shard_offsets[1], s.shard_sizes[1]
            found.append(Shard(table=t.name, device=names[s.placement.rank()], rows=(0, t.rows), columns=(left, left + width)))
    return found


def by_links(columns: Any, compute_s: Any, fabric: Fabric) -> tuple[list[list[float]], list[list[float]]]:
    one = Tables(tables=(Table(name="any", rows=1, dim=4),), batch=BATCH)
    problem = TableProblem(tables=one, fabric=fabric, costs=(assumed_costs(BATCH, 4, 0),))
    back = problem.by_links(columns)
    ends = compute_s + back
    return back.tolist(), problem.by_links(columns, ends - ends.min(1, keepdims=True)).tolist()


class Here(PlanMeasure):
    """Exchanges in the lab or, without one, by the links' rate."""

    def __call__(self, plans: Sequence[Any], compute_s: Sequence[Sequence[float]]) -> list[Measured]:
        if self.lab is not None:
            return super().__call__(plans, compute_s)
        back, fore = by_links(np.array([p.columns for p in plans], float), np.array(compute_s), self.fabric)
        return [Measured(compute_s=tuple(c), backward_s=tuple(b), forward_s=tuple(f)) for c, b, f in zip(compute_s, back, fore, strict=True)]


def measured(plans: Sequence[tuple[Sequence[Shard], Meter]], fabric: Fabric, lab: Any) -> list[dict[str, Any]]:
    """Plans of a task take turns; those that give all devices the same are measured once."""
    names, meters = [d.name for d in fabric.devices], {id(meter): meter for _, meter in plans}
    alike = [(id(meter), tuple(sorted((s.device, s.table, s.rows, s.width) for s in shards))) for shards, meter in plans]
    once = {key: list(shards) for key, (shards, _) in zip(alike, plans, strict=True)}
    compute = {}
    for k, meter in meters.items():
        mine = [key for key in once if key[0] == k]
        lookups = meter.plans_s([once[key] for key in mine], names, runs=LOOKUP_RUNS, rounds=LOOKUP_ROUNDS)
        compute |= dict(zip(mine, lookups, strict=True))
    columns = {key: [sum(s.width for s in shards if s.device == n) for n in names] for key, shards in once.items()}
    if lab is None:
        back, fore = by_links(np.array(list(columns.values()), float), np.array([compute[key] for key in once]), fabric)
    else:
        tasks = [ExchangeTask(columns=columns[key], compute_s=compute[key]) for key in once]
        back, fore = measure_exchanges(tasks, len(names), BATCH, lab=lab, runs=JUDGED_RUNS)
    taken = {}
    for key, b, f in zip(once, back, fore, strict=True):
        c = compute[key]
        taken[key] = {
            "compute_s": c, "backward_s": b, "forward_s": f, "columns": columns[key], "total_s": max(map(sum, zip(c, b, f, strict=True))),
        }  # fmt: skip
    return [taken[key] for key in alike]


def fitted(args: Any, whole: Tables, fabric: Fabric, lab: Any) -> tuple[LookupCosts, dict[str, Any]]:
    """Costs, and how long lookups (and exchanges) took to be measured and learned. Lookups are kept in --costs: they want processor time, exchanges a
    quiet machine, so each can have its own hour."""
    began, facts = time.perf_counter(), {}
    kept = Path(str(args.costs) + ".json")
    if args.costs and kept.exists():
        costs, facts = read_lookup_costs(args.costs), json.loads(kept.read_text())
    else:
        found = fit_costs(whole, fabric, points=args.points, exchange_points=0, epochs=args.epochs)
        costs, facts = found.costs, {"additive": found.additive_error, "lookups_s": time.perf_counter() - began, "points": args.points}
        if args.costs:
            write_lookup_costs(args.costs, costs)
            kept.write_text(json.dumps(facts))
    if lab is None:
        return costs, {**facts, "fit_s": facts["lookups_s"]}
    began = time.perf_counter()
    tasks = exchange_tasks(whole, len(fabric.devices), args.exchange_points, np.random.default_rng(2))
    back, fore = measure_exchanges(tasks, len(fabric.devices), BATCH, lab=lab, runs=RUNS)
    loads, starts = np.array([t.columns for t in tasks], float), np.array([t.start_s for t in tasks])
    costs = fit_exchange(costs, loads, starts, np.array(back), np.array(fore), fabric=fabric.name, epochs=args.epochs)
    costs = better_exchanges(costs, whole, fabric, loads, starts, np.array([back, fore]))
    return costs, {**facts, "fit_s": facts["lookups_s"] + time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--exchange-points", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--only", type=int, help="this task alone, e.g. the worst of a run before")
    parser.add_argument("--tables", type=int, default=24)
    parser.add_argument("--costs", type=Path, help="file of measured lookups: read if it is there, else written")
    parser.add_argument("--lookups-only", action="store_true", help="measure lookups into --costs, and end")
    parser.add_argument("--computed-exchanges", action="store_true", help="exchanges by the links' rate, where the machine is too busy to time them")
    args = parser.parse_args()
    whole, fabric = pool(), load_fabric(FABRIC)
    if args.lookups_only:
        print(fitted(args, whole, fabric, None))
        return
    with nullcontext() if args.computed_exchanges else Lab.up(FABRIC, name="bench-tables", verify=False) as lab:
        fabric = fabric if lab is None else lab.fabric  # its links are token buckets
        costs, facts = fitted(args, whole, fabric, lab)
        print(facts, dict(costs.errors), flush=True)
        draw, plan_s, finals_s, bounds = np.random.default_rng(7), list[float](), list[float](), dict[int, float]()
        plans: list[tuple[int, str, list[Shard], Meter, float | None]] = []
        for n in range(args.tasks):
            chosen = tuple(whole.tables[i] for i in draw.permutation(len(whole.tables))[: args.tables])
            if args.only not in (None, n):
                continue
            tables = Tables(tables=chosen, batch=BATCH, name=f"task {n}")
            problem = TableProblem(tables=tables, fabric=fabric, costs=(costs,))
            began = time.perf_counter()
            ranked, bound = compare_tables(problem, [NeuroShard(), DimGreedy(), LookupGreedy(), SizeLookupGreedy(), RandomTables()], seed=n)
            plan_s.append(time.perf_counter() - began)
            bounds[n] = float(bound)
            began = time.perf_counter()
            best = finals(problem, ranked, Here(meter=Meter(tables, seed=n), fabric=fabric, lab=lab), FINALISTS, seed=n)[0]
            finals_s.append(time.perf_counter() - began)
            assert best.plan is not None
            meter = Meter(tables, seed=n)
            plans.append((n, "ours", list(best.plan.shards), meter, best.plan.cost_s))
            for t in ranked:
                assert t.plan is not None
                plans.append((n, t.strategy.name, list(t.plan.shards), meter, t.plan.cost_s))
            try:
                plans.append((n, "torchrec", torchrec_shards(tables, fabric), meter, None))
            except ImportError as error:
                print(f"no torchrec here: {error}")
        print("planned:", [round(x, 2) for x in plan_s], "finalists chosen:", [round(x, 1) for x in finals_s], flush=True)
        taken = measured([(p[2], p[3]) for p in plans], fabric, lab)
    raw = [{"task": p[0], "plan": p[1], **t, "predicted_s": p[4]} for p, t in zip(plans, taken, strict=True)]
    record(args, raw, bounds, (max(plan_s), max(map(sum, zip(plan_s, finals_s, strict=True)))), facts["fit_s"], costs.errors, facts["additive"])


def record(
    args: Any, raw: list[dict[str, Any]], bounds: dict[int, float], slowest_s: tuple[float, float], fit_s: float, errors: Any, additive: float | None,
) -> None:  # fmt: skip
    total = {(r["task"], r["plan"]): r["total_s"] for r in raw}
    names = list(dict.fromkeys(r["plan"] for r in raw))

    def beside(ours: str, peer: str) -> list[float]:
        return [total[n, ours] / total[n, peer] for n in range(args.tasks) if (n, peer) in total]

    exchanges = 0 if args.computed_exchanges else args.exchange_points
    guessed = [r for r in raw if r["predicted_s"] and r["plan"] != "ours"]
    ranks = [np.argsort(np.argsort([r[k] for r in guessed])) for k in ("predicted_s", "total_s")]
    rows = [
        {"what": f"lookups by the net: median error on unseen sets ({operator_name()})", "value": errors["compute"], "unit": "",
         "limit": ASKED["error"], "peer": additive, "asked_ratio": 0.5},
        *({"what": f"exchanges: median error, {k}", "value": errors[k], "unit": ""} for k in sorted(errors) if k != "compute"),
        {"what": f"fit: {args.points} points of lookups, {exchanges} of exchanges, nets", "value": fit_s, "unit": "s",
         "limit": ASKED["fit_s"]},
        {"what": "neuroshard: one plan, by the costs alone, slowest", "value": slowest_s[0], "unit": "s", "limit": ASKED["plan_s"]},
        {"what": f"ours: one plan, chosen among {FINALISTS} measured finalists, all in all, slowest", "value": slowest_s[1], "unit": "s",
         "limit": ASKED["plan_s"]},
        {"what": "rank correlation of predicted and measured costs", "value": float(np.corrcoef(*ranks)[0, 1]), "unit": ""},
        {"what": "bound over ours, mean", "value": statistics.mean(b / total[n, "ours"] for n, b in bounds.items()), "unit": ""},
    ]  # fmt: skip
    for ours in ("ours", "neuroshard"):
        for peer in [x for x in names if x not in ("ours", "neuroshard")]:
            found = beside(ours, peer)
            rows.append({
                "what": f"{ours}: cost over that of {peer}, mean of {len(found)} tasks", "value": statistics.mean(found), "unit": "",
                "worst": max(found), "best": min(found), "limit": ASKED.get(peer), "limit_worst": ASKED.get(f"{peer} worst"),
            })  # fmt: skip
    for row in rows:
        print(f"{row['what']:<90} {row['value']}", *(f"{k} {row[k]}" for k in ("worst", "limit", "peer") if row.get(k) is not None))
    how = "by the links' rate" if args.computed_exchanges else "measured in the lab"
    command = "python benchmarks/tables.py" + " --computed-exchanges" * args.computed_exchanges + f" --tasks {args.tasks}"
    if args.only is None:
        machine.record("tables", rows, command=command, exchanges=how, raw=raw)


if __name__ == "__main__":
    main()
