"""Sparse all-reduces on real tensors: one protocol per published system, run over torch.distributed or by a twin in one process."""

from .reducer import METHODS, SparseAllReduce
from .state import StepStats, Update

__all__ = ["METHODS", "SparseAllReduce", "StepStats", "Update"]
