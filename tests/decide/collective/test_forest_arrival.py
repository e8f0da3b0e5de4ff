"""Trees that hurry: same limits on every link, data there sooner; and graphs without a way back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from collective_oracle import balanced_fabric
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import assert_sound

from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll import arrival
from meshwright.decide.collective.forestcoll.arrival import HopTimes, arrival_s, quicker, without_way_back
from meshwright.decide.collective.forestcoll.forest import build_forest
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric


def with_latencies(fabric: Fabric, rng: np.random.Generator) -> Fabric:
    links = tuple(
        replace(x, latency_s=float(rng.integers(0, 5)) * 1e-6, library_latency_s=float(rng.integers(0, 3)) * 1e-6) for x in fabric.links
    )
    return replace(fabric, links=links)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 8), st.integers(0, 3), st.booleans())
def test_quicker_forests_are_sound_and_never_later(seed: int, devices: int, switches: int, broadcast: bool) -> None:
    rng = np.random.default_rng(seed)
    fabric = with_latencies(balanced_fabric(rng, devices, switches), rng)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    weight = [int(r == 1 or not broadcast) for r in range(devices)]
    seconds = HopTimes(fabric, graph, turned=False)
    slow = build_forest(graph, weight, max_trees=10**9)
    fast = quicker(slow, seconds)
    assert_sound(fast, graph)
    assert (fast.k, fast.stretch, fast.optimum) == (slow.k, slow.stretch, slow.optimum)
    assert arrival_s(fast, seconds) <= arrival_s(slow, seconds)
    assert Counter({t.root: t.units for t in fast.trees}).keys() == Counter({t.root: t.units for t in slow.trees}).keys()


def test_what_data_takes_over_a_path_is_its_wires_and_the_largest_library() -> None:
    fabric = load_fabric("dgx-h100:2")
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    number = {name: v for v, name in enumerate(graph.names)}
    path = tuple(number[x] for x in ("box0/gpu0", "box0/nic0", "ib", "box1/nic0", "box1/gpu0"))
    assert HopTimes(fabric, graph, turned=False)(path) == pytest.approx(16.6e-6)
    assert HopTimes(fabric, graph.reversed(), turned=True)(path[::-1]) == pytest.approx(16.6e-6)


@pytest.mark.parametrize(("name", "before_us", "most_us"), [("mi250:1", 40.0, 24.7), ("dgx-h100:2", 28.0, 20.8)])
def test_published_machines_get_trees_that_hurry(name: str, before_us: float, most_us: float) -> None:
    """Packed as they come, trees of MI250 boxes are chains, and those of DGX-H100 boxes go through NVLink before and after the network."""
    fabric = load_fabric(name)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    seconds = HopTimes(fabric, graph, turned=False)
    slow = build_forest(graph, [1] * graph.ranks)
    fast = quicker(slow, seconds)
    assert slow.ratio == fast.ratio == 1
    assert arrival_s(slow, seconds) * 1e6 > before_us and arrival_s(fast, seconds) * 1e6 <= most_us
    assert max(fast.load[arc] / graph.arcs[arc] for arc in fast.load) <= fast.stretch


def test_many_trees_and_images_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load_fabric("dgx-h100:2")
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    seconds = HopTimes(fabric, graph, turned=False)
    slow = build_forest(graph, [1] * graph.ranks)
    assert quicker(slow, seconds) is not slow
    monkeypatch.setattr(arrival, "MAX_ANNEALED_ENTRIES", 16)
    assert quicker(slow, seconds) is slow
    images = build_forest(rate_graph(load_fabric("hgx-b200:2"), [d.name for d in fabric.devices]), [1] * graph.ranks)
    assert images.symmetry is not None and quicker(images, seconds) is images


@pytest.mark.parametrize("name", ["dgx-h100:2", "dgx-h100:4", "mi300x:2", "mi250:2", "dgx-a100:3", "ndv2:2", "two-islands"])
def test_without_a_way_back_the_optimum_of_one_root_is_the_same(name: str) -> None:
    fabric = load_fabric(name)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    pruned = without_way_back(graph, 0)
    assert pruned is not None and len(pruned.arcs) < len(graph.arcs)
    home = graph.group[0]
    assert not [arc for arc in pruned.arcs if graph.group[arc[0]] != home == graph.group[arc[1]]]
    weight = [1] + [0] * (graph.ranks - 1)
    assert worst_cut(pruned, weight).ratio == worst_cut(graph, weight).ratio
    for w in range(graph.ranks, graph.nodes):
        assert sum(r for (_, v), r in pruned.arcs.items() if v == w) == sum(r for (u, _), r in pruned.arcs.items() if u == w)


@pytest.mark.parametrize("name", ["mi250:1", "ring:4"])
def test_links_back_stay_where_there_is_one_server_or_trees_need_them(name: str) -> None:
    """Round a ring of servers trees go both ways: without the links out of the last one only one way is left."""
    fabric = load_fabric(name)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    assert without_way_back(graph, 0) is None
    problem = CollectiveProblem.on(fabric, "broadcast", 1 << 24)
    plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    assert plan.notes["ratio"] == "1" and Fraction(plan.notes["bandwidth_time_s"]) == bandwidth_bound(problem).exact


def planned(op: str, name: str, **options: object):  # type: ignore[no-untyped-def]
    problem = CollectiveProblem.on(load_fabric(name), op, 1 << 20)
    return ForestColl(**options).plan(problem, rng=np.random.default_rng(0))  # type: ignore[arg-type]


def sends_into(plan, server: int) -> int:  # type: ignore[no-untyped-def]
    """Channels from the other server of eight."""
    channels = plan.program.channels
    return int(((channels.src // 8 != server) & (channels.dst // 8 == server)).sum())


def test_links_back_are_left_out_where_asked_and_where_it_helps() -> None:
    chosen = planned("broadcast", "mi300x:2")
    assert chosen.options["back"] is False
    with_back = planned("broadcast", "mi300x:2", trees=8, structure=False, back=True)
    assert with_back.options["back"] is True and sends_into(with_back, 0) > 0 == sends_into(chosen, 0)
    again = planned("broadcast", "mi300x:2", **chosen.options)
    assert again.options == chosen.options and len(again.program.steps) == len(chosen.program.steps)


@pytest.mark.parametrize(("op", "name"), [("all-gather", "mi300x:2"), ("broadcast", "mi250:1")])
def test_leaving_out_what_is_not_there_is_refused(op: str, name: str) -> None:
    with pytest.raises(Unsupported, match="no link leads back") as refusal:
        planned(op, name, back=False)
    assert refusal.value.hint == "leave back out"
