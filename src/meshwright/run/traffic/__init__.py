"""Gradient traffic as planned, in real training: for DDP through its communication hook, for FSDP2 through its reduce-scatter."""

from .ddp import PlannedTraffic
from .hook import traffic_hook

__all__ = ["PlannedTraffic", "traffic_hook"]
