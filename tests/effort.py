"""How much a test tries: a share in CI, all of it under `./test --full`."""

from __future__ import annotations

import os

__all__ = ["FULL", "PROFILE", "few"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
FULL = PROFILE != "ci"
SHARE = 0.25  # of the seeds and examples that a test asks for: what more of them find, they found when the test was written; `./test --full` runs all


def few(wanted: int, *, least: int = 1) -> int:
    """How many of a test's own seeds or examples to try."""
    return wanted if FULL else min(wanted, max(least, round(SHARE * wanted)))
