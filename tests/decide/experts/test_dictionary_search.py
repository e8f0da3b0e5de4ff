"""The dictionary search: against an exhaustive one, with drift, and refusals."""

from __future__ import annotations

import random

import pytest

from effort import few
from meshwright.decide.experts import Choice, DictionarySearch
from meshwright.decide.experts.search import BAND, CLOSE, PATIENCE, RUN_OFF, TRIALS, bucket_of
from meshwright.errors import UsageError


def candidates(shares: int) -> list[Choice]:
    degrees = [0, *(r for r in range(1, shares + 1) if shares % r == 0)]
    return [Choice(r, d, a) for r in degrees for d in (1, 2, 4) for a in ("linear", "2dh") if r or (d == 1)]


@pytest.mark.parametrize("seed", range(few(20)))
def test_finds_the_exhaustive_best_in_fewer_trials(seed: int) -> None:
    """Cost convex in r, and chunks and algorithm whose gain is the same at every degree; times are noisy upwards once in a while."""
    draw = random.Random(seed)
    shares = draw.choice([1, 2, 12, 64, 360])
    everything = candidates(shares)
    up, down, none = draw.uniform(0.001, 1), draw.uniform(0.001, 40), draw.uniform(0.5, 90)
    gain = {(d, a): draw.uniform(0.5, 1) for d in (1, 2, 4) for a in ("linear", "2dh")}

    def cost(c: Choice) -> float:
        return (up * c.degree + down / c.degree if c.degree else none) * gain[c.chunks, c.algorithm]

    search = DictionarySearch(everything, window=64)
    twin = DictionarySearch(everything, window=64)
    steps = 0
    while not search.settled:
        choice = search.choose(100)
        assert choice == twin.choose(100), "equal times give equal choices"
        time_s = cost(choice) * (1 + (steps % 2) * draw.random())  # the second trial of each may be slow
        for one in (search, twin):
            one.record(100, choice, time_s)
        steps += 1
        assert steps <= RUN_OFF * len(everything)
        search.choose(100)  # settles once nothing is due
    best = search.choose(100)
    plain = [c for c in everything if (c.chunks, c.algorithm) == (1, "linear")]
    reached = min(plain, key=cost)  # the degree is decided among these
    assert best.degree == reached.degree
    assert cost(best) == min(cost(c) for c in everything if c.degree == best.degree)
    if shares == 360:
        assert steps < 0.7 * TRIALS * len(everything)


def test_ranges_of_capacity_have_choices_of_their_own() -> None:
    a, b = Choice(1, 1, "linear"), Choice(2, 1, "linear")
    search = DictionarySearch([a, b], window=128)
    for capacity, fast in ((128, a), (129, b)):
        for _ in range(2 * TRIALS):
            choice = search.choose(capacity)
            search.record(capacity, choice, 1.0 if choice == fast else 2.0)
        assert search.choose(capacity) == fast
    assert search.settled == {1: a, 2: b} and bucket_of(1, 128) == 1 == bucket_of(128, 128)


def test_a_machine_that_changes_is_explored_again() -> None:
    a, b = Choice(1, 1, "linear"), Choice(2, 1, "linear")
    search = DictionarySearch([a, b])
    speed = {a: 1.0, b: 1.5}
    for _ in range(10):
        choice = search.choose(10)
        search.record(10, choice, speed[choice])
    assert search.choose(10) == a
    search.record(10, a, 1.4)  # one slow step is no drift
    assert search.choose(10) == a and search.settled
    speed[a] = 3.0
    for _ in range(PATIENCE + 2 * TRIALS + 2):
        choice = search.choose(10)
        search.record(10, choice, speed[choice])
    assert search.choose(10) == b and search.ranges[1].explorations == 2 and 0 < BAND < 1
    search.record(10, a, 100.0)  # of a step that began before
    assert search.choose(10) == b


@pytest.mark.parametrize(("found", "window"), [([], 1), ([Choice(1, 1, "linear")], 0)])
def test_nothing_to_choose_among_is_refused(found: list[Choice], window: int) -> None:
    with pytest.raises(UsageError, match="needs candidates and a window"):
        DictionarySearch(found, window=window)


def test_choices_near_each_other_are_tried_again() -> None:
    """Neither two unlucky trials of the better one decide, nor one lucky trial of another."""
    a, b, far = Choice(1, 1, "linear"), Choice(1, 2, "linear"), Choice(1, 4, "linear")
    search, lasts = DictionarySearch([a, b, far]), {a: iter([0.91, 1.0, 1.0, 1.0]), b: iter([0.99, 0.99, 0.93, 0.95]), far: iter([1.4] * 9)}
    tried: list[Choice] = []
    while not search.settled:
        tried.append(choice := search.choose(10))
        search.record(10, choice, next(lasts[choice]))
        search.choose(10)
    assert search.choose(10) == b and (tried.count(a), tried.count(b), tried.count(far)) == (RUN_OFF, RUN_OFF, TRIALS)


def test_chunks_of_every_near_degree_are_tried() -> None:
    """Two degrees that take as long with one chunk: with four, one of them is far better."""
    speed = {Choice(0, 1, "linear"): 1.0, Choice(1, 1, "linear"): 1.0 + CLOSE / 2, Choice(1, 4, "linear"): 0.7, Choice(2, 1, "linear"): 2.0}
    search = DictionarySearch(list(speed))
    while not search.settled:
        choice = search.choose(10)
        search.record(10, choice, speed[choice])
        search.choose(10)
    assert search.choose(10) == Choice(1, 4, "linear") and len(search.ranges[1].times[Choice(2, 1, "linear")]) == TRIALS
