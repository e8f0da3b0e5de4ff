"""What benchmarks on real processes share: the tests' models and rigs on the path, a pool of ranks, and `--quick`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["quick_asked", "rank_pool"]

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "run"


def quick_asked(description: str | None) -> bool:
    """Whether the command line says `--quick`: a few cases, nothing recorded."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    return bool(parser.parse_args().quick)


@contextmanager
def rank_pool(ranks: int = 4) -> Iterator[Any]:
    """Processes that run functions of the tests' rigs as ranks of one group; those can be imported inside."""
    os.chdir(ROOT)
    sys.path.insert(0, str(TESTS))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    from processes import RankPool

    pool = RankPool(ranks)
    try:
        yield pool
    finally:
        pool.close()
