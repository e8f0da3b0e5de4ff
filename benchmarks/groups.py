"""Several groups at once: the joint plan against independent plans of the same groups, simulated together, beside the joint bound.

Run: `python benchmarks/groups.py` (prints one JSON document; raw output goes to benchmarks/results/groups.json).
Independent plans are the best of: each group's own choice among rings, ForestColl and joint packing, unrolled or in iterations; and ForestColl
that may relay through devices of other groups, as the joint plan may. All times are simulated on the fabric's links; planning is processor seconds.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from typing import Any

import machine
import numpy as np

from meshwright.check import check_program
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import STRATEGIES, CollectiveProblem, ForestColl, auto
from meshwright.decide.collective.groups.problem import GroupsProblem
from meshwright.decide.collective.groups.strategy import Groups, independent
from meshwright.decide.collective.problem import Use
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.io.fabric.name import load_fabric

MIB = 1 << 20


def tensor_and_data(name: str, tensor: int, op: str, tensor_bytes: int, data_bytes: int) -> GroupsProblem:
    """Tensor groups of neighbours, data groups across them, all at once."""
    fabric = load_fabric(name)
    names = [d.name for d in fabric.devices]
    n = len(names)

    def group(what: str, members: range, size: int) -> CollectiveProblem:
        return CollectiveProblem(fabric=fabric, op=what, ranks=tuple(names[i] for i in members), size_bytes=size)

    groups = [group(op, range(i, i + tensor), tensor_bytes) for i in range(0, n, tensor)]
    groups += [group("all-reduce", range(i, n, tensor), data_bytes) for i in range(tensor)]
    return GroupsProblem(groups=tuple(groups))


def independent_times(problem: GroupsProblem) -> dict[str, float]:
    found: dict[str, float] = {}
    uses: dict[str, Use] = {"unrolled": "beside", "in iterations": "beside, in iterations"}
    ways: dict[str, list[Any]] = {way: [v for kind in STRATEGIES for v in kind.variants(problem.groups[0], use)] for way, use in uses.items()}
    ways["relays"] = [ForestColl(unroll=False, pieces=128, fold=False, relay=True)]
    for way, candidates in ways.items():
        try:
            plans = [auto(group, candidates=candidates)[0].plan for group in problem.groups]
            program = independent(problem, [p for p in plans if p is not None]).program
        except Unsupported:
            continue
        found[way] = simulated_time_s(program, problem.fabric, problem.ranks, None)
    return found


def row(name: str, tensor: int, op: str, tensor_bytes: int, data_bytes: int) -> dict[str, Any]:
    problem = tensor_and_data(name, tensor, op, tensor_bytes, data_bytes)
    start = time.process_time()
    joint = Groups().plan(problem, rng=np.random.default_rng(0))
    cpu_s = time.process_time() - start
    assert joint.bound is not None and not check_bound(joint.bound, problem.fabric)
    assert check_program(joint.program).ok
    together = simulated_time_s(joint.program, problem.fabric, problem.ranks, None)
    alone = independent_times(problem)
    return {
        "fabric": name, "groups": [f"{len(problem.ranks) // tensor} x {op} {tensor_bytes // MIB} MiB of {tensor} devices",
                                   f"{tensor} x all-reduce {data_bytes // MIB} MiB of {len(problem.ranks) // tensor} devices"],
        "joint_s": together, "independent_s": alone, "independent_over_joint": min(alone.values()) / together, "bound_s": joint.bound.value,
        "joint_over_bound": together / float(joint.bound), "exact_equals_bound": Fraction(joint.notes["bandwidth_time_s"]) == joint.bound.exact,
        "of_optimum": joint.notes["of_optimum"], "trees": joint.notes["trees"], "relay": joint.notes["relay"], "plan_cpu_s": cpu_s,
    }  # fmt: skip


def main() -> None:
    row("two-islands", 2, "all-reduce", MIB, MIB)  # compiles
    rows = [
        row("mi250:1", 4, "all-reduce", 256 * MIB, 256 * MIB),
        row("mi250:1", 4, "all-gather", 512 * MIB, 256 * MIB),
        row("dgx1-v100", 4, "all-reduce", 256 * MIB, 256 * MIB),
        row("dgx1-v100", 4, "all-reduce", 256 * MIB, 512 * MIB),
        row("dgx-a100:2", 8, "all-reduce", 256 * MIB, 64 * MIB),
        row("two-islands", 2, "all-reduce", 16 * MIB, 16 * MIB),
    ]
    print(json.dumps(machine.record("groups", rows), indent=1))


if __name__ == "__main__":
    main()
