"""Published training runs beside what meshwright's price of their layouts says: no search, the layout is the published one.

Run: `python benchmarks/published.py` (about ten minutes of one core; raw output in benchmarks/results/published.json). `--seen` leaves the held-out
half alone, `--groups a,b` takes some groups, `--graphs DIR` keeps captured graphs there, `--plain` prices without framework profiles.
Rows are in benchmarks/published.toml with their sources. Half of them, by a hash of their names, are held out: they choose nothing. The error is
predicted / measured - 1. Rows whose source leaves out what decides their price are predicted with `--all` only, as if not interleaved and of
micro-batch 1, and not judged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil, exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import published_price as price

TIME, TIME_P90, MEMORY, RANK = 0.08, 0.20, 0.10, 0.9  # asked of the held-out half
DECIDING = {"microbatch", "interleave"}  # facts without which a row is not judged
BARS = 0.90  # share of rows that their 90 % intervals contain


def framework_of(run: dict[str, Any]) -> Any:
    """The profile of the run's framework, with what the row says: compiled or not, attention, overlap of tensor collectives."""
    import msgspec

    from meshwright.profile.frameworks import Framework, framework

    found = framework(run["framework"])
    changes: dict[str, Any] = {"attention": run["attention"]} if "attention" in run else {}
    if run["framework"] == "torchtitan":
        changes |= {"fused": run.get("compiled", False), "fused_loss": run.get("compiled_loss", False)}
        changes["loss_bytes"] = found.loss_bytes if changes["fused_loss"] else Framework(name="").loss_bytes
    if run.get("tensor_overlap"):
        changes["tensor_overlap"] = framework("megatron-core").tensor_overlap
    return msgspec.structs.replace(found, **changes)


@cache
def kinds_of(cluster: str, servers: int) -> Any:
    from meshwright.fabric.servers import server_kinds
    from meshwright.io.fabric.name import load_fabric

    row = next(c for c in price.read_published()["cluster"] if c["name"] == cluster)
    fabric = load_fabric(f"{row['fabric']}:{servers}")
    changes = {"memory_bandwidth_Bps": round(row["memory_Bps"])} if "memory_Bps" in row else {}
    return fabric, tuple(replace(k, device=replace(k.device, **changes)) for k in server_kinds(fabric))


