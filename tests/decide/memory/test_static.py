"""Arenas: the order of storages against networkx, bound and height against brute force, runs, capacities, and plans that a checker must refuse."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from static_rig import apart, smallest_arena

from meshwright.arena import ArenaPlan, ArenaProblem, intervals_problem, rows
from meshwright.check.arena import check_arena
from meshwright.decide.memory.static import FirstFit, StaticMemory, conflicts, heaviest_antichain, lifetimes
from meshwright.decide.memory.static import order as static_order
from meshwright.decide.memory.static.intervals import FITS, NEVER, STOPPED, mixed_order, preorders, search
from meshwright.errors import Infeasible, Unsupported, UsageError
from meshwright.testing.arenas import arena_problems

NO_STOP = np.zeros(1, np.int64)


def planned(problem: ArenaProblem, **options: float) -> ArenaPlan:
    plan = StaticMemory(**options).plan(problem, rng=np.random.default_rng(0))  # type: ignore[arg-type]
    verdict = check_arena(problem, plan)
    assert verdict.ok, verdict.findings
    return plan


@settings(max_examples=150, deadline=None)
@given(problem=arena_problems())
def test_order_and_bound_are_those_of_the_graph(problem: ArenaProblem) -> None:
    life, order = lifetimes(problem), apart(problem)
    count = len(problem.size_bytes)
    assert {(a, b) for a in range(count) for b in range(count) if a != b and life.precedes(a, b)} == order
    some = [t for t in range(count) if life.size_bytes[t]]
    rival = {frozenset(pair) for pair in combinations(some, 2) if pair not in order and pair[::-1] not in order}
    pairs = conflicts(life)
    assert {frozenset((t, int(u))) for t in range(count) for u in pairs[t]} == rival
    heaviest = max(
        sum(int(life.size_bytes[t]) for t in chosen)
        for k in range(len(some) + 1) for chosen in combinations(some, k) if all(frozenset(p) in rival for p in combinations(chosen, 2))
    )  # fmt: skip
    bound, clique = heaviest_antichain(problem, life)
    assert bound == heaviest == sum(int(life.size_bytes[t]) for t in clique)
    assert all(frozenset(p) in rival for p in combinations(clique, 2))


@settings(max_examples=60, deadline=None)
@given(problem=arena_problems(storages=6))
def test_plans_are_safe_and_near_the_smallest_arena(problem: ArenaProblem) -> None:
    smallest = smallest_arena(problem)
    plan = planned(problem)
    assert plan.bound_bytes <= smallest <= plan.arena_bytes
    assert plan.arena_bytes == smallest and plan.optimal
    for by in ("size", "area", "span", "load", "product"):
        one = FirstFit(by=by, best_fit=by != "size").plan(problem, rng=np.random.default_rng(0))
        assert check_arena(problem, one).ok and one.arena_bytes >= plan.arena_bytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_stream_is_solved_exactly(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    lower = [data.draw(st.integers(0, 8)) for _ in range(count)]
    upper = [a + data.draw(st.integers(1, 6)) for a in lower]
    size = [data.draw(st.integers(1, 9)) for _ in range(count)]
    problem = intervals_problem(lower, upper, size)
    smallest = smallest_arena(problem)
    plan = planned(problem)
    assert plan.arena_bytes == smallest and plan.optimal
    life = np.array(lower), np.array(upper), np.array(size), np.array(upper) - np.array(lower)
    for rank, by_load in (*preorders(*life), (mixed_order(*life, np.random.default_rng(count)), False)):
        assert sorted(rank.tolist()) == list(range(count))
        offset = np.zeros(count, np.int64)
        args = np.array(lower), np.array(upper), np.array(size), rank, by_load
        assert search(*args, smallest, 10**6, offset, NO_STOP)[0] == FITS
        assert all(offset[i] + size[i] <= smallest for i in range(count))
        assert search(*args, smallest - 1, 10**6, offset, NO_STOP)[0] == NEVER
    assert planned(problem, capacity_bytes=smallest).arena_bytes <= smallest
    with pytest.raises(Infeasible) as refused:
        twice = replace(problem, size_bytes=problem.size_bytes * 2)
        planned(twice, capacity_bytes=2 * smallest - 1)
    assert refused.value.data["proved"]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pieces=st.integers(8, 30))
def test_a_rectangle_cut_into_pieces_is_put_together_again(seed: int, pieces: int) -> None:
    """No byte to spare anywhere: a branch that is cut off wrongly would end in NEVER."""
    rng = np.random.default_rng(seed)
    cut = [(0, 24, 0, 60)]
    while len(cut) < pieces:
        a, b, low, high = cut.pop(int(rng.integers(len(cut))))
        if rng.random() < 0.5 and b - a > 1:
            at = int(rng.integers(a + 1, b))
            cut += [(a, at, low, high), (at, b, low, high)]
        else:
            at = int(rng.integers(low, high))
            cut += [(a, b, low, at), (a, b, at, high)] if at > low else [(a, b, low, high)]
    lower, upper, low, high = np.ascontiguousarray(np.array(cut, np.int64).T)  # as everywhere: of views the search would be compiled again
    life = lower, upper, high - low, upper - lower
    for rank, by_load in (*preorders(*life), *((mixed_order(*life, rng), False) for _ in range(4))):
        offset = np.zeros(pieces, np.int64)
        verdict, _ = search(*life[:3], rank, by_load, 60, 5_000, offset, NO_STOP)
        assert verdict in (FITS, STOPPED)
        if verdict == FITS:
            plan = ArenaPlan(strategy="search", offset_bytes=offset, arena_bytes=60, bound_bytes=0, clique=())
            assert check_arena(intervals_problem(lower.tolist(), upper.tolist(), life[2].tolist()), plan).ok


def test_a_search_that_is_cut_short_says_so() -> None:
    rng = np.random.default_rng(0)
    lower = rng.integers(0, 50, 60)
    args = lower, lower + rng.integers(1, 20, 60), rng.integers(1, 100, 60)
    assert search(*args, *preorders(*args, args[1] - args[0])[0], int(args[2].sum()) // 4, 3, np.zeros(60, np.int64), NO_STOP)[0] in (STOPPED, NEVER)
    assert search(*args, *preorders(*args, args[1] - args[0])[0], int(args[2].sum()), 3, np.zeros(60, np.int64), NO_STOP) == (STOPPED, 4)


@settings(max_examples=80, deadline=None)
@given(problem=arena_problems(), data=st.data())
def test_moving_a_storage_onto_one_in_use_is_refused(problem: ArenaProblem, data: st.DataObject) -> None:
    plan = planned(problem, effort=0)
    order = apart(problem)
    some = np.flatnonzero(problem.size_bytes).tolist()
    rivals = [(a, b) for a, b in combinations(some, 2) if (a, b) not in order and (b, a) not in order]
    assume(rivals)
    a, b = data.draw(st.sampled_from(rivals))
    offsets = plan.offset_bytes.copy()
    offsets[a] = offsets[b]
    verdict = check_arena(replace(problem, runs=()), replace(plan, offset_bytes=offsets, arena_bytes=plan.arena_bytes + 100))
    assert verdict.status == "wrong"
    assert any({a, b} == set(f.witness["storages"]) for f in verdict.findings if "storages" in f.witness)


def two_streams(events: list[list[int]]) -> ArenaProblem:
    """Stream 0: op 0 writes A, op 1 reads it. Stream 1: op 2 writes B, op 3 reads it."""
    return ArenaProblem(
        stream=np.array([0, 0, 1, 1], np.int32), after=rows(events), size_bytes=np.array([100, 100], np.int64), sources=rows([[0], [2]]),
        consumers=rows([[1], [3]]), names=("A", "B"),
    )  # fmt: skip


def test_streams_without_an_event_never_share() -> None:
    """In the order of the list A is dead when B begins; nothing makes the streams run in that order."""
    assert planned(two_streams([[], [], [], []])).arena_bytes == 200
    assert planned(two_streams([[], [], [0], []])).arena_bytes == 200  # waits for A's writer, not for its reader
    assert planned(two_streams([[], [], [1], []])).arena_bytes == 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arena_bytes": 150}, "outside the arena"), ({"bound_bytes": 100}, "its storages hold 200"), ({"clique": (0, 0)}, "not all different"),
        ({"offset_bytes": np.array([0, 50])}, "share bytes 50 to 100"), ({"offset_bytes": np.array([0])}, "1 offsets for 2"),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused_by_name(change: dict[str, object], said: str) -> None:
    problem = two_streams([[], [], [], []])
    verdict = check_arena(problem, replace(planned(problem), **change))  # type: ignore[arg-type]
    assert verdict.status == "wrong" and any(said in f.message for f in verdict.findings)


def test_bounds_runs_and_alignment_are_checked() -> None:
    shared = two_streams([[], [], [1], []])
    stated = replace(planned(shared), clique=(0, 1), bound_bytes=200, arena_bytes=200)
    assert "never in use together" in check_arena(shared, stated).findings[0].message
    run = replace(two_streams([[], [], [], []]), runs=((1, 0),), alignment_bytes=64)
    plan = planned(run)
    assert plan.offset_bytes.tolist() == [128, 0]
    assert "not behind B" in check_arena(run, replace(plan, offset_bytes=np.array([0, 128]))).findings[0].message
    crooked = replace(plan, offset_bytes=np.array([130, 0]), arena_bytes=400)
    assert "no multiple of 64" in check_arena(replace(run, runs=()), crooked).findings[0].message
    below = replace(planned(two_streams([[]] * 4)), arena_bytes=199)
    assert any("below its bound" in f.message for f in check_arena(two_streams([[]] * 4), below).findings)


def test_too_many_operators_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_streams([[]] * 4)
    plan = planned(problem)
    monkeypatch.setattr("meshwright.check.arena.MAX_OPERATORS", 3)
    assert check_arena(problem, plan).status == "unknown"


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_order, "MAX_PAIRS", 0)
    with pytest.raises(Unsupported, match="1 pairs"):
        planned(two_streams([[]] * 4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alignment_bytes": 0}, "at least 1"), ({"stream": np.array([0, 0, -1, 1], np.int32)}, "numbered from 0"),
        ({"after": rows([[]])}, "one row per"),
        ({"size_bytes": np.array([1, -1])}, "cannot place -1"), ({"after": rows([[], [1], [], []])}, "waits for operator 1"),
        ({"consumers": rows([[1], [9]])}, "no operator 9"), ({"sources": rows([[0], []])}, "no operator writes it"),
        ({"runs": ((0, 1), (1,))}, "two runs"),
    ],
)  # fmt: skip
def test_problems_that_contradict_themselves_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(two_streams([[]] * 4), **change)  # type: ignore[arg-type]


def test_a_reader_that_does_not_wait_is_refused() -> None:
    with pytest.raises(UsageError, match="operator 2 reads it and does not wait for operator 0"):
        lifetimes(replace(two_streams([[]] * 4), consumers=rows([[2], [3]])))
    with pytest.raises(UsageError, match="alive from 3 to 3"):
        intervals_problem([3], [3], [1])
    with pytest.raises(UsageError, match="3 times for 4 operators"):
        replace(two_streams([[]] * 4), clock=np.arange(3))
    with pytest.raises(UsageError, match="no order 'weight'"):
        FirstFit(by="weight").plan(two_streams([[]] * 4), rng=np.random.default_rng(0))
    with pytest.raises(UsageError, match="not negative"):
        StaticMemory(effort=-1).plan(two_streams([[]] * 4), rng=np.random.default_rng(0))


def test_no_storages_and_no_bytes() -> None:
    empty = intervals_problem([], [], [])
    assert planned(empty).arena_bytes == 0
    assert planned(intervals_problem([0, 1], [2, 3], [0, 0])).arena_bytes == 0


def test_a_large_graph_on_four_streams() -> None:
    """Hundreds of storages: safe, above a bound that the checker accepts, and lowered by the walk."""
    rng = np.random.default_rng(3)
    ops, count = 200, 400
    stream = rng.integers(0, 4, ops).astype(np.int32)
    after: list[set[int]] = [set() for _ in range(ops)]
    sources, consumers = [], []
    for _ in range(count):
        at = int(rng.integers(0, ops - 1))
        ends = {min(ops - 1, at + int(d)) for d in rng.geometric(0.1, 2)}
        for v in ends:
            after[v].add(at)
        sources.append([at])
        consumers.append(sorted(ends))
    problem = ArenaProblem(
        stream=stream, after=rows([sorted(a) for a in after]), size_bytes=rng.integers(1, 2000, count) * 512, sources=rows(sources),
        consumers=rows(consumers), alignment_bytes=512,
    )  # fmt: skip
    first = planned(problem, effort=0)
    walked = planned(problem)
    assert walked.arena_bytes <= first.arena_bytes and walked.arena_bytes <= 1.08 * walked.bound_bytes
    assert walked.arena_bytes == planned(problem).arena_bytes  # the walk depends on the seed alone
    assert planned(problem, seconds=1e-9).arena_bytes >= walked.arena_bytes
