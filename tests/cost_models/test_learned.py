"""Trees grow as a plain twin grows them, ignore spoiled rows and give equal bytes; the learned table beats its roofline and never sees held rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models import boosting
from meshwright.cost_models.boosting import fit_trees
from meshwright.cost_models.learned import MIN_ROWS, _fewest_waves, fit_learned
from meshwright.cost_models.products import GpuPeaks, ProductModel, fit_products
from meshwright.errors import FormatError

PEAKS = GpuPeaks(flops=1e15, memory_Bps=3e12, processors=132, weight_bytes=2, input_bytes=2)


def plain_tree(coded, gradient, weight, depth, least, shrink):
    """The same tree, node by node and split by split, in plain Python: list of (feature, threshold, value)."""
    nodes = [(-1, 0, 0.0)] * (2 ** (depth + 1) - 1)

    def grow(a, rows, level):
        g, h = gradient[rows].sum(), weight[rows].sum()
        best, choice = 1e-9, None
        for f in range(coded.shape[1] if level < depth else 0):
            for b in range(boosting.MAX_BINS - 1):
                left = rows[coded[rows, f] <= b]
                gl, hl = gradient[left].sum(), weight[left].sum()
                if hl < least or h - hl < least:
                    continue
                gain = gl**2 / (hl + shrink) + (g - gl) ** 2 / (h - hl + shrink) - g**2 / (h + shrink)
                if gain > best + 1e-12:
                    best, choice = gain, (f, b)
        nodes[a] = (-1, 0, g / (h + shrink)) if choice is None else (*choice, 0.0)
        if choice is not None:
            for side in (0, 1):
                grow(2 * a + 1 + side, rows[(coded[rows, choice[0]] > choice[1]) == bool(side)], level + 1)

    grow(0, np.arange(len(coded)), 0)
    return nodes


def plain_value(nodes, row):
    a = 0
    while nodes[a][0] >= 0:
        a = 2 * a + (2 if row[nodes[a][0]] > nodes[a][1] else 1)
    return nodes[a][2]


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_a_tree_is_its_plain_twin(seed, depth, features):
    rng = np.random.default_rng(seed)
    coded = rng.integers(0, boosting.MAX_BINS, (60, features)).astype(np.uint8)
    gradient, weight = rng.normal(size=60), rng.uniform(0.2, 1, 60)
    grown = boosting._grow(coded, gradient, weight, depth, 3.0, 1.0)
    twin = plain_tree(coded, gradient, weight, depth, 3.0, 1.0)
    mine = boosting._sum(coded, *(part[None] for part in grown))
    assert mine == pytest.approx([plain_value(twin, row) for row in coded], abs=1e-9)


def test_trees_follow_a_step_and_ignore_spoiled_rows():
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 1, (2000, 2))
    truth = np.where(x[:, 0] > 0.5, 0.3, -0.2)
    y = truth + rng.normal(0, 0.01, 2000)
    y[::20] += 3.0
    found = fit_trees(x, y, trees=150, depth=3)
    good = np.abs(x[:, 0] - 0.5) > 0.02
    assert np.abs(found.at(x) - truth)[good].max() < 0.06 and np.median(np.abs(found.at(x) - truth)) < 0.01
    again = fit_trees(x, y, trees=150, depth=3)
    assert found.values.tobytes() == again.values.tobytes() and found.features.tobytes() == again.features.tobytes()
    assert fit_trees(x, y, trees=150, depth=3, seed=1).values.tobytes() != found.values.tobytes()


@pytest.mark.parametrize(
    ("x", "y"), [(np.zeros((0, 2)), []), (np.zeros((2, 1)), [1.0]), (np.zeros((1, 1)), [np.nan]), (np.full((1, 1), np.inf), [1.0])]
)
def test_rows_that_are_none(x, y):
    with pytest.raises(FormatError, match="finite"):
        fit_trees(x, np.array(y))


def test_other_features_than_fitted():
    found = fit_trees(np.zeros((40, 2)), np.ones(40), trees=2, depth=1)
    assert found.at(np.zeros((3, 2))).tolist() == [1, 1, 1]
    with pytest.raises(FormatError, match="rows of 2 features"):
        found.at(np.zeros((3, 1)))


def test_fewest_waves_by_hand():
    """128 x 4096 on 132 processors: one row of tiles; 32 columns give 128 tiles, more than any wider tile that keeps one wave, fewer than 132."""
    waves, full, tall, wide, work, padded = (float(c[0]) for c in _fewest_waves(np.array([128.0]), np.array([4096.0]), 132))
    assert waves == 0.0 and (tall, wide) == (128.0, 32.0) and full == pytest.approx(128 / 132)
    assert work == pytest.approx(np.log(128 * 32)) and padded == pytest.approx(np.log(128 * 32 * 132 / (128 * 4096)))


SIDES = [256.0, 512.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 6144.0, 8192.0]
M = np.array(
    [1, 2, 4, 8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024, 1025, 1536, 2048, 2049, 4096, 4097, 8192, 16384], float
)


def rows_of_two_kernels():
    """A law of the compact model, 30 % slower wherever n exceeds 2048 and m exceeds 64: another kernel, which no roofline knows."""
    m, n, k = (x.ravel() for x in np.meshgrid(M, SIDES, SIDES, indexing="ij"))
    truth = ProductModel(peaks=PEAKS, numbers=(5.0, 0.6, 1.0, 0.5, 0.85, 5.0, 30.0), tile=128).time_s(m, n, k)
    return m, n, k, truth * np.where((n > 2048) & (m > 64), 1.3, 1.0)


def test_a_second_kernel_is_learned():
    m, n, k, times = rows_of_two_kernels()
    back = np.isin(m, M[1::2])
    found = fit_learned(m[~back], n[~back], k[~back], times[~back], PEAKS)
    roofline = fit_products(m, n, k, times, PEAKS)
    off = np.abs(found.time_s(m, n, k) / times - 1)
    assert np.median(off) < 0.02 < np.percentile(np.abs(roofline.time_s(m, n, k) / times - 1), 75) and np.percentile(off, 90) < 0.08
    assert found.time_s(100.0, 3000.0, 777.0).shape == () and found.time_s(np.ones((2, 1)), 4096.0, np.ones(3)).shape == (2, 3)
    far = float(found.time_s(65536.0, 65536.0, 65536.0))
    assert 0.5 < far / float(roofline.time_s(65536.0, 65536.0, 65536.0)) < 2
    assert "300 trees" in found.form
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(FormatError, match="sizes of one or more"):
            found.time_s(bad, 8.0, 8.0)


def test_rows_that_do_not_determine_trees():
    few = np.ones(MIN_ROWS - 1)
    with pytest.raises(FormatError, match="trees need 1000 rows"):
        fit_learned(few, few, few, few, PEAKS)
    with pytest.raises(FormatError, match="positive finite"):
        fit_learned(np.ones(MIN_ROWS), np.ones(MIN_ROWS), np.ones(MIN_ROWS), np.zeros(MIN_ROWS), PEAKS)
