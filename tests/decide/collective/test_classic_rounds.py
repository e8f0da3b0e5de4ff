"""Every classic algorithm: right numbers for every size, root and order; counts and times of the textbook on an ideal fabric."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from classic_oracle import assert_right, hub
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import OPERATIONS, CollectivePlan, CollectiveProblem
from meshwright.decide.collective.classic.bruck import Bruck
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.classic.double_tree import DoubleTree, double_parents
from meshwright.decide.collective.classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from meshwright.decide.collective.classic.hierarchical import Hierarchical
from meshwright.decide.collective.classic.pat import Pat, pat_edges
from meshwright.decide.collective.classic.ring import Ring
from meshwright.decide.collective.classic.rooted_tree import RootedTree
from meshwright.decide.collective.classic.scatter_allgather import ScatterAllGather
from meshwright.decide.collective.classic.strategy import ALGORITHMS, Classic, classic_candidates
from meshwright.decide.collective.problem import SHARDED
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.program.hash import program_hash
from meshwright.program.program import Part

RNG = np.random.default_rng
# everything but the ring, whose tests are in test_programs
VARIANTS: list[Any] = [
    HalvingDoubling(), HalvingDoubling(near=False), HalvingDoubling(near=True, pack=False), HalvingDoubling(radix=3),
    HalvingDoubling(radix=4, near=False), RecursiveDoubling(), Bruck(), Bruck(radix=3, pack=True),
    Bruck(radix=4, pack=False), Pat(), Pat(aggregate=1), Pat(aggregate=2, pack=False), Direct(), Direct(shots=1), Direct(shots=2), DoubleTree(),
    DoubleTree(pieces=3), DoubleTree(pieces=3, unroll=False), RootedTree(), RootedTree(shape="chain", pieces=4), RootedTree(shape="k-ary", arity=3),
    ScatterAllGather(), ScatterAllGather(exchange="bruck"), Hierarchical(), Hierarchical(pieces=3),
]  # fmt: skip


def plan_of(strategy: Any, problem: CollectiveProblem) -> CollectivePlan | None:
    try:
        return strategy.plan(problem, rng=RNG(0))
    except Unsupported as refusal:
        assert refusal.hint
        return None


def time_s(strategy: Any, problem: CollectiveProblem) -> float:
    plan = plan_of(strategy, problem)
    assert plan is not None
    return simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)


# ---- right ---------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(10)
@pytest.mark.parametrize("strategy", VARIANTS, ids=repr)
def test_right_for_every_number_of_ranks(strategy: Any) -> None:
    done = set()
    for n in range(2, 10):
        for op in OPERATIONS:
            problem = CollectiveProblem.on(hub(n, servers=1 + n // 3), op, 4 * 1000, root=(n - 1) // 2)
            plan = plan_of(strategy, problem)
            if plan is None:
                continue
            done.add(op)
            assert_right(plan.program, problem, RNG(n))
            verdict = check_program(plan.program)
            assert verdict.ok, verdict.findings
    assert done, "an algorithm without an operation"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(2, 9), op=st.sampled_from(OPERATIONS), which=st.sampled_from(VARIANTS))
def test_right_in_any_order_from_any_root(data: st.DataObject, n: int, op: str, which: Any) -> None:
    more: dict[str, Any] = {"root": data.draw(st.integers(0, n - 1))}
    if op == "permute":
        more["peers"] = tuple(data.draw(st.lists(st.integers(-1, n - 1), min_size=n, max_size=n)))
    order = tuple(data.draw(st.permutations(range(n))))
    if isinstance(which, Hierarchical):
        cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3)))
        strategy = Hierarchical(groups=tuple(order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)), pieces=which.pieces)
    else:
        strategy = replace(which, order=order)
    problem = CollectiveProblem.on(hub(n), op, 4 * data.draw(st.integers(1, 200)), **more)
    plan = plan_of(strategy, problem)
    if plan is not None:
        assert_right(plan.program, problem, RNG(n))
        assert check_program(plan.program).ok


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(2, 7), op=st.sampled_from(SHARDED), which=st.sampled_from([*VARIANTS, Ring(), Ring(slices=2)]))
def test_uneven_shards_even_empty_ones(data: st.DataObject, n: int, op: str, which: Any) -> None:
    shards = data.draw(st.lists(st.sampled_from([0, 12, 24, 60]), min_size=n, max_size=n).filter(any))
    problem = CollectiveProblem.on(hub(n), op, sum(shards), shard_bytes=tuple(shards), root=data.draw(st.integers(0, n - 1)))
    plan = plan_of(which, problem)
    if plan is not None:
        assert_right(plan.program, problem, RNG(n))
        assert check_program(plan.program).ok
        held = plan.program.contract.outputs if op in ("reduce-scatter", "scatter") else plan.program.contract.inputs  # type: ignore[union-attr]
        if op != "scatter":
            assert [count * int(plan.program.buffers.chunk_bytes[b]) for b, _, count in held] == shards


def test_a_ring_carries_uneven_shards_along_one_way_links() -> None:
    devices = tuple(Device(name=f"d{i}") for i in range(4))
    ring = Fabric(name="ring", devices=devices, links=tuple(Link(src=f"d{i}", dst=f"d{(i + 1) % 4}", rate_Bps=10**6) for i in range(4)))
    for op in ("all-gather", "reduce-scatter"):
        problem = CollectiveProblem.on(ring, op, 400, shard_bytes=(0, 40, 160, 200))
        plan = plan_of(Ring(), problem)
        assert plan is not None and (plan.options["slices"], plan.options["rings"]) == (1, 1)
        assert_right(plan.program, problem, RNG(0))
        assert all(dst == (src + 1) % 4 for src, dst in zip(plan.program.channels.src, plan.program.channels.dst, strict=True))
        again = plan_of(Ring(**plan.options), problem)
        assert again is not None and program_hash(again.program) == program_hash(plan.program)


def test_a_program_remembered_from_another_size_is_the_one_built_afresh() -> None:
    for strategy in VARIANTS:
        for op in ("all-reduce", "all-gather", "all-to-all", "broadcast"):
            first, second = (CollectiveProblem.on(hub(5, servers=2), op, size) for size in (1 << 16, 1 << 20))
            warm, fresh = replace(second, fabric=first.fabric), second
            if plan_of(strategy, first) is None:
                continue
            one, two = plan_of(strategy, warm), plan_of(strategy, fresh)
            assert one is not None and two is not None and program_hash(one.program) == program_hash(two.program)


def test_shards_without_a_common_size_are_refused() -> None:
    problem = CollectiveProblem.on(hub(2), "all-gather", (1 << 26) + 4, shard_bytes=((1 << 26) - 4, 8))
    with pytest.raises(Unsupported, match="in common"):
        Direct().plan(problem, rng=RNG(0))


def test_all_ranks_hold_the_same_bits_after_an_all_reduce() -> None:
    """Every rank adds in the same order (or adds the same pairs, which floating point does commute): followed by symbolic sums."""
    for strategy in (Direct(shots=1), Direct(shots=2), RecursiveDoubling(), HalvingDoubling(), Bruck(), DoubleTree(), Hierarchical()):
        for n in (2, 3, 5, 8):
            plan = plan_of(strategy, CollectiveProblem.on(hub(n, servers=2), "all-reduce", 4 * 1000))
            assert plan is not None
            assert len(set(_sums(plan, n))) == 1, (strategy, n)


def _sums(plan: CollectivePlan, n: int) -> list[str]:
    """How the output of every rank was added up, with the two sides of each sum sorted, as text."""
    program, contract = plan.program, plan.program.contract
    assert contract is not None
    memory: dict[tuple[int, int], str] = {}
    for rank, (buffer, first, count) in enumerate(contract.inputs):
        memory |= {(buffer, first + k): f"{rank}" for k in range(count)}

    def add(a: str, b: str) -> str:
        return "(" + "+".join(sorted([a, b])) + ")"

    fifo: dict[int, list[list[str]]] = {}
    done: set[int] = set()
    at = [int(s) for s in program.lanes.start]
    moved = True
    while moved:
        moved = False
        for lane, end in enumerate(program.lanes.end.tolist()):
            while at[lane] < end:
                step = program.step(at[lane])
                if any(a not in done for a, _ in step.after) or (Part.RECV in step.parts and not fifo.get(step.chan_in)):
                    break
                value = fifo[step.chan_in].pop(0) if Part.RECV in step.parts else None
                if Part.READ in step.parts:
                    local = [memory.get((step.src[0], step.src[1] + k), "?") for k in range(step.count)]
                    value = local if value is None else [add(a, b) for a, b in zip(value, local, strict=True)]
                assert value is not None
                for k, term in enumerate(value if Part.STORE in step.parts else []):
                    place = (step.dst[0], step.dst[1] + k)
                    memory[place] = add(term, memory[place]) if Part.ADD in step.parts and Part.RECV not in step.parts else term
                if Part.SEND in step.parts:
                    fifo.setdefault(step.chan_out, []).append(value)
                done.add(at[lane])
                at[lane] += 1
                moved = True
    return ["|".join(memory[b, first + k] for k in range(count)) for b, first, count in contract.outputs]


# ---- as fast as the textbook says ------------------------------------------------------------------------------------------
ALPHA, RATE = 1e-3, 10**6
POWERS = (2, 4, 8, 16)
ANY = (2, 3, 4, 5, 6, 7, 8, 9, 13)


def ideal(n: int, op: str, size: int, **more: Any) -> CollectiveProblem:
    return CollectiveProblem.on(hub(n, rate_Bps=RATE, latency_s=ALPHA, **more), op, size)


@pytest.mark.parametrize("n", POWERS)
def test_halving_and_doubling_take_their_textbook_time(n: int) -> None:
    size = 4 * 5040 * 16
    whole, log = size / RATE, n.bit_length() - 1
    assert time_s(HalvingDoubling(), ideal(n, "all-reduce", size)) == pytest.approx(2 * log * ALPHA + 2 * (n - 1) / n * whole)
    assert time_s(RecursiveDoubling(), ideal(n, "all-reduce", size)) == pytest.approx(log * (ALPHA + whole))
    for op in ("all-gather", "reduce-scatter"):
        for near in (False, True):
            assert time_s(HalvingDoubling(near=near), ideal(n, op, size)) == pytest.approx(log * ALPHA + (n - 1) / n * whole)


@pytest.mark.parametrize(("n", "radix"), [(9, 3), (4, 4), (16, 4), (27, 3)])
def test_larger_radixes_take_the_time_of_bcube(n: int, radix: int) -> None:
    """log_r n stages of r - 1 messages at once, each as large as what a rank still has over r."""
    size = 4 * 5040 * 16 * 27
    stages = round(log2(n) / log2(radix))
    book = 2 * stages * ALPHA + 2 * (n - 1) / n * size / RATE
    assert time_s(HalvingDoubling(radix=radix), ideal(n, "all-reduce", size)) == pytest.approx(book)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 13])
def test_folding_costs_one_message_before_and_one_after(n: int) -> None:
    """Counted, and timed: ranks with no one outside start at once, and their messages share a port with those of the first round."""
    size = 4 * 5040 * 16 * 13
    whole, log = size / RATE, n.bit_length() - 1
    p = 1 << log
    for strategy, rounds, book in (
        (HalvingDoubling(), 2 * log + 2, 2 * (log + 1) * ALPHA + (2 * (p - 1) / p + 2) * whole),
        (RecursiveDoubling(), log + 2, (log + 2) * (ALPHA + whole)),
    ):
        plan = plan_of(strategy, ideal(n, "all-reduce", size))
        assert plan is not None and plan.notes["rounds"] == rounds
        assert plan.notes["messages"] == (rounds - 2) * p + 2 * (n - p)
        took = simulated_time_s(plan.program, hub(n, rate_Bps=RATE, latency_s=ALPHA), plan.notes["order"], None)
        assert book * (1 - 1e-9) <= took <= book + 2 * (ALPHA + whole)


@pytest.mark.parametrize("n", ANY)
def test_bruck_and_pat_take_their_textbook_time(n: int) -> None:
    size = 4 * 5040 * 16 * 13
    rounds, whole = ceil(log2(n)), size / RATE
    gather = rounds * ALPHA + (n - 1) / n * whole
    moved = sum(sum(1 for i in range(n) if i >> j & 1) for j in range(rounds))
    exchange = rounds * ALPHA + moved / n * whole
    # a message of a later round that needs nothing of the one before may hide its latency, or delay a shorter one
    slack = 0.0 if n in POWERS else (rounds - 1) * ALPHA
    for strategy in (Bruck(pack=True), Pat()):
        cases = [("all-gather", 1, gather), ("reduce-scatter", 1, gather), ("all-reduce", 2, 2 * gather), ("all-to-all", 1, exchange)]
        for op, factor, book in cases:
            plan = plan_of(strategy, ideal(n, op, size))
            if plan is None:
                continue
            assert abs(time_s(strategy, ideal(n, op, size)) - book) <= factor * slack + 1e-9, (strategy, op)
            assert plan.notes["messages"] == factor * rounds * n


@pytest.mark.parametrize("n", ANY)
def test_direct_exchange_takes_its_textbook_time(n: int) -> None:
    size = 4 * 5040 * 16 * 13
    whole = size / RATE
    share = (n - 1) / n * whole
    for op in ("all-gather", "reduce-scatter", "all-to-all", "scatter", "gather"):
        assert time_s(Direct(), ideal(n, op, size)) == pytest.approx(ALPHA + share), op
    assert time_s(Direct(shots=1), ideal(n, "all-reduce", size)) == pytest.approx(ALPHA + (n - 1) * whole)
    assert time_s(Direct(shots=2), ideal(n, "all-reduce", size)) == pytest.approx(2 * ALPHA + 2 * share)
    assert time_s(Direct(), ideal(n, "permute", size)) == pytest.approx(ALPHA + whole)


@pytest.mark.parametrize("n", POWERS)
def test_trees_take_their_textbook_time(n: int) -> None:
    size = 4 * 5040 * 16
    whole, log = size / RATE, n.bit_length() - 1
    for op, times in (("broadcast", 1), ("reduce", 1), ("all-reduce", 2)):
        assert time_s(RootedTree(pieces=1), ideal(n, op, size)) == pytest.approx(times * log * (ALPHA + whole))
    for op in ("scatter", "gather"):
        assert time_s(RootedTree(), ideal(n, op, size)) == pytest.approx(log * ALPHA + (n - 1) / n * whole)
    book = (log + n - 1) * ALPHA + 2 * (n - 1) / n * whole
    assert book - (n - 1) * ALPHA <= time_s(ScatterAllGather(), ideal(n, "broadcast", size)) <= book * (1 + 1e-9)
    for pieces in (1, 4):  # a sender is free before the latency has passed, which the textbook charges for every piece
        chain = (n - 2 + pieces) * (ALPHA + whole / pieces)
        measured = time_s(RootedTree(shape="chain", pieces=pieces), ideal(n, "broadcast", size))
        assert (n - 1) * ALPHA + (n - 2 + pieces) * whole / pieces <= measured * (1 + 1e-9) and measured <= chain * (1 + 1e-9)


@pytest.mark.parametrize(("servers", "each"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_two_levels_take_their_textbook_time(servers: int, each: int) -> None:
    size, n = 4 * 5040 * 16, servers * each
    whole, up, across = size / RATE, each.bit_length() - 1, servers.bit_length() - 1
    book = 2 * up * (ALPHA + whole) + 2 * across * ALPHA + 2 * (servers - 1) / servers * whole
    assert time_s(Hierarchical(pieces=1), ideal(n, "all-reduce", size, servers=servers)) == pytest.approx(book)
    gather = plan_of(Hierarchical(), ideal(n, "all-to-all", size, servers=servers))
    assert gather is not None
    messages = gather.program.steps.parts[gather.program.steps.chan_out >= 0]
    assert len(messages) == n * (each - 1) * 2 + servers * (servers - 1) * each  # to peers and proxies, then one per pair of servers and proxy


# ---- shapes ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", range(2, 40))
def test_pat_sends_every_block_once_and_far_ones_first(n: int) -> None:
    log = ceil(log2(n))
    for aggregate in [None, *(1 << k for k in range(log))]:
        edges = pat_edges(n, aggregate)
        assert sum(len(sent) for _, sent in edges) == n - 1
        held = {0}
        for reach, sent in edges:
            assert set(sent) <= held and not {o + reach for o in sent} & held
            held |= {o + reach for o in sent}
            assert len(sent) <= (aggregate or n)
        assert held == set(range(n))
        limit = log if aggregate is None else int(log2(aggregate)) + (1 << log - int(log2(aggregate))) - 1
        assert len(edges) <= limit
    assert [reach for reach, _ in pat_edges(n)] == [1 << d for d in reversed(range(log))]


def test_pat_of_six_ranks_is_the_published_one() -> None:
    assert [len(sent) for _, sent in pat_edges(6)] == [1, 1, 3]


def test_pat_staging_stays_within_its_limit() -> None:
    problem = ideal(32, "all-gather", 32 * 4096)
    for blocks in (1, 2, 4):
        plan = plan_of(Pat(staging_bytes=blocks * 4096 + 100), problem)
        assert plan is not None and plan.options["aggregate"] == blocks
        b = plan.program.buffers
        staging = [int(b.chunks[i]) * int(b.chunk_bytes[i]) for i in range(len(b)) if b.role[i] == 6]
        assert max(staging, default=0) <= 2 * blocks * 4096


def test_double_trees_have_the_published_shape() -> None:
    """Heights for 2 to 16 ranks; for even n nobody is inside both trees, for odd n only rank 0."""
    heights = []
    for n in range(2, 17):
        first, second = double_parents(n)
        for parents in (first, second):
            assert sum(p < 0 for p in parents) == 1
            for r in range(n):
                seen, v = set(), r
                while v >= 0:
                    assert v not in seen
                    seen.add(v)
                    v = parents[v]
        children = [[parents.count(r) for r in range(n)] for parents in (first, second)]
        assert max(map(max, children)) <= 2
        inside = [r for r in range(n) if children[0][r] and children[1][r]]
        assert n == 2 or inside == ([] if n % 2 == 0 else [0])
        heights.append(max(_depth(first, r) for r in range(n)))
    assert heights == [ceil(log2(n)) for n in range(2, 17)]


def _depth(parents: list[int], r: int) -> int:
    return 0 if parents[r] < 0 else 1 + _depth(parents, parents[r])


@pytest.mark.parametrize("n", [4, 8, 16])
def test_double_trees_use_both_directions_of_every_port(n: int) -> None:
    """Large messages: near the message's own time, where a single tree needs twice that at its inner ranks."""
    problem = CollectiveProblem.on(hub(n, rate_Bps=RATE, latency_s=1e-6), "all-reduce", 1 << 22)
    double, single = time_s(DoubleTree(pieces=64), problem), time_s(RootedTree(shape="k-ary", pieces=64), problem)
    assert double < 2.6 * (1 << 22) / RATE and single > double


