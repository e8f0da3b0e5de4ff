"""Task graphs on fabrics: strategies tried, the best by simulation as a checked plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..decide.place import STRATEGIES, Placement, PlaceProblem, PlaceStrategy, place_bound
from ..decide.place.judge import simulated_s
from ..decide.place.lower import lower_placement, price_table
from ..decide.strategies import options_given
from ..errors import MeshwrightError, MissingExtra, Unsupported
from ..kernels.stages import stage
from ..plan.plan import Alternative, Plan
from .plans import check_plan, make_plan

__all__ = ["Tried", "compare_placements", "plan_placement"]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A strategy's placement; `time_s`: simulated, messages sharing links. Without a placement: its refusal."""

    strategy: PlaceStrategy
    placement: Placement | None = None
    time_s: float = float("inf")
    refused: MeshwrightError | None = None

    @property
    def why(self) -> str:
        return self.refused.message if self.refused is not None else ""


@stage("placements")
def compare_placements(problem: PlaceProblem, candidates: Sequence[PlaceStrategy] | None = None, *, seed: int = 0) -> tuple[list[Tried], Bound]:
    """All candidates (default: every strategy), by simulated time, refused ones last; and the bound."""
    found = []
    listed = [kind() for kind in STRATEGIES] if candidates is None else list(candidates)
    for each in listed:
        try:
            placement = each.plan(problem, rng=np.random.default_rng(seed))
        except (Unsupported, MissingExtra) as refused:
            found.append(Tried(strategy=each, refused=refused))
            continue
        found.append(Tried(strategy=each, placement=placement, time_s=simulated_s(problem, placement)))
    return sorted(found, key=lambda t: t.time_s), place_bound(problem)


def plan_placement(problem: PlaceProblem, candidates: Sequence[PlaceStrategy] | None = None, *, seed: int = 0) -> tuple[Plan, list[Tried], Bound]:
    """The shortest in simulation as a checked plan, all that were tried, and the bound.

    Raises: CheckFailed; where all refuse, the first one's refusal (Unsupported, MissingExtra)."""
    ranked, bound = compare_placements(problem, candidates, seed=seed)
    best = ranked[0]
    if best.placement is None:
        assert best.refused is not None
        raise best.refused
    program = lower_placement(problem, best.placement)
    decision: dict[str, Any] = {
        "strategy": best.strategy.name, "options": options_given(best.strategy, [f.name for f in fields(best.strategy)]),  # type: ignore[arg-type]
        "why": _why(best, ranked, bound), "cite": best.strategy.cite.key,
    }  # fmt: skip
    plan = make_plan(
        "placement", problem.fabric, tuple(d.name for d in problem.fabric.devices), program, job={"tasks": msgspec.to_builtins(problem.graph)},
        cost=price_table(problem, best.placement), decisions={"place": decision}, bound=bound, prediction=best.time_s, seed=seed,
        alternatives=(Alternative(what=t.strategy.name, time_s=t.time_s if t.placement else None, why=t.why) for t in ranked[1:]),
    )  # fmt: skip
    check_plan(plan)
    return plan, ranked, bound


def _why(best: Tried, ranked: Sequence[Tried], bound: Bound) -> str:
    over = best.time_s / float(bound) - 1 if float(bound) else 0.0
    others = [t for t in ranked[1:] if t.placement is not None]
    beside = f", {others[0].strategy.name} {others[0].time_s / best.time_s:.3f} times as long" if others and best.time_s else ""
    return f"{over:.1%} above the bound{beside}"
