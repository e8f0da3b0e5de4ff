"""Sums and gathers of every size class on real ranks, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from traffic_rig import exchanged

from meshwright.run.traffic.exchange import MAX_ADD_HERE_BYTES, MAX_AT_ONCE_BYTES, MAX_IN_PARTS_BYTES

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

RANKS = 3
# Of float32, on both sides of every line.
COUNTS = (1, 7, MAX_ADD_HERE_BYTES // 8, MAX_ADD_HERE_BYTES // 8 + 2, MAX_IN_PARTS_BYTES // 4, MAX_IN_PARTS_BYTES // 4 + 1)
LENGTHS = (1, MAX_AT_ONCE_BYTES // 2, MAX_AT_ONCE_BYTES // 2 + 1)


def test_every_way_to_sum_and_to_gather_gives_the_same_on_all_ranks(pool, tmp_path):
    found = pool.run(exchanged, RANKS, RANKS, str(tmp_path / "store"), COUNTS, LENGTHS)
    for i, count in enumerate(COUNTS):
        values = [np.arange(count) % 100 + r for r in range(RANKS)]
        assert all(np.array_equal(sums[i].numpy(), sum(values)) for sums, _ in found)
    for i, length in enumerate(LENGTHS):
        expected = np.concatenate([(np.arange(length) + r) % 251 for r in range(RANKS)])
        assert all(np.array_equal(wires[i].numpy(), expected) for _, wires in found)
