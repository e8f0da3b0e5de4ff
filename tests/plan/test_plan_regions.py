"""Pieces of flattened tensors as boxes: every box holds the elements that the piece holds there, and together all of them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UsageError
from meshwright.plan.regions import elements, flat_region, local_shape, lying, minus, region_along, whole_region


@st.composite
def regions(draw):
    """(shape, region): all of a tensor, or some ranges of one dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    if not shape or draw(st.booleans()):
        return shape, whole_region(shape)
    axis = draw(st.integers(0, len(shape) - 1))
    marks = sorted(draw(st.sets(st.integers(0, shape[axis]), min_size=2, max_size=6))) if shape[axis] > 1 else [0, 1]
    ranges = list(zip(marks[::2], marks[1::2], strict=False))
    return shape, region_along(shape, axis, ranges)


def slices(box):
    return tuple(slice(a, b) for a, b in box)


@given(regions(), st.data())
def test_a_piece_is_its_boxes(found, data):
    shape, region = found
    whole = np.arange(prod(shape)).reshape(shape)
    axis = next((i for i in range(len(shape)) if len({b[i] for b in region}) > 1), 0)
    parts = [whole[slices(box)] for box in region]
    local = np.concatenate(parts, axis) if shape else whole
    assert local.shape == local_shape(region)
    first = data.draw(st.integers(0, local.size))
    stop = data.draw(st.integers(first, local.size))
    piece = local.reshape(-1)[first:stop]
    flat = flat_region(region, first, stop)
    assert local_shape(flat) == (stop - first,) and elements(flat) == stop - first
    seen = []
    for box in flat:
        where = lying(flat, box)
        view = piece[where.first : where.first + prod(where.shape)].reshape(where.shape)
        assert np.array_equal(view[slices(where.box)], whole[slices(box)])
        seen += whole[slices(box)].reshape(-1).tolist()
        inner = tuple((a, b - (b - a > 1)) for a, b in box)  # a part of the box
        where = lying(flat, inner)
        view = piece[where.first : where.first + prod(where.shape)].reshape(where.shape)
        assert np.array_equal(view[slices(where.box)], whole[slices(inner)])
    assert sorted(seen) == sorted(piece.tolist())


def test_pieces_cover_without_overlap_in_few_boxes():
    region = whole_region((5, 7, 3))
    left = list(region)
    for first, stop in ((0, 31), (31, 32), (32, 90), (90, 105)):
        piece = flat_region(region, first, stop)
        assert len(piece) <= 5
        assert elements(left) - (stop - first) == elements(left := [b for cut in [left] for b in _without(cut, piece)])
    assert not left


def _without(boxes, piece):
    for cut in piece:
        boxes = minus(boxes, cut)
    return boxes


def test_what_a_piece_does_not_hold_is_refused():
    with pytest.raises(UsageError, match="is in no box"):
        lying(flat_region(whole_region((4, 4)), 0, 6), ((2, 3), (0, 4)))
