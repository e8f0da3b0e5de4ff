"""Searching layouts for large clusters: how long it takes, how many candidates are evaluated, and how far the result is from two bounds.

Run: `python benchmarks/layout_search.py` (all cases; raw output goes to benchmarks/results/layout_search.json), or with the name of one case. Every
case is a process of its own. `capture` is the model's operator graph (fake tensors), done once per model; `search` is everything from the graph to
the ranked layouts: layer table, candidates, closed forms, event simulations, refinement, bounds. Gaps are 1 - bound / time. The clusters are
presets with nominal rates and the cost is the roofline with its default efficiencies: this measures the search, not a cluster.
`weights stay` allows sharding levels 0 and 1 only: nothing is gathered per micro-batch, nothing has to overlap.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from machine import fresh, memory_high_water_bytes, record

from meshwright.capture.graph import capture
from meshwright.cost import assumed_cost
from meshwright.decide.layout.layer_costs import MIXED
from meshwright.drive.layout.search import find_layouts
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.fabric.machines import GPUS
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric

EXAMPLES = Path(__file__).parent.parent / "examples"
# model, fabric, global batch, sharding levels, limits: seconds, universal gap, family gap
CASES: dict[str, tuple[str, str, int, tuple[int, ...], float, float | None, float | None]] = {
    "175B on 1024 A100": ("gpt3_175b", "dgx-a100:128", 1536, (0, 1, 2, 3), 60, 0.20, 0.08),
    "175B on 1024 A100, weights stay": ("gpt3_175b", "dgx-a100:128", 1536, (0, 1), 60, 0.20, 0.08),
    "13B on 16 H100, 24 A100, 24 V100": ("gpt_13b", "three kinds", 1024, (0, 1, 2, 3), 120, 0.20, 0.08),
    "13B on 16 H100, 24 A100, 24 V100, weights stay": ("gpt_13b", "three kinds", 1024, (0, 1), 120, None, None),
    "Llama 8B on 16 H100": ("llama_8b", "dgx-h100:2", 256, (0, 1, 2, 3), 20, 0.20, 0.08),
    "Llama 70B on 512 H100": ("llama_70b", "dgx-h100:64", 512, (0, 1, 2, 3), 60, 0.20, 0.08),
    "Llama 405B on 16,384 H100": ("llama_405b", "dgx-h100:2048", 2048, (0, 1, 2, 3), 180, 0.20, 0.08),
}
# As published: degrees of the run and its share of the peak ("The Llama 3 Herd of Models", arXiv:2407.21783, table 4: 16M tokens a step, 8,192 each).
PUBLISHED = {"Llama 405B on 16,384 H100": ("dp128 tp8 pp16", 0.41)}
BOXES = (("h100", 2, 450 * 10**9, 50 * 10**9), ("a100", 3, 300 * 10**9, 25 * 10**9), ("v100", 3, 150 * 10**9, 12_500_000_000))


def gpt_13b() -> Any:
    """40 layers of width 5120, 2,048 tokens: 13 billion parameters."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import build

    return build(vocabulary=50257, sequence=2048, layers=40, width=5120, heads=40, batch=1)


