"""What stages recompute, against brute force over all mixes, and what a layout then says it keeps."""

from __future__ import annotations

import functools
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from captured import captured
from meshwright.cost import Cost
from meshwright.decide.layout.build import build_layout
from meshwright.decide.layout.megatron import find_regions
from meshwright.decide.layout.problem import Degrees
from meshwright.decide.memory.regions import RegionChooser
from meshwright.errors import Infeasible
from meshwright.fabric.fabric import Device
from meshwright.graph.graph import OpGraph
from meshwright.graph.liveness import kept_storages, replay_workspace, segment_workspace
from meshwright.plan.plan import TrainingLayout
from meshwright.plan.recompute import LayoutRegions

MODEL = str(Path(__file__).parent.parent.parent.parent / "examples" / "gpt.py:")
DEVICE = Device(name="d", flops={"fp32": 10**10}, memory_bytes=0)


@functools.cache
def graph(name: str = "tiny") -> OpGraph:
    return captured(MODEL + name)


@functools.cache
def layout(tensor: int = 1, pipeline: int = 1, name: str = "tiny") -> TrainingLayout:
    g = graph(name)
    d = Degrees(1, tensor, pipeline, g.batch_size)
    return build_layout(g, find_regions(g), d, 4 * g.batch_size, cost=Cost(), device=DEVICE, border_Bps=1e9, workspace=segment_workspace)


def chooser(regions: LayoutRegions) -> RegionChooser:
    return RegionChooser(regions.regions, lambda n, key: Cost().roofline(n.forward, DEVICE).time_s)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_cheapest_choice_is_that_of_brute_force(tensor: int, in_flight: int) -> None:
    c = chooser(LayoutRegions(graph(), layout(tensor)))
    most = c.most_saved()
    limit = most.saved_bytes * in_flight - most.workspace_bytes
    for share in (0.1, 0.35, 0.6, 0.9):
        need = int(limit * share)
        try:
            found = c.cheapest(need, in_flight)
        except Infeasible as error:
            assert error.data["most_bytes"] < need
            continue
        assert found.saved_bytes * in_flight - found.workspace_bytes >= need
        best = float("inf")
        for mix in product(*(combinations_with_replacement(range(min(len(k.points), 6)), len(k.members)) for k in c.classes)):
            used = [k.points[i] for k, picks in zip(c.classes, mix, strict=True) for i in picks]
            saved = sum(k.whole.kept_bytes - k.points[i].kept_bytes for k, picks in zip(c.classes, mix, strict=True) for i in picks)
            if saved * in_flight - max(p.workspace_bytes for p in used) >= need:
                best = min(best, sum(p.time_s for p in used))
        assert found.time_s <= best * (1 + 1e-9)  # brute force looks at the first points only
        assert found.bound_s <= found.time_s * (1 + 1e-9)


def test_more_than_can_be_saved_is_refused() -> None:
    c = chooser(LayoutRegions(graph(), layout()))
    with pytest.raises(Infeasible, match="saves at most") as caught:
        c.cheapest(10**12, 2)
    assert caught.value.data["most_bytes"] <= c.most_saved().saved_bytes * 2


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("rule", ["selective", "full", "least"])
def test_a_layout_keeps_so_many_bytes_fewer(tensor: int, pipeline: int, rule: str) -> None:
    before = layout(tensor, pipeline)
    regions = LayoutRegions(graph(), before)
    c = chooser(regions)
    chosen = c.most_saved() if rule == "least" else c.rule(rule)
    after = regions.apply(chosen.again)
    assert sum(a.saved_bytes - b.saved_bytes for a, b in zip(before.segments, after.segments, strict=True)) >= chosen.saved_bytes > 0
    assert sum(s.again.flops for s in after.segments) > 0
    grown = [b.backward_workspace_bytes - a.backward_workspace_bytes for a, b in zip(before.segments, after.segments, strict=True)]
    assert max(grown) > 0 or rule == "selective"  # its region's results may fit where the head's temporaries were
    kept = kept_storages(graph())
    for s in after.segments:  # every result that runs again was kept before, or is read by a call whose result was
        again = {n for names in s.computed_again() for n in names}
        assert again <= set(s.nodes)
        made = {x for n in again for x in regions.makes(regions.node[n])}
        assert not again or made & {x for n in s.nodes for x in kept.get(n, ())}


def test_a_plan_of_many_layers_stays_small() -> None:
    regions = LayoutRegions(graph(), layout())
    (segment,) = regions.apply(chooser(regions).rule("full").again).segments
    assert len(segment.recompute) <= 3 and sum(len(r.starts) for r in segment.recompute) == len(regions.regions)


def test_one_layer_at_a_time_is_made_again() -> None:
    """Backward's temporaries grow by one layer's results, not by all layers'."""
    regions = LayoutRegions(graph(), layout())
    (before,) = layout().segments
    chosen = chooser(regions).rule("full")
    (after,) = regions.apply(chosen.again).segments
    grown = after.backward_workspace_bytes - before.backward_workspace_bytes
    assert 0 < grown <= 1.5 * chosen.saved_bytes / len(regions.regions) < chosen.saved_bytes / 2
    assert replay_workspace(graph(), before.nodes, ()) == segment_workspace(graph(), before.nodes)


def test_without_repeated_layers_modules_are_the_regions() -> None:
    g = captured(MODEL.replace("gpt.py", "convnet.py") + "tiny")
    d = Degrees(1, 1, 1, g.batch_size)
    whole = build_layout(g, (), d, g.batch_size, cost=Cost(), device=DEVICE, border_Bps=1e9, workspace=segment_workspace)
    regions = LayoutRegions(g, whole)
    again = {n for names in chooser(regions).most_saved().again.values() for n in names}
    assert not any("batch_norm" in regions.node[n].target for n in again)
