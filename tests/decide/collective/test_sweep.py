"""Strategies over many sizes: resized schedules are the strategies' own, right, and ranked; sizes in between are not worse than their neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from collective_oracle import assert_delivers

from meshwright.check import check_program
from meshwright.decide.collective import NAMES, OPERATIONS, CollectiveProblem, auto, default_candidates
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.sweep import planned_sizes, resized, sweep
from meshwright.errors import Unsupported
from meshwright.io.fabric.name import load_fabric
from meshwright.program.hash import program_hash

FABRIC = load_fabric("two-islands:3")
QUICK = ("ring", "forestcoll", "direct", "bruck", "halving-doubling")


def test_sizes_that_are_planned_at():
    assert planned_sizes([1 << i for i in range(10, 31)]) == [1 << i for i in (10, 14, 18, 22, 26, 30)]
    assert planned_sizes([5, 3, 3]) == [3, 5]
    assert planned_sizes([1, 2, 3, 4, 5, 6]) == [1, 6]
    assert planned_sizes([1, 100, 10_000, 10**6, 10**8]) == [1, 100, 10_000, 10**6, 10**8]


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", OPERATIONS)
def test_resized_schedules_deliver_and_keep_the_messages(op):
    before = CollectiveProblem.on(FABRIC, op, 6 * 4096, root=2)
    after = replace(before, size_bytes=6 * 40_004)
    made = 0
    for name, kind in NAMES.items():
        try:
            plan = kind().plan(before, rng=np.random.default_rng(0))
        except Unsupported:
            continue
        other = resized(plan, before, after)
        assert other is not None and other.bound is not None, name
        check_program(other.program).raise_if_wrong()
        if len(other.program.steps) < 2000:
            assert_delivers(other.program, np.random.default_rng(0))
        assert other.program.executed_steps == plan.program.executed_steps
        whole = max(c for _, _, c in other.program.contract.outputs) * int(other.program.lanes.repeat.max())
        assert whole * other.program.buffers.chunk_bytes[0] >= (after.size_bytes if op not in ("reduce-scatter", "scatter") else 40_004)
        back = resized(other, after, before)
        assert back is not None and program_hash(back.program) == program_hash(plan.program)
        made += 1
    assert made >= 3


def test_resized_is_what_the_strategy_itself_makes_with_the_same_options():
    before = CollectiveProblem.on(FABRIC, "all-reduce", 6 << 16)
    after = replace(before, size_bytes=6 << 19)
    for name in ("ring", "direct", "joint", "blink", "blueconnect", "forestcoll"):
        plan = NAMES[name]().plan(before, rng=np.random.default_rng(0))
        own = NAMES[name](**plan.options).plan(after, rng=np.random.default_rng(0))
        made = resized(plan, before, after)
        assert made is not None and program_hash(made.program) == program_hash(own.program), name


def test_uneven_shards_are_not_resized():
    even = CollectiveProblem.on(FABRIC, "all-gather", 6 * 4096)
    uneven = replace(even, shard_bytes=(4096, 0, 8192, 4096, 4096, 4096))
    plan = NAMES["ring"]().plan(uneven, rng=np.random.default_rng(0))
    assert resized(plan, uneven, even) is None and resized(NAMES["ring"]().plan(even, rng=np.random.default_rng(0)), even, uneven) is None


def test_every_row_is_ranked_and_not_worse_than_its_neighbours_plans():
    problem = CollectiveProblem.on(FABRIC, "all-gather", 1024)
    candidates = [NAMES[name]() for name in QUICK]
    sizes = [6 << i for i in range(8, 19)]
    rows = list(sweep(problem, reversed(sizes), candidates))
    assert [r.problem.size_bytes for r in rows] == sizes and [r.planned for r in rows].count(True) == len(planned_sizes(sizes)) < len(sizes)
    for row in rows:
        times = [r.time_s for r in row.ranked if r.time_s is not None]
        assert times[0] <= min(times) * (1 + 1e-9) and times[1:] == sorted(times[1:]) and times[0] >= float(row.bound) * (1 - 1e-9)
        assert {r.strategy for r in row.ranked} == set(QUICK)
        if not row.planned:
            size = row.problem.size_bytes
            low, high = max(x for x in planned_sizes(sizes) if x < size), min(x for x in planned_sizes(sizes) if x > size)
            for neighbour in (r for r in rows if r.problem.size_bytes in (low, high)):
                made = resized(neighbour.ranked[0].plan, neighbour.problem, row.problem)
                assert times[0] <= simulated_time_s(made.program, FABRIC, problem.ranks, None) * (1 + 1e-9)


def test_every_size_is_what_auto_says():
    problem = CollectiveProblem.on(FABRIC, "all-reduce", 1024)
    candidates = [NAMES[name]() for name in QUICK]
    sizes = [6 << i for i in range(8, 14)]
    for row in sweep(problem, sizes, candidates, every=True):
        ranked = auto(row.problem, candidates=candidates, search=True)
        assert row.planned and [(r.strategy, r.time_s) for r in row.ranked] == [(r.strategy, r.time_s) for r in ranked]


def test_auto_is_never_worse_than_the_best_single_strategy():
    for size in (24, 6 << 12, 6 << 20):
        problem = CollectiveProblem.on(FABRIC, "all-reduce", size)
        best = auto(problem, search=True)[0]
        for candidate in default_candidates(problem):
            try:
                plan = candidate.plan(problem, rng=np.random.default_rng(0))
            except Unsupported:
                continue
            assert best.time_s <= simulated_time_s(plan.program, FABRIC, (*problem.ranks, *plan.switches), None) * (1 + 1e-9)
