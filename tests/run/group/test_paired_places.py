"""Pieces of two rows of places that are cut differently: equally long, in order, and all of both."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.run.group.chunk_places import paired


def cut(rng: np.random.Generator, total: int, space: int) -> list[tuple[int, int, int]]:
    """Runs of elements, `total` together, with gaps between them."""
    found, at, left = [], 0, total
    while left:
        size = int(rng.integers(1, left + 1))
        at += int(rng.integers(0, 3))
        found.append((space, at, at + size))
        at, left = at + size, left - size
    return found


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_both_sides_are_equally_long_and_all_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = int(rng.integers(0, 30))
    into, source = cut(rng, total, 0), cut(rng, total, 1)
    pieces = list(paired(into, source))
    assert all(0 < b - a == d - c for (_, a, b), (_, c, d) in pieces)
    for side, places in ((0, into), (1, source)):
        walked = [(x[side][0], i) for x in pieces for i in range(x[side][1], x[side][2])]
        assert walked == [(space, i) for space, low, high in places for i in range(low, high)]
    assert len(pieces) < len(into) + len(source) or not total
