"""Restarting a training job on other devices: which rank goes on which device, and which bytes come from where."""

from .placement import reuse_bytes, reuse_placement
from .problem import STORAGE, LostPart, Piece, RestartProblem, Transfers
from .program import RestartEstimate, estimate_restart, restart_program, with_storage
from .transfers import plan_transfers, require_complete

__all__ = [
    "STORAGE", "LostPart", "Piece", "RestartEstimate", "RestartProblem", "Transfers", "estimate_restart", "plan_transfers", "require_complete",
    "restart_program", "reuse_bytes", "reuse_placement", "with_storage",
]  # fmt: skip
