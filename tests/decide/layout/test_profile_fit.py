"""The least squares of fitted runtimes over unknowns that are not negative: the conditions of an optimum, also of fewer runs than unknowns."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.decide.layout.profiled.fit import _non_negative


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_the_fit_meets_the_conditions_of_an_optimum(rows: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = rng.normal(size=(rows, 3)), rng.normal(size=rows)
        x = _non_negative(a, b)
        slope = a.T @ (a @ x - b)
        assert (x >= 0).all() and (slope >= -1e-9).all() and abs(x @ slope) < 1e-9
