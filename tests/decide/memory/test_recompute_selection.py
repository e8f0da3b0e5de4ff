"""Selection of operators to recompute against brute force over all sets, rules, and captured layers."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from captured import captured
from meshwright.decide.memory import FullUniform, OptimalRecompute, RecomputeProblem, StageBudget, selective, strategies, strategy
from meshwright.decide.memory.captured import core_attention, layer_nodes, layer_of, repeated_layers
from meshwright.decide.memory.problem import Layer, LayerPolicy, Operator, policy_of
from meshwright.decide.memory.rules import FullBlock, KeepAll, SelectiveAttention
from meshwright.decide.memory.selective import best_policy, frontier, relaxed_time_s, stage_mix
from meshwright.errors import Infeasible, UnknownName, Unsupported, UsageError
from meshwright.graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from meshwright.testing.recompute import layers

RNG = np.random.default_rng(0)
BLOCKS = Path(__file__).parent.parent.parent / "ledger" / "ledger_blocks.py"


def every_policy(layer: Layer) -> list[LayerPolicy]:
    names, found = [o.name for o in layer.operators], []
    for r in range(len(names) + 1):
        for chosen in combinations(names, r):
            try:
                found.append(policy_of(layer, chosen))
            except UsageError:
                continue
    return found


@given(layers(), st.integers(0, 200))
@settings(max_examples=150)
def test_the_best_policy_is_that_of_brute_force(layer: Layer, budget: int) -> None:
    fitting = [p for p in every_policy(layer) if p.kept_bytes <= budget]
    if not fitting:
        with pytest.raises(Infeasible):
            best_policy(layer, budget)
        return
    found = best_policy(layer, budget)
    assert found.kept_bytes <= budget
    assert found.time_s == min(p.time_s for p in fitting)
    assert relaxed_time_s(layer, budget) <= found.time_s + 1e-9


@given(layers(most=7))
@settings(max_examples=60)
def test_the_frontier_is_that_of_brute_force(layer: Layer) -> None:
    points = {(p.kept_bytes, p.time_s) for p in every_policy(layer)}
    pareto = [(k, t) for k, t in points if not any((k2 <= k and t2 < t) or (k2 < k and t2 <= t) for k2, t2 in points)]
    for found in (frontier(layer), selective._by_programmes(layer, 64)):  # by all sets, and as layers of more operators
        assert [(p.kept_bytes, p.time_s) for p in found] == sorted(pareto, reverse=True)


def test_layers_that_differ_in_names_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Layer:
        chain = [Operator(name=f"{name}{i}", time_s=1.125 + i, reads=(i,), makes=(i + 1,)) for i in range(4)]
        return Layer(operators=tuple(chain), sizes=(8, 16, 32, 64, 128), needed=(1, 2, 3, 4))

    solved, own = [], selective._of_all_sets
    monkeypatch.setattr(selective, "_of_all_sets", lambda layer: solved.append(1) or own(layer))
    first, second = (frontier(named(name)) for name in "ab")
    assert len(solved) == 1 and len(first) > 2
    assert [[x.replace("a", "b") for x in p.recompute] for p in first] == [[*p.recompute] for p in second]
    assert frontier(named("a"), points=2) == first[:2]


@given(layers(most=5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 700))
@settings(max_examples=60)
def test_the_mix_of_a_stage_is_that_of_brute_force(layer: Layer, count: int, flight: int, bytes_: int) -> None:
    policies, budget = frontier(layer)[:4], StageBudget(layers=count, in_flight=flight, budget_bytes=bytes_)
    slots, best = count * flight, float("inf")

    def counts(left: int, kinds: int) -> Any:
        if kinds == 1:
            yield (left,)
            return
        for n in range(left + 1):
            yield from ((n, *rest) for rest in counts(left - n, kinds - 1))

    for c in counts(slots, len(policies)):
        kept = sum(n * p.kept_bytes for n, p in zip(c, policies, strict=True))
        workspace = max(p.workspace_bytes for n, p in zip(c, policies, strict=True) if n)
        if kept + workspace <= bytes_:
            best = min(best, sum(n * p.time_s for n, p in zip(c, policies, strict=True)) / flight)
    if best == float("inf"):
        with pytest.raises(Infeasible, match="may keep"):
            stage_mix(policies, budget)
        return
    found = stage_mix(policies, budget)
    assert found.time_s == pytest.approx(best, abs=1e-9)
    assert found.bound_s <= found.time_s
    assert sum(found.counts) == slots and found.kept_bytes + found.workspace_bytes <= bytes_


def chain() -> RecomputeProblem:
    """x -> a -> b -> c, where b is core attention: big and cheap."""
    operators = (
        Operator(name="a", time_s=4.0, reads=(0,), makes=(1,)),
        Operator(name="b", time_s=1.0, reads=(1,), makes=(2,)),
        Operator(name="c", time_s=8.0, reads=(2,), makes=(3,)),
    )
    layer = Layer(operators=operators, sizes=(10, 20, 100, 10), needed=(0, 1, 2))
    return RecomputeProblem(layer=layer, core=("b",), stages=tuple(StageBudget(layers=3, in_flight=n, budget_bytes=1200) for n in (3, 2, 1)))


def test_rules_count_what_they_say() -> None:
    problem = chain()
    with pytest.raises(Infeasible, match="stage 0: keeps 1170 bytes") as error:
        KeepAll().plan(msgspec.structs.replace(problem, stages=(StageBudget(layers=3, in_flight=3, budget_bytes=1000),)), rng=RNG)
    assert error.value.data == {"stage": 0, "needed_bytes": 1170, "limit_bytes": 1000}
    assert [s.kept_bytes for s in KeepAll().plan(problem, rng=RNG).stages] == [1170, 780, 390]
    selective = SelectiveAttention().plan(problem, rng=RNG)
    assert selective.policies[0].recompute == ("b",) and [s.kept_bytes for s in selective.stages] == [270, 180, 90]
    assert selective.slowest_s == 3.0 and selective.stages[0].workspace_bytes == 100
    full = FullUniform().plan(problem, rng=RNG)
    assert full.policies[0].recompute == ("a", "b") and [s.kept_bytes for s in full.stages] == [90, 60, 30]  # c is needed by nobody
    assert full.slowest_s == 15.0
    pairs = FullUniform(every=2).plan(problem, rng=RNG)
    assert pairs.stages[0].counts == (6, 3) and pairs.stages[0].kept_bytes == 60 and pairs.stages[0].workspace_bytes == 120 + 130
    block = FullBlock(layers=2).plan(problem, rng=RNG)
    assert block.stages[1].counts == (4, 2) and block.stages[1].kept_bytes == 4 * 10 + 2 * 130
    assert FullBlock(layers=0).plan(problem, rng=RNG).stages[2].kept_bytes == 390


def test_later_stages_recompute_less() -> None:
    stages = tuple(StageBudget(layers=3, in_flight=n, budget_bytes=500) for n in (3, 2, 1))
    found = OptimalRecompute().plan(msgspec.structs.replace(chain(), stages=stages), rng=RNG)
    assert found.stages[2].time_s == 0.0
    assert found.stages[0].time_s > found.stages[2].time_s
    assert all(sum(n for n in s.counts) == 3 * flight for s, flight in zip(found.stages, (3, 2, 1), strict=True))
    one = OptimalRecompute(layer_budget_bytes=30).plan(msgspec.structs.replace(chain(), stages=stages), rng=RNG)
    assert [p.recompute for p in one.policies] == [("b",)]


@given(layers(most=6), st.integers(0, 400))
@settings(max_examples=40)
def test_no_rule_beats_the_optimum(layer: Layer, bytes_: int) -> None:
    core = tuple(o.name for o in layer.operators[1:3])
    problem = RecomputeProblem(layer=layer, core=core, stages=(StageBudget(layers=2, in_flight=2, budget_bytes=bytes_),))
    try:
        best = OptimalRecompute().plan(problem, rng=RNG).slowest_s
    except Infeasible:
        best = float("inf")
    for rule in (KeepAll(), SelectiveAttention()):
        try:
            assert rule.plan(problem, rng=RNG).slowest_s >= best - 1e-9
        except (Infeasible, Unsupported, UsageError):
            continue


def test_every_strategy_is_named_and_rebuilt_from_its_options() -> None:
    for kind in strategies("regions"):
        plan = kind().plan(chain(), rng=RNG)
        assert plan.strategy == kind.name and strategy(kind.name, "regions") is kind
        assert msgspec.json.encode(kind(**plan.options).plan(chain(), rng=RNG)) == msgspec.json.encode(plan)


def test_wrong_problems_are_refused() -> None:
    good = chain().layer
    for change in (
        {"sizes": (1, 2)},
        {"needed": (9,)},
        {"sizes": (1, 2, 3, -4)},
        {"operators": (good.operators[0], good.operators[0])},
        {"operators": (msgspec.structs.replace(good.operators[0], time_s=-1.0),)},
    ):
        with pytest.raises(UsageError):
            Layer(**{"operators": good.operators, "sizes": good.sizes, "needed": good.needed, **change})
    with pytest.raises(UsageError, match="no operator 'z'"):
        policy_of(good, ["z"])
    torn = Layer(operators=(good.operators[0], Operator(name="w", time_s=0.0, reads=(), makes=(1,))), sizes=good.sizes, needed=(1,))
    with pytest.raises(UsageError, match="in place"):
        policy_of(torn, ["w"])
    for bad in (FullUniform(every=0), FullBlock(layers=-1), OptimalRecompute(points=1)):
        with pytest.raises(UsageError, match="must be at least"):
            bad.plan(chain(), rng=RNG)
    with pytest.raises(Unsupported, match="no core attention"):
        SelectiveAttention().plan(msgspec.structs.replace(chain(), core=()), rng=RNG)


def test_a_captured_layer() -> None:
    from meshwright.ledger.layer import layer_ledger, total_bytes
    from meshwright.ledger.transformer import SplitLayout, Transformer

    graph = captured(f"{BLOCKS}:paper", loss="output", scalable=False)
    assert repeated_layers(graph) == ("blocks.0", "blocks.1")
    layer = layer_of(graph, "blocks.1", lambda n: float(n.forward.flops))
    model = Transformer(layers=2, hidden=64, heads=4, sequence=32, vocabulary=96, statistics_bytes=2)
    ledger = layer_ledger(model, SplitLayout(microbatch_size=2))
    assert policy_of(layer, ()).kept_bytes == total_bytes(ledger)
    core = core_attention(layer_nodes(graph, "blocks.1"))
    assert [graph.node(n).target.split(".")[1] for n in core if "getitem" not in n] == [
        "matmul", "div", "full", "triu", "add", "softmax", "native_dropout", "matmul",
    ]  # fmt: skip
    problem = RecomputeProblem(layer=layer, core=core, stages=(StageBudget(layers=2, in_flight=1, budget_bytes=1 << 30),))
    selective = SelectiveAttention().plan(problem, rng=RNG)
    assert selective.policies[0].kept_bytes == total_bytes(tuple(k for k in ledger if not k.core))  # the paper's 34sbh
    assert FullUniform().plan(problem, rng=RNG).policies[0].kept_bytes == 2 * 32 * 2 * 64  # the paper's 2sbh
    with pytest.raises(UnknownName, match=r"'blocks\.7'"):
        layer_nodes(graph, "blocks.7")


def test_nothing_repeats_in_a_graph_without_lists() -> None:
    value = GraphValue(shape=(2,), dtype="float32", storage=0)
    node = OpNode(name="relu", target="aten.relu_.default", module="net", inputs=("input:0",), outputs=(value,), forward=Work(calls=1), saved=(0,))
    graph = OpGraph(
        model="m", method="export", batch_size=1, loss="output", inputs=(value,), parameters=(), nodes=(node,),
        storages=(Storage(size_bytes=8, owner="input:0"),),
    )  # fmt: skip
    assert repeated_layers(graph) == ()
    layer = layer_of(graph, "net", lambda n: 1.0)
    assert layer.operators[0].makes == (0,) and layer.operators[0].reads == ()  # in place


def test_nearest_changes_of_a_budget_fit_and_are_tight():
    from meshwright.decide.memory.nearest import nearest_feasible

    chain = layer_of_sizes()
    slim, slack = policy_of(chain, ()), 3
    stage = StageBudget(layers=6, in_flight=4, budget_bytes=10 * slim.kept_bytes + slack)
    problem = RecomputeProblem(layer=chain, stages=(stage,))
    with pytest.raises(Infeasible) as caught:
        KeepAll().plan(problem, rng=np.random.default_rng(0))
    better = nearest_feasible(caught.value, problem, KeepAll(), {"optimal": OptimalRecompute()}, smaller=iter([(1, problem)]))
    changes = {c["kind"]: c for c in better.data["changes"]}

    def fits(**fields):
        changed = msgspec.structs.replace(problem, stages=(msgspec.structs.replace(stage, **fields),))
        try:
            KeepAll().plan(changed, rng=np.random.default_rng(0))
        except Infeasible:
            return False
        return True

    assert changes["layers"]["value"] == 2 and fits(layers=2) and not fits(layers=3)
    assert changes["in-flight"]["value"] == 1 and fits(in_flight=1) and not fits(in_flight=2)
    needed = changes["budget"]["value"]
    assert needed == 24 * slim.kept_bytes and fits(budget_bytes=needed) and not fits(budget_bytes=needed - 1)
    assert "micro-batch" not in changes  # the problem it was given does not fit either
    assert better.hint.startswith("nearest changes: ") and better.exit_code == 3
    bare = Infeasible("x")
    alone = nearest_feasible(bare, problem, KeepAll(), {})
    assert alone is bare


def layer_of_sizes():
    """Three operators in a row, each of whose results backward needs."""
    operators = tuple(Operator(name=f"o{i}", time_s=1.0, reads=(i,), makes=(i + 1,)) for i in range(3))
    return Layer(sizes=(4, 10, 20, 30), operators=operators, needed=(0, 1, 2, 3))
