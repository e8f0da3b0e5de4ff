"""Uneven shards, scatter and gather: what arrives is what was promised, at the exact optimum of the shards."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from collective_oracle import all_cuts, balanced_fabric, bandwidth_time_s, execute, full_mesh, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.trees.shards import MAX_WEIGHT_UNITS, shard_table, shard_weights
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Fabric
from meshwright.program.program import Program

OPS = ("all-gather", "reduce-scatter", "scatter", "gather")
SHARDS = st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(lambda x: sum(x[1:]) > 0)


def problem_of(fabric: Fabric, op: str, units: list[int], root: int, chunk: int = 16 * 2520) -> CollectiveProblem:
    n = len(fabric.devices)
    shards = tuple(units[i % len(units)] * chunk for i in range(n - 1)) + (chunk,)
    return CollectiveProblem.on(fabric, op, sum(shards), root=root % n, shard_bytes=shards)


def plan(problem: CollectiveProblem, **options: object) -> Program | None:
    """None: the splitting refused one-way links, or the root owns everything."""
    try:
        return ForestColl(**options).plan(problem, rng=np.random.default_rng(0)).program  # type: ignore[arg-type]
    except Unsupported as refusal:
        assert refusal.hint
        return None


def worst_cut_s(problem: CollectiveProblem) -> Fraction:
    """Bytes that must leave a set over its rate, the worst of all sets."""
    shards = dict(zip(problem.ranks, problem.shards, strict=True))
    best, root = Fraction(0), problem.ranks[problem.root]
    for inside, leaving in all_cuts(problem.fabric):
        here = sum(shards[d] for d in shards if d in inside)
        there = sum(shards.values()) - here
        need = {
            "all-gather": here if any(d not in inside for d in shards) else 0,
            "reduce-scatter": there if any(d in inside for d in shards) else 0,
            "gather": here if root not in inside else 0,
            "scatter": there if root in inside else 0,
        }[problem.op]
        if need and leaving:
            best = max(best, Fraction(need, leaving))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 3), st.sampled_from(OPS), SHARDS, st.integers(0, 4))
def test_uneven_shards_arrive_at_the_optimum(seed: int, devices: int, switches: int, op: str, units: list[int], root: int) -> None:
    problem = problem_of(balanced_fabric(np.random.default_rng(seed), devices, switches), op, units, root)
    program = plan(problem, max_trees=10**6, pieces=1)
    if program is None:
        return
    assert check_program(program).ok
    memory = execute(program, np.random.default_rng(seed))
    c = program.contract
    assert c is not None and c.op == op
    starts = np.concatenate([[0], np.cumsum([n for _, _, n in (c.inputs if op in ("all-gather", "gather") else c.outputs)])])
    for rank, (buffer, first, count) in enumerate(c.outputs):
        for j in range(count):
            have = memory.get((buffer, 0, first + j))
            owner = int(np.searchsorted(starts, (first + j), side="right")) - 1
            if op == "all-gather" or (op == "gather" and rank == c.root):
                assert have == {(owner, first + j - int(starts[owner]), 0): 1}
            elif op == "scatter":
                assert owner == rank and have == {(c.root, first + j, 0): 1}
            elif op == "reduce-scatter":
                assert owner == rank and have == {(r, first + j, 0): 1 for r in range(devices)}
    # Borders of trees are rounded to chunks, so a link may carry a chunk per tree more than its share; equal shards are padded.
    assert bandwidth_time_s(program, problem.fabric, problem.ranks) <= worst_cut_s(problem) * Fraction(21, 20)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 3), st.sampled_from(["scatter", "gather"]), st.integers(0, 4))
def test_equal_scatter_and_gather_reach_the_optimum_exactly(seed: int, devices: int, switches: int, op: str, root: int) -> None:
    fabric = balanced_fabric(np.random.default_rng(seed), devices, switches)
    size = 4 * devices * 5040
    problem = CollectiveProblem.on(fabric, op, size, root=root % devices)
    made = ForestColl(max_trees=10**6, pieces=1).plan(problem, rng=np.random.default_rng(0))
    assert check_program(made.program).ok
    assert made.notes["exact"] and Fraction(made.notes["bandwidth_time_s"]) == worst_cut_s(problem)


def test_weights_are_exact_while_they_are_few() -> None:
    fabric = full_mesh(3)
    exact = CollectiveProblem.on(fabric, "all-gather", 60 * 4096, shard_bytes=(10 * 4096, 20 * 4096, 30 * 4096))
    assert shard_weights(exact) == [1, 2, 3]
    odd = CollectiveProblem.on(fabric, "all-gather", 4 * 3_000_000, shard_bytes=(4 * 999_999, 4 * 1_000_003, 4 * 999_998))
    weights = shard_weights(odd)
    assert sum(weights) <= MAX_WEIGHT_UNITS and max(weights) - min(weights) <= 1
    with pytest.raises(Unsupported, match="in common"):
        shard_table(odd, 1, 1)


def test_chunks_divide_every_shard_and_are_fine_enough() -> None:
    problem = CollectiveProblem.on(full_mesh(3), "gather", 36 * 720, shard_bytes=(0, 12 * 720, 24 * 720))
    table = shard_table(problem, 5, 2)
    assert all(count * table.chunk_bytes == shard for count, shard in zip(table.count, problem.shards, strict=True))
    assert table.count[1] >= 10 and table.start == (0, 0, table.count[1])


def test_a_root_that_owns_everything_is_refused() -> None:
    problem = CollectiveProblem.on(two_islands(), "scatter", 4096, shard_bytes=(4096, 0, 0, 0))
    with pytest.raises(Unsupported, match="nothing is sent"):
        ForestColl().plan(problem, rng=np.random.default_rng(0))


def test_a_fold_that_cannot_be_is_refused() -> None:
    with pytest.raises(Unsupported, match="cannot be folded"):
        ForestColl(fold=True).plan(CollectiveProblem.on(two_islands(), "all-gather", 4096), rng=np.random.default_rng(0))
