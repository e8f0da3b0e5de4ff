"""Packed bits against numpy: any length, NaN and zeros among the values."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.kernels.packed import clear_unless, pack_bits, pack_signs, pass_where, unpack_bits


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_signs_and_bits(count: int, dtype: type) -> None:
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count).astype(dtype)
    values[rng.random(count) < 0.2] = rng.choice([0.0, -0.0, np.nan, np.inf, -np.inf])
    wanted = ~(values <= 0)
    bits, again = np.full(-(-count // 8), 255, np.uint8), np.full(-(-count // 8), 255, np.uint8)
    pack_signs(values, bits)
    pack_bits(wanted.view(np.uint8), again)
    assert np.array_equal(bits, again) and np.array_equal(bits, np.packbits(wanted, bitorder="little"))
    flags = np.zeros(count, np.uint8)
    unpack_bits(bits, flags)
    assert np.array_equal(flags.astype(bool), wanted)
    gradient = rng.standard_normal(count).astype(dtype)
    out = np.empty_like(gradient)
    pass_where(bits, gradient, out)
    clear_unless(bits, gradient.view(np.int32 if dtype is np.float32 else np.int64))
    assert np.array_equal(out, gradient) and np.array_equal(out != 0, wanted)
