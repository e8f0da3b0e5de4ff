"""Triton kernels in the interpreter against the CPU kernels, bit for bit. Needs `triton` beside torch; skipped without it."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.kernels import quantise, select, sparse
from meshwright.kernels.counter_random import key_of

pytest.importorskip("triton", reason="triton is not installed: GPU kernels unchecked (pip install triton)")
torch = pytest.importorskip("torch")

from meshwright.kernels.gpu import quantise as gpu_quantise  # noqa: E402
from meshwright.kernels.gpu import select as gpu_select  # noqa: E402
from meshwright.kernels.gpu import signs as gpu_signs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy: divisions by zero and overflows warn
SIZES = [0, 1, 7, 8, 63, 1024, 2500]


def values(n: int) -> np.ndarray:  # type: ignore[type-arg]
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    x[::11] = 0
    return x


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("limit", [-1, 0.0, 1.5, 1e9])
def test_select(n: int, limit: float) -> None:
    x = values(n)
    if n > 60:
        x[50] = np.nan
    threshold = -1 if limit == -1 else select.magnitude_of(limit)
    expected = select.select_above(x, threshold)
    indices, found = gpu_select.select_above(torch.from_numpy(x), threshold)
    assert indices.dtype == torch.int32 and np.array_equal(indices.numpy(), expected)
    assert np.array_equal(found.numpy().view(np.int32), x[expected].view(np.int32))
    ours, theirs = np.ones(n, np.float32), torch.ones(n)
    sparse.add_at(ours, expected, x[expected])
    gpu_select.add_at(theirs, indices, found)
    assert np.array_equal(ours.view(np.int32), theirs.numpy().view(np.int32))
    sparse.put_at(ours, expected, np.float32(3))
    gpu_select.put_at(theirs, indices, 3.0)
    assert np.array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("keep", [False, True])
def test_signs(n: int, keep: bool) -> None:
    x = values(n)
    packed = np.empty(-(-n // 8), np.uint8)
    quantise.pack_signs(x.view(np.int32), packed)
    theirs = gpu_signs.pack_signs(torch.from_numpy(x))
    assert np.array_equal(theirs.numpy(), packed)
    means = np.empty(quantise.blocks_of(n, 64), np.float32)
    quantise.block_means(x, 64, means)
    assert np.allclose(gpu_signs.block_means(torch.from_numpy(x), 64).numpy(), means, rtol=2e-7)
    both = np.stack((means, -means), 1).reshape(-1)
    out, other = np.ones(n, np.float32), torch.ones(n)
    quantise.add_two_values(packed, 64, both, out, keep)
    gpu_signs.add_two_values(theirs, 64, torch.from_numpy(both), other, keep)
    assert np.array_equal(out, other.numpy())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("width", "scale"), [(2, "max"), (4, "norm"), (8, "norm"), (8, "nearest")])
@pytest.mark.parametrize("block", [64, 96])
def test_levels(n: int, width: int, scale: str, block: int) -> None:
    x, levels, key = values(n), 2 ** (width - 1) - 1, key_of(1, n)
    if n > 1000:
        x[:block], x[block : 2 * block], x[2 * block] = 0, 1e-41, np.nan
    tx = torch.from_numpy(x)
    scales = np.empty(quantise.blocks_of(n, block), np.float32)
    if scale == "norm":
        quantise.block_norms(x, block, scales)
        assert np.allclose(gpu_quantise.block_norms(tx, block).numpy(), scales, rtol=2e-7, equal_nan=True)
    else:
        quantise.block_maxima(x.view(np.int32), block, scales.view(np.int32))
        assert np.array_equal(gpu_quantise.block_maxima(tx, block).numpy(), scales, equal_nan=True)
    codes = np.empty(n, np.uint8)
    if scale == "nearest":
        quantise.round_nearest(x, block, scales, levels, codes)
        found = gpu_quantise.round_nearest(tx, block, torch.from_numpy(scales), levels)
    else:
        quantise.round_levels(x, block, scales, levels, *key, 5, codes)
        found = gpu_quantise.round_levels(tx, block, torch.from_numpy(scales), levels, tuple(map(int, key)), 5)
    usable = np.isfinite(np.repeat(scales, block)[:n])
    assert np.array_equal(found.numpy()[usable], codes[usable])
    packed = codes
    if width < 8:
        packed = np.empty(-(-n * width // 8), np.uint8)
        quantise.pack_codes(codes, width, packed)
        assert np.array_equal(gpu_quantise.pack_codes(torch.from_numpy(codes), width).numpy(), packed)
    out, other = np.ones(n, np.float32), torch.ones(n)
    quantise.add_levels(packed, width, levels, block, scales, out, True)
    gpu_quantise.add_levels(torch.from_numpy(packed), width, levels, block, torch.from_numpy(scales), other, True)
    assert np.array_equal(out, other.numpy(), equal_nan=True)
