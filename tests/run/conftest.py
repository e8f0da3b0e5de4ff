"""What several files of tests on real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from processes import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Five processes that wait for work, for all tests: starting them and importing what they need costs more than most cases."""
    torch.set_num_threads(1)
    made = RankPool(5)
    yield made
    made.close()
