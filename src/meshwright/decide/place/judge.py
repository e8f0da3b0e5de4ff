"""How long a placement takes in the simulator, where messages share links."""

from __future__ import annotations

from ...simulate import simulate_program
from .lower import lower_placement, price_table
from .problem import Placement, PlaceProblem

__all__ = ["simulated_s"]


def simulated_s(problem: PlaceProblem, placement: Placement) -> float:
    """Seconds of the placement's program on the problem's fabric."""
    names = tuple(d.name for d in problem.fabric.devices)
    program = lower_placement(problem, placement)
    return simulate_program(program, problem.fabric, names, price_table(problem, placement), record=False, memory=False).makespan_s
