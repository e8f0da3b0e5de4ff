"""Which fabric to build: frontiers of wirings, prices of networks, shares of all-to-all traffic, pairs of rings, boards for jobs; the lab at the end.

Run: `python benchmarks/topology.py [PART...]`, parts as below (all: some ten minutes of one core; `lab` needs root). Each figure stands beside what
was asked or published; times are processor times of this machine.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import machine
import numpy as np

from meshwright.decide.topology import FatTree, HammingMesh, HyperX, TopologyProblem, Torus
from meshwright.decide.topology.directconnect.families import generalized_kautz
from meshwright.decide.topology.directconnect.loads import gather_cost
from meshwright.decide.topology.directconnect.wiring import Wiring
from meshwright.decide.topology.hammingmesh.allocate import Boards, allocate, find
from meshwright.decide.topology.hammingmesh.bandwidth import mesh_share
from meshwright.decide.topology.hammingmesh.network import Builder
from meshwright.decide.topology.hammingmesh.replay import BoardJob, best_replay
from meshwright.decide.topology.hammingmesh.strategy import Mesh
from meshwright.drive.network import compare_networks
from meshwright.drive.wiring import design_wiring
from meshwright.errors import Disconnected, Infeasible
from meshwright.fabric.prices import shipped_prices
from meshwright.io.fabric.document import fabric_document
from meshwright.kernels import highs
from meshwright.kernels.torus_rings import ring_pair

Row = dict[str, Any]
RNG = np.random.default_rng(0)
MOST_RING_SIDE = 64


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found = run()
    return time.process_time() - begin, found


def frontiers() -> Iterator[Row]:
    published = {5: 1.332, 6: 1.020}
    for paired, asked in ((False, {5: "1.09", 6: "1023/1024"}), (True, {9: "1023/1024"})):
        problem = TopologyProblem(nodes=1024, ports=4, bidirectional=paired)
        cpu_s, rows = timed(lambda problem=problem: design_wiring(problem, options={"table": False}))
        for row in rows:
            yield {
                "what": f"1,024 nodes, 4 ports{', two-way cables' if paired else ''}: T_B in {row.design.steps} steps, {row.design.name}",
                "value": float(row.design.factor), "unit": "M/B", "exact": str(row.design.factor), "peer": published.get(row.design.steps),
                "asked": asked, "steps_bound": row.design.steps_bound, "forest_factor": str(row.forest_factor), "usd": row.usd,
                "checked": [v.status if v else None for v in (row.gather, row.scatter)], "search_cpu_s": cpu_s,
            }  # fmt: skip


def kautz() -> Iterator[Row]:
    for nodes in (1024, 8192):
        wiring = generalized_kautz(nodes, 4)
        cpu_s, cost = timed(lambda wiring=wiring: gather_cost(wiring))
        yield {
            "what": f"generalized Kautz of {nodes} nodes, 4 ports: exact T_B", "value": float(cost.load * 4 / nodes), "unit": "M/B",
            "exact": str(cost.load * 4 / nodes), "steps": cost.steps, "cpu_s": cpu_s, "asked_s": 5 if nodes == 1024 else 60,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip


def linear_programs() -> Iterator[Row]:
    """The whole all-gather as one program per node and step, on digraphs that random permutations make."""
    rng, equal, tried, worst = np.random.default_rng(1), 0, 0, 0.0
    while tried < 500:
        nodes, ports = int(rng.integers(3, 13)), int(rng.integers(1, 5))
        arcs = [(a, int(b)) for _ in range(ports) for a, b in enumerate(rng.permutation(nodes))]
        wiring = Wiring.of("random", nodes, arcs)
        try:
            cost = gather_cost(wiring)
        except Disconnected:
            continue
        tried += 1
        error = abs(sum(_program(wiring, cost.steps)) - float(cost.load))
        worst, equal = max(worst, error), equal + (error < 1e-6)
    yield {"what": "random digraphs on which the exact load equals linear programs", "value": equal, "unit": "of 500", "asked": 500, "worst": worst}


def _program(wiring: Wiring, steps: int) -> list[float]:
    links, nodes = wiring.links(), wiring.nodes
    hops = np.full((nodes, nodes), 99)
    np.fill_diagonal(hops, 0)
    for _ in range(nodes):
        for a, b in links:
            hops[:, b] = np.minimum(hops[:, b], hops[:, a] + 1)
    most = [0.0] * steps
    for u in range(nodes):
        for t in range(1, steps + 1):
            shards = [v for v in range(nodes) if hops[v, u] == t]
            ways = [(v, w) for v in shards for w, to in links if to == u and hops[v, w] == t - 1]
            if not shards:
                continue
            lp = highs.solver()
            lp.addVars(len(ways) + 1, np.zeros(len(ways) + 1), np.full(len(ways) + 1, np.inf))
            lp.changeColCost(len(ways), 1.0)
            for v in shards:
                own = np.array([i for i, way in enumerate(ways) if way[0] == v], np.int32)
                lp.addRow(1.0, 1.0, len(own), own, np.ones(len(own)))
            for w in {w for _, w in ways}:
                own = [i for i, way in enumerate(ways) if way[1] == w]
                values = np.array([1.0] * len(own) + [-float(links[w, u])])
                lp.addRow(-np.inf, 0.0, len(own) + 1, np.array([*own, len(ways)], np.int32), values)
            highs.require_optimal(lp, what="one step")
            most[t - 1] = max(most[t - 1], float(highs.values(lp)[-1]))
    return most


def prices() -> Iterator[Row]:
    published = {1024: {"fat": "25.3 17.53 13.03", "HyperX": "10.8", "Hx": "5.4 2.7", "torus": "2.5"}, 16384: {"fat": "- 418.99 270.7"}}
    for nodes in (1024, 16384):
        for kind in (FatTree, HyperX, HammingMesh, Torus):
            for design in kind().plan(TopologyProblem(nodes=nodes), rng=RNG):
                usd = shipped_prices().of(design.parts)
                peer = next((p for key, p in published[nodes].items() if design.name.startswith(key)), None)
                yield {"what": f"price of {design.name}", "value": usd / 1e6, "unit": "million USD", "published_row": peer, "usd": usd}


def shares() -> Iterator[Row]:
    for mesh in (Mesh(2, 2, 4, 4), Mesh(2, 2, 8, 8), Mesh(4, 4, 4, 4)):
        cpu_s, share = timed(lambda mesh=mesh: mesh_share(mesh))
        exact = mesh.global_bound()
        yield {
            "what": f"share of all-to-all traffic of {mesh.name}: linear program beside the closed form", "value": share, "unit": "of injection",
            "peer": float(exact), "exact": str(exact), "difference": abs(share - float(exact)), "cpu_s": cpu_s,
        }  # fmt: skip


def rings() -> Iterator[Row]:
    right, worst = 0, 0.0
    sides = [(r, c) for r in range(3, MOST_RING_SIDE + 1) for c in range(3, r + 1)]
    for rows, columns in sides:
        cpu_s, pair = timed(lambda rows=rows, columns=columns: ring_pair(rows, columns))
        worst = max(worst, cpu_s)
        edges: set[tuple[int, int]] = set()
        for ring in pair:
            walk = np.array([*ring, ring[0]])
            (i, k), (j, m) = (walk[:-1] // columns, walk[1:] // columns), (walk[:-1] % columns, walk[1:] % columns)
            along = (i == k) & np.isin((j - m) % columns, (1, columns - 1)) | (j == m) & np.isin((i - k) % rows, (1, rows - 1))
            assert along.all() and len(set(ring)) == rows * columns
            edges |= set(zip(np.minimum(walk[:-1], walk[1:]).tolist(), np.maximum(walk[:-1], walk[1:]).tolist(), strict=True))
        right += len(edges) == 2 * rows * columns
    yield {
        "what": f"tori of 3..{MOST_RING_SIDE} rows and no more columns with two rings that share no cable", "value": right,
        "unit": f"of {len(sides)}", "asked": len(sides), "worst_cpu_s": worst, "asked_s": 1,
    }  # fmt: skip


def boards() -> Iterator[Row]:
    rnd, equal, asked = random.Random(0), 0, 0
    for _ in range(2000):
        rows, columns = rnd.randint(1, 6), rnd.randint(1, 6)
        alive = rnd.choice([0.4, 0.6, 0.8])
        free = [sum((rnd.random() < alive) << c for c in range(columns)) for _ in range(rows)]
        right = True
        for u in range(1, rows + 1):
            for v in range(1, columns + 1):
                there = any(sum(all(row >> c & 1 for c in some) for row in free) >= u for some in combinations(range(columns), v))
                right &= (find(free, columns, u, v) is not None) == there
        equal, asked = equal + right, asked + 1
    yield {"what": "grids up to 6 x 6 where every shape is found exactly as by exhaustion", "value": equal, "unit": f"of {asked}", "asked": asked}
    worst, refused = 0.0, 0
    for seed in range(5):
        rnd = random.Random(seed)
        grid = Boards.of(64, 64, [(r, c) for r in range(64) for c in range(64) if rnd.random() < 0.5])
        for shape in ((4, 8), (6, 10), (8, 8), (7, 9), (12, 12), (32, 32)):

            def placed(grid: Boards = grid, shape: tuple[int, int] = shape) -> bool:
                try:
                    allocate(grid, *shape)
                except Infeasible:
                    return False
                return True

            cpu_s, fits = timed(placed)
            worst, refused = max(worst, cpu_s), refused + (not fits)
    yield {
        "what": "64 x 64 boards, half of them dead: slowest answer, nearest shape included", "value": worst, "unit": "s", "asked": 1,
        "refused": refused, "of": 30,
    }  # fmt: skip
    below, gains = 0, []
    for seed in range(20):
        rnd = random.Random(seed)
        jobs = [
            BoardJob(name=f"j{i}", rows=min(8, int(2 ** rnd.uniform(0, 3.3))), columns=min(8, int(2 ** rnd.uniform(0, 3.3))),
                     arrival_s=rnd.uniform(0, 400), duration_s=rnd.uniform(20, 100))
            for i in range(80)
        ]  # fmt: skip
        found = best_replay(16, 16, [(rnd.randrange(16), rnd.randrange(16)) for _ in range(16)], jobs)
        by = {r.policy: r.utilisation for r in found}
        below += found[0].utilisation < by.get("greedy", 0.0)
        gains.append({policy: round(x, 4) for policy, x in by.items()})
    yield {"what": "mixes of 80 jobs on 16 x 16 boards replayed below greedy", "value": below, "unit": "of 20", "asked": 0, "utilisation": gains}


def lab() -> Iterator[Row]:
    """Hx2Mesh of 2 x 2 boards, 20 Mbit/s a port: an all-reduce of 4 MB on two rings both ways, beside one ring both ways."""
    mesh = Mesh(2, 2, 2, 2)
    builder = Builder(2_500_000, 1e-4)
    mesh.build(builder)
    run, name = [sys.executable, "-m", "meshwright"], "bench-hx2"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hx2.json")
        path.write_text(json.dumps(fabric_document(builder.fabric("hx2", "benchmark"))))
        subprocess.run([*run, "lab", "up", str(path), "--name", name, "--no-verify", "--quiet"], check=True)
        try:
            said = {}
            for label, plan in (("pair", ["--option", "torus=[4,4]"]), ("one", [])):
                out = Path(folder, f"{label}.json")
                words = ["collective", "plan", "all-reduce", "--fabric", str(path), "--size", "4MB", "--strategy", "ring"]
                words += ["--option", "bidirectional=true"]
                order = [] if plan else ["--option", "order=" + json.dumps(list(ring_pair(4, 4)[0]))]
                subprocess.run([*run, *words, *plan, *order, "--out", str(out), "--quiet"], check=True)
                bench = ["collective", "bench", "all-reduce", "--lab", name, "--plan", str(out), "-n", "5", "-b", "4MB", "-e", "4MB"]
                bench += ["--no-builtin", "--json"]
                every = {**os.environ, "MESHWRIGHT_MIN_BYTES": "0"}
                said[label] = json.loads(subprocess.run([*run, *bench], check=True, stdout=subprocess.PIPE, env=every).stdout)["rows"][0]
        finally:
            subprocess.run([*run, "lab", "down", name, "--quiet"], check=True)
    pair, one = (float(said[x]["in_place"]["time_s"]) for x in ("pair", "one"))
    yield {
        "what": "all-reduce of 4 MB on Hx2Mesh 2x2 in the lab: two rings, beside one ring both ways", "value": pair, "unit": "s", "peer": one,
        "gain": one / pair, "asked_gain": 1.6, "simulated_s": said["pair"]["simulated_s"], "peer_simulated_s": said["one"]["simulated_s"],
    }  # fmt: skip


def simulated() -> Iterator[Row]:
    """All networks for so many accelerators, their jobs timed on the fabric. All-to-alls on tori reach their cut."""
    for nodes in (64, 1024, 4096):
        begin = time.process_time()
        found = compare_networks(TopologyProblem(nodes=nodes), simulate=True)
        over = {row.design.name: (row.simulated_s or 0.0) / row.time_s for row in found}
        took = time.process_time() - begin
        yield {"what": f"{len(found)} networks for {nodes} accelerators, simulated", "value": took, "unit": "s", "over_least": over}


PARTS = {part.__name__: part for part in (frontiers, kautz, linear_programs, prices, shares, boards, rings, simulated, lab)}

if __name__ == "__main__":
    asked = sys.argv[1:] or list(PARTS)
    before = machine.RESULTS / "topology.json"  # parts that are not run again keep their rows
    rows: list[Row] = [row for row in json.loads(before.read_text())["rows"] if row["part"] not in asked] if before.exists() else []
    for part in asked:
        for row in PARTS[part]():
            rows.append({"part": part, **row})
            print(json.dumps(rows[-1], default=str), flush=True)
    machine.record("topology", rows, command="python benchmarks/topology.py " + " ".join(PARTS))
