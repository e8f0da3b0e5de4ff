"""What is decided of input pipelines, and what a strategy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...profile.input_plan import InputPlan, Place
from ...profile.input_rates import InputRates
from ..strategies import Listed

__all__ = ["FeedProblem", "FeedStrategy"]


@dataclass(frozen=True, kw_only=True)
class FeedProblem:
    """Rates as they were measured on a node, and where the jobs run. `seed`: of the files that are kept."""

    rates: InputRates
    place: Place
    seed: int = 0


class FeedStrategy(Listed, Protocol):
    """A strategy: its options, and the plan of a problem."""

    def plan(self, problem: FeedProblem, *, rng: np.random.Generator) -> InputPlan: ...
