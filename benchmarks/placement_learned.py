"""GiPH's net beside random task + EFT and first-improvement search, on problems of GiPH's public generators that it never saw.

    python benchmarks/placement_learned.py --peer DIR [--updates 100] [--quick]

DIR: a copy of github.com/uidmice/placement-rl, as for `placement.py`. The net is trained on 20 devices by our own generator. Then 60 problems of
theirs (v 10 and 15, alpha 0.1 to 0.3, connection probability 0.1 and 0.2, type probability 0.2, seeds from 25 on), 30 on 8 devices and 30 on 40: one
search from a random placement with two moves for every task. Others begin at the same placement and simulate as often: random task + EFT by their
rule, which knows no busy devices (their own code runs it too, on the first 3 problems of either size), and by ours, which does; and moves of one
random task to one random other device, of which the first that makes the schedule shorter is kept. The clock is theirs: first come, first served, no
shared links. Beside them, first improvement until nothing improves, HEFT, and search.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import machine
import numpy as np
from placement import clocked, problem_of

from meshwright.decide.place.giph.episodes import Episodes, random_start
from meshwright.decide.place.giph.generate import random_problem
from meshwright.decide.place.giph.net import ScoringNet
from meshwright.decide.place.giph.train import fit_moves, searched
from meshwright.decide.place.lists import Heft, RandomEft
from meshwright.decide.place.search import Search
from meshwright.io.costs.moves import read_move_net, write_move_net
from meshwright.kernels.tasks import first_come


def first_improvement(problem: Any, on: np.ndarray, budget: int, rng: Any) -> tuple[float, int]:
    """(makespan, schedules looked at)."""
    on = on.copy()
    best, looked = clocked(problem, on.tolist()), 1
    better = True
    while better and looked < budget:
        better = False
        for i, k in rng.permutation(np.argwhere(np.isfinite(problem.arrays.dur))):
            if on[i] == k or looked >= budget:
                continue
            old, on[i] = on[i], k
            looked += 1
            if (found := clocked(problem, on.tolist())) < best:
                best, better = found, True
            else:
                on[i] = old
    return best, looked


def random_eft(problem: Any, on: np.ndarray, moves: int) -> float:
    """Their rule: a random task to where it would end first if the device were free."""
    a, on, n = problem.arrays, on.copy(), len(on)
    start, end = np.empty(n), np.empty(n)
    best = first_come(problem.edge_numbers, on, *a, start, end)
    for _ in range(moves):
        i = int(np.random.choice(n))
        into = slice(a.ptr[i], a.ptr[i + 1])
        p, k = a.parent[into], np.flatnonzero(np.isfinite(a.dur[i]))
        m = on[p]
        arrives = end[p][:, None] + np.where(m[:, None] == k, 0.0, a.delay[m][:, k] + a.size[into][:, None] * a.per_byte[m][:, k])
        on[i] = k[np.argmin(a.dur[i, k] + (arrives.max(0) if len(p) else 0.0))]
        best = min(best, first_come(problem.edge_numbers, on, *a, start, end))
    return float(best)


def random_eft_of(baseline: Any, program: Any, network: Any, start: np.ndarray, constraints: Any, moves: int) -> float:
    """By their code."""
    from env.latency import evaluate

    found = baseline.random_op_eft_dev(program, network, start.tolist(), constraints, iter_num=moves)[1]
    return float(min(float(evaluate(start.tolist(), program, network)), *map(float, found)))


def one(peer: Any, net: ScoringNet, devices: int, number: int, rng: Any) -> dict[str, Any]:
    utils, baseline, Program, FullNetwork = peer
    v, alpha, p = int(rng.choice([10, 15])), float(rng.choice([0.1, 0.2, 0.3])), float(rng.choice([0.1, 0.2]))
    program = Program(utils.generate_graph(alpha, v, p, 25 + number, 5, 100, 100, b_comp=0.4, b_comm=0.4))
    made = utils.generate_network(devices, 100 + number, 5, 0.2, 5, 100, 10, 0.8, 0.8)
    network = FullNetwork(made["delay"], made["comm_speed"], made["speed"], made["device_constraints"])
    network.comp_rate = network.comp_rate.reshape(-1, 1) if network.comp_rate.dim() == 1 else network.comp_rate
    problem = problem_of(program, network)
    start, n = random_start(problem, rng), len(problem.graph.tasks)
    begin = time.process_time()
    episodes = Episodes([problem], [start])
    searched(net, episodes, [2 * n], rng)
    row: dict[str, Any] = {"devices": devices, "tasks": n, "start": clocked(problem, start.tolist()), "giph": episodes.searches[0].best_s}
    row["giph_cpu_s"] = time.process_time() - begin
    np.random.seed(number)
    constraints = baseline.get_placement_constraints(program, network)
    row["random_eft_theirs"] = random_eft(problem, start, 2 * n)
    if number < 3:
        np.random.seed(number)
        row["peer_differs"] = abs(random_eft_of(baseline, program, network, start, constraints, 2 * n) / row["random_eft_theirs"] - 1)
    row["random_eft"] = RandomEft(evaluations=2 * n + 1).plan(problem, rng=np.random.default_rng(number)).makespan_s
    row["first_improvement"], _ = first_improvement(problem, start, 2 * n + 1, np.random.default_rng(number))
    row["first_to_the_end"], row["first_looked"] = first_improvement(problem, start, 10**6, np.random.default_rng(number))
    row["heft"] = Heft().plan(problem, rng=rng).makespan_s
    row["search"] = Search(links="own").plan(problem, rng=rng).makespan_s
    return row


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--updates", type=int, default=100, help="steps of the optimizer, 16 episodes each (default 100)")
    parser.add_argument("--net", type=Path, help="a net that was trained already; the training is left out")
    parser.add_argument("--quick", action="store_true", help="six problems after ten steps; nothing is written")
    args = parser.parse_args()
    sys.path.insert(0, args.peer)
    sys.modules["dgl"] = types.ModuleType("dgl")
    np.Inf = np.inf  # type: ignore[attr-defined]  # their code is of NumPy 1
    import env.utils as utils
    import placement_rl.baseline as baseline
    from env.network import FullNetwork
    from env.program import Program

    torch.set_num_threads(1)
    begin, cpu, curve = time.perf_counter(), time.process_time(), []
    if args.net is None:
        trained = fit_moves(random_problem, updates=10 if args.quick else args.updates, told=lambda u, x: curve.append((u, x)))
        if not args.quick:
            write_move_net(Path(__file__).parent / "results" / "placement_learned.safetensors", trained)
    else:
        trained = read_move_net(args.net)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    print("trained:", dict(trained.trained), f"{wall_s:.0f} s, {cpu_s:.0f} s of the processor", flush=True)
    net, rng = ScoringNet.of(trained), np.random.default_rng(7)
    with torch.no_grad():
        rows = [one((utils, baseline, Program, FullNetwork), net, d, i, rng) for d in (8, 40) for i in range(3 if args.quick else 30)]
    mean = {name: statistics.mean(r[name] for r in rows) for name in ("giph_cpu_s", "first_looked", "tasks")}
    table: list[dict[str, Any]] = []
    for name, limit in (("random_eft_theirs", 0.95), ("random_eft", None), ("first_improvement", 1.01), ("first_to_the_end", None), ("heft", None),
                        ("search", None)):  # fmt: skip
        for where, some in (("", rows), *((f", {d} devices", [r for r in rows if r["devices"] == d]) for d in (8, 40))):
            ratio = statistics.mean(r["giph"] for r in some) / statistics.mean(r[name] for r in some)
            table.append({"what": f"mean makespan of giph over {name}{where}", "value": ratio, "unit": "ratio",
                          **({"limit": limit} if limit and not where else {})})  # fmt: skip
    if args.net is None:
        table.append({"what": "training, processor time", "value": cpu_s, "unit": "s", "limit": 600})
        table.append({"what": "training, wall time of a shared machine", "value": wall_s, "unit": "s"})
    differs = max(r["peer_differs"] for r in rows if "peer_differs" in r)
    table.append({"what": "their random task + EFT by their code and by ours, largest difference", "value": differs, "unit": "share", "limit": 1e-5})
    table.append({"what": "schedules that first improvement to the end looks at, for every task", "value": mean["first_looked"] / mean["tasks"],
                  "unit": "schedules"})  # fmt: skip
    table.append({"what": "a search, processor time", "value": mean["giph_cpu_s"], "unit": "s"})
    for line in table:
        print({k: round(x, 4) if isinstance(x, float) else x for k, x in line.items()})
    if not args.quick and args.net is None:
        command = "python benchmarks/placement_learned.py --peer DIR" + f" --updates {args.updates}" * (args.updates != 100)
        machine.record("placement_learned", table, command=command, instances=rows, trained=dict(trained.trained), curve=curve)


if __name__ == "__main__":
    main()
