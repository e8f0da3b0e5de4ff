"""Plans as Chakra execution traces and back: priced, ordered by simulation on the way out, planned, checked and simulated on the way in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...cost import Cost, Priced
from ...errors import UsageError
from ...fabric.fabric import Fabric
from ...interop.chakra import ChakraSet
from ...interop.from_chakra import from_chakra
from ...interop.to_chakra import to_chakra
from ...plan.plan import Plan, Prediction
from ...program.calls import Callee, InlinedProgram, inline
from ...program.fold import expand
from ...program.program import Program
from ...simulate import durations
from ...timeline import Timeline
from ..plans import check_plan, cost_of, fabric_of, make_plan, simulate_plan, works_of
from ..training.collectives import CollectivePlanner

__all__ = ["chakra_of_plan", "plan_of_chakra"]


def chakra_of_plan(plan: Plan, *, inlined: bool = False) -> ChakraSet:
    """Traces of the plan's main program with the plan's prices. `inlined`: collectives as the messages of our schedules, not by name.

    Raises: Unsupported (`interop.to_chakra`).
    """
    main = expand(plan.main) if plan.main.fold is not None else plan.main
    plain = replace(plan, programs={**plan.programs, plan.cycle[0].program: main}) if main is not plan.main else plan
    flat = inline(main, plain.programs)
    program = flat.program if inlined else main
    fabric, works = fabric_of(plan), works_of(plan)
    seconds = durations(program, cost_of(plan), fabric, plan.placement, works)
    start = _starts(program, flat, simulate_plan(plain), inlined)
    return to_chakra(program, seconds, programs=plan.programs, works=works, start_s=start)


def _starts(program: Program, flat: InlinedProgram, timeline: Timeline, inlined: bool) -> NDArray[np.float64]:
    """When every executed step of `program` starts: of a call, when the first step of it does."""
    spans = timeline.spans
    repeat = program.lanes.repeat[program.lane_of_step()].astype(np.int64)
    first = np.cumsum(repeat) - repeat
    step = spans.step.astype(np.int64) if inlined else flat.origin_step[spans.step].astype(np.int64)
    own = np.minimum(spans.iteration, repeat[step] - 1)
    start = np.full(int(repeat.sum()), np.inf)
    np.minimum.at(start, first[step] + own, spans.start_s)
    return np.where(np.isfinite(start), start, 0.0)


def plan_of_chakra(
    traces: ChakraSet, fabric: Fabric, *, strategy: str = "auto", title: str = "", seed: int = 0
) -> Plan:
    """A checked and simulated plan that does what the traces say, rank i on the fabric's i-th device.

    Args: strategy: of the collectives that the traces call by name (`auto`, `ring`, `forestcoll`).
    Raises: UsageError (fewer devices than ranks), FormatError and Unsupported (`interop.from_chakra`), CheckFailed.
    """
    ranks = len(traces.traces)
    if ranks > len(fabric.devices):
        raise UsageError(
            f"{ranks} traces, but fabric {fabric.name!r} has {len(fabric.devices)} devices",
            where="--fabric", hint=f"name a fabric with {ranks} devices",
        )  # fmt: skip
    fabric.require_connected()
    devices = tuple(d.name for d in fabric.devices[:ranks])
    planner = CollectivePlanner(fabric=fabric, transport=Cost().transport, strategy=strategy, seed=seed)

    def plan_collective(members: tuple[int, ...], size_bytes: int, op: str) -> Callee:
        return planner.collective("trace", tuple(devices[r] for r in members), size_bytes, op)

    made = from_chakra(traces, plan_collective, title=title)
    cost = Cost(name="trace", source="durations of the traces", table={key: Priced(seconds, "assumed") for key, seconds in made.seconds.items()})
    plan = make_plan(
        "imported", fabric, devices, made.program, job={"chakra": {"ranks": ranks, "title": title}}, cost=cost, works=made.works,
        others=made.callees.values(), decisions=planner.decisions(made.callees), seed=seed,
    )  # fmt: skip
    timeline = simulate_plan(plan, record=False)
    plan = replace(plan, prediction=Prediction(target_fabric=fabric.name, time_s=timeline.makespan_s))
    check_plan(plan)
    return plan
