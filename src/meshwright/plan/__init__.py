"""Plans: what was decided. Layouts, shares and regions of tensors, and a layout on a pipeline schedule."""

from .plan import Alternative, CycleEntry, Plan, Prediction, Segment, Stage, TrainingLayout
from .shards import part_ranges

__all__ = ["Alternative", "CycleEntry", "Plan", "Prediction", "Segment", "Stage", "TrainingLayout", "part_ranges"]
