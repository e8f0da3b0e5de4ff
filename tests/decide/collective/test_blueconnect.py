"""BlueConnect: every plan delivers, few bytes cross between servers, the search finds what exhaustion finds, unlike servers overlay."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from collective_oracle import assert_delivers, bandwidth_time_s, full_mesh, link_loads, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.blueconnect.cost import CostTable, Level, factorisations
from meshwright.decide.collective.blueconnect.flow import runs_of
from meshwright.decide.collective.blueconnect.grid import GridPlan, grid_program
from meshwright.decide.collective.blueconnect.levels import find_hierarchy
from meshwright.decide.collective.blueconnect.overlay import OverlayPlan, elementary_intervals
from meshwright.decide.collective.blueconnect.strategy import BlueConnect
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

RNG = np.random.default_rng
GB = 10**9
OPS = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "scatter", "gather", "all-to-all"]


def servers(sizes: tuple[int, ...], port_Bps: int = GB, latency_s: float = 0.0) -> Fabric:
    """Servers of the given sizes: a fast switch inside, a port per GPU to one network switch."""
    cables = []
    for h, k in enumerate(sizes):
        for i in range(k):
            cables += [(f"s{h}/{i}", f"s{h}/in", 20 * GB), (f"s{h}/{i}", "net", port_Bps)]
    return Fabric(
        name="servers",
        devices=tuple(Device(name=f"s{h}/{i}", group=f"s{h}") for h, k in enumerate(sizes) for i in range(k)),
        switches=(*(Switch(name=f"s{h}/in", group=f"s{h}") for h in range(len(sizes))), Switch(name="net")),
        links=tuple(Link(src=a, dst=b, rate_Bps=r, latency_s=latency_s) for u, v, r in cables for a, b in ((u, v), (v, u))),
    )


def random_plan(rng: np.random.Generator, n: int) -> GridPlan:
    options = factorisations(n)
    factors = options[int(rng.integers(len(options)))]
    order = tuple(int(x) for x in rng.permutation(len(factors)))
    names = []
    for j in order:
        useful = ["direct", "ring"] + (["halving-doubling"] if factors[j] in (4, 8, 16) else [])
        names.append(str(rng.choice(useful)))
    return GridPlan(tuple(int(x) for x in rng.permutation(n)), factors, order, tuple(names))


# ---- every plan delivers --------------------------------------------------------------------------------------------------
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4, 6, 8, 12, 16]), st.sampled_from(OPS), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_factorisation_order_primitive_and_grid_delivers(seed: int, n: int, op: str, slices: int, unroll: bool, reverse: bool) -> None:
    """Sizes that do not divide; the checker proves contributor sets, blocks in rank order, no race, no deadlock."""
    rng = RNG(seed)
    problem = CollectiveProblem.on(full_mesh(n), op, 4 * int(rng.integers(1, 500)), root=int(rng.integers(n)))
    program = grid_program(problem, random_plan(rng, n), slices=slices, unroll=unroll, reverse=reverse)
    verdict = check_program(program)
    assert verdict.ok, verdict.findings
    if op in ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce"):
        assert_delivers(program, rng)
    assert program.buffers.actor.tolist() == list(range(n))


@pytest.mark.sample(10)
@pytest.mark.parametrize("op", ["all-reduce", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 2), (2, 3, 4), (1, 1, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_servers_of_any_sizes_deliver(op: str, sizes: tuple[int, ...], weighted: bool) -> None:
    problem = CollectiveProblem.on(servers(sizes), op, 4 * 997)
    for inside, across in product(("direct", "ring"), repeat=2):
        plan = BlueConnect(overlay=True, primitives=(inside, across), weighted=weighted, parts=2).plan(problem, rng=RNG(0))
        assert check_program(plan.program).ok
        assert_delivers(plan.program, RNG(1))
        assert plan.options["overlay"] is True


# ---- bytes between servers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sizes", "options"), [
    ((4, 4), {"factors": (4, 2), "order": (0, 1), "primitives": ("direct", "direct")}),
    ((4, 4, 4), {"factors": (4, 3), "order": (0, 1), "primitives": ("ring", "ring")}),
    ((4, 4, 4), {"factors": (2, 2, 3), "order": (1, 0, 2), "primitives": ("direct", "direct", "ring")}),
    ((2, 2, 2, 2), {"factors": (2, 4), "order": (0, 1), "primitives": ("direct", "halving-doubling")}),
    ((3, 5), {"overlay": True, "primitives": ("direct", "direct")}),
    ((2, 3, 4), {"overlay": True, "primitives": ("ring", "ring")}),
])  # fmt: skip
def test_every_server_sends_and_receives_the_least_that_an_all_reduce_needs(sizes: tuple[int, ...], options: dict[str, object]) -> None:
    """2 (H - 1) / H of the message out of and into each server, equal or not."""
    fabric, count = servers(sizes), len(sizes)
    problem = CollectiveProblem.on(fabric, "all-reduce", 4 * 5040 * count)
    plan = BlueConnect(parts=1, weighted=False if "overlay" in options else None, **options).plan(problem, rng=RNG(0))
    held = int(plan.program.buffers.chunks[0]) * int(plan.program.buffers.chunk_bytes[0])
    assert held == problem.size_bytes
    loads = link_loads(plan.program, fabric, problem.ranks)
    for h in range(count):
        for out in (True, False):
            crossing = sum(b for (u, v), b in loads.items() if "net" in (u, v) and (u if out else v).startswith(f"s{h}/"))
            assert crossing == Fraction(2 * (count - 1), count) * problem.size_bytes


def test_order_decides_what_crosses() -> None:
    """The slow level first moves as many times more bytes over it as there are ranks inside."""
    problem = CollectiveProblem.on(servers((4, 4)), "all-reduce", 4 * 8 * 1000)
    times = []
    for order in ((0, 1), (1, 0)):
        plan = BlueConnect(factors=(4, 2), order=order, primitives=("direct",) * 2, parts=1).plan(problem, rng=RNG(0))
        times.append(bandwidth_time_s(plan.program, problem.fabric, problem.ranks))
    assert times[1] == 4 * times[0] == 4 * Fraction(problem.size_bytes, 4 * GB)


# ---- search ---------------------------------------------------------------------------------------------------------------
def every_program_time(problem: CollectiveProblem, grid: tuple[int, ...]) -> float:
    """Exhaustion, written apart from the search: all factorisations of p, orders and primitives, slices 1 to 8."""
    n, best = len(grid), float("inf")

    def compositions(size: int) -> list[list[int]]:
        return [[]] if size == 1 else [[k, *rest] for k in range(2, size + 1) if size % k == 0 for rest in compositions(size // k)]

    for factors in compositions(n):
        for order in permutations(range(len(factors))):
            every = {2: ("direct",), 4: ("direct", "ring", "halving-doubling"), 8: ("direct", "ring", "halving-doubling")}
            for names in product(*(every.get(factors[j], ("direct", "ring")) for j in order)):
                for slices in (1, 2, 4, 8):
                    program = grid_program(problem, GridPlan(grid, tuple(factors), order, names), slices=slices, unroll=True, reverse=True)
                    best = min(best, simulated_time_s(program, problem.fabric, problem.ranks, None))
    return best


@pytest.mark.sample(10)
@pytest.mark.parametrize("size", [4 * 64, 4 * 64_000, 4 * 4_000_000])
@pytest.mark.parametrize("op", ["all-reduce", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (4, 2)])
def test_the_search_finds_what_exhaustion_finds(size: int, op: str, shape: tuple[int, int]) -> None:
    fabric = servers((shape[0],) * shape[1], latency_s=2e-6)
    problem = CollectiveProblem.on(fabric, op, size)
    plan = BlueConnect(judged=12, max_parts=8).plan(problem, rng=RNG(0))
    found = simulated_time_s(plan.program, fabric, problem.ranks, None)
    assert found <= every_program_time(problem, find_hierarchy(problem).grid) * 1.03
    assert found == min(row["simulated_s"] for row in plan.notes["judged"])


def test_the_best_plan_depends_on_the_size() -> None:
    problem = CollectiveProblem.on(servers((4, 4), latency_s=1e-5), "all-reduce", 4 * 64)
    small = BlueConnect().plan(problem, rng=RNG(0))
    large = BlueConnect().plan(CollectiveProblem.on(problem.fabric, "all-reduce", 1 << 26), rng=RNG(0))
    assert small.options["factors"] != large.options["factors"]
    assert large.options["order"][-1] == len(large.options["factors"]) - 1  # the slow level comes last
    assert large.options["parts"] > 1 == small.options["parts"] or small.options["parts"] <= 2


# ---- hierarchy and table ------------------------------------------------------------------------------------------------------
def test_levels_are_found_from_servers_and_routes() -> None:
    assert find_hierarchy(CollectiveProblem.on(servers((4, 4, 4)), "all-reduce", 64)).sizes == (4, 3)
    racks = []
    for r, h, i in product(range(2), range(2), range(2)):
        racks += [(f"r{r}h{h}/{i}", f"r{r}h{h}/in", 20 * GB)]
    racks += [(f"r{r}h{h}/in", f"leaf{r}", 2 * GB) for r in range(2) for h in range(2)] + [(f"leaf{r}", "spine", GB) for r in range(2)]
    names = [(f"r{r}h{h}/{i}", f"r{r}h{h}") for r, h, i in product(range(2), repeat=3)]
    others = {b for _, b, _ in racks}
    fabric = Fabric(
        name="racks", devices=tuple(Device(name=n, group=g) for n, g in names), switches=tuple(Switch(name=s) for s in sorted(others)),
        links=tuple(Link(src=a, dst=b, rate_Bps=w) for u, v, w in racks for a, b in ((u, v), (v, u))),
    )  # fmt: skip
    shuffled = tuple(names[i][0] for i in (0, 4, 2, 6, 1, 5, 3, 7))
    found = find_hierarchy(CollectiveProblem(fabric=fabric, op="all-reduce", ranks=shuffled, size_bytes=64))
    assert found.sizes == (2, 2, 2) and not found.uneven
    groups = [{fabric.device(shuffled[r]).group for r in found.grid[i : i + 2]} for i in range(0, 8, 2)]
    assert all(len(g) == 1 for g in groups) and {x[:2] for g in groups[:2] for x in g} in ({"r0"}, {"r1"})
    quads = find_hierarchy(CollectiveProblem.on(load_fabric("dgx1-v100"), "all-reduce", 64))
    assert prod(quads.sizes) == 8
    assert find_hierarchy(CollectiveProblem.on(servers((3, 5)), "all-reduce", 64)).uneven


def test_the_closed_form_of_a_stage_and_the_papers_identity() -> None:
    """Bandwidth of stages with equal rates adds up to the flat ring's; latency falls from p - 1 to the sum of p_i - 1."""
    level = Level(alpha_s=3e-6, rate_Bps=10e9, share=4)
    assert level.stage_s("ring", 4, 1e8) == pytest.approx(3 * 3e-6 + 0.75e8 / 2.5e9)
    assert level.stage_s("halving-doubling", 4, 1e8) == pytest.approx(2 * 3e-6 + 0.75e8 / 2.5e9)
    assert level.stage_s("direct", 4, 1e8, 1e-6) == pytest.approx(3e-6 + 3e-6 + 0.75e8 / 2.5e9)
    factors, size, same = (4, 6, 2), 1e8, Level(1e-6, 1e9)
    total = sum(same.stage_s("ring", k, size / prod(factors[:i])) for i, k in enumerate(factors))
    assert total == pytest.approx(sum(k - 1 for k in factors) * 1e-6 + 47 / 48 * size / 1e9)