class Gallery:
    def __init__(self, graphs: Path | None, *, plain: bool) -> None:
        self.document, self.graphs, self.plain = price.read_published(), graphs, plain
        self.numbers = {m["name"]: i for i, m in enumerate(self.document["model"])}

    def graph(self, run: dict[str, Any]) -> Any:
        number, sequence = self.numbers[run["model"]], run["sequence"]
        if self.graphs is None:
            return price.graph_of(number, sequence)
        from meshwright.io.model.graph import read_graph, write_graph

        path = self.graphs / f"{run['model']}-{sequence}.json"
        if not path.exists():
            write_graph(path, price.graph_of(number, sequence))
        return read_graph(path)

    def predicted(self, run: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a step and bytes of the fullest device."""
        import msgspec

        from meshwright.cost import assumed_cost
        from meshwright.decide.layout.layer_costs import MIXED, layer_table
        from meshwright.decide.layout.mixed.candidate import Candidate, Pool, Problem
        from meshwright.decide.layout.profiled.predict import predict
        from meshwright.drive.layout.schedules import LayoutSchedules
        from meshwright.drive.layout.search import framework_runtime, runtime_of_servers
        from meshwright.fabric.servers import network_of
        from meshwright.graph.scale import at_batch

        graph, model = self.graph(run), self.document["model"][self.numbers[run["model"]]]
        cluster = next(c for c in self.document["cluster"] if c["name"] == run["cluster"])
        fabric, kinds = kinds_of(run["cluster"], 1 if run["devices"] <= price.BOX else 2)
        cost, made = assumed_cost(fabric), None if self.plain else framework_of(run)
        precision = MIXED if made is None else replace(MIXED, state=made.state)
        table = layer_table(
            lambda b: at_batch(graph, b), kinds, cost, microbatches=[run["microbatch"]], tensors=[run.get("tensor", 1)], precision=precision,
            sequence=run.get("sequence_parallel", False), framework=made, watts={kinds[0].name: cluster["power_W"]} if "power_W" in cluster else None,
        )  # fmt: skip
        table = price.repeated(table, model["layers"])
        runtime = runtime_of_servers(kinds, table, cost)
        if made is not None:
            runtime = framework_runtime(runtime, made, kinds)
        runtime = msgspec.structs.replace(runtime, p2p="overlapped") if run.get("interleave", 1) > 1 else runtime
        schedules = LayoutSchedules(("interleaved",))
        layout = price.layout_of(run, table, schedules)
        candidate = Candidate(layout, price.choices_of(run, table.layers), "published")
        pools = tuple(Pool(kind=k, memory_bytes=0) for k in kinds)
        problem = Problem(
            table=table, pools=pools, network=network_of(kinds), runtime=runtime, global_batch=run["global_batch"], choices=(), schedules=schedules,
        )  # fmt: skip
        orders = problem.orders(layout) if layout.schedule is not None else None
        if layout.schedule is not None and orders is None:
            estimate = problem.estimate(candidate)
            return {"time_s": estimate.time_s, "memory_bytes": max(estimate.memory_bytes)}
        found = predict(problem.profile(candidate), layout, problem.network, runtime, bars=False, orders=orders)
        return {"time_s": found.time_s, "memory_bytes": max(found.memory_peak_bytes)}

    def row(self, run: dict[str, Any]) -> dict[str, Any]:
        model = self.document["model"][self.numbers[run["model"]]]
        ours = self.predicted(run)
        row = {"name": run["name"], "group": run["group"], "held_out": price.held_out(run["name"]), "predicted_s": ours["time_s"]}
        if run.get("dtype", "bf16") != "fp8" and ("tokens_per_s_gpu" in run or "step_s" in run or "tflops_gpu" in run):
            row["measured_s"] = price.step_s(run, price.formula_flops(model, run))
            row["error"] = ours["time_s"] / row["measured_s"] - 1
            row["judged"] = not set(run.get("missing", ())) & DECIDING
        if "memory_GiB" in run:
            row["memory_error"] = ours["memory_bytes"] / 2**30 / run["memory_GiB"] - 1
            row["memory_GiB"] = run["memory_GiB"]
        return row


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    import numpy as np

    a, b = (np.argsort(np.argsort([p[i] for p in pairs])) for i in range(2))
    return float(np.corrcoef(a, b)[0, 1])


def percentile(errors: Sequence[float], share: float) -> float:
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bar_of(rows: Sequence[dict[str, Any]]) -> float:
    """Half-width, in log(measured / predicted), of an interval that contains BARS of new rows (split conformal: one rank further out than the
    quantile of these)."""
    residuals = sorted(abs(log(r["measured_s"] / r["predicted_s"])) for r in rows)
    return residuals[min(len(residuals) - 1, ceil(BARS * (len(residuals) + 1)) - 1)]


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every seen group by what the others leave (no row of its cluster and models among them), and of the held-out half by the whole seen one."""
    seen, out = ([r for r in rows if r.get("judged") and r["held_out"] is half] for half in (False, True))
    inside = total = 0
    for group in dict.fromkeys(r["group"] for r in seen):
        mine, others = ([r for r in seen if (r["group"] == group) is same] for same in (True, False))
        if len(others) >= 10:
            width = bar_of(others)
            inside += sum(abs(log(r["measured_s"] / r["predicted_s"])) <= width for r in mine)
            total += len(mine)
    said: list[dict[str, Any]] = []
    if total:
        said.append({"what": "seen: 90 % intervals from the other groups contain", "value": round(inside / total, 4), "unit": "share", "rows": total})
    if seen and out:
        width = bar_of(seen)
        share = statistics.fmean(abs(log(r["measured_s"] / r["predicted_s"])) <= width for r in out)
        said += [
            {"what": "90 % interval from the seen half: factor", "value": round(exp(width), 4), "unit": "ratio", "rows": len(seen)},
            {"what": "held out: that interval contains", "value": round(share, 4), "unit": "share", "rows": len(out), "limit": BARS},
        ]  # fmt: skip
    return said


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    halves: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        halves["held out" if r["held_out"] else "seen"].append(r)
    for half, some in halves.items():
        limits = (TIME, TIME_P90, MEMORY) if half == "held out" else (None, None, None)
        time = [abs(r["error"]) for r in some if r.get("judged")]
        memory = [abs(r["memory_error"]) for r in some if "memory_error" in r]
        for what, errors, share, limit in (
            ("time, median error", time, 0.5, limits[0]), ("time, 90th percentile", time, 0.9, limits[1]),
            ("memory, median error", memory, 0.5, limits[2]),
        ):
            if errors:
                value = statistics.median(errors) if share == 0.5 else percentile(errors, share)
                said.append({"what": f"{half}: {what}", "value": round(value, 4), "unit": "share", "rows": len(errors)} | _limit(limit))
        for group in dict.fromkeys(r["group"] for r in some):
            mine = [r for r in some if r["group"] == group and r.get("judged")]
            if len(mine) >= 3:
                pairs = [(r["predicted_s"], r["measured_s"]) for r in mine]
                value = statistics.median(abs(r["error"]) for r in mine)
                said.append({"what": f"{half}: {group}, median error", "value": round(value, 4), "unit": "share", "rows": len(mine)})
                said.append({"what": f"{half}: {group}, rank correlation", "value": round(rank_correlation(pairs), 4), "unit": "share"})
    return said


def _limit(value: float | None) -> dict[str, float]:
    return {} if value is None else {"limit": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seen", action="store_true", help="leave the held-out half alone, and write no result")
    parser.add_argument("--groups", default="", help="some groups only, and write no result")
    parser.add_argument("--all", action="store_true", help="predict also rows that lack what decides their price; they are not judged")
    parser.add_argument("--graphs", type=Path, help="keep captured graphs here")
    parser.add_argument("--plain", action="store_true", help="without framework profiles, and write no result")
    args = parser.parse_args()
    gallery, groups = Gallery(args.graphs, plain=args.plain), set(filter(None, args.groups.split(",")))
    rows = []
    for run in gallery.document["run"]:
        if not args.all and set(run.get("missing", ())) & DECIDING:
            continue
        if (args.seen and price.held_out(run["name"])) or (groups and run["group"] not in groups):
            continue
        row = gallery.row(run)
        rows.append(row)
        error, memory = (f"{row[k]:+7.1%}" if k in row else "       " for k in ("error", "memory_error"))
        note = "" if row.get("judged") or "measured_s" not in row else "  (not judged)"
        print(f"{row['name']:<34} {row['predicted_s']:9.4g} s {error}  memory {memory}{note}", flush=True)
    said = summary(rows) + bars(rows)
    for r in said:
        print(f"{r['what']}: {r['value']}" + (f" (limit {r['limit']})" if "limit" in r else ""))
    if not (args.seen or groups or args.plain):
        machine.record("published", said, runs=rows)


if __name__ == "__main__":
    main()
