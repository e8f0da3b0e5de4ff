"""Rank orders: brute force on few hosts, bounds that hold for every order, the card's example, constraints, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import networkx as nx
import numpy as np
import pytest
from classic_oracle import assert_right, hub
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.classic.ring import Ring
from meshwright.decide.collective.cloudcollectives.bound import (
    assignment_bound,
    bottleneck_matching,
    lower_bound,
    one_tree_bound,
    ring_bottleneck_bound,
    ring_sum_bound,
)
from meshwright.decide.collective.cloudcollectives.cost import ALGORITHMS, CostMatrix, Model, model_of
from meshwright.decide.collective.cloudcollectives.groups import infer_groups
from meshwright.decide.collective.cloudcollectives.search import ring_tour
from meshwright.decide.collective.cloudcollectives.strategy import CloudCollectives, best_choice, order_ranks
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.rank_orders import best_order

RNG = np.random.default_rng
SIZE = 1 << 20


def matrix_of(alpha: np.ndarray, beta: np.ndarray | None = None, **more: Any) -> CostMatrix:
    n = len(alpha)
    defaults: dict[str, Any] = {"host": tuple(range(n)), "group": (0,) * n}
    beta = np.zeros((n, n)) if beta is None else beta
    return CostMatrix(names=tuple(f"h{i}" for i in range(n)), alpha_s=alpha, beta_s_per_byte=beta, **{**defaults, **more})


def random_matrix(seed: int, n: int, *, symmetric: bool = False, groups: int = 1, uplinks: bool = False) -> CostMatrix:
    rng = RNG(seed)
    alpha, beta = rng.integers(1, 20, (n, n)) * 1e-5, rng.integers(1, 20, (n, n)) * 1e-9
    if symmetric:
        alpha, beta = np.minimum(alpha, alpha.T), np.minimum(beta, beta.T)
    np.fill_diagonal(alpha, 0)
    np.fill_diagonal(beta, 0)
    group = tuple(int(g) for g in rng.integers(0, groups, n))
    rates = tuple(float(r) for r in rng.integers(1, 9, groups) * 1e8) if uplinks else ()
    return matrix_of(alpha, beta, group=group, uplink_Bps=rates)


def two_racks(n: int, *, near: float = 1e-5, far: float = 1e-3, uplink: float = 0.0) -> CostMatrix:
    """n hosts, even ones in one rack and odd ones in the other."""
    group = tuple(i % 2 for i in range(n))
    alpha = np.array([[0.0 if i == j else near if group[i] == group[j] else far for j in range(n)] for i in range(n)])
    return matrix_of(alpha, np.full((n, n), 1e-8), group=group, uplink_Bps=(uplink, uplink) if uplink else ())


def models(matrix: CostMatrix) -> list[Model]:
    found = []
    for algorithm in ALGORITHMS:
        for op in ("all-reduce", "all-gather", "all-to-all", "broadcast"):
            try:
                found.append(model_of(matrix, algorithm, op, SIZE))
            except Unsupported:
                continue
    return found


# ---- the oracle: every order -------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 6), groups=st.integers(1, 3), uplinks=st.booleans(), first=st.sampled_from([None, 0, 1]))
def test_few_hosts_get_the_best_of_all_orders(seed: int, n: int, groups: int, uplinks: bool, first: int | None) -> None:
    matrix = random_matrix(seed, n, groups=groups, uplinks=uplinks)
    for model in models(matrix):
        orders = [o for o in permutations(range(n)) if first is None or o[0] == first]
        best = min(model(o) for o in orders)
        found = order_ranks(matrix, model.algorithm, model.op, SIZE, rng=RNG(0), first=first)
        assert found.after == model(found.order) == pytest.approx(best)
        assert sorted(found.order) == list(range(n)) and (first is None or found.order[0] == first)
        assert found.proof and found.bound_s <= found.after.time_s * (1 + 1e-9)
        if not first:
            assert found.after <= found.before


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.sampled_from([7, 8]), groups=st.integers(1, 3))
def test_rings_of_eight_hosts_by_dynamic_programming_equal_brute_force(seed: int, n: int, groups: int) -> None:
    matrix = random_matrix(seed, n, groups=groups)
    d = matrix.alpha_s
    rings = [(0, *rest) for rest in permutations(range(1, n))]
    steps = [[float(d[a, b]) for a, b in zip(r, (*r[1:], r[0]), strict=True)] for r in rings]
    tour = ring_tour(d, bottleneck=False)
    assert sum(d[a, b] for a, b in zip(tour, [*tour[1:], tour[0]], strict=True)) == pytest.approx(min(map(sum, steps)))
    tour = ring_tour(d, bottleneck=True)
    assert max(d[a, b] for a, b in zip(tour, [*tour[1:], tour[0]], strict=True)) == min(map(max, steps))


def test_rings_too_large_for_all_orders_are_exact_by_dynamic_programming() -> None:
    """Fourteen hosts; the oracle is the search of every order, as far as it rules orders out."""
    matrix = random_matrix(5, 14, groups=2)
    found = order_ranks(matrix, "ring", "all-reduce", SIZE, rng=RNG(0))
    assert found.proof == "exact" and found.evaluated < 50
    model = model_of(matrix, "ring", "all-reduce", SIZE)
    order, whole, _ = best_order(
        [[h] for h in range(14)], 1, model.passes, matrix.alpha_s, matrix.beta_s_per_byte, np.asarray(matrix.group), matrix.capacity_Bps,
        tuple(range(14)), most=10**8,
    )  # fmt: skip
    assert whole and model(order).time_s == pytest.approx(found.after.time_s)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 6), groups=st.integers(1, 3), uplinks=st.booleans(), symmetric=st.booleans())
def test_no_order_beats_the_bounds(seed: int, n: int, groups: int, uplinks: bool, symmetric: bool) -> None:
    matrix = random_matrix(seed, n, groups=groups, uplinks=uplinks, symmetric=symmetric)
    for model in models(matrix):
        bound = lower_bound(model)
        assert all(model(order).time_s >= bound * (1 - 1e-9) for order in permutations(range(n)))
    d = matrix.alpha_s
    sums = min(sum(d[a, b] for a, b in zip(o, (*o[1:], o[0]), strict=True)) for o in permutations(range(n)))
    assert max(assignment_bound(d), one_tree_bound(d)) == ring_sum_bound(d) <= sums + 1e-12
    largest = min(max(d[a, b] for a, b in zip(o, (*o[1:], o[0]), strict=True)) for o in permutations(range(n)))
    assert ring_bottleneck_bound(d) <= largest


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 9))
def test_matchings_and_assignments_agree_with_networkx(seed: int, n: int) -> None:
    cost = random_matrix(seed, n).alpha_s
    graph = nx.DiGraph()
    graph.add_edges_from((("s", i), ("r", j), {"weight": float(cost[i, j])}) for i in range(n) for j in range(n) if i != j)
    plain = nx.Graph(graph)
    best = nx.bipartite.minimum_weight_full_matching(plain, [("s", i) for i in range(n)]) if _has_scipy() else None
    if best is not None:
        assert assignment_bound(cost) == pytest.approx(sum(cost[i, best["s", i][1]] for i in range(n)))
    limit = bottleneck_matching(cost, n)

    def matched(edges: list[tuple[Any, Any]]) -> int:
        some = nx.Graph(edges)
        some.add_nodes_from(("s", i) for i in range(n))
        return len(nx.bipartite.hopcroft_karp_matching(some, [("s", i) for i in range(n)])) // 2

    below = [(("s", i), ("r", j)) for i in range(n) for j in range(n) if i != j and cost[i, j] < limit]
    assert matched([*below, *((("s", i), ("r", j)) for i in range(n) for j in range(n) if i != j and cost[i, j] == limit)]) == n
    assert matched(below) < n


def test_a_matching_may_move_a_thousand_pairs_on() -> None:
    """Each sender takes the first receiver, so the last one's needs all of them moved: a search that calls itself went too deep."""
    n = 1100
    cost = np.full((n, n), 9.0)
    at = np.arange(n - 1)
    cost[at, at + 1] = cost[at, (at + 2) % n] = cost[n - 1, 1] = 1.0
    assert bottleneck_matching(cost, n) == 1.0



