"""AutoDDL: SBP signatures for every operator, found automatically with near-optimal bandwidth cost."""

from .problem import Bytes, ShardingPlan, ShardingProblem, ValueState
from .strategy import CITE, DEVIATIONS, SEARCHES, AutoDDL

__all__ = ["CITE", "DEVIATIONS", "SEARCHES", "AutoDDL", "Bytes", "ShardingPlan", "ShardingProblem", "ValueState"]
