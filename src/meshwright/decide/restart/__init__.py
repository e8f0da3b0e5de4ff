"""Restarting a training job on other devices: which rank goes on which device, and which bytes come from where."""

from .placement import MostInPlace, reuse_bytes, reuse_placement
from .problem import RestartProblem, RestartStrategy, Transfers
from .program import RestartEstimate, estimate_restart, restart_program, with_storage
from .transfers import NearestCopy, plan_transfers, require_complete

__all__ = [
    "STRATEGIES", "RestartEstimate", "RestartProblem", "RestartStrategy", "Transfers", "estimate_restart", "plan_transfers", "require_complete",
    "restart_program", "reuse_bytes", "reuse_placement", "with_storage",
]  # fmt: skip

# The list, for both questions (`RestartStrategy.answers`): citations and the contract battery follow from it.
STRATEGIES: tuple[type[RestartStrategy], ...] = (MostInPlace, NearestCopy)
