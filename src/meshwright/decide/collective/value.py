"""What a collective program is worth on a fabric: its simulated time. Folded programs are simulated folded where the fabric has their symmetry."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost import Cost, Transport
from ...errors import Unsupported
from ...fabric import Fabric
from ...program import Program
from ...program_fold import expand
from ...simulate import simulate_folded, simulate_program

__all__ = ["simulated_time_s"]


def simulated_time_s(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport | None) -> float:
    """Makespan in seconds, on the simulator's own choice of network model."""
    cost = Cost(transport=transport) if transport is not None else Cost()
    if program.fold is not None:
        try:
            return simulate_folded(program, fabric, tuple(ranks), cost).makespan_s
        except Unsupported:
            program = expand(program)
    return simulate_program(program, fabric, tuple(ranks), cost, record=False).makespan_s
