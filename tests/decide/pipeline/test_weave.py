"""Two halves of a pair woven into one row of compute steps: as fast as the best of all rows, and never slower than one half after the other."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.pipeline import weave as module
from meshwright.decide.pipeline.weave import BACKWARD, FORWARD, MAX_WAITING, WEIGHTS, Piece, in_a_row, weave, woven_s

seconds = st.integers(0, 6).map(float)
pieces = st.builds(Piece, seconds, seconds, st.booleans())


@st.composite
def pairs(draw, most=4):
    forward, backward = (tuple(draw(st.lists(pieces, min_size=1, max_size=most))) for _ in range(2))
    places = sorted(draw(st.lists(st.integers(1, len(backward)), max_size=min(3, most))))
    return forward, backward, tuple(Piece(draw(seconds), after=i) for i in places)


def rows(forward, backward, weights):
    """Every order of a pair in which at most MAX_WAITING gradients of weights are put off while anything else runs."""

    def on(i, j, w, turns):
        if (i, j, w) == (len(forward), len(backward), len(weights)):
            yield turns
            return
        made = sum(p.after <= j for p in weights)
        if w < made:
            yield from on(i, j, w + 1, (*turns, WEIGHTS))
        if made - w <= MAX_WAITING:
            if i < len(forward):
                yield from on(i + 1, j, w, (*turns, FORWARD))
            if j < len(backward):
                yield from on(i, j + 1, w, (*turns, BACKWARD))

    return on(0, 0, 0, ())


def clock(forward, backward, weights, turns):
    """By hand: the device, the network, and until when each half's exchanges take."""
    device = network = 0.0
    over, left = {FORWARD: 0.0, BACKWARD: 0.0, WEIGHTS: 0.0}, {FORWARD: [*forward], BACKWARD: [*backward], WEIGHTS: [*weights]}
    for turn in turns:
        piece = left[turn].pop(0)
        device = max(device, over[turn] if piece.waits else 0.0) + piece.compute_s
        if piece.exchange_s:
            network = over[turn] = max(device, network) + piece.exchange_s
    return max(device, network)


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_no_row_is_faster(pair):
    turns = weave(*pair)
    assert sorted(turns) == sorted(in_a_row(*pair))
    done = [0, 0, 0]
    for turn in turns:  # each gradient of weights after its step of the backward
        assert turn != WEIGHTS or pair[2][done[WEIGHTS]].after <= done[BACKWARD]
        done[turn] += 1
    best = min(clock(*pair, row) for row in (*rows(*pair), in_a_row(*pair)))
    assert woven_s(*pair, turns) == clock(*pair, turns) == best


@settings(max_examples=30, deadline=None)
@given(pairs(most=12))
def test_halves_that_are_woven_by_sections_are_never_slower_than_in_a_row(pair):
    whole = woven_s(*pair, weave(*pair))
    assert whole <= woven_s(*pair, in_a_row(*pair))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_STATES", 12)
        module._weave.cache_clear()
        turns = weave(*pair)
    module._weave.cache_clear()
    assert sorted(turns) == sorted(in_a_row(*pair))
    assert whole - 1e-9 <= woven_s(*pair, turns) + sum(p.compute_s for p in pair[2]) and woven_s(*pair, turns) <= woven_s(*pair, in_a_row(*pair))


@cache
def alike(layers):
    """Attention, exchange, experts, exchange: everything takes one second, the gradients of weights too."""
    half = tuple(Piece(1.0, 1.0, i > 0) for i in range(2 * layers))
    return half, half, tuple(Piece(1.0, after=i + 1) for i in range(2 * layers))


def test_exchanges_as_long_as_computations_are_hidden():
    pair = alike(4)
    assert woven_s(*pair, in_a_row(*pair)) == 8 + 8 + 8 + 14
    assert woven_s(*pair, weave(*pair)) <= 24 + 1, "24 steps compute, and only the first or last exchange is seen"


def test_a_whole_backward_and_nothing_to_exchange():
    half = (Piece(1.0), Piece(2.0))
    turns = weave(half, half)
    assert sorted(turns) == [FORWARD, FORWARD, BACKWARD, BACKWARD] and woven_s(half, half, (), turns) == 6
