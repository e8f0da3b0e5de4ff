"""What was decided: plans, layouts, shares and regions of tensors, and a layout put on a schedule."""

from .plan import Alternative, CycleEntry, Plan, Prediction, Segment, Stage, TrainingLayout
from .shards import part_ranges

__all__ = ["Alternative", "CycleEntry", "Plan", "Prediction", "Segment", "Stage", "TrainingLayout", "part_ranges"]
