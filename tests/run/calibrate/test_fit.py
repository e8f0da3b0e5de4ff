from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FormatError
from meshwright.run.calibrate.fit import Curve, errors_of, fit_line, held_back

SIZES = np.array([4.0 * 4**i for i in range(12)])
times = st.floats(1e-7, 1.0)


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-12, 1e-8))
def test_a_line_is_found_again(alpha, beta):
    line = fit_line(SIZES, alpha + beta * SIZES)
    assert np.allclose(line.at(SIZES), alpha + beta * SIZES, rtol=1e-6)


@given(alpha=st.floats(1e-5, 1e-3), beta=st.floats(1e-10, 1e-9), where=st.integers(0, 11))
def test_one_odd_size_hardly_tilts_the_line(alpha, beta, where):
    measured = alpha + beta * SIZES
    measured[where] *= 10
    line = fit_line(SIZES, measured)
    others = np.arange(12) != where
    assert np.median(np.abs(line.at(SIZES) / (alpha + beta * SIZES) - 1)[others]) < 0.10


@given(st.lists(times, min_size=1, max_size=12))
def test_line_is_never_negative_and_no_worse_than_a_constant(y):
    y = np.array(y)
    line = fit_line(SIZES[: len(y)], y)
    assert line.alpha_s >= 0 and line.beta_s_per_byte >= 0 and line.alpha_s + line.beta_s_per_byte > 0


@given(st.lists(times, min_size=1, max_size=12))
def test_curve_passes_through_its_points_and_stays_between_neighbours(y):
    y = np.array(y)
    curve = Curve(SIZES[: len(y)], y)
    assert np.allclose(curve.at(curve.sizes), y, rtol=1e-9)
    for i in range(len(y) - 1):
        middle = float(curve.at(np.sqrt(SIZES[i] * SIZES[i + 1])))
        assert middle == pytest.approx(np.sqrt(y[i] * y[i + 1]), rel=1e-9)  # a straight line in log-log


def test_power_laws_are_exact_also_beyond_the_ends():
    curve = Curve(SIZES[2:6], 3e-9 * SIZES[2:6] ** 0.7)
    assert np.allclose(curve.at(SIZES), 3e-9 * SIZES**0.7, rtol=1e-9)


def test_held_back_sizes_are_the_inner_odd_ones():
    measured = 1e-5 + 1e-9 * SIZES
    line, curve = held_back(SIZES, measured)
    assert len(line) == len(curve) == 5 and np.allclose(line, 0, atol=1e-9)
    spoiled = measured.copy()
    spoiled[[1, 3, 5, 7, 9]] *= 2  # only held back sizes change, so the fit does not, and every error does
    line, _ = held_back(SIZES, spoiled)
    assert np.allclose(line, 0.5, atol=1e-9)
    spoiled = measured.copy()
    spoiled[-1] *= 2  # the last size is always kept: nothing is extrapolated
    assert len(held_back(SIZES, spoiled)[0]) == 5


def test_too_few_points_have_no_errors():
    line, curve = held_back(SIZES[:2], np.array([1.0, 2.0]))
    assert len(line) == len(curve) == 0
    summary = errors_of(line, curve)
    assert summary.points == 0 and np.isnan(summary.line_median)


def test_summary():
    summary = errors_of(np.array([0.1, 0.2, 0.3]), np.array([0.0, 0.1, 0.5]))
    assert (summary.line_median, summary.curve_median, summary.points) == (0.2, 0.1, 3)
    assert summary.to_json()["curve_p95"] == pytest.approx(0.46)


@pytest.mark.parametrize(
    ("sizes", "measured"),
    [([], []), ([1.0, 1.0], [1.0, 2.0]), ([2.0, 1.0], [1.0, 1.0]), ([0.0], [1.0]), ([1.0], [0.0]), ([1.0], [np.inf]), ([1.0], [])],
)
def test_curves_refuse_what_has_no_logarithm_or_order(sizes, measured):
    with pytest.raises(FormatError, match="rising"):
        Curve(np.array(sizes), np.array(measured))


@pytest.mark.parametrize("measured", [[], [1.0, 0.0]])
def test_lines_refuse(measured):
    with pytest.raises(FormatError, match="positive"):
        fit_line(np.arange(1.0, len(measured) + 1), np.array(measured))
