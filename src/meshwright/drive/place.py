"""Task graphs on fabrics: strategies tried, the best by simulation as a checked plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..cost_models.moves import MoveNet
from ..decide.place import STRATEGIES, Placement, PlaceProblem, PlaceStrategy, place_bound
from ..decide.place.judge import simulated_s
from ..decide.place.lower import lower_placement, price_table
from ..decide.place.problem import OBJECTIVES
from ..decide.place.sums import reweighted, sum_bound, sums_of
from ..decide.strategies import options_given
from ..errors import FormatError, MeshwrightError, MissingExtra, Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..graph.tasks import TaskGraph
from ..io.quantity import show_time
from ..kernels.effort import Budget, why_with
from ..kernels.stages import innermost, stage
from ..plan.plan import Alternative, Plan
from ..program.program import Kind
from .plans import check_plan, make_plan

__all__ = ["Tried", "compare_placements", "devices_of", "fit_placer", "plan_placement", "tasks_of"]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A strategy's placement; `time_s`: simulated, messages sharing links; `value`: of the objective. Without a placement: its refusal."""

    strategy: PlaceStrategy
    placement: Placement | None = None
    time_s: float = float("inf")
    value: float = float("inf")
    refused: MeshwrightError | None = None

    @property
    def why(self) -> str:
        return self.refused.message if self.refused is not None else ""


@stage("placements")
def compare_placements(
    problem: PlaceProblem, candidates: Sequence[PlaceStrategy] | None = None, *, seed: int = 0, budget: Budget | None = None
) -> tuple[list[Tried], Bound]:
    """All candidates (default: every strategy), the best by the objective first, of equal ones the shortest, refused ones last; and the objective's
    bound. `budget`: of so many; what ends it leaves the candidates so far. Raises: UsageError as `sums_of`."""
    found: list[Tried] = []
    sums = None if problem.objective == "makespan" else sums_of(problem)
    listed = [kind() for kind in STRATEGIES] if candidates is None else list(candidates)
    budget, here = budget or Budget(len(listed)), innermost()
    for each in listed:
        if not budget.spend():
            break
        try:
            with budget.net():
                placement = each.plan(problem, rng=np.random.default_rng(seed))
                time_s = simulated_s(problem, placement)
                value = time_s if sums is None else sums.total(np.array(placement.on))
                found.append(Tried(strategy=each, placement=placement, time_s=time_s, value=value))
        except (Unsupported, MissingExtra) as refused:
            found.append(Tried(strategy=each, refused=refused))
            continue
        best = min(found, key=lambda t: (t.value, t.time_s))
        here.best = f"{best.strategy.name}, {show_time(best.time_s)}"
    bound = place_bound(problem) if sums is None else sum_bound(problem, reweighted(sums, problem.graph.order))
    return sorted(found, key=lambda t: (t.value, t.time_s)), bound


def plan_placement(
    problem: PlaceProblem, candidates: Sequence[PlaceStrategy] | None = None, *, seed: int = 0, budget: Budget | None = None
) -> tuple[Plan, list[Tried], Bound]:
    """The best by the objective (makespan: in simulation) as a checked plan, all that were tried, and the objective's bound. `budget`: as in
    `compare_placements`.

    Raises: CheckFailed; where all refuse, the first one's refusal (Unsupported, MissingExtra)."""
    budget = budget or Budget(len(STRATEGIES if candidates is None else candidates))
    ranked, bound = compare_placements(problem, candidates, seed=seed, budget=budget)
    best = ranked[0]
    if best.placement is None:
        assert best.refused is not None
        raise best.refused
    program = lower_placement(problem, best.placement)
    decision: dict[str, Any] = {
        "strategy": best.strategy.name, "options": _options(best.strategy), **why_with(_why(best, ranked, bound), budget.cut),
        "cite": best.strategy.cite.key,
        **({"moves": best.placement.notes["moves"]} if best.placement.notes.get("moves") else {}),
    }  # fmt: skip
    job: dict[str, Any] = {"tasks": msgspec.to_builtins(problem.graph)}
    by_time = problem.objective == "makespan"
    if not by_time:
        unit = OBJECTIVES[problem.objective]
        job["objective"] = {"name": problem.objective, "unit": unit, "value": best.value, "bound": msgspec.to_builtins(bound)}
    plan = make_plan(
        "placement", problem.fabric, tuple(d.name for d in problem.fabric.devices), program, job=job,
        cost=price_table(problem, best.placement), decisions={"place": decision}, bound=bound if by_time else place_bound(problem),
        prediction=best.time_s, seed=seed,
        alternatives=(Alternative(what=t.strategy.name, time_s=t.time_s if t.placement else None, why=t.why) for t in ranked[1:]),
    )  # fmt: skip
    check_plan(plan)
    return plan, ranked, bound


def fit_placer(
    graphs: Sequence[TaskGraph] = (), fabric: Fabric | None = None, *, devices: int = 20, updates: int = 100, seed: int = 0,
    told: Callable[[int, float], None] | None = None,
) -> MoveNet:  # fmt: skip
    """GiPH's net, trained on random problems of so many devices; where graphs are given, every second problem is one of them on the fabric.

    Raises: MissingExtra without torch; what `PlaceProblem` raises for a graph that the fabric cannot run."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", extra="torch", needed_for="training a net that places tasks")
    from ..decide.place.giph.generate import random_problem
    from ..decide.place.giph.train import fit_moves

    given = [PlaceProblem(graph=g, fabric=fabric) for g in graphs] if fabric is not None else []

    def draw(rng: np.random.Generator) -> PlaceProblem:
        return given[int(rng.integers(len(given)))] if given and rng.random() < 0.5 else random_problem(rng, devices=devices)

    return fit_moves(draw, updates=updates, seed=seed, told=told)


def tasks_of(plan: Plan) -> TaskGraph:
    """Raises: FormatError for a plan of something else."""
    if plan.kind != "placement":
        raise FormatError(f"is a plan of kind {plan.kind!r}", where="kind", hint="make one with `meshwright place plan`")
    try:
        return msgspec.convert(plan.job["tasks"], TaskGraph)
    except (KeyError, msgspec.ValidationError, UsageError) as error:
        raise FormatError(f"lacks or mangles its tasks: {error}", where="job.tasks", hint="make the plan again") from None


def devices_of(plan: Plan) -> dict[str, str]:
    """The device of every task, by name."""
    p = plan.main
    actor = p.lanes.actor[p.lane_of_step()]
    return {p.ops.graph[int(p.steps.op[s])]: plan.placement[int(actor[s])] for s in np.flatnonzero(p.steps.kind == int(Kind.COMPUTE)).tolist()}


def _options(strategy: PlaceStrategy) -> dict[str, Any]:
    """Of a net its digest."""
    given = options_given(strategy, [f.name for f in fields(strategy)])  # type: ignore[arg-type]
    return {name: getattr(value, "digest", value) for name, value in given.items()}


def _why(best: Tried, ranked: Sequence[Tried], bound: Bound) -> str:
    over = best.value / float(bound) - 1 if float(bound) else 0.0
    others = [t for t in ranked[1:] if t.placement is not None]
    word = "long" if bound.quantity == "placement time" else "dear"
    beside = f", {others[0].strategy.name} {others[0].value / best.value:.3f} times as {word}" if others and best.value else ""
    return f"{over:.1%} above the bound{beside}"
