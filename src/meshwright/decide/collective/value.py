"""What a collective program is worth on a fabric: its simulated time."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost import Cost, Transport
from ...fabric import Fabric
from ...program import Program
from ...simulate import simulate_program

__all__ = ["simulated_time_s"]


def simulated_time_s(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport | None) -> float:
    """Makespan in seconds, on the simulator's own choice of network model."""
    cost = Cost(transport=transport) if transport is not None else Cost()
    return simulate_program(program, fabric, tuple(ranks), cost, record=False).makespan_s
