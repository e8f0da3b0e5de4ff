"""Works with plans of every kind: read, write, simulate, check, and say how well their prices are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .. import __version__
from ..bound import Bound
from ..cost import Cost
from ..errors import UsageError
from ..fabric.fabric import Fabric
from ..kernels.stages import stage
from ..plan.plan import Alternative, CycleEntry, Plan, Prediction, TrainingLayout
from ..program.hash import program_hash
from ..program.program import Program
from ..timeline import Timeline

if TYPE_CHECKING:
    from ..check.verdict import Verdict

__all__ = [
    "check_plan", "cost_of", "fabric_of", "make_plan", "read_fabric", "read_plan", "simulate_plan", "works_of", "write_plan",
]  # fmt: skip


def make_plan(
    kind: str, fabric: Fabric, placement: tuple[str, ...], main: Program, *, decisions: Mapping[str, Any], job: Mapping[str, Any], cost: Cost,
    works: Mapping[str, Any] | None = None, others: Iterable[Program] = (), table: Mapping[str, str] | None = None,
    layout: TrainingLayout | None = None, bound: Bound | None = None, prediction: Prediction | float | None = None,
    alternatives: Iterable[Alternative] = (), seed: int = 0,
) -> Plan:  # fmt: skip
    """Makes a plan of what was decided. Only this function makes plans. The plan is not checked yet.

    Args: others: programs that the main one calls or takes turns with; table: which of these runs in a step, by what selects it;
    prediction: that, or just the seconds of a step.
    """
    from ..io.fabric.document import fabric_document

    name = program_hash(main)
    return Plan(
        kind=kind,
        job={**job, "cost": msgspec.to_builtins(cost), "works": {key: msgspec.to_builtins(work) for key, work in sorted((works or {}).items())}},
        target_fabric=fabric_document(fabric),
        placement=placement,
        programs={name: main, **{program_hash(p): p for p in others}},
        cycle=(CycleEntry(program=name, when="select", table=dict(table)) if table else CycleEntry(program=name),),
        decisions=dict(decisions),
        layout=layout,
        bound=bound,
        prediction=Prediction(target_fabric=fabric.name, time_s=prediction) if isinstance(prediction, float) else prediction,
        alternatives=tuple(alternatives),
        seed=seed,
        versions={"meshwright": __version__},
    )


def read_fabric(spec: str, devices: str | None = None) -> Fabric:
    """A fabric by file name or preset (`two-islands`, `dgx-h100:2`), optionally only some of its devices (`0-3,8`)."""
    from ..io.fabric.name import load_fabric

    return load_fabric(spec, devices)


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, `.json` or `.json.gz`. Raises: UsageError (no such file), FormatError (not a plan, a damaged program)."""
    from ..io.plan.plan import read_plan as read

    return read(Path(path))


def write_plan(path: str | Path, plan: Plan) -> None:
    """Writes the plan to a file, gzipped where it is named `.json.gz`; equal plans give equal bytes."""
    from ..io.plan.plan import write_plan as write

    write(Path(path), plan)


@stage("simulating the plan")
def simulate_plan(
    plan: Plan, fabric: Fabric | None = None, cost: Cost | None = None, *, record: bool = True, transfers: bool = False,
    target: Fabric | None = None, placement: Sequence[str] = (),
) -> Timeline:  # fmt: skip
    """Simulates the plan's main program, by default on the fabric it was made for (`target`, if that is read already); another fabric takes its
    devices in order, or as `placement` names them."""
    from ..simulate import simulate_stored

    target = target or fabric_of(plan)
    where = target if fabric is None else fabric
    placement = placement or (plan.placement if fabric is None else tuple(d.name for d in where.devices[: plan.main.ranks]))
    if len(placement) < plan.main.ranks:
        raise UsageError(f"the plan needs {plan.main.ranks} devices, fabric {where.name!r} has {len(where.devices)}")
    return simulate_stored(
        plan.main, where, placement, cost or cost_of(plan), works=works_of(plan), programs=plan.programs, record=record, transfers=transfers
    )


def check_plan(plan: Plan, fabric: Fabric | None = None) -> Verdict:
    """The verdict, `ok` or, where a checker could not decide, `unknown`. `fabric`: the plan's, where it was read already.

    Raises: CheckFailed with a witness where a checker finds the plan wrong.
    """
    from ..check import check_plan as verdict_on

    with stage("proving the plan"):
        verdict = verdict_on(plan, fabric or fabric_of(plan))
    verdict.raise_if_wrong()
    return verdict


def fabric_of(plan: Plan) -> Fabric:
    from ..io.fabric.document import fabric_from_document

    return fabric_from_document(dict(plan.target_fabric))


def cost_of(plan: Plan) -> Cost:
    return msgspec.convert(plan.job["cost"], Cost)


def works_of(plan: Plan) -> dict[str, Any]:
    from ..graph.graph import Work

    return {key: msgspec.convert(value, Work) for key, value in plan.job["works"].items()}
