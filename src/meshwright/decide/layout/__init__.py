"""The layout decision: how operators, parameters and the batch are split over ranks."""

from .grid import Grid
from .problem import Degrees, LayoutCandidate, LayoutProblem, LayoutStrategy

STRATEGIES = (Grid,)

__all__ = ["STRATEGIES", "Degrees", "Grid", "LayoutCandidate", "LayoutProblem", "LayoutStrategy"]
