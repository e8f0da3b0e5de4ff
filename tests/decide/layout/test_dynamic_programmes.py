"""Every dynamic programme and greedy of the search against all possibilities."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.layout.mixed.fleet import share_microbatches
from meshwright.decide.layout.mixed.interop import inter_operator
from meshwright.decide.layout.mixed.perlayer import best_choices
from meshwright.decide.layout.mixed.split import split_layers
from meshwright.errors import UsageError

whole = st.integers(1, 9)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_split_has_the_least_slowest_stage(data: st.DataObject) -> None:
    layers, stages = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    if stages > layers:
        with pytest.raises(UsageError, match="stages for"):
            split_layers([np.ones(layers)] * stages)
        return
    times = [np.array(data.draw(st.lists(whole, min_size=layers, max_size=layers)), dtype=float) for _ in range(stages)]
    found = split_layers(times)
    assert sum(found) == layers and min(found) >= 1

    def slowest(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, layers)
        return max(float(times[s][ends[s] : ends[s + 1]].sum()) for s in range(stages))

    best = min(slowest(cuts) for cuts in combinations(range(1, layers), stages - 1))
    assert slowest(tuple(np.cumsum(found)[:-1])) == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_choice_per_layer_is_faster(data: st.DataObject) -> None:
    layers, choices = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    shape = (layers, choices)

    def draw(*s: int) -> np.ndarray:
        count = int(np.prod(s))
        return np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), dtype=float).reshape(s)

    time, memory, working = draw(*shape), draw(*shape), draw(*shape)
    moves = draw(layers, choices, choices)
    limit = data.draw(st.integers(0, 45))
    found = best_choices(time, memory, working, moves, limit, 1.0)
    best = None
    for picked in product(range(choices), repeat=layers):
        need = sum(memory[x, s] for x, s in enumerate(picked)) + max(working[x, s] for x, s in enumerate(picked))
        if need <= limit:
            seconds = sum(time[x, s] for x, s in enumerate(picked)) + sum(moves[x, picked[x - 1], picked[x]] for x in range(1, layers))
            best = seconds if best is None else min(best, seconds)
    assert (found is None) == (best is None)
    if found is not None:
        assert found[0] == pytest.approx(best)
        picked = found[1]
        again = sum(time[x, s] for x, s in enumerate(picked)) + sum(moves[x, picked[x - 1], picked[x]] for x in range(1, layers))
        assert again == pytest.approx(best)
        assert sum(memory[x, s] for x, s in enumerate(picked)) + max(working[x, s] for x, s in enumerate(picked)) <= limit


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_pipeline_of_unlike_stages_is_faster(data: st.DataObject) -> None:
    blocks, devices, longest = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    degrees, microbatches = (1, 2), data.draw(st.integers(1, 6))
    cost = np.full((2, blocks + 1, blocks + 1), np.inf)
    fits = [np.zeros(cost.shape, dtype=bool) for _ in range(longest)]
    for n in range(2):
        for i in range(blocks):
            for j in range(i + 1, blocks + 1):
                cost[n, i, j] = data.draw(whole)
                for s in range(longest):
                    fits[s][n, i, j] = data.draw(st.booleans()) or data.draw(st.booleans())
    best = np.inf
    for stages in range(1, min(blocks, longest) + 1):
        for cuts in combinations(range(1, blocks), stages - 1):
            ends = (0, *cuts, blocks)
            for used in product(range(2), repeat=stages):
                if sum(degrees[n] for n in used) != devices:
                    continue
                if all(fits[stages - 1 - s][used[s], ends[s], ends[s + 1]] for s in range(stages)):
                    spans = [cost[used[s], ends[s], ends[s + 1]] for s in range(stages)]
                    best = min(best, sum(spans) + (microbatches - 1) * max(spans))
    found = inter_operator(cost, fits, degrees, devices, microbatches, epsilon=0.0)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found[0] == pytest.approx(best)
        assert sum(b for b, _ in found[1]) == blocks and sum(d for _, d in found[1]) == devices


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(whole, whole), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_shares_of_micro_batches_end_earlier(pipelines: list[tuple[int, int]], extra: int) -> None:
    first, each, total = [a for a, _ in pipelines], [b for _, b in pipelines], len(pipelines) + extra
    found = share_microbatches(total, first, each)
    assert sum(found) == total and min(found) >= 1

    def end(counts: tuple[int, ...]) -> float:
        return max(f + (m - 1) * e for f, e, m in zip(first, each, counts, strict=True))

    others = [c for c in product(range(1, total + 1), repeat=len(pipelines)) if sum(c) == total]
    assert end(found) == min(map(end, others))
