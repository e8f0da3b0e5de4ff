"""From a measured profile to a plan that was run: plan, run the plan for some steps, fit everything again with them, and plan again.

A planner picks where its model is most hopeful, so the plan it picks is where the model errs to that side. With the plan's own steps among those that
are fitted it errs no more there; it may then prefer another plan, which runs next. What is taken in the end has run, and its prediction has been held
against steps of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from ...drive.traffic import plan_traffic, with_groups
from ...errors import MeshwrightError, RunError
from ...traffic import TrafficPlan, TrafficProfile
from ..fabric.first_rank import first_rank_bytes
from .steps import MeasuredTraffic

__all__ = ["planned", "settled_plan"]

MAX_ROUNDS = 3  # of planning, running and fitting; a plan that comes back ends them sooner


def settled_plan(found: MeasuredTraffic, codecs: Sequence[str] | None = None) -> tuple[MeasuredTraffic, TrafficPlan]:
    """(all that was measured, the plan), equal on all ranks; of these codecs, by default of all and with leaving gradients to DDP among the choices.

    Of plans that were run and are still not what the last fit would choose, the one with the shortest measured step.
    Raises: what `plan_traffic` raises on the first rank, RunError on the others.
    """
    first = len(found.probes)
    plan = planned(found.profile, found.state.rank, found.steps.ddp.process_group, codecs)
    tried: list[TrafficPlan] = []
    while not plan.leave and all(plan.groups != t.groups for t in tried):
        if len(tried) == MAX_ROUNDS:
            times = [p.measured_ns for p in found.probes[first:]]
            return found, with_groups(plan, tried[times.index(min(times))].groups)
        tried.append(plan)
        found = found.with_steps_of(plan.groups)
        plan = planned(found.profile, found.state.rank, found.steps.ddp.process_group, codecs)
    return found, plan


def planned(profile: TrafficProfile, rank: int, ranks: dist.ProcessGroup | None, codecs: Sequence[str] | None = None) -> TrafficPlan:
    """The first rank's plan, on all ranks. Raises: what `plan_traffic` raises there, RunError on the others."""
    made = b""
    failed: MeshwrightError | None = None
    if rank == 0:
        try:
            made = msgspec.json.encode(plan_traffic(profile, codecs=codecs))
        except MeshwrightError as error:  # the others wait: they must hear of it
            failed = error
    if not (made := first_rank_bytes(made, ranks)):
        raise failed or RunError("rank 0 could not plan", where="measured traffic", hint="see its message")
    return msgspec.json.decode(made, type=TrafficPlan)
