"""What several files of tests on real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from processes import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Four processes that wait for work, for all tests of a file."""
    torch.set_num_threads(1)
    made = RankPool(4)
    yield made
    made.close()
