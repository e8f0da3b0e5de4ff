"""A wiring of accelerators: designed, checked in both directions, and set beside what any schedule could reach on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..check.verdict import Verdict
from ..check.wiring import check_wiring
from ..decide.collective import CollectiveProblem
from ..decide.collective.bounds.collective import bandwidth_bound
from ..decide.topology import TopologyProblem, strategy
from ..decide.topology.directconnect.loads import Cost
from ..decide.topology.directconnect.strategy import WiringDesign
from ..errors import UsageError
from ..kernels.stages import stage

__all__ = ["WiringRow", "design_wiring"]


@dataclass(frozen=True, kw_only=True)
class WiringRow:
    """`forest_factor`: T_B of the best schedule that there is on this wiring, however many steps (ForestColl reaches it). `usd`: of all its parts."""

    design: WiringDesign
    gather: Verdict | None
    scatter: Verdict | None
    forest_factor: Fraction
    usd: int


@stage("designing wirings")
def design_wiring(
    problem: TopologyProblem, *, strategy_name: str = "directconnect", options: Mapping[str, Any] | None = None, seed: int = 0
) -> list[WiringRow]:
    """The frontier, fewest steps first, each design checked. Raises: as the strategy's `plan`; UsageError for its options; CheckFailed."""
    kind = strategy(strategy_name, "wiring", where="--strategy")
    try:
        made = kind(**(options or {}))
    except TypeError as error:
        raise UsageError(f"{strategy_name}: {str(error).partition('() ')[2] or error}", where="options") from None
    return [_row(design, problem) for design in made.plan(problem, rng=np.random.default_rng(seed)) if isinstance(design, WiringDesign)]


def _row(design: WiringDesign, problem: TopologyProblem) -> WiringRow:
    size = design.nodes * 1000  # any size: the bound is a rate
    bound = bandwidth_bound(CollectiveProblem.on(design.fabric(problem), "all-gather", size))
    return WiringRow(
        design=design, gather=_checked(design, design.gather, 1), scatter=_checked(design, design.scatter, -1),
        forest_factor=bound.exact * design.wiring.ports * problem.rate_Bps / size, usd=problem.prices.of(design.parts),
    )  # fmt: skip


def _checked(design: WiringDesign, cost: Cost | None, way: int) -> Verdict | None:
    """None where the design is costed by a rule. Raises: CheckFailed."""
    if cost is None:
        return None
    arcs = [(a, b) for a, b in design.wiring.arcs[:, ::way].tolist()]
    tight = [(t.node, t.senders) for t in cost.tight]
    verdict = check_wiring(
        design.nodes, design.wiring.ports, arcs, steps=cost.steps, load=cost.load, paired=design.wiring.paired, tight=tight,
    )  # fmt: skip
    verdict.raise_if_wrong()
    return verdict