def test_the_table_counts_what_shared_ports_carry() -> None:
    """Two GPUs behind one port: the stage across takes twice as long, as with sharing factor 2."""
    cables = [(f"s{h}/{i}", f"s{h}/in", 20 * GB) for h in range(2) for i in range(2)] + [(f"s{h}/in", "net", GB) for h in range(2)]
    fabric = Fabric(
        name="shared", devices=tuple(Device(name=f"s{h}/{i}", group=f"s{h}") for h in range(2) for i in range(2)),
        switches=(Switch(name="s0/in"), Switch(name="s1/in"), Switch(name="net")),
        links=tuple(Link(src=a, dst=b, rate_Bps=r) for u, v, r in cables for a, b in ((u, v), (v, u))),
    )  # fmt: skip
    size = 8_000_000
    problem = CollectiveProblem.on(fabric, "reduce-scatter", size)
    plan = GridPlan((0, 1, 2, 3), (2, 2), (0, 1), ("direct", "direct"))
    inside, across = Level(0, 20 * GB), Level(0, GB, share=2)
    wanted = inside.stage_s("direct", 2, size) + across.stage_s("direct", 2, size / 2)
    assert CostTable(problem).time_s(plan) == pytest.approx(wanted)
    program = grid_program(problem, plan, slices=1, unroll=True, reverse=True)
    assert simulated_time_s(program, fabric, problem.ranks, None) == pytest.approx(wanted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_overlaid_shares_have_one_owner_per_server(sizes: list[int]) -> None:
    ranks = iter(range(sum(sizes)))
    members = tuple(tuple(next(ranks) for _ in range(k)) for k in sizes)
    shares = tuple(tuple(Fraction(1, len(m)) for _ in m) for m in members)
    grains, intervals = elementary_intervals(OverlayPlan(members, shares, "direct", "direct"))
    assert len(intervals) <= sum(sizes) - len(sizes) + 1
    assert [a for a, _, _ in intervals] == [0, *(b for _, b, _ in intervals)][:-1] and intervals[-1][1] == grains
    for h, m in enumerate(members):
        for r in m:
            owned = sum(b - a for a, b, owners in intervals if owners[h] == r)
            assert owned == Fraction(grains, len(m))


def test_stretches_of_chunks() -> None:
    assert runs_of([0, 1, 2, 5, 6, 9], [3, 4, 5, 6, 7, 0]) == [(0, 3, 3), (5, 6, 2), (9, 0, 1)]
    assert runs_of([], []) == [] and sorted(factorisations(12)) == [(2, 2, 3), (2, 3, 2), (2, 6), (3, 2, 2), (3, 4), (4, 3), (6, 2), (12,)]


# ---- refusals -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"parts": 0}, {"max_parts": 0}, {"judged": 0}, {"primitives": ("teleport",)}, {"factors": (2, 3)}, {"factors": (1, 4)},
        {"factors": (2, 2), "order": (0, 0)}, {"factors": (2, 2), "primitives": ("ring",)},
        {"factors": (2, 2), "primitives": ("halving-doubling",) * 2},
        {"order": (0,)}, {"grid": (0, 1, 2, 2)}, {"levels": (3,)}, {"levels": (2, 2), "grid": (0, 0, 1, 2)},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BlueConnect(**options).plan(CollectiveProblem.on(two_islands(), "all-reduce", 64), rng=RNG(0))


def test_refusals_say_what_to_do() -> None:
    links = tuple(Link(src=f"d{i}", dst=f"d{i + 1}", rate_Bps=9) for i in range(2))
    line = Fabric(name="line", devices=tuple(Device(name=f"d{i}") for i in range(3)), links=links)
    cases = [
        (BlueConnect(), CollectiveProblem.on(two_islands(), "permute", 64), "does not do permute"),
        (BlueConnect(), CollectiveProblem.on(line, "broadcast", 4096), "reach every other"),
        (BlueConnect(overlay=True), CollectiveProblem.on(two_islands(), "broadcast", 64), "overlaid"),
        (BlueConnect(overlay=True), CollectiveProblem.on(full_mesh(4), "all-reduce", 64), "overlaid"),
        (BlueConnect(), CollectiveProblem.on(full_mesh(4), "all-gather", 64, shard_bytes=(40, 8, 8, 8)), "equal shards"),
        (BlueConnect(), CollectiveProblem.on(servers((513,)), "broadcast", 1 << 20), "at most 512"),
    ]  # fmt: skip
    for strategy, problem, text in cases:
        with pytest.raises(Unsupported, match=text) as refusal:
            strategy.plan(problem, rng=RNG(0))
        assert refusal.value.hint


def test_given_levels_and_grid_are_used() -> None:
    problem = CollectiveProblem.on(full_mesh(8), "all-reduce", 1 << 16)
    plan = BlueConnect(levels=(4, 2), grid=(0, 2, 4, 6, 1, 3, 5, 7)).plan(problem, rng=RNG(0))
    assert plan.options["grid"] == (0, 2, 4, 6, 1, 3, 5, 7) and prod(plan.options["factors"]) == 8
    assert plan.notes["servers"] == [8]
