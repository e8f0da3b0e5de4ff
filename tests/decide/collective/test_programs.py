"""Every program delivers each contribution exactly once: proved by symbolic execution in random lane orders."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from collective_oracle import assert_delivers, balanced_fabric, bandwidth_time_s, full_mesh, line, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import NAMES, CollectiveProblem, ForestColl, Ring, auto
from meshwright.decide.collective.classic.ring import ring_order
from meshwright.errors import UnknownName, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.program import Program

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")  # of rings and forests, in place
RNG = np.random.default_rng


@pytest.mark.sample(30)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("both", [False, True])
def test_rings_deliver(op: str, n: int, both: bool) -> None:
    for slices, unroll in ((1, True), (3, True), (3, False), (None, True)):
        problem = CollectiveProblem.on(full_mesh(n), op, 4 * 1000, root=n - 1)
        plan = Ring(slices=slices, bidirectional=both, unroll=unroll).plan(problem, rng=RNG(n))
        assert_delivers(plan.program, RNG(n))
        assert plan.program.lanes.repeat.max() == (1 if unroll else plan.options["slices"])


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 3), st.sampled_from(OPERATIONS), st.sampled_from([1, 2, 5]), st.booleans())
def test_forests_deliver_at_the_speed_they_promise(seed: int, devices: int, switches: int, op: str, pieces: int, unroll: bool) -> None:
    rng = np.random.default_rng(seed)
    fabric = balanced_fabric(rng, devices, switches)
    root = int(rng.integers(devices))
    exact = CollectiveProblem.on(fabric, op, 4, root=root)
    plan = ForestColl(pieces=pieces, unroll=unroll, max_trees=10**9).plan(exact, rng=rng)
    chunks = plan.program.contract.outputs[root][2] * (len(exact.ranks) if op == "reduce-scatter" else 1)
    size = 4 * chunks * (1 if unroll else pieces)
    problem = CollectiveProblem.on(fabric, op, size, root=root)  # a size without padding, so that times are exact
    plan = ForestColl(pieces=pieces, unroll=unroll, max_trees=10**9).plan(problem, rng=rng)
    assert_delivers(plan.program, rng)
    assert plan.notes["exact"]
    took = bandwidth_time_s(plan.program, fabric, problem.ranks)
    assert took == Fraction(plan.notes["bandwidth_time_s"]) <= Fraction(plan.notes["halves_optimum_s"])
    assert plan.bound is not None
    if op != "all-reduce":
        assert took == plan.bound.exact
    else:
        assert plan.bound.exact <= took


@pytest.mark.parametrize("op", OPERATIONS)
def test_partial_allocations_use_only_their_own_devices_when_they_can(op: str) -> None:
    problem = CollectiveProblem(fabric=two_islands(3), op=op, ranks=("d4", "d1", "d3"), size_bytes=1200)
    plan = ForestColl().plan(problem, rng=RNG(0))
    assert plan.options["relay"] is False
    assert_delivers(plan.program, RNG(1))
    through = {name for route in plan.program.channels.routes for name in route[1:-1]}
    assert not through & {d.name for d in problem.fabric.devices}


def test_devices_outside_the_collective_relay_only_where_there_is_no_other_way() -> None:
    problem = CollectiveProblem(fabric=line(4), op="all-gather", ranks=("d0", "d3"), size_bytes=80)
    plan = ForestColl().plan(problem, rng=RNG(0))
    assert plan.options["relay"] is True
    assert_delivers(plan.program, RNG(1))
    assert bandwidth_time_s(plan.program, problem.fabric, problem.ranks) == plan.bound.exact


def test_routes_are_pinned_only_where_the_fabric_would_go_another_way() -> None:
    plan = ForestColl().plan(CollectiveProblem.on(two_islands(), "all-reduce", 1 << 20), rng=RNG(0))
    assert plan.program.channels.routes == () and (plan.program.channels.route == -1).all()
    cables = [("a", "s", 100), ("b", "s", 100), ("a", "t", 100), ("b", "t", 100)]
    planes = Fabric(
        name="planes",
        devices=(Device(name="a"), Device(name="b")),
        switches=(Switch(name="s"), Switch(name="t")),
        links=tuple(Link(src=x, dst=y, rate_Bps=r) for u, v, r in cables for x, y in ((u, v), (v, u))),
    )
    problem = CollectiveProblem.on(planes, "all-gather", 8000)
    plan = ForestColl(pieces=1).plan(problem, rng=RNG(0))
    assert {route[1] for route in plan.program.channels.routes} == {"t"}  # the other plane is the default route
    assert bandwidth_time_s(plan.program, planes, problem.ranks) == plan.bound.exact


@pytest.mark.parametrize("strategy", [Ring(), ForestColl()])
@pytest.mark.parametrize("op", OPERATIONS)
def test_one_in_place_buffer_per_rank_with_equal_chunks(strategy: Ring | ForestColl, op: str) -> None:
    problem = CollectiveProblem.on(two_islands(), op, 4 * 999, root=2)
    program = strategy.plan(problem, rng=RNG(0)).program
    assert program.buffers.actor.tolist() == [0, 1, 2, 3]
    assert len(set(program.buffers.chunks.tolist())) == 1
    chunks, chunk_bytes = int(program.buffers.chunks[0]), int(program.buffers.chunk_bytes[0])
    assert chunks * chunk_bytes >= problem.size_bytes > (chunks * (chunk_bytes - 4))
    assert program.contract is not None and program.contract.op == op
    own = chunks // 4
    for r, ((_, a, b), (_, c, d)) in enumerate(zip(program.contract.inputs, program.contract.outputs, strict=True)):
        assert (a, b) == ((r * own, own) if op == "all-gather" else (0, chunks))
        assert (c, d) == ((r * own, own) if op == "reduce-scatter" else (0, chunks))


def test_ring_order_keeps_islands_together() -> None:
    """Ranks interleaved over two islands: a good ring crosses the trunk once each way."""
    problem = CollectiveProblem(fabric=two_islands(4), op="all-reduce", ranks=("d0", "d4", "d1", "d5", "d2", "d6", "d3", "d7"), size_bytes=800)
    order = ring_order(problem, RNG(0))
    side = [int(problem.ranks[r][1:]) // 4 for r in order]
    assert sum(a != b for a, b in zip(side, side[1:] + side[:1], strict=True)) == 2
    plan = Ring().plan(problem, rng=RNG(0))
    assert bandwidth_time_s(plan.program, problem.fabric, problem.ranks) == Fraction(2 * 7 * 100, 25_000_000)


def test_ring_order_finds_the_wide_links_of_a_mesh() -> None:
    """A Hamiltonian cycle of fast links hidden in a slow full mesh, in shuffled device order."""
    rng = RNG(3)
    cycle = [int(x) for x in rng.permutation(8)]
    fast = {frozenset(pair) for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    mesh = full_mesh(8, 100)
    links = tuple(Link(src=x.src, dst=x.dst, rate_Bps=1000 if frozenset((int(x.src[1:]), int(x.dst[1:]))) in fast else 100) for x in mesh.links)
    problem = CollectiveProblem.on(Fabric(name="hidden", devices=mesh.devices, links=links), "all-reduce", 8000)
    found = Ring().plan(problem, rng=rng)
    assert bandwidth_time_s(found.program, problem.fabric, problem.ranks) <= Fraction(2 * 7 * 1000, 100)
    order = found.options["order"]
    assert {frozenset(pair) for pair in zip(order, order[1:] + order[:1], strict=True)} == fast


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"op": "all-to-none"}, UnknownName),
        ({"ranks": ("d0",)}, UsageError),
        ({"ranks": ("d0", "d9")}, UnknownName),
        ({"ranks": ("d0", "d1", "d0")}, UsageError),
        ({"size_bytes": 0}, UsageError),
        ({"size_bytes": 6}, UsageError),
        ({"root": 4}, UsageError),
        ({"element_bytes": 0}, UsageError),
        ({"time_limit_s": 0.0}, UsageError),
    ],
)
def test_problems_that_make_no_sense_are_refused(bad: dict[str, object], what: type[Exception]) -> None:
    with pytest.raises(what):
        CollectiveProblem(**{"fabric": two_islands(), "op": "all-reduce", "ranks": ("d0", "d1", "d2", "d3"), "size_bytes": 64, **bad})


@pytest.mark.parametrize(
    "strategy",
    [
        Ring(slices=0), Ring(rings=0), Ring(order=(0, 1, 1, 3)),
        ForestColl(trees=0), ForestColl(pieces=0), ForestColl(max_trees=0), ForestColl(max_pieces=0),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(strategy: Ring | ForestColl) -> None:
    with pytest.raises(UsageError):
        strategy.plan(CollectiveProblem.on(two_islands(), "all-reduce", 64), rng=RNG(0))


def test_a_broadcast_down_a_one_way_line_needs_no_ring() -> None:
    """The ring is refused, not infeasible, so that `auto` goes on to the trees."""
    devices = tuple(Device(name=n) for n in "abc")
    fabric = Fabric(name="one-way", devices=devices, links=(Link(src="a", dst="b", rate_Bps=10), Link(src="b", dst="c", rate_Bps=10)))
    problem = CollectiveProblem.on(fabric, "broadcast", 40)
    with pytest.raises(Unsupported, match="every rank to reach every other"):
        Ring().plan(problem, rng=RNG(0))
    ranked = auto(problem, candidates=[Ring(), ForestColl()])
    assert ranked[0].strategy == "forestcoll" and ranked[0].plan is not None and ranked[-1].plan is None
    assert_delivers(ranked[0].plan.program, RNG(0))


def test_auto_passes_on_the_first_refusal_when_nothing_has_a_plan() -> None:
    problem = CollectiveProblem.on(two_islands(), "all-to-all", 48)
    with pytest.raises(Unsupported, match="forestcoll does not do all-to-all"):
        auto(problem, candidates=[ForestColl()])
    ranked = auto(problem, candidates=[NAMES["direct"](), ForestColl()])
    assert ranked[0].strategy == "direct" and "forestcoll does not do all-to-all" in ranked[-1].why


def test_a_switch_that_takes_in_more_than_it_gives_out() -> None:
    """4 B/s in, 3 out: trees use what goes out again, and the plan is right."""
    links = (("a", "s", 2), ("b", "s", 1), ("c", "s", 1), ("s", "a", 1), ("s", "b", 1), ("s", "c", 1))
    fabric = Fabric(
        name="lopsided", devices=tuple(Device(name=n) for n in "abc"), switches=(Switch(name="s"),),
        links=tuple(Link(src=u, dst=v, rate_Bps=r) for u, v, r in links),
    )  # fmt: skip
    problem = CollectiveProblem.on(fabric, "all-gather", 48)
    plan = auto(problem, candidates=[ForestColl()])[0].plan
    assert plan is not None and not check_program(plan.program).findings


def test_folding_a_ring_out_of_rank_order_is_refused() -> None:
    problem = CollectiveProblem(fabric=two_islands(), op="all-reduce", ranks=("d0", "d2", "d1", "d3"), size_bytes=64)
    with pytest.raises(Unsupported, match="rank order"):
        Ring(folded=True).plan(problem, rng=RNG(0))
    with pytest.raises(Unsupported, match="broadcast"):
        Ring(folded=True).plan(CollectiveProblem.on(two_islands(), "broadcast", 64), rng=RNG(0))


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter"])
@pytest.mark.parametrize(("n", "slices", "unroll"), [(2, 1, True), (3, 2, True), (5, 1, True), (5, 3, False)])
def test_a_folded_ring_stands_for_the_whole_ring(op: str, n: int, slices: int, unroll: bool) -> None:
    """Images of rank 0's lanes, worked out here from the definition of `Fold`, are the lanes of the unfolded program."""
    problem = CollectiveProblem.on(full_mesh(n), op, 4 * 60 * n)
    whole = Ring(slices=slices, unroll=unroll).plan(problem, rng=RNG(0)).program
    folded = Ring(slices=slices, unroll=unroll, folded=True).plan(problem, rng=RNG(0)).program
    assert folded.executed_steps == whole.executed_steps == n * len(folded.steps) * int(folded.lanes.repeat[0])
    assert folded.fold is not None and folded.fold.members == n
    chunks, shift = int(folded.buffers.chunks[0]), int(folded.fold.buffer_shift[0, 0])

    def lanes(program: Program, member: int, moved: int) -> list[list[tuple[object, ...]]]:
        found = []
        for lane in np.flatnonzero(program.lanes.actor == member):
            steps = [program.step(i) for i in range(program.lanes.start[lane], program.lanes.end[lane])]
            found.append(
                [
                    (
                        s.parts,
                        # the image of the stored channel that ends at this member
                        (member + moved - program.channels.dst[s.chan_in] + program.channels.src[s.chan_in]) % n if s.chan_in >= 0 else -1,
                        (program.channels.dst[s.chan_out] + moved) % n if s.chan_out >= 0 else -1,
                        (s.src[1] + moved * shift) % chunks if s.src[0] >= 0 else -1,
                        (s.dst[1] + moved * shift) % chunks if s.dst[0] >= 0 else -1,
                        s.count,
                        len(s.after),
                    )
                    for s in steps
                ]
            )
        return found

    for member in range(n):
        assert lanes(folded, 0, member) == lanes(whole, member, 0)
