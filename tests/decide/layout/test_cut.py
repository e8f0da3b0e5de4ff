"""Stages against brute force; units in a topological order with regions contiguous."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.decide.layout.cut import MAX_CUTS, Unit, border_values, cut_stages, dtype_bytes, order_units
from meshwright.decide.layout.megatron import Region
from meshwright.errors import Infeasible
from meshwright.graph.graph import GraphValue, OpGraph, OpNode

UNIT = Unit(())


def stage_value(starts: list[int], time_of: list[float], border: list[float]) -> float:
    ends = [*starts[1:], len(time_of)]
    return max(sum(time_of[a:b]) + (border[b] if b < len(time_of) else 0.0) for a, b in zip(starts, ends, strict=True))


@given(st.data(), st.integers(2, 9), st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_brute_force_makes_it(data: st.DataObject, n: int, stages: int) -> None:
    time_of = data.draw(st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n))
    border = [0.0, *data.draw(st.lists(st.integers(0, 5).map(float), min_size=n - 1, max_size=n - 1)), 0.0]
    allowed = [True, *data.draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)), True]
    cuts = [i for i in range(1, n) if allowed[i]]
    options = [[0, *c] for c in combinations(cuts, stages - 1)]
    if not options:
        with pytest.raises(Infeasible, match="at most"):
            cut_stages([UNIT] * n, stages, time_of, border, allowed)
        return
    found = cut_stages([UNIT] * n, stages, time_of, border, allowed)
    assert found in options
    assert stage_value(found, time_of, border) == min(stage_value(o, time_of, border) for o in options)


def test_a_graph_with_very_many_cuts_is_thinned_to_the_cheapest_ones() -> None:
    n = MAX_CUTS * 5
    border = [0.0, *(1.0 if i % 7 else 0.0 for i in range(1, n)), 0.0]
    starts = cut_stages([UNIT] * n, 4, [1.0] * n, border, [True] * (n + 1))
    assert [border[s] for s in starts[1:]] == [0.0] * 3
    assert max(b - a for a, b in pairwise([*starts, n])) <= n // 4 + 14


def graph_of(edges: dict[str, list[str]], pick: tuple[str, ...] = ()) -> OpGraph:
    nodes = tuple(
        OpNode(
            name=name,
            target="operator.getitem" if name in pick else "aten.relu.default",
            module="",
            inputs=tuple(ins),
            outputs=(GraphValue(shape=(2,), dtype="float32", storage=0),),
        )
        for name, ins in edges.items()
    )
    return OpGraph(model="m", method="export", batch_size=2, loss="mse", inputs=(), parameters=(), nodes=nodes, outputs=(nodes[-1].name,))


def region(*nodes: str) -> Region:
    return Region(nodes=nodes, entries=(), rows=(nodes[-1],), shards=(), row_bias=(), units=2)


def test_regions_become_contiguous_and_order_stays_topological() -> None:
    graph = graph_of({"a": [], "r1": ["a"], "b": ["a"], "r2": ["r1"], "c": ["b", "r2"]})
    units = order_units(graph, [region("r1", "r2")])
    assert [[n.name for n in u.nodes] for u in units] == [["a"], ["r1", "r2"], ["b"], ["c"]]
    assert [set(b) for b in border_values(units)] == [set(), {"a"}, {"a", "r2"}, {"b", "r2"}, set()]


def test_a_region_that_would_close_a_cycle_is_dissolved() -> None:
    graph = graph_of({"a": [], "r1": ["a"], "b": ["r1"], "r2": ["b"], "c": ["r2"]})
    units = order_units(graph, [region("r1", "r2")])
    assert [u.region for u in units] == [None] * 5


def test_nodes_that_pick_from_a_tuple_stay_with_it() -> None:
    graph = graph_of({"a": [], "s": ["a"], "x": ["a"], "s0": ["s"], "s1": ["s"], "y": ["s0", "s1", "x"]}, pick=("s0", "s1"))
    units = order_units(graph, [])
    assert ["s", "s0", "s1"] in [[n.name for n in u.nodes] for u in units]


def test_bytes_of_dtypes() -> None:
    assert [dtype_bytes(d) for d in ("float32", "bfloat16", "int64", "bool")] == [4, 2, 8, 1]
