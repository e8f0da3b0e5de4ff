"""What to keep for backward when recomputation is planned by exact liveness: minimum cuts, a search over schedules, one frontier for all budgets."""

from .frontier import Frontier, frontier_of
from .hull import CutPoint, Moment, cut_points, moments
from .network import MinCut
from .strategy import FusionAware

__all__ = ["CutPoint", "Frontier", "FusionAware", "MinCut", "Moment", "cut_points", "frontier_of", "moments"]
