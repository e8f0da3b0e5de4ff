"""Which schedule a compiled step gets: the fastest whose compiled peak fits, with the figures of that schedule."""

from __future__ import annotations

import random

import pytest

from meshwright.decide.memory.fusionaware.frontier import frontier_of
from meshwright.decide.memory.fusionaware.fused import fused_peak_bytes
from meshwright.errors import Infeasible
from meshwright.run.steps.partitioner import MemoryPartitioner
from meshwright.testing.steps import random_step_graph


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_that_fits(seed: int) -> None:
    graph = random_step_graph(random.Random(seed), forward=7, alternatives=False)
    frontier = frontier_of(graph, 20_000, False, True)
    plans = [frontier.lives.plan(e.hold_from, strategy="fusionaware", options={"compiled": True}) for e in frontier.entries]
    peaks = [fused_peak_bytes(graph, p) for p in plans if p is not None]
    for n in range(len(peaks)):
        first = next(k for k, peak in enumerate(peaks) if peak <= peaks[n])
        made = MemoryPartitioner(budget_bytes=peaks[n])._chosen(graph, frontier)
        assert (made.peak_bytes, made.plain_bytes) == (peaks[first], peaks[0]) and made.plan == plans[first] and made.graph is graph
        assert made.plain_s == frontier.plain_s and made.again_s == pytest.approx(frontier.entries[first].time_s - frontier.plain_s)
        plan = made.plan
        forward = {graph.nodes[a.node].name for a in plan.actions[: plan.boundary]}
        assert len(set(made.saved)) == len(made.saved)
        assert all(name in forward or graph.nodes[[x.name for x in graph.nodes].index(name)].phase == "input" for name in made.saved)
        again = {graph.nodes[a.node].name for a in plan.actions[plan.boundary :]}
        assert made.saved or again
    with pytest.raises(Infeasible) as caught:
        MemoryPartitioner(budget_bytes=min(peaks) - 1)._chosen(graph, frontier)
    assert caught.value.data == {"least_bytes": min(peaks), "budget_bytes": min(peaks) - 1}
    least = MemoryPartitioner(share=0.0)._chosen(graph, frontier)
    assert (least.peak_bytes, least.plain_bytes) == (min(peaks), peaks[0]), "a share that nothing keeps: the least there is"
    assert MemoryPartitioner(share=1.0)._chosen(graph, frontier).peak_bytes == peaks[0]