def _has_scipy() -> bool:
    from importlib.util import find_spec

    return find_spec("scipy") is not None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 9))
def test_the_ring_bottleneck_bound_is_two_edge_connectivity(seed: int, n: int) -> None:
    cost = random_matrix(seed, n, symmetric=True).alpha_s

    def fits(limit: float) -> bool:
        graph = nx.Graph((i, j) for i in range(n) for j in range(i) if cost[i, j] <= limit)
        return len(graph) == n and nx.is_connected(graph) and not any(nx.bridges(graph))

    values = sorted({float(x) for x in cost[~np.eye(n, dtype=bool)]})
    assert ring_bottleneck_bound(cost) == next(v for v in values if fits(v))


def test_an_assignment_by_brute_force() -> None:
    for seed in range(20):
        cost = random_matrix(seed, 5).alpha_s
        best = min(sum(cost[i, p[i]] for i in range(5)) for p in permutations(range(5)) if all(p[i] != i for i in range(5)))
        assert assignment_bound(cost) == pytest.approx(best)


# ---- what it is for ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [8, 16, 24])
def test_interleaved_racks_are_crossed_twice(n: int) -> None:
    """The card's example: 2 racks x 4 interleaved hosts, ring crossings 8 -> 2. All orders tie on the slowest message."""
    matrix = two_racks(n)
    found = order_ranks(matrix, "ring", "all-reduce", SIZE, rng=RNG(0))
    racks = [matrix.group[i] for i in found.order]
    assert sum(a != b for a, b in zip(racks, [*racks[1:], racks[0]], strict=True)) == 2
    assert found.before.time_s == found.after.time_s and found.before.load == n / 2 * found.after.load
    assert found.verdict == "no gain in time; less load on the network" and found.proof


