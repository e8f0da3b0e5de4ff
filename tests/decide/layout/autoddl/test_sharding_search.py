"""Searches against brute force and each other; templates; memory; what cannot be planned."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_problems import COST, problem, star

from meshwright.decide.layout.autoddl import AutoDDL, ShardingPlan, ShardingProblem
from meshwright.decide.layout.autoddl.descent import descend
from meshwright.decide.layout.autoddl.eliminate import cost_of, minimise
from meshwright.decide.layout.autoddl.evaluate import evaluate
from meshwright.decide.layout.autoddl.ilp import solve_ilp
from meshwright.decide.layout.autoddl.mesh import all_meshes, factorisations, make_mesh
from meshwright.decide.layout.autoddl.model import Model
from meshwright.decide.layout.autoddl.search import MeshSearch
from meshwright.decide.layout.autoddl.templates import TEMPLATES, kinds_of
from meshwright.errors import Disconnected, Infeasible, TimeLimit, UnknownName, Unsupported, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import Budget
from meshwright.plan.sharding import item_bytes

Table = np.ndarray


@st.composite
def tables(draw: st.DrawFn, *, chain: bool = False) -> tuple[list[Table], list[tuple[int, int, Table]]]:
    count = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = [int(rng.integers(1, 5)) for _ in range(count)]
    vertices = [rng.integers(0, 20, n).astype(float) for n in sizes]
    pairs = [(i, i + 1) for i in range(count - 1)]
    if not chain:
        pairs = [(int(rng.integers(count)), int(rng.integers(count))) for _ in range(int(rng.integers(0, 2 * count)))]
    edges = []
    for a, b in pairs:
        costs = rng.integers(0, 20, (sizes[a], sizes[b])).astype(float)
        costs[rng.random(costs.shape) < 0.15] = np.inf
        edges.append((a, b, costs))
    return vertices, edges


def brute_force(vertices: list[Table], edges: list[tuple[int, int, Table]]) -> float:
    return min(cost_of(vertices, edges, choice) for choice in product(*(range(len(v)) for v in vertices)))


@settings(max_examples=80, deadline=None)
@given(tables())
def test_elimination_finds_what_brute_force_finds(given_tables: tuple[list[Table], list[tuple[int, int, Table]]]) -> None:
    vertices, edges = given_tables
    found = minimise(vertices, edges)
    assert found is not None
    want = brute_force(vertices, edges)
    assert found[0] == want
    if np.isfinite(want):
        assert cost_of(vertices, edges, found[1]) == want


@settings(max_examples=25, deadline=None)
@given(tables())
def test_the_integer_programme_finds_the_same(given_tables: tuple[list[Table], list[tuple[int, int, Table]]]) -> None:
    vertices, edges = given_tables
    edges = [(a, b, t) for a, b, t in edges if a != b]
    want = brute_force(vertices, edges)
    if not np.isfinite(want):
        with pytest.raises(Infeasible):
            solve_ilp(vertices, edges)
        return
    picked, proven = solve_ilp(vertices, edges)
    assert proven and cost_of(vertices, edges, picked) == pytest.approx(want)


@settings(max_examples=25, deadline=None)
@given(tables(), st.integers(20, 200))
def test_the_integer_programme_keeps_within_memory(given_tables: tuple[list[Table], list[tuple[int, int, Table]]], limit: int) -> None:
    vertices, edges = given_tables
    edges = [(a, b, t) for a, b, t in edges if a != b]
    rng = np.random.default_rng(limit)
    sizes, kept = [rng.integers(0, 60, len(v)).astype(float) for v in vertices], [rng.integers(0, 9, t.shape).astype(float) for _, _, t in edges]

    def memory(choice: tuple[int, ...]) -> float:
        return cost_of(sizes, [(a, b, k) for (a, b, _), k in zip(edges, kept, strict=True)], choice)

    fitting = [cost_of(vertices, edges, c) for c in product(*(range(len(v)) for v in vertices)) if memory(c) <= limit]
    want = min(fitting, default=np.inf)
    if not np.isfinite(want):
        with pytest.raises(Infeasible):
            solve_ilp(vertices, edges, memory=(sizes, kept, float(limit)))
        return
    picked, _ = solve_ilp(vertices, edges, memory=(sizes, kept, float(limit)))
    assert memory(tuple(picked)) <= limit * (1 + 1e-6) and cost_of(vertices, edges, picked) == pytest.approx(want)


@settings(max_examples=30, deadline=None)
@given(tables(chain=True), st.integers(0, 1000))
def test_descent_never_beats_the_optimum_and_reaches_a_local_minimum_of_pairs(
    given_tables: tuple[list[Table], list[tuple[int, int, Table]]], seed: int
) -> None:
    vertices, edges = given_tables
    want = brute_force(vertices, edges)
    cost, picked = descend(vertices, edges, [], rng=np.random.default_rng(seed), restarts=20)
    assert cost >= want and (not np.isfinite(cost) or cost == cost_of(vertices, edges, picked))
    if np.isfinite(cost):
        for a, b, _ in edges:
            for i, j in product(range(len(vertices[a])), range(len(vertices[b]))):
                other = list(picked)
                other[a], other[b] = i, j
                assert cost_of(vertices, edges, other) >= cost - 1e-9


def test_elimination_gives_up_on_time() -> None:
    table = np.zeros((2, 2))
    budget = Budget(1, time_limit_s=-1.0)
    with pytest.raises(TimeLimit), budget.net():
        minimise([np.zeros(2)] * 2, [(0, 1, table)])


# ---- on captured nets ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("net", ["fc", "branches"])
def test_the_exact_plan_is_no_slower_than_any_template_or_descent(net: str) -> None:
    plan = AutoDDL().plan(problem(net))
    assert plan.exact and {a["what"] for a in plan.alternatives} >= {"exact", "data"}
    assert all(plan.time_s <= a["time_s"] * (1 + 1e-9) for a in plan.alternatives)
    descended = AutoDDL(search="descent", restarts=5).plan(problem(net))
    assert plan.time_s <= descended.time_s * (1 + 1e-9)
    assert descended.time_s <= 1.05 * plan.time_s


def test_tiny_nets_by_brute_force() -> None:
    """Every assignment of one linear layer with its loss, priced by `evaluate`, which shares nothing with the search but the model."""
    given_problem = ShardingProblem(graph=problem("fc").graph, fabric=star(2), cost=COST)
    model = Model.of(given_problem, make_mesh(given_problem.fabric, COST, (2,)))
    search = MeshSearch(model)
    best = search.best_exact()
    assert best is not None
    rng = np.random.default_rng(0)
    for _ in range(300):  # random assignments are never better, when they can be carried out at all
        at = [int(rng.integers(len(c))) for c in model.choices]
        total = cost_of(model.times, search.edges(), at)
        if np.isfinite(total):
            assert evaluate(model, at).time_s >= best.evaluation.time_s * (1 - 1e-9)


def test_evaluation_is_the_searched_sum_when_nothing_waits_in_a_bucket() -> None:
    given_problem = problem("wide")
    search = MeshSearch(Model.of(given_problem, make_mesh(given_problem.fabric, COST, (2, 2))))
    vertices, edges = search.model.times, search.edges(())
    found = minimise(vertices, edges)
    assert found is not None
    assert evaluate(search.model, found[1]).time_s == pytest.approx(found[0])


def test_two_dimensional_products_are_found_where_they_are_best() -> None:
    """Equal sides, many devices: on one axis a device must receive a whole matrix, on two it receives panels."""
    plan = AutoDDL().plan(problem("wide", fabric=star(16, mbit=1000)))
    assert len(plan.mesh) >= 2
    flat = min(a["time_s"] for a in plan.alternatives if len(a["mesh"]) == 1)
    assert plan.time_s < 0.5 * flat
    kinds = {name for op in plan.ops.values() for name in op.names}
    assert {"data", "column"} <= kinds or {"data", "row"} <= kinds or {"column", "row"} <= kinds


def test_three_dimensional_products_can_be_said() -> None:
    """Rows, columns and contraction on three axes at once, the result a sum over the third."""
    given_problem = problem("wide", devices=8)
    model = Model.of(given_problem, make_mesh(given_problem.fabric, COST, (2, 2, 2)))
    index = model.network.vertex_of("linear")
    choice = next(c for c in model.choices[index] if c.names == ("data", "column", "row"))
    assert choice.inputs[:2] == (("S0", "B", "S1"), ("B", "S0", "S1")) and choice.output == ("S0", "S1", "P")


def test_axes_are_priced_with_everything_that_shares_a_link() -> None:
    """Two servers of four: an axis across the servers has all its groups on the same two ports."""
    fabric = load_fabric("two-islands:4")
    across, inside = make_mesh(fabric, COST, (2, 4)).axes
    trunk = min(x.rate_Bps for x in fabric.links)
    assert across.s_per_byte == pytest.approx(4 / trunk)
    assert inside.s_per_byte < across.s_per_byte


def test_meshes_are_all_ordered_factorisations() -> None:
    assert list(factorisations(8)) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert list(factorisations(1)) == [(1,)] and list(factorisations(7)) == [(7,)]
    assert [m.sizes for m in all_meshes(star(4), COST)] == [(4,), (2, 2)]
    assert make_mesh(star(4), COST, (2, 2)).groups(0) == [[0, 2], [1, 3]]


def test_equal_inputs_give_equal_plans() -> None:
    import msgspec

    plans = [msgspec.json.encode(AutoDDL(search=s).plan(problem("branches"), seed=3)) for s in ("auto", "auto", "descent", "descent")]
    assert plans[0] == plans[1] and plans[2] == plans[3]


def test_one_device_needs_no_communication() -> None:
    plan = AutoDDL().plan(problem("fc", fabric=star(1)))
    assert plan.mesh == (1,) and plan.bytes_sent[0].total == 0


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_a_tighter_memory_makes_other_plans_and_at_last_none() -> None:
    free = AutoDDL().plan(problem("fc", memory_bytes=0))
    tight = AutoDDL().plan(problem("fc", memory_bytes=int(free.memory_bytes * 0.97)))
    assert tight.memory_bytes <= free.memory_bytes * 0.97 and tight.time_s >= free.time_s
    with pytest.raises(Infeasible) as error:
        AutoDDL().plan(problem("fc", memory_bytes=1000))
    assert error.value.data["available_bytes"] == 1000 and error.value.data["needed_bytes"] > 1000
    stated = AutoDDL().plan(problem("fc", fabric=star(4, memory=10**9)))  # the fabric's own limit
    assert stated.memory_bytes <= 10**9


# ---- what cannot be --------------------------------------------------------------------------------------------------
def test_operators_without_a_known_split_are_kept_whole_and_named() -> None:
    plan = AutoDDL().plan(problem("branches"))
    assert [w.split(" ")[0] for w in plan.whole] == ["sort"]
    assert set(plan.ops["sort"].names) <= {"replicate", "broadcast"} and any("sort" in n for n in plan.notes)


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(UnknownName, match="search"):
        AutoDDL(search="magic").plan(problem("fc"))
    with pytest.raises(UnknownName, match="template"):
        kinds_of("magic", 1)
    with pytest.raises(UsageError, match="is not 4 devices"):
        AutoDDL(mesh=(2, 3)).plan(problem("fc"))
    with pytest.raises(UsageError, match="at most"):
        make_mesh(star(257), COST, (257,))
    with pytest.raises(UsageError, match="cannot be split"):
        item_bytes("quint8")
    with pytest.raises(Unsupported, match="no plan here"):
        AutoDDL(search="data+megatron", mesh=(4,)).plan(problem("fc"))
    lonely = star(2)
    with pytest.raises(Disconnected):
        AutoDDL().plan(problem("fc", fabric=Fabric(name="cut", devices=lonely.devices, switches=lonely.switches, links=lonely.links[:2])))


def test_templates_are_what_they_are_called() -> None:
    plans: dict[str, ShardingPlan] = {t: AutoDDL(search=t).plan(problem("fc")) for t in TEMPLATES}
    assert plans["data"].ops["linear"].names == ("data",) and plans["data"].sources["input:0"] == ("S0",)
    assert all(s == ("R",) for n, s in plans["data"].sources.items() if n.startswith("param:"))
    assert [plans["megatron"].ops[n].names for n in ("linear", "linear_1")] == [("column",), ("row",)]
    assert plans["data+megatron"].ops["linear"].names[0] == "data" and len(plans["data+megatron"].mesh) > 1
