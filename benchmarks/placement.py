"""Placements beside GiPH's public code: its generators, its simulator, its HEFT and its random-task + EFT baseline, on its own instances.

    python benchmarks/placement.py --peer DIR [--quick]

DIR: a copy of github.com/uidmice/placement-rl (needs torch, networkx, simpy, matplotlib; dgl is not imported by what is used and is stubbed). Ten
instances: v 12, alpha 0.3, connection probability 0.2, 5 devices, 5 types, type probability 0.6, seeds 0 to 9. Of each: does our clock of first come,
first served give their simulator's makespan for their HEFT's mapping and 20 random ones; our HEFT, our search at 2, 20 and 10,000 schedules for every
task, each timed with messages that share no links, as theirs; and, with OR-Tools, the exact solver. Every gain is over their HEFT's
mapping in their own simulator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from importlib.util import find_spec
from typing import Any

import machine
import numpy as np

from meshwright.decide.place import PlaceProblem, place_bound
from meshwright.decide.place.exact import Exact
from meshwright.decide.place.lists import Heft
from meshwright.decide.place.search import Search
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph
from meshwright.kernels.tasks import first_come

UNIT = 10**9  # bytes and operations of one unit of theirs, so that rates are whole numbers


def problem_of(program: Any, network: Any) -> PlaceProblem:
    kinds = {i: f"k{program.P.nodes[i]['h_constraint']}" for i in program.P.nodes}
    tasks = tuple(Task(name=f"t{i}", work=float(program.op_compute[i]) * UNIT, kind=kinds[i]) for i in program.P.nodes)
    edges = tuple(TaskEdge(src=f"t{a}", dst=f"t{b}", size_bytes=round(float(program.data_bytes[a, b]) * UNIT)) for a, b in program.P.edges)
    devices = tuple(
        Device(name=f"d{k}", kind="cpu", runs={f"k{t}": round(UNIT / float(network.comp_rate[k, 0])) for t in network.device_constraints[k]})
        for k in range(network.n_devices)
    )
    links = tuple(
        Link(src=f"d{a}", dst=f"d{b}", rate_Bps=round(UNIT / float(network.comm_rate[a, b])), latency_s=float(network.comm_delay[a, b]))
        for a in range(network.n_devices) for b in range(network.n_devices) if a != b
    )  # fmt: skip
    order = sorted(tasks, key=lambda t: int(t.name[1:]))
    return PlaceProblem(graph=TaskGraph(tasks=tuple(order), edges=edges), fabric=Fabric(name="giph", devices=devices, links=links))


def clocked(problem: PlaceProblem, mapping: list[int]) -> float:
    n = len(mapping)
    return float(first_come(problem.edge_numbers, np.array(mapping), *problem.arrays, np.empty(n), np.empty(n)))


def one(peer: Any, seed: int, v: int, devices: int) -> dict[str, Any]:
    utils, latency, baseline = peer
    graph = utils.generate_graph(0.3, v, 0.2, seed, 5, 100, 100, b_comp=0.4, b_comm=0.4)
    made = utils.generate_network(devices, seed, 5, 0.6, 5, 100, 10, 0.8, 0.8)
    from env.network import FullNetwork
    from env.program import Program

    program = Program(graph)
    network = FullNetwork(made["delay"], made["comm_speed"], made["speed"], made["device_constraints"])
    network.comp_rate = network.comp_rate.reshape(-1, 1) if network.comp_rate.dim() == 1 else network.comp_rate
    constraints = baseline.get_placement_constraints(program, network)
    problem = problem_of(program, network)
    begin = time.process_time()
    theirs = baseline.heft(program, network, constraints)
    heft_cpu_s = time.process_time() - begin
    np.random.seed(seed)
    start = [int(np.random.choice(c)) for c in constraints]
    n = program.n_operators
    eft = baseline.random_op_eft_dev(program, network, start, constraints, iter_num=2 * n)[1]
    evaluate = latency.evaluate
    row: dict[str, Any] = {
        "seed": seed, "tasks": n, "edges": len(problem.graph.edges), "peer_heft": float(evaluate(theirs, program, network)),
        "peer_heft_cpu_s": heft_cpu_s, "peer_random_eft": float(min(eft)), "bound": float(place_bound(problem)),
    }  # fmt: skip
    tried = [theirs, *([int(np.random.choice(c)) for c in constraints] for _ in range(20))]
    parity = [(clocked(problem, m), float(evaluate(m, program, network))) for m in tried]
    row["clock_differs"] = max(abs(a / b - 1) for a, b in parity)
    rng = np.random.default_rng
    row["heft"] = Heft().plan(problem, rng=rng(0)).makespan_s
    for name, each in (("search_2", 2), ("search_20", 20), ("search_10000", 10_000)):
        begin = time.process_time()
        row[name] = Search(evaluations=each * n, links="own").plan(problem, rng=rng(0)).makespan_s
        row[f"{name}_cpu_s"] = time.process_time() - begin
    if find_spec("ortools") is not None:
        begin = time.perf_counter()
        exact = Exact(effort=30.0).plan(problem, rng=rng(0))
        row |= {"exact": exact.makespan_s, "exact_says": exact.notes["solver"], "exact_wall_s": time.perf_counter() - begin}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--quick", action="store_true", help="three instances; nothing is written")
    args = parser.parse_args()
    sys.path.insert(0, args.peer)
    sys.modules["dgl"] = types.ModuleType("dgl")
    np.Inf = np.inf  # type: ignore[attr-defined]  # their code is of NumPy 1
    import env.latency as latency
    import env.utils as utils
    import placement_rl.baseline as baseline

    rows = []
    for seed in range(3 if args.quick else 10):
        rows.append(one((utils, latency, baseline), seed, 12, 5))
        print({k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    gains = {name: [1 - r[name] / r["peer_heft"] for r in rows] for name in ("heft", "search_2", "search_20", "search_10000")}
    table: list[dict[str, Any]] = [
        {"what": "their simulator and our clock, largest difference", "value": max(r["clock_differs"] for r in rows), "unit": "share", "limit": 1e-5},
        {"what": "longest of ours over their HEFT", "value": max(r["search_2"] / r["peer_heft"] for r in rows), "unit": "ratio", "limit": 1.0},
    ]
    for name, limit in (("search_2", 0.015), ("search_20", 0.03), ("search_10000", 0.03)):
        table.append({"what": f"{name}: mean gain over their HEFT", "value": statistics.mean(gains[name]), "unit": "share", "at_least": limit})
    table.append({"what": "HEFT with gaps: mean gain over their HEFT", "value": statistics.mean(gains["heft"]), "unit": "share"})
    beats = statistics.mean(1 - r["search_2"] / r["peer_random_eft"] for r in rows)
    table.append({"what": "search_2: mean gain over their random task + EFT at equal schedules", "value": beats, "unit": "share"})
    if "exact" in rows[0]:
        table.append({"what": "proved optimal", "value": sum(r["exact_says"] == "optimal" for r in rows), "unit": f"of {len(rows)}", "at_least": 8})
        reached = sum(r["search_10000"] <= r["exact"] * (1 + 1e-6) for r in rows)
        table.append({"what": "search_10000 no longer than the exact solver's", "value": reached, "unit": f"of {len(rows)}"})
    for line in table:
        print(line)
    if not args.quick:
        machine.record("placement", table, command="python benchmarks/placement.py --peer DIR", instances=rows)


if __name__ == "__main__":
    main()