@pytest.mark.parametrize("n", [8, 16, 24])
def test_a_shared_uplink_makes_crossings_cost(n: int) -> None:
    matrix = two_racks(n, far=1e-5, uplink=1e8)
    found = order_ranks(matrix, "ring", "all-reduce", 1 << 26, rng=RNG(0))
    assert found.gain == pytest.approx(n / 2, rel=0.2) and found.verdict == "worth it" and found.proof


@pytest.mark.parametrize("algorithm", ["halving-doubling", "bcube", "recursive-doubling", "hierarchical", "double-tree"])
def test_other_algorithms_gain_from_order_too(algorithm: str) -> None:
    matrix = two_racks(16, far=1e-5, uplink=1e8)
    found = order_ranks(matrix, algorithm, "all-reduce", 1 << 26, rng=RNG(0), budget=2000)
    assert found.after < found.before and found.bound_s <= found.after.time_s


def test_halving_with_near_partners_first_puts_racks_in_blocks_of_two() -> None:
    matrix = two_racks(8, far=1e-5, uplink=1e8)
    found = order_ranks(matrix, "halving-doubling", "all-reduce", 1 << 26, rng=RNG(0), budget=8000)
    blocks = [matrix.group[i] for i in found.order]
    assert blocks == sorted(blocks) or blocks == sorted(blocks, reverse=True)  # only the smallest exchange leaves a rack


@pytest.mark.parametrize("told", [True, False])
def test_racks_that_nobody_named_are_kept_together(told: bool) -> None:
    """Eight hosts of two racks in turn, in a file without groups, or with one group for all: a ring crosses eight times where two suffice."""
    document = two_racks(8).to_document() | {"group": [0] * 8}
    if not told:
        del document["group"]
    matrix = CostMatrix.from_document(document)
    assert len(set(matrix.group)) == (1 if told else 2)
    racks = [i % 2 for i in range(8)]
    found = order_ranks(matrix, "ring", "all-reduce", SIZE, rng=RNG(0))
    assert sum(racks[a] != racks[b] for a, b in pairwise([*found.order, found.order[0]])) == 2
    assert found.verdict == "no gain in time; less load on the network" and found.proof == "exact" and found.more["proved_for"] == "all orders"


