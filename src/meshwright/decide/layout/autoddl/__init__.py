"""AutoDDL: SBP signatures for every operator, found automatically with near-optimal bandwidth cost."""

from ....plan.sharding import Bytes, ShardingPlan, ValueState
from .problem import ShardingProblem
from .strategy import CITE, DEVIATIONS, SEARCHES, AutoDDL

__all__ = ["CITE", "DEVIATIONS", "SEARCHES", "AutoDDL", "Bytes", "ShardingPlan", "ShardingProblem", "ValueState"]
