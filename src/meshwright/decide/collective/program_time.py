"""What a collective program is worth on a fabric: its simulated time, or of programs too large for that the time of its busiest link.

Folded programs are simulated folded where the fabric has their symmetry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cost import Cost, Transport
from ...errors import Unsupported
from ...fabric.fabric import Fabric
from ...kernels.effort import count_work
from ...program.fold import expand
from ...program.program import MAX_EXECUTED_STEPS, Part, Program
from ...simulate import compile_network, simulate_folded, simulate_program

__all__ = ["MAX_SIMULATED_STEPS", "busiest_link_s", "simulated", "simulated_steps", "simulated_time_s"]

# Counted work (`kernels.effort`), in seconds of a quiet core: of a simulated step, an instant with new rates, a link or flow looked at for them.
WORK_PER_STEP_S = 2e-7
WORK_PER_INSTANT_S = 3e-7
WORK_PER_LOOK_S = 2e-8
MAX_SIMULATED_STEPS = 1_200_000  # where thousands of messages share links, more take many minutes


def simulated_time_s(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport | None) -> float:
    """Makespan in seconds, on the simulator's own choice of network model."""
    return simulated(program, fabric, ranks, transport)[0]


def simulated(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport | None) -> tuple[float, int]:
    """Makespan in seconds, and what it cost to find: instants with new rates times channels (0 for folded programs, which cost little)."""
    count_work(WORK_PER_STEP_S * simulated_steps(program))
    cost = Cost(transport=transport) if transport is not None else Cost()
    if program.fold is not None:
        try:
            return simulate_folded(program, fabric, tuple(ranks), cost).makespan_s, 0
        except Unsupported:
            if program.executed_steps > MAX_EXECUTED_STEPS:
                raise
            program = expand(program)
    timeline = simulate_program(program, fabric, tuple(ranks), cost, record=False, memory=False)
    instants: int = timeline.attributes["rate_instants"]
    count_work(WORK_PER_INSTANT_S * instants + WORK_PER_LOOK_S * timeline.attributes["rate_work"])
    return timeline.makespan_s, instants * len(program.channels)


def simulated_steps(program: Program) -> int:
    """Steps that the simulator executes: of a folded program, those of the stored lanes."""
    lanes = program.lanes
    return int(((lanes.end - lanes.start).astype(np.int64) * lanes.repeat).sum())


def busiest_link_s(program: Program, fabric: Fabric, ranks: Sequence[str]) -> float:
    """Seconds that the most loaded link needs at full rate, or the longest route's latency: no run of the program is faster.

    Raises: Unsupported for folded programs and for channel sets (switches that copy).
    """
    s = program.steps
    if program.fold is not None or bool(np.any(s.parts & (Part.IN_SET | Part.OUT_SET))):
        raise Unsupported("link loads are counted for plain programs only", where=program.name, hint="expand it")
    network = compile_network(program, fabric, tuple(ranks))
    sends = (s.parts & Part.SEND) != 0
    moved = (program.message_bytes() * program.lanes.repeat[program.lane_of_step()])[sends]
    per_channel = np.bincount(s.chan_out[sends], weights=moved, minlength=len(program.channels))
    hops = np.diff(network.route_ptr)
    load = np.bincount(network.route_link, weights=np.repeat(per_channel, hops), minlength=len(network.rate_Bps))
    return max(float((load / network.rate_Bps).max(initial=0.0)), float(network.flight_s[np.unique(s.chan_out[sends])].max(initial=0.0)))
