"""Shares in whole units, and the ranges they mean: every element once, key-value heads where their query heads are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.decide.layout.tensor_shares import TensorOptions, choose_shares, largest_remainder
from meshwright.errors import Unsupported
from meshwright.plan.plan import ParamShard, ValueInfo, ValueSplit
from meshwright.plan.shards import local_shape, local_value, part_ranges, replica_groups

speeds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


@given(st.integers(1, 200), speeds)
def test_largest_remainder_is_whole_positive_and_near_the_speed(total, weights):
    assume(total >= len(weights))
    parts = largest_remainder(total, weights)
    assert sum(parts) == total and min(parts) >= 1 and len(parts) == len(weights)
    exact = [total * w / sum(weights) for w in weights]
    if min(exact) >= 1:
        assert all(abs(p - e) < 1 for p, e in zip(parts, exact, strict=True))


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 3), st.data())
def test_parts_tile_every_block(units, parts, blocks, data):
    weights = data.draw(st.one_of(st.just(()), st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=parts, max_size=parts).map(tuple)))
    shares = choose_shares(units, (), parts, TensorOptions(speeds=weights, column_block=4))
    if shares is None:
        assert units < parts
        return
    size = units * data.draw(st.sampled_from([1, 3, 4]))
    shard = ParamShard(param="w", axis=0, blocks=blocks, shares=shares)
    whole = np.arange(blocks * size)
    held = [np.concatenate([whole[a:b] for a, b in part_ranges(len(whole), shard, i, parts)]) for i in range(parts)]
    assert sorted(np.concatenate(held).tolist()) == whole.tolist()
    for block in range(blocks):  # each rank's part of every block is one run, in rank order
        runs = [h[h // size == block] for h in held]
        assert np.concatenate(runs).tolist() == whole[block * size : (block + 1) * size].tolist()
    assert replica_groups((len(whole),), shard, parts) is None


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 8))
def test_key_value_heads_are_where_their_query_heads_are(heads, queries, parts):
    """Brute force over query heads: a rank holds exactly the key-value heads that its query heads read, equally often each."""
    units = heads * queries
    shares = choose_shares(units, (heads,) if heads < units else (), parts)
    if shares is None:
        assert units < parts or heads < parts  # some key-value head would have fewer query heads than ranks
        return
    if heads == units:
        return
    q = ParamShard(param="q", axis=0, shares=shares)
    k = ParamShard(param="k", axis=0, shares=shares, groups=heads)
    for part in range(parts):
        ((a, b),) = part_ranges(units, q, part, parts)
        ((c, d),) = part_ranges(heads, k, part, parts)
        needed = [head // queries for head in range(a, b)]
        assert sorted(set(needed)) == list(range(c, d))
        assert len({needed.count(x) for x in needed}) == 1
    partial = replica_groups((heads,), k, parts)
    assert (partial is not None) == (heads < parts)
    if partial is not None:
        assert sorted(i for g in partial.groups for i in g) == list(range(parts))


@pytest.mark.parametrize(
    ("units", "groups", "parts", "speeds", "expected"),
    [
        (8, (), 2, (), ()), (5, (), 2, (), (3, 2)), (3, (), 4, (), None), (8, (2,), 4, (), ()), (8, (2,), 3, (), (2, 2, 4)), (6, (3,), 2, (), (2, 1)),
        (12, (), 2, (2.0, 1.0), (2, 1)), (1024, (), 2, (2.0, 1.0), (11, 5)), (4, (2,), 6, (), None), (6, (2, 3), 4, (), None),
    ],
)  # fmt: skip
def test_known_shares(units, groups, parts, speeds, expected):
    assert choose_shares(units, groups, parts, TensorOptions(speeds=speeds)) == expected


@pytest.mark.parametrize(
    ("extent", "cut", "parts", "why"),
    [
        (9, {"shares": (1, 1, 1)}, 2, "3 shares"), (8, {"shares": (1, 0)}, 2, "shares"), (9, {"blocks": 2}, 2, "does not divide into 2 blocks"),
        (5, {}, 2, "does not divide into 1 blocks of 2 parts"), (9, {"groups": 2}, 2, "does not divide into 2 groups"),
        (9, {"mixed": ((4, 0), (4, 0))}, 2, "does not divide"),
    ],
)  # fmt: skip
def test_shares_that_cut_an_element_are_refused(extent, cut, parts, why):
    with pytest.raises(Unsupported, match=why):
        part_ranges(extent, ParamShard(param="w", axis=0, **cut), 0, parts)


def test_parts_that_overlap_without_being_equal_are_refused():
    with pytest.raises(Unsupported, match="share some groups and not others"):
        replica_groups((12,), ParamShard(param="k", axis=0, shares=(3, 3, 6), groups=3), 3)
    packed = ParamShard(param="qkv", axis=0, mixed=((8, 0), (2, 2), (2, 2)))
    with pytest.raises(Unsupported, match="share some groups") as caught:
        replica_groups((12,), packed, 4)
    assert "packed projections need whole groups" in caught.value.hint
    assert replica_groups((12,), packed, 2) is None


def test_values_shrink_with_their_split():
    value = ValueInfo(name="x", shape=(4, 10), dtype="float32", size_bytes=160, split=ValueSplit(dim=1, shares=(3, 2)))
    assert [local_value(value, i, 2).shape for i in (0, 1)] == [(4, 6), (4, 4)]
    assert [local_value(value, i, 2).size_bytes for i in (0, 1)] == [96, 64]
    assert local_value(msgspec.structs.replace(value, split=None), 1, 2).shape == (4, 10)
    assert local_shape((4, 10), 1, ParamShard(param="w", axis=1), 0, 2) == (4, 5)
