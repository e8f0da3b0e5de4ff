"""How much a test tries: a share in CI, all of it under `./test --full`."""

from __future__ import annotations

import os

__all__ = ["few"]

SHARE_OF_SEEDS = 0.4


def few(seeds: int) -> int:
    """How many of a test's own seeds to try."""
    return seeds if os.environ.get("HYPOTHESIS_PROFILE", "ci") != "ci" else max(1, round(SHARE_OF_SEEDS * seeds))
