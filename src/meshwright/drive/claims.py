"""Every claim of a plan: what `check` proves, and beside it what only others can say, its prediction and the names of its strategies.

The checker shares no code with the simulator and knows no strategies, so a plan's seconds and names are compared here: the prediction with the
simulator's time for the plan's own programs, fabric and prices, names with those that are listed.
"""

from __future__ import annotations

from dataclasses import replace

from ..check.verdict import Finding, Verdict, guarded
from ..decide.collective.groups.strategy import Groups
from ..fabric.fabric import Fabric
from ..plan.plan import Plan
from ..plan.shapes import plans_of_shapes
from .pipeline.fill import check_filled
from .plans import fabric_of, simulate_plan
from .strategies import decisions

__all__ = ["check_claims"]

# Share of the simulated time by which a prediction may differ: sums of floats in another order.
PREDICTION_TOLERANCE = 1e-6
LISTS = {"collective": ("collective", "collective.sparse"), "pipeline": ("pipeline",), "layout": ("layout",), "place": ("place",),
         "tables": ("tables",), "halo": ("traffic.halo",)}  # fmt: skip
# What plans write that is on no list: schedules of other tools, the joint planner, the work in idle time, state divided over replicas.
BESIDES = {"collective": ("msccl", Groups.name), "fill": ("pipefisher",), "sharding": tuple(f"zero-{level}" for level in range(4))}


def check_claims(plan: Plan) -> Verdict:
    """The checker's verdict on the plan, and the claims that it cannot judge itself. Notes name what a plan does not state."""
    from ..check import check_plan

    fabric = fabric_of(plan)
    verdict = check_plan(plan, fabric)
    notes = list(verdict.notes)
    found = [*verdict.findings, *guarded("claims", lambda: _names(plan, notes))]
    if plan.bound is None:
        notes.append("the plan states no bound")
    if plan.prediction is None:
        notes.append("the plan states no prediction")
    elif verdict.ok and any(e.table for e in plan.cycle):
        notes.append("its prediction is a mean over programs that the data select: not compared with a simulation")
    elif verdict.ok:  # what is wrong need not end in the simulator
        found += [f for p in plans_of_shapes(plan) for f in guarded("claims", lambda p=p: _prediction(p, fabric))]  # type: ignore[misc]
    if "fill" in plan.job and verdict.ok:
        found += guarded("fill", lambda: check_filled(plan))
    return replace(verdict, findings=tuple(found), notes=tuple(notes))


def _prediction(plan: Plan, fabric: Fabric) -> list[Finding]:
    if plan.prediction is None:  # of one of its shapes
        return []
    claimed, simulated = plan.prediction.time_s, simulate_plan(plan, record=False, target=fabric).makespan_s
    if abs(claimed - simulated) <= PREDICTION_TOLERANCE * simulated:
        return []
    text = f"the plan predicts {claimed:.6g} s, its programs take {simulated:.6g} s in the simulator"
    return [Finding(check="claims", message=text, witness={"field": "prediction.time_s", "claimed_s": claimed, "simulated_s": simulated})]


def _names(plan: Plan, notes: list[str]) -> list[Finding]:
    """Decisions name strategies that exist, ours or an installed package's."""
    from ..decide.strategies import outside

    ours, found, open_keys = decisions(), [], []
    for key, entry in plan.decisions.items():
        kind = key.partition(":")[0]
        names = {*BESIDES.get(kind, ())}
        for decision in LISTS.get(kind, ()):
            names |= {name for x in ours[decision] for name in (x.name, *getattr(x, "aliases", ()))}
            names |= {other.name for other in outside(decision, ours[decision])}
        for name in str(entry.get("strategy")).split("+") if names else ():
            if name not in names:
                text = f"decisions.{key}.strategy: there is no strategy {name[:64]!r}"
                found.append(Finding(check="claims", message=text, witness={"field": f"decisions.{key}.strategy", "strategy": name[:64]}))
        open_keys += [key] if not names else []
    if open_keys:
        notes.append(f"names of decisions that have no list are not judged: {', '.join(sorted(open_keys))}")
    return found
