"""Selection by magnitude against sorting: ties, signs, NaN, lengths around the block, samples that mislead."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meshwright.kernels import select
from meshwright.kernels.select import Floats, accumulate, kth_magnitude, largest_magnitude, magnitude_of, select_above, top_k


def by_sorting(x: Floats, k: int) -> list[int]:
    return sorted(sorted(range(x.size), key=lambda i: (-abs(float(x[i])), i))[:k])


@given(arrays(np.float32, st.integers(1, 70), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-42, 3e38])), st.integers(0, 70))
def test_top_k_with_ties(x: Floats, k: int) -> None:
    k = min(k, x.size)
    assert top_k(x, k).tolist() == by_sorting(x, k)
    if k:
        assert kth_magnitude(x, k) == magnitude_of(sorted(np.abs(x))[-k])


@pytest.mark.parametrize("n", [15, 16, 17, 4097, 70_001])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 1.0])
def test_top_k_of_many(n: int, share: float) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    k = max(1, int(n * share))
    assert np.array_equal(top_k(x, k), np.sort(np.argsort(-np.abs(x), kind="stable")[:k]))


def test_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too high a first threshold costs a second pass, never an element."""
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    expected = top_k(x, 500)
    monkeypatch.setattr(select, "sampled_threshold", lambda values, k: magnitude_of(3.9))
    assert np.array_equal(top_k(x, 500), expected)
    monkeypatch.setattr(select, "sampled_threshold", lambda values, k: -1)
    assert np.array_equal(top_k(x, 500), expected)


def test_above_a_threshold() -> None:
    x = np.array([0.5, -2.0, 1.0, np.nan, -np.inf, 1.0000001], np.float32)
    assert select_above(x, magnitude_of(1.0)).tolist() == [1, 3, 4, 5]
    assert select_above(x, -1).tolist() == list(range(6))
    many = np.ones(5000, np.float32)
    assert select_above(many, magnitude_of(0.5)).size == 5000


def test_accumulate_and_the_largest() -> None:
    x, y = np.array([1.0, -2.0] * 5000, np.float32), np.array([-3.0, 1.0] * 5000, np.float32)
    assert accumulate(x, y) == magnitude_of(2.0) and np.array_equal(x, np.array([-2.0, -1.0] * 5000, np.float32))
    assert largest_magnitude(y) == magnitude_of(3.0) and largest_magnitude(np.empty(0, np.float32)) == 0
    y[123] = np.nan
    assert accumulate(x, y) >= select.INFINITE
