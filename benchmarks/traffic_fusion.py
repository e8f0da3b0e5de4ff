"""Fusion of gradients: the plan against all partitions of 12 tensors on 1,000 random instances, and the time to plan 300 tensors.

Run: `python benchmarks/traffic_fusion.py [--quick]` (4 minutes; prints one JSON document, raw output in benchmarks/results/traffic_fusion.json).
All 2^11 partitions of an instance are priced at once by a vectorised walk of the timeline, which the checker's replay confirms on the best one.
Instances with two codecs have 8 tensors (2 * 3^7 choices). Planning times are wall seconds of one process without the time to compile
kernels (kept on disk between runs), proof included, its check apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from typing import Any

import machine
import numpy as np

from meshwright.check.traffic import check_traffic, replayed_ns
from meshwright.decide.traffic import NAMES, Cupcake, TrafficProblem
from meshwright.drive.traffic import plan_traffic
from meshwright.testing.traffic import traffic_profile
from meshwright.traffic import TrafficProfile

LIMIT_S = 5.0


def all_partitions_ns(profile: TrafficProfile) -> tuple[int, tuple[int, ...]]:
    """(least step, its group ends) over all partitions with the profile's only codec, by walking all of them together."""
    problem = TrafficProblem.of(profile)
    n, permille = problem.count, profile.interference_permille
    cuts = np.array([[*(mask >> i & 1 for i in range(n - 1)), 1] for mask in range(1 << (n - 1))], bool)
    tables = [np.zeros((n + 1, n + 1), np.int64) for _ in range(3)]
    for k in range(n):
        for table, part in zip(tables, problem.starting_at(k), strict=True):
            table[k] = part[0]
    encode, exchange, decode = tables
    rows = np.arange(len(cuts))
    start, compute, network = (np.zeros(len(cuts), np.int64) for _ in range(3))
    arrivals, decodes = np.zeros((len(cuts), n), np.int64), np.zeros((len(cuts), n), np.int64)
    for i in range(1, n + 1):
        here = cuts[:, i - 1]
        k = start[here]
        work = problem.ready_ns[i] - problem.ready_ns[k] + encode[k, i]
        lost = np.minimum(work * permille // 1000, np.maximum(network[here] - compute[here], 0) * permille // (1000 + permille))
        compute[here] += work + lost
        network[here] = np.maximum(network[here], compute[here]) + exchange[k, i]
        arrivals[here, i - 1], decodes[here, i - 1] = network[here], decode[k, i]
        start[here] = i
    end = compute
    for i in range(n):
        end = np.maximum(end, arrivals[:, i]) + decodes[:, i]
    best = int(np.argmin(end))
    assert rows[best] == best
    return int(end[best]), tuple(i + 1 for i in range(n) if cuts[best, i])


def all_choices_ns(profile: TrafficProfile) -> int:
    """Least step over all partitions and all codecs per group, by the checker's replay."""
    n, names, best = len(profile.tensors), [c.codec for c in profile.codecs], None
    for mask in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if mask >> i & 1] + [n]
        for codecs in itertools.product(names, repeat=len(ends)):
            step = replayed_ns(profile, list(zip([0, *ends], ends, codecs, strict=False)))
            best = step if best is None else min(best, step)
    assert best is not None
    return best


def optimal(instances: int) -> dict[str, Any]:
    equal = proved = 0
    for seed in range(instances):
        profile = traffic_profile(random.Random(seed), 12, 1, (0, 300)[seed % 2], knee=seed % 3 == 0)
        least, ends = all_partitions_ns(profile)
        name = profile.codecs[0].codec
        assert replayed_ns(profile, [(a, b, name) for a, b in zip([0, *ends], ends, strict=False)]) == least
        fusion = Cupcake().plan(TrafficProblem.of(profile))
        equal += fusion.step_ns == least
        proved += fusion.least_ns == least
    return {"instances": instances, "tensors": 12, "codecs": 1, "equal_to_brute_force": equal, "proved": proved}


def optimal_choices(instances: int) -> dict[str, Any]:
    equal = proved = 0
    for seed in range(instances):
        profile = traffic_profile(random.Random(10_000 + seed), 8, 2, (0, 300)[seed % 2])
        fusion, least = Cupcake().plan(TrafficProblem.of(profile)), all_choices_ns(profile)
        equal += fusion.step_ns == least
        proved += fusion.least_ns == least
    return {"instances": instances, "tensors": 8, "codecs": 2, "equal_to_brute_force": equal, "proved": proved}


def large(tensors: int, codecs: int, permille: int, seed: int) -> dict[str, Any]:
    profile = traffic_profile(random.Random(seed), tensors, codecs, permille)
    problem = TrafficProblem.of(profile)
    start = time.perf_counter()
    fusion = Cupcake().plan(problem)
    plan_s = time.perf_counter() - start
    plan = plan_traffic(profile)
    start = time.perf_counter()
    assert not check_traffic(plan)
    check_s = time.perf_counter() - start
    rivals = {name: NAMES[name]().plan(problem).step_ns / fusion.step_ns for name in NAMES if name != "cupcake"}
    return {
        "tensors": tensors, "codecs": codecs, "interference_permille": permille, "seed": seed, "plan_s": plan_s,
        "plan_s_over_limit": plan_s / LIMIT_S, "step_over_bound": fusion.step_ns / fusion.least_ns, "states": len(fusion.labels),
        "check_s": check_s, "rivals_over_plan": rivals,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of the instances")
    quick = parser.parse_args().quick
    Cupcake().plan(TrafficProblem.of(traffic_profile(random.Random(0), 5)))  # compiles, or loads what was compiled
    shapes = [(1, 0), (1, 200), (2, 0), (4, 0)]
    rows = [optimal(100 if quick else 1000), optimal_choices(4 if quick else 40)]
    rows += [large(300, codecs, permille, seed) for codecs, permille in shapes for seed in range(1 if quick else 5)]
    print(json.dumps(rows if quick else machine.record("traffic_fusion", rows), indent=1))


if __name__ == "__main__":
    main()
