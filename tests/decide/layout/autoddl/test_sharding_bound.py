"""The bounds: the published cases, and no feasible plan below them."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_problems import COST, problem

from meshwright.decide.layout.autoddl import AutoDDL
from meshwright.decide.layout.autoddl.bound import bound_bytes, bound_time_s, fastest_ingress_Bps, layers, least_words
from meshwright.decide.layout.autoddl.descent import descend
from meshwright.decide.layout.autoddl.evaluate import evaluate
from meshwright.decide.layout.autoddl.mesh import make_mesh
from meshwright.decide.layout.autoddl.model import Model
from meshwright.decide.layout.autoddl.network import build_network
from meshwright.decide.layout.autoddl.search import MeshSearch


def published(m: int, n: int, k: int, p: int) -> float:
    """Al Daas et al. 2022, Theorem 3: m >= n >= k."""
    m, n, k = sorted((m, n, k), reverse=True)
    if p <= m / n:
        return n * k * (1 - 1 / p)
    if p <= m * n / k**2:
        return 2 * sqrt(m * n * k * k / p) - (m * k + n * k) / p
    return 3 * (m * n * k / p) ** (2 / 3) - (m * n + m * k + n * k) / p


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4096))
def test_the_bound_of_one_product_is_the_published_one(m: int, n: int, k: int, p: int) -> None:
    assert least_words(m, n, k, 1 / p) == pytest.approx(max(0.0, published(m, n, k, p)), rel=1e-6, abs=1e-3 + 1e-6 * (m * n + m * k + n * k))


def test_memory_makes_it_larger_and_redundancy_smaller() -> None:
    assert least_words(4096, 4096, 4096, 1 / 4, memory=10_000) > least_words(4096, 4096, 4096, 1 / 4)
    assert least_words(64, 64, 64, 1.0) == 0.0
    assert least_words(64, 64, 64, 1 / 4, most=1 / 2) <= least_words(64, 64, 64, 1 / 4)
    assert least_words(64, 64, 64, 1 / 4, first=True) <= least_words(64, 64, 64, 1 / 4)


def test_layers_that_read_one_value_count_once() -> None:
    found = layers(build_network(problem("branches")))
    assert [x.node for x in found] == ["linear", "linear_1"]
    assert found[0].first and not found[1].first


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["fc", "fc_uneven", "wide", "branches"]), st.sampled_from([(2,), (4,), (2, 2), (2, 4), (2, 2, 2)]), st.integers(0, 10**6))
def test_no_feasible_plan_is_below_the_bounds(net: str, sizes: tuple[int, ...], seed: int) -> None:
    ranks = int(np.prod(sizes))
    given_problem = problem(net, devices=ranks)
    model = MODELS.setdefault((net, sizes), Model.of(given_problem, make_mesh(given_problem.fabric, COST, sizes)))
    rng = np.random.default_rng(seed)
    # a random assignment, made feasible: costs drawn at random instead of the model's
    vertices = [rng.random(len(c)) for c in model.choices]
    edges = [(e.source, e.reader, np.where(np.isfinite(model.edge_costs(i)[0]), rng.random(model.edge_costs(i)[0].shape), np.inf))
             for i, e in enumerate(model.network.edges)]  # fmt: skip
    cost, at = descend(vertices, edges, [], rng=rng, restarts=1, pairs=False)
    if not np.isfinite(cost):
        return
    found = evaluate(model, at)
    assert found.time_s >= bound_time_s(model)
    if not redundant(model, at):
        assert found.mean_bytes >= bound_bytes(model.network, ranks)


MODELS: dict[tuple[str, tuple[int, ...]], Model] = {}


def redundant(model: Model, at: list[int]) -> bool:
    """Whether some counted product is not divided by every axis."""
    counted = {x.node for x in layers(model.network)}
    return any(
        v.name in counted and not all(s.divided for s in model.choices[i][at[i]].signatures)
        for i, v in enumerate(model.network.vertices)
        if v.kind == "op"
    )


@pytest.mark.parametrize("net", ["fc", "wide"])
def test_the_best_plans_are_above_and_near(net: str) -> None:
    plan = AutoDDL().plan(problem(net))
    assert plan.bound_time_s <= plan.time_s <= 8 * plan.bound_time_s
    search = MeshSearch(Model.of(problem(net), make_mesh(problem(net).fabric, COST, plan.mesh)))
    assert plan.bound_time_s == pytest.approx(bound_time_s(search.model))


def test_the_fastest_ingress_is_all_links_into_a_device() -> None:
    assert fastest_ingress_Bps(problem("fc").fabric) == 100 * 125_000
