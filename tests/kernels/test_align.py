"""Longest common subsequences against the textbook table, whole and split; cuts of a sequence against all cuts."""

from itertools import combinations_with_replacement

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.align import common_subsequence
from meshwright.kernels.split import best_split

WORDS = st.lists(st.integers(0, 4), max_size=40)


def textbook(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, st.sampled_from([0, 7, 60, 1 << 20]))
def test_as_long_as_can_be(a, b, direct_cells):
    left, right = common_subsequence(np.array(a, np.int32), np.array(b, np.int32), direct_cells=direct_cells)
    assert len(left) == len(right) == textbook(a, b)
    assert (np.diff(left) > 0).all() and (np.diff(right) > 0).all()
    assert [a[i] for i in left] == [b[j] for j in right]


def test_long_and_nearly_equal():
    rng = np.random.default_rng(1)
    a = rng.integers(0, 40, 6000).astype(np.int32)
    b = np.delete(a, rng.choice(6000, 30, replace=False))
    left, right = common_subsequence(a, b, direct_cells=1 << 16)
    assert len(left) == len(b) and np.array_equal(a[left], b[right])


def charge(group, parts, least, most, weight, outside, opens, place):
    inside = np.zeros(len(group), bool)
    total = 0
    for c, (begin, end) in enumerate(parts):
        inside[begin:end] = True
        for g, w in enumerate(weight):
            have = int((group[begin:end] == g).sum())
            total += w * (max(least[c][g] - have, 0) + max(have - most[c][g], 0))
        if end > begin:
            total += int(group[begin] != opens[c]) + int(abs(begin - place[c]) > 1)
    return total + sum(outside[g] for g in group[~inside])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cheapest_cut(data):
    kinds, count, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    number = st.integers(0, 3)

    def table(rows, columns):
        return np.array(data.draw(st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=rows, max_size=rows)), np.int64)

    least = table(count, kinds)
    most, weight = least + table(count, kinds), table(1, kinds)[0] + 1
    outside, opens, place = table(1, kinds)[0], np.minimum(table(1, count)[0], kinds - 1), table(1, count)[0]
    group = np.minimum(table(1, n)[0], kinds - 1) if n else np.zeros(0, np.int64)
    prefix = np.zeros((kinds, n + 1), np.int64)
    for g in range(kinds):
        prefix[g, 1:] = np.cumsum(group == g)
    cost, back = np.zeros((count + 1, n + 1), np.int64), np.zeros((count + 1, n + 1), np.int64)
    parts = np.zeros((count, 2), np.int64)
    found = best_split(group, prefix, least, most, weight, outside, opens, place, np.full(count, n, np.int64), cost, back, parts)
    cuts = combinations_with_replacement(range(n + 1), 2 * count)
    best = min(charge(group, [(x[2 * c], x[2 * c + 1]) for c in range(count)], least, most, weight, outside, opens, place) for x in cuts)
    assert found == best == charge(group, parts.tolist(), least, most, weight, outside, opens, place)
    flat = parts.ravel()
    assert (np.diff(flat) >= 0).all()


def test_longest_limits_a_part():
    group, prefix = np.zeros(4, np.int64), np.arange(5, dtype=np.int64)[None]
    args = [np.array([[4]]), np.array([[4]]), np.array([5]), np.array([1]), np.array([0]), np.array([0]), np.array([2])]
    parts = np.zeros((1, 2), np.int64)
    best_split(group, prefix, *args, np.zeros((2, 5), np.int64), np.zeros((2, 5), np.int64), parts)
    assert parts[0, 1] - parts[0, 0] == 2
