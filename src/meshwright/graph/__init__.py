"""What a model computes: its operator graph, at any batch size, and its training step counted by storage."""

from .graph import GraphValue, OpGraph, OpNode, Work
from .scale import at_batch
from .step_graph import StepGraph, StepPlan

__all__ = ["GraphValue", "OpGraph", "OpNode", "StepGraph", "StepPlan", "Work", "at_batch"]