@pytest.mark.parametrize("algorithm", ["halving-doubling", "halving-doubling-far", "double-tree"])
def test_eight_hosts_of_one_group_get_the_best_of_all_orders(algorithm: str) -> None:
    matrix = random_matrix(11, 8)
    model = model_of(matrix, algorithm, "all-reduce", SIZE)
    found = order_ranks(matrix, algorithm, "all-reduce", SIZE, rng=RNG(0), budget=1)
    sample = min(model(RNG(k).permutation(8).tolist()) for k in range(1500))
    assert found.proof == "exact" and found.after.time_s < found.before.time_s and found.after <= sample


def test_far_first_is_near_first_in_another_order() -> None:
    matrix = random_matrix(12, 8)
    near, far = (order_ranks(matrix, a, "all-reduce", SIZE, rng=RNG(0)) for a in ("halving-doubling", "halving-doubling-far"))
    assert near.after.time_s == pytest.approx(far.after.time_s)
    with pytest.raises(Unsupported, match="halving-doubling-far has no all-gather"):
        order_ranks(matrix, "halving-doubling-far", "all-gather", SIZE, rng=RNG(0))


def test_orders_inside_a_host_are_changed_where_it_helps() -> None:
    """Two hosts of two endpoints; only the first of each is near the other host's second."""
    alpha = np.full((4, 4), 1e-3)
    for a, b in ((0, 1), (2, 3), (0, 3), (2, 1)):
        alpha[a, b] = alpha[b, a] = 1e-5
    np.fill_diagonal(alpha, 0)
    given = replace(matrix_of(alpha), host=(0, 0, 1, 1), names=("a0", "a1", "b0", "b1"))
    crossed = replace(given, alpha_s=alpha[np.ix_([0, 1, 3, 2], [0, 1, 3, 2])])  # the second host's endpoints the other way round
    found = order_ranks(crossed, "ring", "all-reduce", SIZE, rng=RNG(0))
    whole = order_ranks(given, "ring", "all-reduce", SIZE, rng=RNG(0))
    assert whole.verdict == "no gain possible" and found.after.time_s == whole.after.time_s < found.before.time_s
    assert [crossed.host[i] for i in found.order] in ([0, 0, 1, 1], [1, 1, 0, 0])
    pinned = order_ranks(crossed, "ring", "all-reduce", SIZE, rng=RNG(0), first=3)
    assert pinned.order[0] == 3 and pinned.after.time_s == whole.after.time_s


def test_an_order_that_a_fixed_first_rank_makes_slower_is_not_called_a_gain() -> None:
    """A tree whose root is given well, and asked for at an endpoint that sends slowly."""
    alpha = np.full((6, 6), 1e-5)
    alpha[5, :] = 1e-2
    np.fill_diagonal(alpha, 0)
    found = order_ranks(matrix_of(alpha), "rooted-tree", "broadcast", SIZE, rng=RNG(0), first=5)
    assert found.order[0] == 5 and found.gain < 1 and found.verdict == "slower than as given, for the first endpoint that was asked for"


def test_no_gain_is_an_answer() -> None:
    uniform = matrix_of(1e-4 * (1 - np.eye(20)))
    for algorithm in ("ring", "halving-doubling", "recursive-doubling", "bruck"):
        found = order_ranks(uniform, algorithm, "all-reduce", SIZE, rng=RNG(0))
        assert found.verdict == "no gain possible" and found.proof == "bound" and found.evaluated == 0 and found.gain == 1


def test_hosts_that_are_alike_need_no_search() -> None:
    """Eight boxes on one switch: whatever the algorithm, all orders of boxes cost the same, and this is seen from the matrix."""
    fabric = load_fabric("dgx-h100:4")
    matrix = CostMatrix.of_fabric(fabric, [d.name for d in fabric.devices])
    for algorithm in ALGORITHMS:
        model = model_of(matrix, algorithm, "all-reduce", SIZE)
        found = order_ranks(matrix, algorithm, "all-reduce", SIZE, rng=RNG(0))
        assert found.proof and found.evaluated == 0 and found.verdict == "no gain possible"
        boxes = RNG(1).permutation(4)
        assert model([8 * int(b) + i for b in boxes for i in range(8)]).time_s == pytest.approx(model(range(32)).time_s)
    slow = replace(matrix, alpha_s=matrix.alpha_s + np.where(np.arange(32) < 8, 1e-5, 0)[:, None] * (1 - np.eye(32)))
    assert order_ranks(slow, "halving-doubling", "all-reduce", SIZE, rng=RNG(0)).evaluated > 0


