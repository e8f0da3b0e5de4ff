"""What a collective program is worth on a fabric: its simulated time, and a quick estimate for choosing options."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost import Cost, Transport
from ...fabric import Fabric
from ...program import Program

__all__ = ["simulated_time_s"]


def simulated_time_s(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport | None) -> float:
    """Makespan in seconds with max-min fair sharing of links."""
    from ...simulate import simulate_program

    cost = Cost(transport=transport) if transport is not None else Cost()
    return simulate_program(program, fabric, tuple(ranks), cost).makespan_s
