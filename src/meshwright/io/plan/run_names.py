"""Names of the files in a run folder that more than one module writes or reads."""

from __future__ import annotations

__all__ = ["EXPERT_LOADS", "MODULES", "PLAN", "trace_name"]

EXPERT_LOADS = "expert-loads.json"  # rows that every expert got in the run, where the model has expert layers
MODULES = "modules.json"
PLAN = "plan.json"  # the plan that was run


def trace_name(rank: int) -> str:
    return f"trace-rank-{rank:03d}.json.gz"