def test_hosts_stay_together_and_the_first_rank_stays() -> None:
    matrix = replace(two_racks(12), host=tuple(i // 2 for i in range(12)))
    for first in (None, 0, 5):
        found = order_ranks(matrix, "ring", "all-reduce", SIZE, rng=RNG(0), first=first)
        hosts = [matrix.host[i] for i in found.order]
        assert sum(a != b for a, b in pairwise(hosts)) == 5
        assert first is None or found.order[0] == first


def test_equal_seeds_give_equal_orders_and_text_forms_agree() -> None:
    matrix = random_matrix(3, 20, groups=3)
    one, two = (order_ranks(matrix, "halving-doubling", "all-reduce", SIZE, rng=RNG(7), budget=600) for _ in range(2))
    assert one == two
    assert one.hostfile().split() == [matrix.names[i] for i in one.order]
    for line in one.assignment().splitlines():
        name, rank = line.split(" RANK=")
        assert matrix.names[one.order[int(rank)]] == name
    json.dumps(one.to_json())


def test_the_best_algorithm_depends_on_the_size() -> None:
    matrix = matrix_of(1e-4 * (1 - np.eye(16)), np.full((16, 16), 1e-9))
    small = best_choice(matrix, "all-reduce", 64, rng=RNG(0), budget=50)
    large = best_choice(matrix, "all-reduce", 1 << 30, rng=RNG(0), budget=50)
    assert small[0].algorithm in ("recursive-doubling", "bcube") and large[0].algorithm in ("halving-doubling", "bcube", "ring", "bruck")
    for name in set(ALGORITHMS) - {o.algorithm for o in large}:
        assert lower_bound(model_of(matrix, name, "all-reduce", 1 << 30)) >= large[0].after.time_s
    assert [o.after.time_s for o in large] == sorted(o.after.time_s for o in large)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(2, 5), min_size=2, max_size=4))
def test_locality_groups_are_found_in_shuffled_costs(seed: int, sizes: list[int]) -> None:
    rng = RNG(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    rng.shuffle(truth)
    same = truth[:, None] == truth[None, :]
    cost = np.where(same, 1e-5, 1e-3) * rng.uniform(0.9, 1.1, same.shape)
    np.fill_diagonal(cost, 0)
    found = infer_groups(cost)
    assert len({(a, int(b)) for a, b in zip(found, truth, strict=True)}) == len(sizes) == len(set(found))
    assert set(infer_groups(np.where(np.eye(6, dtype=bool), 0, 1e-3))) == {0}


# ---- against the simulator -------------------------------------------------------------------------------------------------
def scattered(name: str, seed: int) -> tuple[Fabric, tuple[str, ...]]:
    fabric = load_fabric(name)
    return fabric, tuple(fabric.devices[i].name for i in RNG(seed).permutation(len(fabric.devices)))


def test_predicted_and_simulated_times_of_rings_rank_alike() -> None:
    """20 random orders on two islands: Spearman >= 0.9."""
    fabric, ranks = scattered("two-islands:4", 0)
    matrix = CostMatrix.of_fabric(fabric, ranks)
    model = model_of(matrix, "ring", "all-reduce", 1 << 22)
    problem = CollectiveProblem(fabric=fabric, op="all-reduce", ranks=ranks, size_bytes=1 << 22)
    predicted, simulated = [], []
    for seed in range(20):
        order = tuple(int(x) for x in RNG(seed + 1).permutation(8))
        predicted.append(model(order).time_s)
        plan = Ring(order=order, rings=1).plan(problem, rng=RNG(0))
        simulated.append(simulated_time_s(plan.program, fabric, ranks, None))
    a, b = (_mean_ranks(np.round(x, 9)) for x in (predicted, simulated))
    assert np.corrcoef(a, b)[0, 1] >= 0.9


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[where]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None])
def test_the_strategy_is_right_and_not_slower_than_the_given_order(algorithm: str | None) -> None:
    fabric, ranks = scattered("two-islands:3", 3)
    for op in ("all-reduce", "all-gather", "broadcast"):
        problem = CollectiveProblem(fabric=fabric, op=op, ranks=ranks, size_bytes=4 * 6 * 4096, root=2)
        try:
            plan = CloudCollectives(algorithm=algorithm, budget=200).plan(problem, rng=RNG(0))
        except Unsupported as refusal:
            assert refusal.hint
            continue
        assert_right(plan.program, problem, RNG(0))
        name = plan.options["algorithm"]
        plain = CloudCollectives(algorithm=name, order=tuple(range(6))).plan(problem, rng=RNG(0))
        took, before = (simulated_time_s(p.program, fabric, ranks, None) for p in (plan, plain))
        assert took <= before
        if op == "all-reduce" and name == "ring":
            assert took < before


