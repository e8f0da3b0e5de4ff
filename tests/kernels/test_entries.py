"""Kernels on lists of entries against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels import entries as e
from meshwright.kernels.select import INFINITE, magnitude_of

QUICK = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 1 << 20)


def made(pairs: dict[int, float], *, wide: bool = False) -> Any:
    rows = np.empty((len(pairs), 2), np.int64 if wide else np.int32)
    rows[:, 0] = list(pairs)
    rows[:, 1] = 0
    e.entry_values(rows)[:] = list(pairs.values())
    return rows


def read(rows: Any) -> dict[int, float]:
    return dict(zip(rows[:, 0].tolist(), e.entry_values(rows).tolist(), strict=True))


@pytest.mark.parametrize("wide", [False, True])
def test_values_of_entries_are_the_bits_beside_the_index(wide: bool) -> None:
    assert read(made({3: -1.5, 9: 0.25}, wide=wide)) == {3: -1.5, 9: 0.25}


@QUICK
@given(seed=SEEDS, n=st.integers(1, 300), room=st.integers(0, 300))
def test_adding_and_selecting_in_one_pass(seed: int, n: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-5, 6, n).astype(np.float32) for _ in range(2))
    if seed % 3 == 0:
        b[int(rng.integers(n))] = np.nan
    out, rows = np.empty(n, np.float32), np.empty((room, 2), np.int32)
    low = magnitude_of(float(rng.integers(1, 9)))
    found, wrong, where = e.add_select(a, b, out, out.view(np.int32), np.int32(low), rows)
    total = a + b
    want = np.flatnonzero(~(np.abs(total) < np.int32(low).view(np.float32)))
    np.testing.assert_array_equal(out, total)
    assert found == len(want) and wrong == np.isnan(total).sum() and (where == -1 or np.isnan(total[where]))
    assert rows[: min(found, room), 0].tolist() == want[:room].tolist()


@QUICK
@given(seed=SEEDS, n=st.integers(1, 300), ties=st.integers(0, 20))
def test_selecting_with_so_many_ties(seed: int, n: int, ties: int) -> None:
    x = np.random.default_rng(seed).integers(-4, 5, n).astype(np.float32)
    rows = np.empty((n, 2), np.int32)
    above, equal = e.select_from(x.view(np.int32), 100, np.int32(magnitude_of(2.0)), ties, rows)
    size = np.abs(x)
    assert (above, equal) == ((size > 2).sum(), (size == 2).sum())
    keep = (size > 2) | ((size == 2) & (np.cumsum(size == 2) <= ties))
    assert read(rows[: above + min(equal, ties)]) == {100 + i: float(x[i]) for i in np.flatnonzero(keep)}
    kept, left = e.move_tail(rows[: above + min(equal, ties)], magnitude_of(2.0), 1, np.empty((n, 2), np.int32))
    assert kept == above + min(equal, ties, 1) and left == min(equal, ties) - min(equal, ties, 1)


@QUICK
@given(seed=SEEDS, n=st.integers(1, 400), k=st.integers(1, 500))
def test_histograms_find_the_kth_largest_of_all(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [(rng.standard_normal(n) * rng.choice([0, 1e-42, 1, 1e30], n)).astype(np.float32) for _ in range(3)]
    prefix = above = 0
    for low, high in e.LEVELS:
        counts = np.zeros(1 << (high - low), np.int64)
        for x in parts:
            e.histogram(x.view(np.int32), low, high, prefix, counts)
        found, higher = e.descend(counts, k - above)
        above += higher
        if found < 0:
            break
        prefix = prefix << (high - low) | found
    sizes = np.sort(np.abs(np.concatenate(parts)))[::-1]
    sizes = sizes[sizes > 0]
    if k > len(sizes):
        assert found == -1 and above == len(sizes)
    else:
        assert prefix == magnitude_of(sizes[k - 1]) and above == (sizes > sizes[k - 1]).sum()


@QUICK
@given(seed=SEEDS, wide=st.booleans())
def test_merging_adds_equal_indices(seed: int, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        chosen = np.sort(rng.choice(40, int(rng.integers(0, 20)), replace=False))
        sides.append({int(i): float(rng.integers(-9, 10)) for i in chosen})
    a, b = (made(side, wide=wide) for side in sides)
    out = np.empty((len(a) + len(b), 2), a.dtype)
    length = e.merge_entries(a, e.entry_values(a), b, e.entry_values(b), out, e.entry_values(out))
    want = {i: sides[0].get(i, 0.0) + sides[1].get(i, 0.0) for i in sorted({*sides[0], *sides[1]})}
    assert read(out[:length]) == want


def test_adding_stops_at_an_index_outside() -> None:
    dense = np.zeros(4, np.float32)
    rows = made({11: 2.0, 13: 1.0})
    assert e.add_entries(dense, 10, rows, e.entry_values(rows)) == -1 and dense.tolist() == [0, 2, 0, 1]
    for outside in (9, 14):
        rows = made({10: 5.0, outside: 1.0, 12: 7.0})
        assert e.add_entries(dense, 10, rows, e.entry_values(rows)) == 1
    assert dense.tolist() == [10, 2, 0, 1]


def test_what_was_given_is_cleared_and_summed() -> None:
    x = np.arange(6, dtype=np.float32)
    own, chosen = made({1: 1.0, 3: -3.0, 5: 5.0}), made({0: 9.0, 3: 9.0, 5: 9.0})
    assert e.clear_chosen(x, own, e.entry_values(own), chosen) == (2.0, 8.0) and x.tolist() == [0, 1, 2, 0, 4, 0]
    assert e.clear_all(x, own, e.entry_values(own)) == (3.0, 9.0) and x.tolist() == [0, 0, 2, 0, 4, 0]


def test_moments_counts_and_distances() -> None:
    x = np.array([1, -2, np.inf], np.float32)
    assert e.count_from(x.view(np.int32), np.int32(magnitude_of(2.0))) == 2
    assert e.count_from(x.view(np.int32), np.int32(INFINITE)) == 1
    assert e.moments(x[:2]) == (-1.0, 5.0) and e.sum_squares(x[:2], np.zeros(2, np.float32)) == 5.0


@QUICK
@given(seed=SEEDS, n=st.integers(2, 200), owners=st.integers(1, 9))
def test_hashing_groups_by_owner_and_back(seed: int, n: int, owners: int) -> None:
    factor = next(f for f in range(n // 2 + 1, 2 * n) if np.gcd(f, n) == 1)
    chosen = np.sort(np.random.default_rng(seed).choice(n, n // 2, replace=False))
    rows, out = made({int(i): float(i) for i in chosen}), np.empty((n // 2, 2), np.int32)
    length, starts = -(-n // owners), np.zeros(owners + 1, np.int64)
    e.scatter_hashed(rows, factor, 0, n, length, starts, out)
    assert starts[0] == 0 and starts[-1] == n // 2
    for owner in range(owners):
        assert out[starts[owner] : starts[owner + 1], 0].tolist() == [i for i in chosen if factor * i % n // length == owner]
    e.rehash(out, factor, 0, n)
    e.rehash(out, pow(factor, -1, n), 0, n)
    assert read(out) == {int(i): float(i) for i in chosen}
