"""Sums that are the fold of a fixed tree: numbers against a fold written from its definition, additions moved about, and who else may promise it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from classic_oracle import execute, hub
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import few
from meshwright.check import check_plan, check_program
from meshwright.decide.collective import STRATEGIES, CollectiveProblem, auto
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.classic.fold_tree import FoldTree
from meshwright.decide.collective.classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from meshwright.decide.collective.classic.ring import Ring
from meshwright.drive.collective.job import plan_collective
from meshwright.errors import FormatError, UnknownName, Unsupported, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.io.plan.program import program_bytes, program_from_bytes
from meshwright.program.hash import program_hash
from meshwright.program.program import Part, Program
from meshwright.program.validate import validate

RNG = np.random.default_rng
WIDTH = 3  # elements in a chunk


def fold(rows: list[np.ndarray]) -> np.ndarray:
    """Pairs from left to right, an odd last one moves up unchanged, until one is left."""
    while len(rows) > 1:
        rows = [rows[i] + rows[i + 1] if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def heavy(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values of which nearly every association gives other bits."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


def run(program: Program, inputs: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Each member's output; `inputs[m]` has a row per chunk."""
    c = program.contract
    assert c is not None
    memory = [np.full((int(n), WIDTH), np.nan, np.float32) for n in program.buffers.chunks]
    for (buffer, first, count), rows in zip(c.inputs, inputs, strict=True):
        memory[buffer][first : first + count] = rows
    execute(program, memory, RNG(seed))
    return [memory[buffer][first : first + count] for buffer, first, count in c.outputs]


def assert_folds(program: Program, op: str, numbers: Any, root: int, seed: int) -> None:
    c = program.contract
    assert c is not None and c.reproducible == "tree"
    n, chunks = program.ranks, c.inputs[0][2]
    inputs = [heavy(RNG(seed + r), chunks, WIDTH) for r in range(n)]
    want = fold([inputs[r] for r in sorted(range(n), key=lambda r: numbers[r] if numbers else r)])
    first = 0
    for rank, got in enumerate(run(program, inputs, seed)):
        if op == "reduce-scatter":
            assert got.tobytes() == want[first : first + len(got)].tobytes()
            first += len(got)
        elif op == "all-reduce" or rank == root:
            assert got.tobytes() == want.tobytes()


def tree(n: int, op: str = "all-reduce", elements: int = 240, **more: Any) -> CollectiveProblem:
    return CollectiveProblem.on(hub(n, servers=2 if n % 2 == 0 else 1), op, 4 * elements * n, reproducible="tree", **more)


RADICES = {
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3)],
    8: [(8,), (2, 2, 2), (4, 2), (2, 4)],
    12: [(4, 3), (2, 2, 3), (2, 6)],
}


@settings(max_examples=few(60), deadline=None)
@given(data=st.data(), n=st.sampled_from(sorted(RADICES)), op=st.sampled_from(["all-reduce", "reduce-scatter", "reduce"]), seed=st.integers(0, 99))
def test_bits_are_those_of_the_fold_and_the_checker_proves_it(data: st.DataObject, n: int, op: str, seed: int) -> None:
    numbers = tuple(data.draw(st.permutations(range(n)))) if data.draw(st.booleans()) else ()
    root = data.draw(st.integers(0, n - 1))
    strategy = FoldTree(radices=data.draw(st.sampled_from(RADICES[n])), pieces=data.draw(st.integers(1, 4)))
    program = strategy.plan(tree(n, op, root=root, numbers=numbers), rng=RNG(0)).program
    verdict = check_program(program)
    assert verdict.ok, verdict.findings
    assert_folds(program, op, numbers, root, seed)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("strategy", [HalvingDoubling(), RecursiveDoubling()])
def test_halving_and_doubling_are_folds_at_powers_of_two(strategy: Any, n: int) -> None:
    program = strategy.plan(tree(n), rng=RNG(0)).program
    assert check_program(program).ok
    assert_folds(program, "all-reduce", (), 0, n)


def test_chosen_alone_it_moves_no_more_than_a_ring_and_honours_options() -> None:
    plan = FoldTree().plan(tree(8, elements=1 << 16), rng=RNG(0))
    sent = [0] * 8
    steps = plan.program.steps
    for step in np.flatnonzero(steps.parts & Part.SEND):
        sent[int(plan.program.channels.src[steps.chan_out[step]])] += int(steps.count[step]) * int(plan.program.buffers.chunk_bytes[0])
    assert set(sent) == {2 * 7 * (4 * (1 << 16))}
    again = FoldTree(**plan.options).plan(tree(8, elements=1 << 16), rng=RNG(0))
    assert program_hash(again.program) == program_hash(plan.program)
    for wrong in ({"radices": (3, 2, 2)}, {"radices": (2, 2)}, {"radices": (8, 1)}, {"pieces": 0}):
        with pytest.raises(UsageError):
            FoldTree(**wrong).plan(tree(8), rng=RNG(0))


# ---- additions that are none of the tree's -----------------------------------------------------------------------------------
def as_tree(program: Program, numbers: tuple[int, ...] = ()) -> Program:
    assert program.contract is not None
    return replace(program, contracts=(replace(program.contract, reproducible="tree", numbers=numbers),))


@pytest.mark.parametrize("strategy", [Ring(), Direct(shots=2), HalvingDoubling(near=False)])
def test_other_associations_are_refused_by_step_and_fold_node(strategy: Any) -> None:
    program = strategy.plan(CollectiveProblem.on(hub(8), "all-reduce", 4 * 800), rng=RNG(0)).program
    assert check_program(program).ok
    found = check_program(as_tree(program)).findings
    assert found and found[0].check == "values"
    assert "not the two children of one fold node" in found[0].message
    assert found[0].witness["step"] >= 0
    low, high = found[0].witness["fold_node"]
    assert 0 <= low < high <= 8