def three_kinds() -> Fabric:
    """Servers of eight, a NIC per GPU, one switch between all: nominal rates of three generations."""
    devices, switches, links, number = [], [Switch(name="core")], [], 0
    for gpu, boxes, nvlink_Bps, nic_Bps in BOXES:
        g = GPUS[gpu]
        for _ in range(boxes):
            box = f"box{number}"
            number += 1
            switches.append(Switch(name=f"{box}/nvswitch", group=box))
            for i in range(8):
                name, nic = f"{box}/gpu{i}", f"{box}/nic{i}"
                devices.append(
                    Device(name=name, group=box, memory_bytes=g.memory_bytes, memory_bandwidth_Bps=g.bandwidth_Bps, flops=dict(g.flops))
                )
                switches.append(Switch(name=nic, group=box))
                cables = ((name, f"{box}/nvswitch", nvlink_Bps, 3.4e-6), (name, nic, nic_Bps, 14e-6), (nic, "core", nic_Bps, 0.0))
                for a, z, rate, library_s in cables:
                    links.append(Link(src=a, dst=z, rate_Bps=rate, latency_s=1e-6, library_latency_s=library_s))
                    links.append(Link(src=z, dst=a, rate_Bps=rate, latency_s=1e-6))
    return Fabric(name="three kinds", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def measure(case: str) -> dict[str, Any]:
    model, spec, batch, levels, _, _, _ = CASES[case]
    source = Path(__file__) if model == "gpt_13b" else EXAMPLES / ("llama.py" if model.startswith("llama") else "gpt.py")
    start, wall = time.process_time(), time.monotonic()
    graph = capture(f"{source}:{model}")
    capture_cpu_s, capture_wall_s = time.process_time() - start, time.monotonic() - wall
    fabric = three_kinds() if spec == "three kinds" else load_fabric(spec)
    start, wall = time.process_time(), time.monotonic()
    result = find_layouts(lambda b: at_batch(graph, b), fabric, assumed_cost(fabric), global_batch=batch, precision=MIXED, levels=levels)
    cpu_s, wall_s = time.process_time() - start, time.monotonic() - wall
    found, best = result.found, result.found.best
    universal, family = found.bounds.gaps(best.time_s)
    assert best.prediction is not None
    layout = best.candidate.layout
    degrees = [" ".join(j.candidate.layout.name.split()[:3]) for j in found.ranked]
    flops = result.problem.table.sample_flops * batch
    peak = sum((p.kind.device.flops.get("bf16") or p.kind.device.flops["fp16"]) * p.kind.devices for p in result.problem.pools)
    ranks = {name: i for i, name in reversed(list(enumerate(dict.fromkeys(degrees), 1)))}
    return {
        "ranked": [
            {"name": j.candidate.layout.name, "time_s": j.time_s, "mfu": flops / j.time_s / peak, "GiB": max(j.prediction.memory_peak_bytes) / 2**30}
            for j in found.ranked[:12] if j.prediction is not None
        ],
        "ranks": ranks,
        "capture_cpu_s": capture_cpu_s, "capture_wall_s": capture_wall_s, "cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": memory_high_water_bytes(),
        "counts": dict(found.counts), "time_s": best.time_s, "universal_s": found.bounds.universal_s, "family_s": found.bounds.family_s,
        "universal_gap": universal, "family_gap": family, "layout": layout.name, "source": best.candidate.source,
        "stages": [s.layers for s in layout.stages], "microbatches": sorted(set(layout.microbatches)),
        "choices": sorted({f"{c.recompute}/{c.sharding}" for c in best.candidate.choices}), "memory_bytes": list(best.prediction.memory_peak_bytes),
    }  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    for case, (model, spec, batch, levels, limit_s, universal, family) in CASES.items():
        m = fresh("layout_search", case, timeout_s=1200)
        facts = {"model": model, "fabric": spec, "global_batch": batch, "levels": list(levels)}
        shown = ("counts", "layout", "source", "stages", "microbatches", "choices", "time_s", "universal_s", "family_s", "memory_bytes", "ranked")
        rows += [
            {"what": f"{case}: search", "value": round(m["cpu_s"], 2), "unit": "processor s", "limit": limit_s, "wall_s": round(m["wall_s"], 2),
             "peak_bytes": m["peak_bytes"], **facts, **{k: m[k] for k in shown}},
            {"what": f"{case}: capture", "value": round(m["capture_cpu_s"], 2), "unit": "processor s", "wall_s": round(m["capture_wall_s"], 2)},
            {"what": f"{case}: gap to the universal bound", "value": round(m["universal_gap"], 4), "unit": "share"} | _limit(universal),
            {"what": f"{case}: gap to the family bound", "value": round(m["family_gap"], 4), "unit": "share"} | _limit(family),
        ]  # fmt: skip
        if case in PUBLISHED:
            degrees, mfu = PUBLISHED[case]
            ours = next((r for r in m["ranked"] if r["name"].startswith(degrees)), None)
            rows += [
                {"what": f"{case}: place of the published degrees ({degrees}) among degrees", "value": m["ranks"].get(degrees, 0), "unit": "place",
                 "limit": 3},
                {"what": f"{case}: MFU predicted of them over that published ({mfu})", "value": round(ours["mfu"] / mfu, 3) if ours else 0.0,
                 "unit": "ratio", "layout": ours["name"] if ours else ""},
            ]  # fmt: skip
        for row in rows[-6 if case in PUBLISHED else -4 :]:
            print(f"{row['what']}: {row['value']} {row['unit']}" + (f" (limit {row['limit']})" if "limit" in row else ""), flush=True)
        print(f"  {m['counts']['candidates']} candidates, {m['counts']['simulated']} simulated; {m['layout']}, {m['time_s']:.4g} s", flush=True)
        record("layout_search", rows)


def _limit(value: float | None) -> dict[str, float]:
    return {} if value is None else {"limit": value}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]))) if len(sys.argv) > 1 else main()
