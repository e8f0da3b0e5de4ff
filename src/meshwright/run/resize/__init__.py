"""Running commands resized window by window, and the same decisions as orders to other engines."""

from __future__ import annotations

from .actuators import LoaderWorkers, kubernetes_resize, slurm_update
from .loop import Outcome, ResizeCommand, resize_commands

__all__ = ["LoaderWorkers", "Outcome", "ResizeCommand", "kubernetes_resize", "resize_commands", "slurm_update"]
