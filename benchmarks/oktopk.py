"""Sparse all-reduces in the lab: volume on the interface, balance, and time against gloo's dense all-reduce, TopkA, gTopk, TopkDSA and Zen.

Run: `python benchmarks/oktopk.py` (root or user namespaces; about ten minutes on two quiet cores), `--quick` for a tenth of the vector and 12 steps.
8 ranks on a switch, 100 Mbit/s each, 10^7 elements, density 1 %, 32 steps from an empty residual, re-evaluations included; all methods select by the
same thresholds and kernels. A step's time is the slowest rank's. What the vectors are: see `oktopk_worker`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import star

RANKS, MBIT = 8, 100
PEERS = {"gloo": 8.0, "topka": 1.4, "gtopk": 2.0, "topkdsa": None, "zen": None}  # how many times slower than Ok-Topk they are to be
DENSE_STEPS = 4


def measured(elements: int, k: int, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any, Any]:
    """(rows of all steps, what the ranks' kernels and messages cost, the lab's measured fabric, use of the machine)."""
    from meshwright.lab import Lab

    cases = [{"name": "oktopk", "steps": steps, "settings": {"method": "oktopk"}}]
    for name in PEERS:
        settings = {"method": "dense" if name == "gloo" else name}
        cases.append({"name": name, "steps": DENSE_STEPS if name == "gloo" else steps, "settings": settings})
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if text.startswith('{"row"'):
            rows.append(json.loads(text)["row"])
        elif text.startswith('{"costs"'):
            costs.append(json.loads(text)["costs"])
        elif "Warning" not in text:
            sys.stderr.write(text + "\n")

    with Lab.up(star(*[MBIT] * RANKS)) as lab:
        worker = str(Path(__file__).with_name("oktopk_worker.py"))
        job = json.dumps({"elements": elements, "k": k, "cases": cases})
        use = lab.run([sys.executable, worker], env={"SPARSE_JOB": job}, timeout_s=3000, sink=sink).machine
        return rows, costs, lab.measured_fabric, use


def predicted(elements: int, k: int, costs: list[dict[str, Any]], fabric: Any, overlap: float) -> dict[str, dict[str, float]]:
    """Simulated seconds of every method's programs, with what was measured of kernels, messages and links."""
    from meshwright.cost import Cost, Priced, Transport
    from meshwright.decide.collective.sparse import NAMES, SparseProblem
    from meshwright.decide.collective.sparse.choice import rank_sparse

    table = {key: Priced(max(c["table"][key] for c in costs), "measured") for key in costs[0]["table"]}
    transport = Transport(per_message_s=median(c["round_s"] for c in costs) / RANKS, evidence="measured")  # a round: that many, end to end
    cost = Cost(name="measured", table=table, transport=transport, source="benchmarks/oktopk.py")
    problem = SparseProblem(
        fabric=fabric, ranks=tuple(d.name for d in fabric.devices), elements=elements, k=k, overlap=overlap, cost=cost
    )  # fmt: skip
    return {r.strategy: r.kinds_s or {"every": r.time_s or 0.0} for r in rank_sparse(problem, [(name, kind()) for name, kind in NAMES.items()])}


def step_s(row: dict[str, Any]) -> float:
    return max(rank["time_s"] for rank in row["ranks"])


def most(row: dict[str, Any], *names: str) -> float:
    return max(sum(rank[n] for n in names) for rank in row["ranks"])


def volume_rows(ours: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    kinds = [row["ranks"][0]["kind"] for row in ours]
    between = [row for row, kind in zip(ours, kinds, strict=True) if "thresholds" not in kind]
    agreed = [row["ranks"][0]["to_regions"] for row, kind in zip(ours, kinds, strict=True) if "regions" in kind]
    hottest = max(max(x) / mean(x) for x in agreed)
    worst = max(between, key=lambda row: most(row, "interface_words"))
    return [
        {"what": "Ok-Topk: words on the interface, busiest rank and step between re-evaluations", "value": round(most(worst, "interface_words")),
         "unit": "words", "limit": round(limit)},
        {"what": "Ok-Topk: words on the interface, busiest rank, mean over all steps", "value": round(mean(most(r, "interface_words") for r in ours)),
         "unit": "words", "limit": round(limit)},
        {"what": "Ok-Topk: words received, busiest rank and step between re-evaluations", "value": max(most(r, "words_received") for r in between),
         "unit": "words", "limit": round(limit)},
        {"what": "Ok-Topk: hottest rank over the mean after new regions", "value": round(hottest, 4), "unit": "x", "limit": 1.05},
        {"what": "Ok-Topk: counted words over those on the interface, mean", "unit": "x",
         "value": round(mean(most(r, "words_sent", "control_words") for r in ours) / mean(most(r, "interface_words") for r in ours), 3)},
        {"what": "Ok-Topk: steps with new regions", "value": sum("regions" in kind for kind in kinds), "unit": f"of {len(ours)}"},
    ]  # fmt: skip


def main() -> None:
    quick = sys.argv[1:] == ["--quick"]
    elements, steps = (1_000_000, 12) if quick else (10_000_000, 32)
    k = elements // 100
    rows, costs, fabric, use = measured(elements, k, steps)
    by_case = {name: [r for r in rows if r["case"] == name] for name in ("oktopk", *PEERS)}
    limit = 6 * k * (RANKS - 1) / RANKS
    found = volume_rows(by_case["oktopk"], limit)
    ours_s = mean(map(step_s, by_case["oktopk"]))
    found.append({"what": "Ok-Topk: mean step", "value": round(ours_s, 4), "unit": "s"})
    for name, asked in PEERS.items():
        peer_s = mean(map(step_s, by_case[name]))
        what = f"{name}: mean step over Ok-Topk's"
        row: dict[str, Any] = {"what": what, "value": round(peer_s / ours_s, 3), "unit": "x", "mean_s": round(peer_s, 4)}
        found.append(row | ({"limit": asked, "ratio": round(peer_s / ours_s / asked, 3), "higher_is_better": True} if asked else {}))
    union = mean(r["ranks"][0]["result"] / mean(x["selected"] for x in r["ranks"]) for r in by_case["topka"])
    overlap = max(0.0, min(1.0, (RANKS - union) / (RANKS - 1)))
    simulated = predicted(elements, k, costs, fabric, overlap)
    for name, kinds in simulated.items():
        case = by_case["gloo" if name == "dense" else name]
        usual = next(iter(kinds))
        times = [step_s(r) for r in case if r["ranks"][0].get("kind", "").split("+")[0] != "thresholds"]
        found.append(
            {"what": f"{name}: median step between re-evaluations, measured over predicted", "value": round(median(times) / kinds[usual], 3),
             "unit": "x", "measured_s": round(median(times), 4), "predicted_s": {x: round(y, 4) for x, y in kinds.items()}}
        )  # fmt: skip
    for row in found:
        asked = f" (asked {row['limit']})" if "limit" in row else ""
        more = "".join(f" {key}={row[key]}" for key in ("mean_s", "measured_s", "predicted_s") if key in row)
        print(f"{row['what']:<85} {row['value']:>10} {row['unit']}{asked}{more}")
    for name, case in by_case.items():
        print(f"{name} steps (s): {' '.join(f'{step_s(r):.3f}' for r in case)}")
    print(f"union of {RANKS} selections: {union:.2f} of one; machine: {use}")
    if not quick:
        machine.record("oktopk", found, steps=rows, costs=costs, union=union, overlap=overlap, elements=elements, k=k)


if __name__ == "__main__":
    main()
