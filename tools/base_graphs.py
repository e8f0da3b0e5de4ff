"""Make the shipped table of base graphs again: `python tools/base_graphs.py [--evaluations N] [--seed N]` (some minutes of one core).

Sizes: all of 4 to 32 accelerators with 2, 3 and 4 ports, and larger ones that expansions begin from; one-way and two-way cables. Of every size
the whole frontier of the search is kept, one wiring at each point.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.decide.topology.directconnect.cayley import best_sets
from meshwright.decide.topology.directconnect.table import SCHEMA, TABLE
from meshwright.decide.topology.problem import steps_bound

ROOT = Path(__file__).parents[1]
FILE = ROOT / "src/meshwright/decide/topology/directconnect" / TABLE
SIZES = [*((n, d) for n in range(4, 33) for d in (2, 3, 4) if d < n - 1), *((n, 4) for n in (36, 40, 48, 64, 96, 128, 256, 1024))]
MOST_STEPS = 2  # times the least: slower base graphs make no row that is shown


def rows_of(nodes: int, ports: int, paired: bool, evaluations: int, seed: int) -> list[list[Any]]:
    """The rows of one size, fewest steps first."""
    most, rng = MOST_STEPS * steps_bound(nodes, ports, bidirectional=paired), np.random.default_rng([seed, nodes, ports, paired])
    found = best_sets(nodes, ports, paired=paired, evaluations=evaluations, rng=rng, most_steps=most, shipped=False)
    points = {(steps, load): (group, generators) for steps, load, group, generators in reversed(found)}
    in_order = [points[point] for point in sorted(points)]
    return [[nodes, ports, paired, group.m, group.n, group.k, list(generators)] for group, generators in in_order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = [row for n, d in SIZES for paired in (False, True) for row in rows_of(n, d, paired, args.evaluations, args.seed)]
    head = {"schema": SCHEMA, "version": 1, "evaluations": args.evaluations, "seed": args.seed}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    FILE.write_text(json.dumps(head)[:-1] + ', "graphs": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(f"{FILE}: {len(rows)} graphs")


if __name__ == "__main__":
    main()
