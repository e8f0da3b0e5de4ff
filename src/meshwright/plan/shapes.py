"""Plans for batches of a few shapes: each shape has a step of its own, over one layout of weights, gradients and optimizer state.

The plan's own program and layout are those of its largest shape. `Plan.shapes` holds the others; entry i is step i + 1 of the cycle. `plan_of_shape`
gives an ordinary plan of one shape, so whoever checks, simulates or runs plans needs to know nothing of this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .plan import CycleEntry, Plan, ShapePlan

__all__ = ["SHAPE", "plan_of_shape", "plans_of_shapes", "with_shapes"]

SHAPE = "shape"  # `when` of a cycle entry that runs for batches of its shape
OF_A_SHAPE = ("graph_fingerprint", "graph_outline", "works", "captured", "undecided", "training")  # entries of `Plan.job` that differ by shape


def plan_of_shape(plan: Plan, number: int) -> Plan:
    """The plan for batches of one shape alone: 0 the plan's own, then those of `Plan.shapes` in order."""
    if not plan.shapes:
        return plan
    if not number:
        return replace(plan, shapes=(), cycle=(CycleEntry(program=plan.cycle[0].program),), programs=_called(plan, plan.cycle[0].program))
    shape = plan.shapes[number - 1]
    job = {k: v for k, v in plan.job.items() if k not in OF_A_SHAPE or k == "training"} | shape.job
    if "batch" in job:
        job["batch"] = {**job["batch"], "inputs": shape.inputs}
    return replace(
        plan, shapes=(), job=job, cycle=(CycleEntry(program=shape.program),), programs=_called(plan, shape.program), decisions=shape.decisions,
        layout=shape.layout, bound=shape.bound, prediction=shape.prediction, alternatives=(),
    )  # fmt: skip


def plans_of_shapes(plan: Plan) -> tuple[Plan, ...]:
    """A plan for every shape, the largest first; of a plan of one shape itself."""
    return tuple(plan_of_shape(plan, i) for i in range(1 + len(plan.shapes)))


def with_shapes(plan: Plan, others: tuple[tuple[list[tuple[list[int], str]], Plan], ...]) -> Plan:
    """`plan`, of its largest shape, with the steps of (inputs, plan of them). Whether they share a state is for the checker to say."""
    shapes, programs = list[ShapePlan](), dict(plan.programs)
    for inputs, other in others:
        assert other.layout is not None
        shapes.append(
            ShapePlan(
                program=other.cycle[0].program, inputs=inputs, layout=other.layout,
                job={k: other.job[k] for k in OF_A_SHAPE if k in other.job and (k != "training" or other.job[k] != plan.job[k])},
                decisions=dict(other.decisions), bound=other.bound, prediction=other.prediction,
            )
        )  # fmt: skip
        programs |= other.programs
    cycle = tuple(CycleEntry(program=name, when=SHAPE) for name in (plan.cycle[0].program, *(s.program for s in shapes)))
    return replace(plan, shapes=tuple(shapes), programs=programs, cycle=cycle)


def _called(plan: Plan, name: str) -> dict[str, Any]:
    """The program and all that it calls, where the plan holds them."""
    found, waiting = dict[str, Any](), [name]
    while waiting:
        if (one := waiting.pop()) in plan.programs and one not in found:
            found[one] = plan.programs[one]
            waiting += found[one].calls.names
    return found
