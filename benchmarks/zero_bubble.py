"""ZBV and ZB1P beside the public zero-bubble scheduler: its orders' makespans by our clock on the same profiles, at equal kept activations.

Run: `python benchmarks/zero_bubble.py --scheduler FOLDER [--random N] [--quick]` (prints a summary; raw output goes to results/zero_bubble.json).

`FOLDER` holds the modules of `zerobubble/scheduler` of sail-sg/zero-bubble-pipeline-parallelism as a package `sched` (imports renamed); they run in a
child process and are no dependency (`pulp` is imported there and not called). Profiles: those in that repository's tests, F = I = W and 2/3/2
slots at several sizes, and random ones. Its two constructions: `zbv` (2 x devices stage activations) and the list construction for one stage per
device (`devices`). Ours: without annealing (`tries=0`) and with the default. Processor time of either is that of one schedule, imports left out.
`free`: the fastest of ours at the peer's kept bytes of activations whatever the placement, without annealing: `zb1p` and `zbv` against its `zb1p`;
`zbv` and `interleaved-zb` of 4 stages per device against its `zbv`; with the processor time of all of them.
Its patterns `v-half` and `v-min` (reordered) stand beside ours of the same name, and at what theirs keep.
`bound` is the peer's makespan over our proven bound for its placement and cap: what could be gained there at all. `--settings` prints it of every
setting (`raw` in the output): where it is below 1/0.98, no order on that placement that keeps as little is 2 % faster.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from meshwright.decide.pipeline.bound import schedule_bound
from meshwright.decide.pipeline.orders import in_flight_peaks, looped, times, vee
from meshwright.decide.pipeline.problem import Action, PipelineProblem, Schedule
from meshwright.decide.pipeline.vschedules import ZBV, VHalf, VMin
from meshwright.decide.pipeline.zerobubble import ZB1P, InterleavedZB

KINDS = {"zbv": ZBV, "zb1p": ZB1P, "v-half": VHalf, "v-min": VMin}
Setting = tuple[int, int, int, int, int, int]  # devices, micro-batches, and slots of F, I, W and a message of one stage
PROFILES: list[Setting] = [
    (8, 32, 18522, 18086, 9337, 601), (16, 48, 11347, 11248, 8132, 377), (32, 96, 10419, 10207, 7715, 408),
    *((d, m, *t, 0) for d in (4, 8, 16) for m in (2 * d, 4 * d) for t in ((1, 1, 1), (2, 3, 2))),
]  # fmt: skip
CHILD = r"""
import contextlib, io, json, sys, time, types
sys.path.insert(0, sys.argv[2])
package = types.ModuleType("sched")
package.__path__ = [sys.argv[2] + "/sched"]
sys.modules["sched"] = package
pulp = types.ModuleType("pulp")
pulp.value = lambda x: x
sys.modules.setdefault("pulp", pulp)
from sched import zb, zbv, zbv_greedy
out = []
for D, M, F, I, W, C in json.load(sys.stdin):
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        if sys.argv[1] == "zbv":
            graph = zbv.PipelineGraph(D, M, F, I, W, C, 1, 0, -1)
            tried = [graph.try_v_schedule(fill_b=b, fill_f=f) for b in (True, False) for f in (True, False)]
            rows = min(tried, key=lambda x: x[2])[0]
            orders = [[("FIW"[c], d if (k == 0) == (c == 0) else 2 * D - 1 - d, m) for c, k, m in row] for d, row in enumerate(rows)]
        elif sys.argv[1] in ("v-half", "v-min"):
            graph = zbv_greedy.PipelineGraph(D, M, sys.argv[1][2:], F, I, W, C)
            pattern = graph.stable_pattern_v_half if sys.argv[1] == "v-half" else graph.stable_pattern_v_min
            _, _, rows = graph.schedule_from_pattern(pattern(D), M, [F, F, I, I, W, W])
            orders = [[("FIW"[t // 2], d if t in (0, 3, 5) else 2 * D - 1 - d, m) for t, m in row] for d, row in enumerate(rows)]
        else:
            costs = types.SimpleNamespace(n_stages=D, n_micro=M, cost_f=[F] * D, cost_b=[I] * D, cost_w=[W] * D, cost_comm=C, mem_f=[1] * D,
                                          mem_b=[0] * D, mem_w=[-1] * D, max_mem=[D] * D)
            graph = zb.Graph.build_graph(D, M, costs)
            _, _, end = zb.initial_solution(graph, False)
            rows = [sorted((end[graph.get_id(k, s, m)], "FIW"[k], s, m) for k in range(3) for m in range(M)) for s in range(D)]
            orders = [[(k, s, m) for _, k, s, m in row] for row in rows]
    out.append({"orders": orders, "cpu_s": time.process_time() - start})
json.dump(out, sys.stdout)
"""


def theirs(what: str, folder: Path, settings: list[Setting]) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", CHILD, what, str(folder)]
    done = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def compare(what: str, folder: Path, settings: list[Setting]) -> list[dict[str, Any]]:
    chunks = 1 if what == "zb1p" else 2
    rows = []
    for setting, peer in zip(settings, theirs(what, folder, settings), strict=True):
        d, m, f, i, w, c = setting
        problem = PipelineProblem.of(
            d, m, forward_s=float(chunks * f), input_grad_s=float(chunks * i), weight_grad_s=float(chunks * w), message_bytes=0,
            p2p_latency_s=float(c), activation_bytes=chunks,
        )  # fmt: skip
        orders = tuple(tuple(Action(*a) for a in order) for order in peer["orders"])
        place = vee(d) if chunks == 2 else looped(d, 1)
        schedule = Schedule(name="peer", devices=d, stages=chunks * d, placement=(place,), copy_of=(0,) * m, orders=orders, split=True)
        span = times(problem, schedule).makespan_s
        row: dict[str, Any] = {
            "what": what, "setting": setting, "peer": span, "kept": max(in_flight_peaks(schedule)), "peer_cpu_s": peer["cpu_s"],
            "bound": span / float(schedule_bound(problem, schedule, cap_bytes=(max(in_flight_peaks(schedule)),) * d)),
        }  # fmt: skip
        for name, tries in (("built", 0), ("annealed", 1000)):
            kind = KINDS[what](tries=tries)
            start = time.process_time()
            ours = kind.plan(problem)
            row |= {f"{name}_cpu_s": time.process_time() - start, name: times(problem, ours).makespan_s / span}
            row[f"{name}_kept"] = max(in_flight_peaks(ours))
            assert what.startswith("v-") or row[f"{name}_kept"] <= row["kept"]
        row |= free(problem, span, what, row)
        rows.append(row)
        print(f"{what} {setting!s:<45} built {row['built']:.4f} annealed {row['annealed']:.4f} bound {row['bound']:.4f} "
              f"cpu {row['peer_cpu_s']:.3f} {row['built_cpu_s']:.3f} {row['annealed_cpu_s']:.3f}", flush=True)  # fmt: skip
    return rows


def free(problem: PipelineProblem, span: float, what: str, row: dict[str, Any]) -> dict[str, Any]:
    """Other placements that keep as many bytes: `row["kept"]` stage activations, each a device's share over the peer's stages per device."""
    d = problem.devices
    more: list[Any] = {"zb1p": [ZBV(tries=0)], "zbv": [InterleavedZB(chunks=4, cap=4 * d, tries=0)]}.get(what, [ZBV(cap=row["kept"], tries=0)])
    start = time.process_time()
    spans = [times(problem, kind.plan(problem)).makespan_s / span for kind in more]
    return {"free": min(row["built"], *spans), "free_cpu_s": row["built_cpu_s"] + time.process_time() - start}


def drawn(count: int) -> list[Setting]:
    rng = random.Random(27)
    found = []
    for _ in range(count):
        d = rng.choice((3, 4, 5, 6, 8, 10, 12))
        f = rng.randint(500, 1500)
        found.append((d, rng.randint(d, 4 * d), f, rng.randint(f // 2, 2 * f), rng.randint(f // 4, 3 * f // 2), rng.randint(0, f // 3)))
    return found


def summary(what: str, rows: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    ratios = {name: sorted(r[name] for r in rows) for name in ("built", "annealed", "free")}
    out = []
    for name, values in ratios.items():
        unit, title = "of the peer's time", f"{what}, {group}, {name}"
        out.append({"what": f"{title}: slowest of {len(rows)}", "value": round(values[-1], 4), "unit": unit, "limit": 1.0})
        out.append({"what": f"{title}: median", "value": round(values[len(values) // 2], 4), "unit": unit, "limit": 0.98})
        out.append({"what": f"{title}: slower than the peer", "value": sum(v > 1 + 1e-9 for v in values), "unit": f"of {len(values)}"})
        out.append({"what": f"{title}: 2 % faster and more", "value": sum(v <= 0.98 for v in values), "unit": f"of {len(values)}"})
    room = sorted(r["bound"] for r in rows)
    out.append({"what": f"{what}, {group}: the peer's time over the bound, median", "value": round(room[len(room) // 2], 4), "unit": "x"})
    title = f"{what}, {group}: bound 2 % below the peer's and more"
    out.append({"what": title, "value": sum(v >= 1 / 0.98 for v in room), "unit": f"of {len(room)}"})
    for name in ("built", "free"):
        cpu = sorted(r[f"{name}_cpu_s"] / max(r["peer_cpu_s"], 1e-3) for r in rows)
        title = f"{what}, {group}, {name}: processor time, median"
        out.append({"what": title, "value": round(cpu[len(cpu) // 2], 2), "unit": "of the peer's", "limit": 3.0})
    return out


def by_setting(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<8}{'devices, micro-batches, F, I, W, message':<45}{'ours':>8}{'bound':>8}{'above':>8}{'any placement':>15}   (of the peer's time)")
    for r in rows:
        ours, least = min(r["built"], r["annealed"]), 1 / r["bound"]
        why = "2 % reached" if ours <= 0.98 else "2 % proved impossible" if least > 0.98 else "open"
        print(f"{r['what']:<8}{r['setting']!s:<45}{ours:8.4f}{least:8.4f}{ours / least - 1:8.2%}{r['free']:15.4f}   {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scheduler", type=Path, help="folder with the package sched")
    parser.add_argument("--random", type=int, default=50, help="random settings")
    parser.add_argument("--settings", action="store_true", help="only print what results/zero_bubble.json says of every setting")
    parser.add_argument("--quick", action="store_true", help="few settings, nothing written")
    args = parser.parse_args()
    if args.settings:
        return by_setting(json.loads((Path(__file__).parent / "results" / "zero_bubble.json").read_text())["raw"])
    if args.scheduler is None:
        parser.error("--scheduler says where the public scheduler is")
    profiles, random_ones = (PROFILES[3:7], drawn(3)) if args.quick else (PROFILES, drawn(args.random))
    rows, raw = [], []
    for what in KINDS:
        compare(what, args.scheduler, [(2, 4, 1, 1, 1, 0)])  # compile
        # its graph of (32, 96) takes a matrix of 85 million entries for zb1p, and its reordering of patterns minutes beyond 16 devices
        listed = [s for s in profiles if what == "zbv" or s[0] < (17 if what == "zb1p" else 9)]
        for group, settings in (("listed", listed), ("random", random_ones)):
            found = compare(what, args.scheduler, settings)
            rows += summary(what, found, group)
            raw += found
    for row in rows:
        print(f"{row['what']:<70} {row['value']:>10} {row['unit']}")
    if not args.quick:
        machine.record("zero_bubble", rows, command="python benchmarks/zero_bubble.py --scheduler FOLDER", raw=raw)


if __name__ == "__main__":
    main()
