"""Models find again what made their data, choose what fits it, and never see what is held back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models import tiles
from meshwright.cost_models.collectives import CollectiveCurve, CollectiveModel, fit_collectives, wire_bytes
from meshwright.cost_models.products import GpuPeaks, ProductModel, fit_products
from meshwright.cost_models.robust_fit import fit_positive
from meshwright.cost_models.tiles import TileChoice, fit_tiles
from meshwright.errors import FormatError, UnknownName, UsageError

PEAKS = GpuPeaks(flops=1e15, memory_Bps=3e12, processors=132, weight_bytes=2, input_bytes=2)
SHAPES = [(n, k) for n in (512, 2048, 8192) for k in (512, 2048, 8192)]
M = np.array([1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 400, 512, 513, 1024, 1025, 2048, 4096, 8192], float)


# ---- the fit -----------------------------------------------------------------------------------------------------------
@given(st.floats(0.5, 2), st.floats(0.5, 2), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_robust_fit_ignores_spoiled_rows(a, b, where):
    x = np.linspace(1, 100, 60)
    y = a + b * x
    y[where * 6] *= 20
    assert fit_positive(lambda e: e[0] + e[1] * x, y, [(1.0, 1.0)]) == pytest.approx([a, b], rel=0.02)


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, np.nan]])
def test_fits_need_times(times):
    with pytest.raises(FormatError, match="positive finite times"):
        fit_positive(lambda e: e[0] * np.ones(len(times)), np.array(times), [(1.0,)])


def test_a_model_without_a_finite_time():
    with pytest.raises(FormatError, match="no finite time from any start"):
        fit_positive(lambda e: e[0] * np.array([np.nan]), np.array([1.0]), [(1.0,)])


# ---- products ----------------------------------------------------------------------------------------------------------
TRUTH = ProductModel(peaks=PEAKS, numbers=(5.0, 0.6, 1.0, 0.5, 0.85, 5.0, 30.0), tile=128)


def product_rows():
    sides = [512.0, 2048.0, 8192.0]
    m, n, k = (x.ravel() for x in np.meshgrid(M, sides, sides, indexing="ij"))
    return m, n, k, TRUTH.time_s(m, n, k)


def test_compact_products_find_their_maker():
    m, n, k, times = product_rows()
    found = fit_products(m[::2], n[::2], k[::2], times[::2], PEAKS)
    assert len(found.numbers) + 1 == 8 and found.tile == 128
    assert np.median(np.abs(found.time_s(m[1::2], n[1::2], k[1::2]) / times[1::2] - 1)) < 0.01


def test_products_are_bounded_by_the_peaks():
    perfect = ProductModel(peaks=PEAKS, numbers=(1e-6, 1.0, 1e-6, 1e-6, 1.0, 1e6, 1e-6), tile=128)
    assert perfect.time_s(8192, 8192, 8192) >= 2 * 8192**3 / 1e15 * (1 - 1e-6)
    assert perfect.time_s(1, 8192, 8192) >= 8192 * 8192 * 2 / 3e12 * 0.99
    assert perfect.time_s(1025, 8192, 8192) > 1.1 * perfect.time_s(1024, 8192, 8192)  # a ninth row of tiles


@pytest.mark.parametrize("field", ["flops", "memory_Bps", "processors", "weight_bytes"])
def test_senseless_peaks(field):
    values = {"flops": 1.0, "memory_Bps": 1.0, "processors": 1, "weight_bytes": 1.0, "input_bytes": 1.0}
    with pytest.raises(UsageError, match="peaks must be positive"):
        GpuPeaks(**{**values, field: 0})


# ---- tiles -------------------------------------------------------------------------------------------------------------
def staircase(n, k, m, tile=64):
    return 1e-6 + 1e-12 * np.ceil(m / tile) * tile * n * k


@pytest.mark.parametrize("tile", [64, 128])
def test_a_staircase_is_recognised_from_the_rows_that_are_kept(tile):
    """On steps of one tile: rows held back are exact where a plain line between neighbours is far off."""
    kept = np.array([1.0, 3, 9, 17, 33, 49, 65, 81, 97, 113, 129, 161, 193, 225, 257, 513])
    table = fit_tiles([(n, k, kept, staircase(n, k, kept, tile)) for n, k in SHAPES])
    assert table.choice.small in {64: (64,), 128: (64, 128)}[tile]
    inner = np.array([2.0, 16, 32, 48, 64, 112, 128, 160, 224, 256])
    for n, k in SHAPES:
        assert table.at(n, k, inner) == pytest.approx(staircase(n, k, inner, tile), rel=0.02)
        plain = np.interp(inner, kept, staircase(n, k, kept, tile))
        assert np.abs(plain / staircase(n, k, inner, tile) - 1).max() > 0.1


def test_a_smooth_table_is_left_alone():
    curves = [(n, k, M, 1e-6 + 1e-12 * M * n * k) for n, k in SHAPES]
    table = fit_tiles(curves)
    assert table.choice[:3] == (1, 1, "linear")
    x = np.array([1.0, 50, 3000, 8192, 20000])
    assert table.at(512, 8192, x) == pytest.approx(1e-6 + 1e-12 * x * 512 * 8192)
    assert table.at(512, 8192, 50.0) == pytest.approx(1e-6 + 1e-12 * 50 * 512 * 8192)


def test_one_disturbed_row_does_not_bend_its_neighbours():
    rng = np.random.default_rng(3)
    clean = {s: 1e-6 + 1e-12 * M * s[0] * s[1] for s in SHAPES}
    noisy = {s: t * np.exp(rng.normal(0, 0.05, len(M))) for s, t in clean.items()}
    noisy[2048, 2048][18] *= 5
    table = fit_tiles([(n, k, M, noisy[n, k]) for n, k in SHAPES])
    assert table.choice.smooth and table.at(2048, 2048, M[18]) < 2 * clean[2048, 2048][18]


def test_rows_that_are_held_back_are_never_seen(monkeypatch):
    """Equal kept rows give equal tables, whatever the others are; leaving out means leaving out."""
    seen = []
    real = tiles._levels
    monkeypatch.setattr(tiles, "_levels", lambda rows, choice, without=-1: seen.append(without) or real(rows, choice, without))
    fit_tiles([(512, 512, M, staircase(512, 512, M))])
    assert set(seen) - {-1} == set(range(1, len(M) - 1))
    rows = tiles._rows([(512, 512, M, staircase(512, 512, M))], None)
    positions, levels = tiles._levels(rows, TileChoice(1, 1, "linear", False), without=5)
    assert M[5] not in positions and levels.shape == (1, len(M) - 1)


def test_shapes_with_different_rows():
    a, b = M[:10], M[8:]
    table = fit_tiles([(512, 512, a, 1e-6 + 1e-9 * a), (512, 2048, b, 2e-6 + 1e-9 * b)])
    assert table.at(512, 512, 20.0) == pytest.approx(1e-6 + 2e-8, rel=0.2) and table.at(512, 2048, 3000.0) == pytest.approx(5e-6, rel=0.2)
    with pytest.raises(UnknownName, match="n 1, k 2"):
        table.at(1, 2, 3.0)


def test_a_falling_last_slope_stays_positive():
    table = fit_tiles([(1, 1, np.array([1.0, 2.0]), np.array([1.0, 0.1]))])
    assert table.at(1, 1, 1e6) > 0


@pytest.mark.parametrize(
    "curves", [[], [(1, 1, M, M), (1, 1, M, M)], [(1, 1, M, -M)], [(1, 1, M[::-1], M)], [(1, 1, M, M[1:])], [(1, 1, M[:0], M[:0])]]
)
def test_tables_that_are_none(curves):
    with pytest.raises(FormatError):
        fit_tiles(curves)


# ---- collectives -------------------------------------------------------------------------------------------------------
SIZES = 2.0 ** np.arange(9, 30)
LINK = 450e9
NUMBERS = (5.0, 0.8, 6.0, 0.9, 0.78, 0.9, 8.0, 1.1)


def collective_curves(keep=slice(None)):
    model = CollectiveModel(link_Bps=LINK, numbers=NUMBERS)
    keys = [(op, g) for op in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all") for g in (2, 4, 8)]
    x = SIZES[keep]
    return [CollectiveCurve(operation=op, gpus=g, link_Bps=LINK, sizes=x, times_s=model.time_s(op, x, g)) for op, g in keys]


def test_compact_collectives_find_their_maker():
    found = fit_collectives(collective_curves(slice(None, None, 2)))
    truth = CollectiveModel(link_Bps=LINK, numbers=NUMBERS)
    assert len(found.numbers) == 8
    for op in ("all-gather", "all-reduce", "all-to-all"):
        assert found.time_s(op, SIZES, 8) == pytest.approx(truth.time_s(op, SIZES, 8), rel=0.02)


def test_interpolation_is_a_line_between_neighbours_and_beyond_is_the_pipelined_transfer():
    sizes = 2.0 ** np.arange(10, 25)
    wire = wire_bytes("all-reduce", sizes, 8)
    latency, root, rate = 1e-5, 3e-9, 0.8 * LINK
    curve = CollectiveCurve(operation="all-reduce", gpus=8, link_Bps=LINK, sizes=sizes, times_s=latency + root * np.sqrt(wire) + wire / rate)
    assert curve.at(1.5 * sizes[3]) == pytest.approx((curve.times_s[3] + curve.times_s[4]) / 2)
    assert curve.at(1.0) == curve.times_s[0] and curve.at(sizes).tolist() == pytest.approx(curve.times_s.tolist())
    far = 2.0 ** np.arange(25, 30)
    truth = latency + root * np.sqrt(wire_bytes("all-reduce", far, 8)) + wire_bytes("all-reduce", far, 8) / rate
    assert curve.at(far) == pytest.approx(truth, rel=0.03)
    line = np.polyfit(sizes, curve.times_s, 1)
    assert np.median(np.abs(np.polyval(line, far) / truth - 1)) > 0.1  # what a plain line makes of it


def test_what_is_no_collective():
    assert wire_bytes("all-gather", 800.0, 4) == 600 and wire_bytes("all-reduce", 800.0, 4) == 1200
    with pytest.raises(UnknownName, match="'gossip'"):
        wire_bytes("gossip", 1.0, 2)
    for sizes, times in (([1.0], [1.0]), ([2.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(FormatError, match="two or more rising"):
            CollectiveCurve(operation="all-gather", gpus=2, link_Bps=LINK, sizes=np.array(sizes), times_s=np.array(times))
    other = CollectiveCurve(operation="all-gather", gpus=2, link_Bps=1.0, sizes=SIZES, times_s=SIZES)
    with pytest.raises(FormatError, match="one link rate"):
        fit_collectives([*collective_curves(), other])
