"""Sparse sums through simulated switches: exact, whatever collides; links carry what the union formula says; arrays where they are smaller."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import few
from meshwright.errors import UsageError
from meshwright.simulate.sparse_switch import HEADER_BYTES, SparseSwitch, random_supports, reduce_sparse, union_pairs, ways


def plain(hosts, elements):
    total = np.zeros(elements)
    for indices, values in hosts:
        total[indices] += values
    return total


def valued(supports, seed=0):
    rng = np.random.default_rng(seed)
    return [(s, rng.integers(1, 51, len(s)).astype(float)) for s in supports]


@settings(max_examples=few(60), deadline=None)
@given(
    st.sampled_from([(1,), (3,), (2, 2), (2, 1, 3), (4, 4)]), st.integers(1, 700), st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.integers(1, 300),
    st.integers(1, 64), st.integers(1, 20), st.integers(0, 99),
)  # fmt: skip
def test_the_sum_is_right_whatever_collides_spills_or_becomes_an_array(tree, elements, density, span, places, spill, seed):
    hosts = valued(random_supports(elements, density, int(np.prod(tree)), overlap=0.3, seed=seed), seed)
    switch = SparseSwitch(span=span, places=places, spill=spill, packet_bytes=64)
    found = reduce_sparse(hosts, elements, tree, switch)
    total = np.zeros(elements)
    total[found.indices] = found.values
    assert (total == plain(hosts, elements)).all()
    assert set(found.indices) == set(np.concatenate([s for s, _ in hosts]))
    assert found.levels[0].pairs == sum(len(s) for s, _ in hosts) and len(found.levels) == len(tree)
    assert all(level.table_bytes <= max(4 * span + 4, 8) for level in found.levels)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.2])
def test_every_link_carries_the_union(density):
    elements, tree = 1 << 20, (2, 4, 2)
    hosts = valued(random_supports(elements, density, 16))
    found = reduce_sparse(hosts, elements, tree, SparseSwitch(places=1 << 19))  # hardly a collision
    assert [level.hosts_below for level in found.levels] == [1, 2, 8] and [level.senders for level in found.levels] == [16, 8, 2]
    for level in found.levels:
        assert level.expected_pairs == pytest.approx(level.senders * union_pairs(elements, density, level.hosts_below), rel=0.02)
        assert level.pairs == pytest.approx(level.expected_pairs, rel=0.03)
    assert len(found.indices) == pytest.approx(union_pairs(elements, density, 16), rel=0.03)


def test_a_small_table_sends_early_and_the_switch_above_adds():
    hosts = valued(random_supports(1 << 16, 0.05, 8))
    wide, narrow = (reduce_sparse(hosts, 1 << 16, (2, 4), SparseSwitch(places=p)) for p in (1 << 14, 64))
    assert narrow.levels[1].spilled > 0 == wide.levels[1].spilled or narrow.levels[1].spilled > wide.levels[1].spilled
    assert narrow.levels[1].pairs > wide.levels[1].pairs
    assert (narrow.indices == wide.indices).all() and (narrow.values == wide.values).all()


def test_an_empty_block_is_one_packet_and_a_full_one_an_array():
    switch = SparseSwitch(span=256, packet_bytes=1024)
    nothing, everything = (np.zeros(0, np.int64), np.zeros(0)), (np.arange(512), np.ones(512))
    found = reduce_sparse([nothing, nothing], 512, (2,), switch)
    assert found.levels[0].mean_bytes == found.down_bytes == 2 * HEADER_BYTES and not len(found.indices)
    found = reduce_sparse([everything, nothing], 512, (2,), switch)
    assert found.levels[0].most_bytes == found.down_bytes == 2 * (1024 + HEADER_BYTES) and found.levels[0].blocks_dense == 2


def test_which_way_is_best():
    def best(density, overlap=0.0):
        supports = random_supports(1 << 18, density, 8, overlap=overlap)
        switch = SparseSwitch(places=1 << 14)
        times = ways(reduce_sparse(valued(supports), 1 << 18, (8,), switch), 1 << 18, 8, 1e9, switch)
        assert times["ring"] == pytest.approx(2 * 7 / 8 * times["dense"]) and min(times.values()) > 0
        return min(times, key=times.__getitem__), times

    assert best(0.5)[0] == "dense"
    assert best(0.01, 0.9)[0] == "sparse"
    _, times = best(0.01)  # little is shared: 7.73 children's pairs come down, where hosts alone receive 7
    assert times["sparse"] / times["hosts"] == pytest.approx(7.73 / 7, rel=0.05)


def test_what_is_refused():
    with pytest.raises(UsageError, match="a tree of 2 x 2 has 4 hosts, there are 3"):
        reduce_sparse([(np.zeros(0, np.int64), np.zeros(0))] * 3, 5, (2, 2), SparseSwitch())
    for indices in ([3, 1], [1, 1], [-1, 2], [1, 5]):
        with pytest.raises(UsageError, match="host 0: ascending"):
            reduce_sparse([(np.array(indices), np.zeros(2))], 5, (1,), SparseSwitch())
    with pytest.raises(UsageError, match="elements"):
        reduce_sparse([], 1 << 40, (), SparseSwitch())
    with pytest.raises(UsageError, match="span, places"):
        SparseSwitch(places=0)
    for density in (-0.1, 1.5):
        with pytest.raises(UsageError, match="density"):
            random_supports(100, density, 2)
