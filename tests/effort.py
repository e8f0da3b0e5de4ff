"""How much a test tries: a share in CI, all of it under `./test --full`."""

from __future__ import annotations

import os

__all__ = ["FULL", "PROFILE", "SHARE_OF_EXAMPLES", "few"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
FULL = PROFILE != "ci"
SHARE = 0.25  # of a test's own seeds: what more of them find, they found when the test was written; `./test --full` runs all
SHARE_OF_EXAMPLES = 0.4  # of those that a test of properties asks for


def few(wanted: int, *, least: int = 1, share: float = SHARE) -> int:
    """How many of a test's own seeds or examples to try."""
    return wanted if FULL else min(wanted, max(least, round(share * wanted)))
