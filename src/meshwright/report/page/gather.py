"""Simulates a plan and collects what its page shows."""

from __future__ import annotations

from dataclasses import replace

from ...drive.plans import cost_of, fabric_of, works_of
from ...explain.assumptions import ErrorBars
from ...explain.breakdown import Breakdown, Simulated, breakdown
from ...explain.explanation import error_bars
from ...fabric.fabric import Fabric
from ...kernels.stages import stage
from ...plan.plan import Plan
from ...program.flat import flatten
from ...simulate import simulate_stored
from .content import PageContent, RunFacts

__all__ = ["gather"]


@stage("simulating for the page")
def gather(
    plan: Plan, *, plan_file: str, run: RunFacts | None = None, entry: int = 0, checked: bool = True, fabric: Fabric | None = None
) -> PageContent:
    """`entry`: which program of the plan's cycle is shown; `fabric`: the plan's, where it was read already.

    Raises: what simulating a plan raises (Deadlock, UnknownName, Disconnected, ...).
    """
    shown = replace(plan, cycle=(*plan.cycle[entry:], *plan.cycle[:entry]))
    fabric, cost = fabric or fabric_of(shown), cost_of(shown)
    inlined = flatten(shown.main, shown.programs)
    timeline = simulate_stored(inlined.program, fabric, shown.placement, cost, works=works_of(shown), record=True, transfers=True)
    found: Breakdown | None = None
    bars: ErrorBars | None = None
    if shown.layout is not None:
        simulated = Simulated(plan=shown, fabric=fabric, cost=cost, inlined=inlined, timeline=timeline)
        found = breakdown(simulated)
        bars = error_bars(simulated, found)
    return PageContent(
        plan=shown, plan_file=plan_file, fabric=fabric, inlined=inlined, timeline=timeline, breakdown=found, bars=bars, run=run, entry=entry,
        checked=checked,
    )  # fmt: skip
