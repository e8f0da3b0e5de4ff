"""Small changes of one schedule: exact, the same every time, and the optimum of small steps, beside exhaustive search."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import chain, step_graphs

from meshwright.decide.memory.fusionaware.frontier import fastest_within, least_bytes
from meshwright.decide.memory.lifetimes import Lifetimes, lifetimes_of
from meshwright.graph.step_graph import StepGraph
from meshwright.kernels.step_anneal import anneal
from meshwright.kernels.step_schedule import NEVER
from meshwright.kernels.step_search import Archive, archive_for


def changed(graph: StepGraph, budget: int, effort: int = 40_000, seed: int = 5, choice: list[int] | None = None) -> tuple[Lifetimes, Archive]:
    lives = lifetimes_of(graph)
    top, plain_s = lives.measure(lives.keep_all())
    archive = archive_for(len(lives.maker), 0, max(top, budget) * 2, bins=512, effort=effort, seed=seed)
    which = np.flatnonzero(lives.movable) if choice is None else np.array(choice, np.int64)
    price = 20 * plain_s / max(top - budget, 1)
    anneal(lives.arrays, lives.scratch, archive, lives.keep_all(), lives.to_the_end(), lives.lazy(), budget, which, 0.05 * plain_s, price)
    return lives, archive


def fastest(archive: Archive, budget: int) -> float:
    return float(min((t for t, p in zip(archive.time, archive.peak, strict=True) if p <= budget), default=np.inf))


def optimum(lives: Lifetimes, budget: int) -> float:
    movable = np.flatnonzero(lives.movable)
    hold, best = lives.keep_all(), np.inf
    for values in product([*range(lives.stages + 1), NEVER], repeat=len(movable)):
        hold[movable] = values
        peak, seconds = lives.measure(hold)
        best = min(best, seconds) if peak <= budget else best
    return float(best)


@settings(deadline=None, max_examples=30)
@given(step_graphs(most=6), st.floats(0, 1))
def test_what_is_noted_is_exact_and_never_better_than_exhaustive_search(graph: StepGraph, share: float) -> None:
    keep = lifetimes_of(graph)
    low, top = least_bytes(keep), keep.measure(keep.keep_all())[0]
    budget = low + round(share * max(0, top - low))
    lives, archive = changed(graph, budget, effort=20_000)
    for i in np.flatnonzero(np.isfinite(archive.time)):
        assert lives.measure(archive.hold_from[i].copy()) == (archive.peak[i], archive.time[i])
    if lives.movable.sum() <= 3:
        assert fastest(archive, budget) >= optimum(lives, budget)
    again = changed(graph, budget, effort=20_000)[1]
    assert np.array_equal(again.time, archive.time) and np.array_equal(again.hold_from, archive.hold_from)


@pytest.mark.parametrize("sizes", [[4, 7, 2, 5], [1, 9, 3, 3], [6, 2, 8, 1], [3, 3, 3, 3]])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_optimum_of_small_chains(sizes: list[int], share: float) -> None:
    graph = chain(sizes, [2.0, 5.0, 1.0, 3.0])
    lives = lifetimes_of(graph)
    top = lives.measure(lives.keep_all())[0]
    budget = top - round(share * (top - least_bytes(lives)))
    best = optimum(lives, budget)
    assert fastest(changed(graph, budget)[1], budget) == best
    assert not np.isfinite(best) or fastest_within(graph, budget, 40_000)[1].time_s == best


def test_nothing_to_move_and_no_effort() -> None:
    graph = chain([4, 7, 2], [1.0, 1.0, 1.0])
    for archive in (changed(graph, 1, choice=[])[1], changed(graph, 1, effort=0)[1]):
        assert np.isfinite(archive.time).sum() <= 1