def test_numbers_belong_to_the_contract() -> None:
    """Halving in rank order is no fold of contributions that are numbered otherwise; planned for these numbers it is."""
    numbers = (0, 2, 1, 3)
    program = HalvingDoubling().plan(tree(4), rng=RNG(0)).program
    assert not check_program(as_tree(program, numbers)).ok
    planned = HalvingDoubling(order=(0, 2, 1, 3)).plan(tree(4, numbers=numbers), rng=RNG(0)).program
    assert check_program(planned).ok
    assert_folds(planned, "all-reduce", numbers, 0, 3)


@pytest.mark.parametrize("seed", range(few(40)))
def test_moved_additions_are_refused_exactly_where_bits_change(seed: int) -> None:
    """Two local additions of one owner trade their operands: refused, or (the mirror image of a node) the same bits."""
    rng = RNG(seed)
    program = FoldTree(radices=(8,), pieces=1).plan(tree(8), rng=rng).program
    s = program.steps
    rank = int(rng.integers(8))
    adds = np.flatnonzero((s.parts & Part.ADD > 0) & (program.lanes.actor[program.lane_of_step()] == rank))
    one, two = rng.choice(adds, 2, replace=False)
    columns = {name: getattr(s, name).copy() for name in ("src_buffer", "src_chunk", "dst_buffer", "dst_chunk")}
    for name in ("src_buffer", "src_chunk") if seed % 2 else tuple(columns):
        columns[name][[one, two]] = columns[name][[two, one]]
    mutant = replace(program, steps=replace(s, **columns))
    verdict = check_program(mutant)
    inputs = [heavy(RNG(seed + r), 8, WIDTH) for r in range(8)]
    if not verdict.ok:
        assert {f.status for f in verdict.findings} == {"wrong"}
        return
    want = fold(list(inputs))
    assert all(got.tobytes() == want.tobytes() for got in run(mutant, inputs, seed))


# ---- who promises what -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["all-reduce", "reduce-scatter", "reduce", "all-gather"])
def test_every_strategy_keeps_the_level_or_refuses(op: str) -> None:
    problem = CollectiveProblem.on(hub(6, servers=2), op, 4 * 6 * 60, reproducible="tree")
    for kind in STRATEGIES:
        if kind.searches:
            continue
        try:
            plan = kind().plan(problem, rng=RNG(0))
        except Unsupported as refusal:
            assert refusal.hint
            continue
        promised = plan.program.contract
        assert promised is not None and check_program(plan.program).ok
        assert promised.reproducible == ("run" if op == "all-gather" else "tree")


def test_the_level_is_written_in_the_plan_and_read_back() -> None:
    problem = tree(4, numbers=(3, 1, 0, 2))
    plan, ranked = plan_collective(problem)
    assert ranked[0].strategy == "fold-tree" and plan.job["collective"]["reproducible"] == "tree"
    again = plan_from_bytes(plan_bytes(plan))
    assert again.main.contract == plan.main.contract and again.main.contract.numbers == (3, 1, 0, 2)
    assert check_plan(again).ok
    lie = replace(plan, job={**plan.job, "collective": {**plan.job["collective"], "reproducible": "exact"}})
    assert any("reproducible" in f.message for f in check_plan(lie).findings)


def test_levels_and_numbers_that_are_none_are_refused() -> None:
    program = tree_program = FoldTree().plan(tree(4), rng=RNG(0)).program
    assert program_from_bytes(program_bytes(program)).contract == program.contract
    with pytest.raises(UnknownName, match="levels: run, tree, exact"):
        CollectiveProblem.on(hub(4), "all-reduce", 4096, reproducible="bits")
    with pytest.raises(UsageError, match="every number"):
        tree(4, numbers=(0, 0, 1, 2))
    assert tree_program.contract is not None
    for wrong in ({"reproducible": "bits"}, {"numbers": (0, 1, 2)}):
        with pytest.raises(FormatError):
            validate(replace(program, contracts=(replace(tree_program.contract, **wrong),)))


def test_exact_sums_are_any_strategys_in_integers() -> None:
    problem = CollectiveProblem.on(hub(4), "all-reduce", 4096, reproducible="exact")
    ranked = auto(problem, candidates=[Ring(), HalvingDoubling()])
    for entry in ranked:
        assert entry.plan is not None and entry.plan.program.contract is not None
        promised, b = entry.plan.program.contract, entry.plan.program.buffers
        assert promised.reproducible == "exact"
        buffer, _, count = promised.inputs[0]
        repeat = int(entry.plan.program.lanes.repeat.max())
        assert int(b.chunk_bytes[buffer]) * count * repeat >= 2 * 4096 and not int(b.chunk_bytes[buffer]) % 8
    with pytest.raises(Unsupported, match="16 B"):
        Ring().plan(replace(problem, element_bytes=16), rng=RNG(0))


@pytest.mark.parametrize("level", ["tree", "exact"])
@pytest.mark.parametrize("op", ["all-gather", "broadcast", "all-to-all"])
def test_operations_that_add_nothing_are_planned_as_ever(op: str, level: str) -> None:
    problem = CollectiveProblem.on(hub(4), op, 4096)
    asked = replace(problem, reproducible=level)
    for strategy in (Direct(), Ring()):
        if op in strategy.operations:
            plans = [strategy.plan(x, rng=RNG(0)) for x in (asked, problem)]
            assert program_hash(plans[0].program) == program_hash(plans[1].program)
