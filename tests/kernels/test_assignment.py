"""The assignment is the cheapest (by brute force), and its dual values prove it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UsageError
from meshwright.kernels.assignment import Assignment, assign


@st.composite
def costs(draw):
    rows = draw(st.integers(0, 5))
    columns = rows + draw(st.integers(0, 2))
    high = draw(st.sampled_from([2, 10, 10**15]))
    values = draw(st.lists(st.integers(-high, high), min_size=rows * columns, max_size=rows * columns))
    return np.array(values, np.int64).reshape(rows, columns)


@given(costs())
def test_no_assignment_costs_less(cost):
    rows, columns = cost.shape
    found = assign(cost)
    cheapest = min(sum(int(cost[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(columns), rows))
    assert found.cost == cheapest
    assert len(set(found.column)) == rows
    assert found.proves(cost)


def test_a_wrong_answer_is_not_proved():
    cost = np.array([[1, 2], [2, 4]], np.int64)
    right = assign(cost)
    assert right.cost == 4 and right.proves(cost)
    assert not Assignment((0, 1), 5, right.u, right.v).proves(cost)
    assert not Assignment((1, 0), 4, right.u + 1, right.v).proves(cost)


def test_large_ones_are_proved_too():
    cost = np.random.default_rng(0).integers(0, 10**9, (120, 150))
    found = assign(cost)
    assert found.proves(cost) and len(set(found.column)) == 120


def test_what_cannot_be_assigned_is_refused():
    with pytest.raises(UsageError, match="3 rows"):
        assign(np.zeros((3, 2), np.int64))
    with pytest.raises(UsageError, match=r"2\^60"):
        assign(np.array([[1 << 60]]))