def test_keeping_the_first_rank_is_an_option() -> None:
    fabric, ranks = scattered("two-islands:3", 2)
    problem = CollectiveProblem(fabric=fabric, op="all-reduce", ranks=ranks, size_bytes=1 << 16)
    plan = CloudCollectives(algorithm="halving-doubling", keep_first=True, hosts=False, budget=300).plan(problem, rng=RNG(0))
    assert plan.options["order"][0] == 0


# ---- files and refusals ------------------------------------------------------------------------------------------------------
def test_matrices_are_read_back_as_written() -> None:
    matrix = random_matrix(1, 5, groups=2, uplinks=True)
    again = CostMatrix.from_document(json.loads(json.dumps(matrix.to_document())))
    assert again.names == matrix.names and (again.alpha_s == matrix.alpha_s).all() and again.uplink_Bps == matrix.uplink_Bps
    assert (again.beta_s_per_byte == matrix.beta_s_per_byte).all() and (again.host, again.group) == (matrix.host, matrix.group)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "else"), ("version", 2), ("names", ["a"]), ("names", ["a", "a", "b"]), ("names", "abc"), ("alpha_s", [[0, 1], [1, 0]]),
        ("alpha_s", [[0, -1, 1]] * 3), ("beta_s_per_byte", [[0, 1, "2"]] * 3), ("beta_s_per_byte", None), ("host", [0, 1]), ("group", [0, 1, 9]),
        ("group", [0, 1, True]), ("uplink_Bps", [-1]), ("uplink_Bps", "fast"),
    ],
)  # fmt: skip
def test_wrong_matrices_name_the_field(field: str, value: Any) -> None:
    document = random_matrix(1, 3).to_document() | {field: value}
    with pytest.raises(FormatError) as error:
        CostMatrix.from_document(document)
    assert error.value.where in (field, "schema")


def test_refusals() -> None:
    matrix = random_matrix(0, 4)
    with pytest.raises(Unsupported):
        order_ranks(matrix, "ring", "broadcast", SIZE, rng=RNG(0))
    with pytest.raises(Unsupported):
        order_ranks(matrix, "quantum", "all-reduce", SIZE, rng=RNG(0))
    with pytest.raises(Unsupported):
        best_choice(matrix, "permute", SIZE, rng=RNG(0))
    for more in ({"first": 4}, {"budget": 0}, {"restarts": 0}):
        with pytest.raises(UsageError):
            order_ranks(matrix, "ring", "all-reduce", SIZE, rng=RNG(0), **more)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        CloudCollectives(order=(0, 0)).plan(CollectiveProblem.on(hub(2), "all-reduce", 8), rng=RNG(0))
    with pytest.raises(UsageError):
        CloudCollectives(algorithm="quantum", order=(0, 1)).plan(CollectiveProblem.on(hub(2), "all-reduce", 8), rng=RNG(0))
    with pytest.raises(Unsupported):
        CloudCollectives().plan(CollectiveProblem.on(hub(2), "all-gather", 16, shard_bytes=(4, 12)), rng=RNG(0))


def test_an_operation_without_orders_is_refused_before_the_costs_of_all_pairs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostMatrix, "of_fabric", staticmethod(lambda *_: pytest.fail("the costs are found first")))
    with pytest.raises(Unsupported, match="does not do scatter"):
        CloudCollectives().plan(CollectiveProblem.on(hub(2), "scatter", 8), rng=RNG(0))