def test_the_classic_choice_is_never_slower_than_any_of_its_algorithms() -> None:
    for op in OPERATIONS:
        for size in (4 * 64, 1 << 20):
            problem = CollectiveProblem.on(hub(6, latency_s=1e-5, servers=2), op, size)
            best = time_s(Classic(), problem)
            each = [time_s(ALGORITHMS[name](**options), problem) for name, options in classic_candidates(problem)]
            assert best == min(each)


def test_small_messages_take_few_rounds_and_large_ones_many() -> None:
    def name(size: int) -> str:
        plan = plan_of(Classic(), CollectiveProblem.on(hub(8, latency_s=1e-5), "all-reduce", size))
        assert plan is not None
        return str(plan.notes["algorithm"])

    assert name(64) in ("recursive-doubling", "direct") and name(1 << 26) in ("halving-doubling", "bruck", "ring", "direct")


# ---- refusals --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "strategy",
    [
        HalvingDoubling(order=(0, 0, 1)), HalvingDoubling(radix=1),
        Bruck(order="sideways"), Bruck(radix=1), Pat(aggregate=3), Pat(staging_bytes=1), Direct(shots=3),  # type: ignore[arg-type]
        DoubleTree(pieces=0), RootedTree(arity=0), RootedTree(shape="bush"), ScatterAllGather(exchange="post"),  # type: ignore[arg-type]
        Hierarchical(groups=((0, 1),)), Hierarchical(pieces=0), Classic(algorithm="quantum"), Classic(algorithm="bruck", settings={"trees": 3}),
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_options_are_named(strategy: Any) -> None:
    op = {"Pat": "all-gather", "ScatterAllGather": "broadcast", "RootedTree": "broadcast"}.get(type(strategy).__name__, "all-reduce")
    with pytest.raises(UsageError) as error:
        strategy.plan(CollectiveProblem.on(hub(3), op, 1200), rng=RNG(0))
    assert error.value.where


def test_one_way_fabrics_are_refused_with_the_missing_path() -> None:
    """A broadcast along a one-way line exists; algorithms that need a way back say so."""
    devices = tuple(Device(name=f"d{i}") for i in range(3))
    line = Fabric(name="line", devices=devices, links=tuple(Link(src=f"d{i}", dst=f"d{i + 1}", rate_Bps=10**6) for i in range(2)))
    problem = CollectiveProblem.on(line, "broadcast", 400)
    assert plan_of(RootedTree(), problem) is not None
    for strategy in (ScatterAllGather(),):
        with pytest.raises(Unsupported, match="no path"):
            strategy.plan(problem, rng=RNG(0))
    with pytest.raises(Unsupported, match="no path"):
        RootedTree(order=(0, 2, 1), shape="chain").plan(problem, rng=RNG(0))
    with pytest.raises(Unsupported, match="one piece"):
        RootedTree(shape="chain").plan(CollectiveProblem.on(hub(3), "scatter", 1200), rng=RNG(0))
