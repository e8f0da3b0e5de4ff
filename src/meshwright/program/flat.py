"""A stored program without calls, folded or not: what is simulated, priced and drawn.

    flat = flatten(plan.main, plan.programs)

The steps of a folded program stay those of its representatives; `represented_by` says which rank stands for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .calls import InlinedProgram, inline
from .fold import representative
from .fold_calls import inline_folded
from .program import Program
from .tables import I32

__all__ = ["flatten", "represented_by"]


def flatten(program: Program, programs: Mapping[str, Program]) -> InlinedProgram:
    """`inline`, or `inline_folded` of a folded program. Raises: what they raise."""
    return inline_folded(program, programs) if program.fold is not None else inline(program, programs)


def represented_by(program: Program) -> I32:
    """Per rank the rank whose stored lanes it runs: itself, where nothing is folded."""
    rank = np.arange(program.ranks, dtype=np.int32)
    return rank if program.fold is None else representative(program.fold, rank).astype(np.int32)
