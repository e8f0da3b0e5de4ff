"""A wiring of accelerators: designed, checked in both directions, and set beside what any schedule could reach on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..check.verdict import Verdict
from ..check.wiring import check_wiring
from ..decide.collective import CollectiveProblem
from ..decide.collective.bfb.strategy import BFB
from ..decide.collective.bounds.bandwidth import bandwidth_bound
from ..decide.topology import TopologyProblem, strategy
from ..decide.topology.directconnect.growth import Grown, grow, least_unplugged, links_of, wiring_of
from ..decide.topology.directconnect.loads import Cost, gather_cost
from ..decide.topology.directconnect.rewire import Standing, least_moved, rewire
from ..decide.topology.directconnect.strategy import WiringDesign
from ..decide.topology.hammingmesh.bandwidth import global_share
from ..decide.topology.problem import factor_bound, steps_bound
from ..errors import UsageError
from ..fabric.edit import without
from ..fabric.fabric import Fabric
from ..kernels.effort import Budget
from ..kernels.stages import stage
from .network import DEFAULT_JOB, MAX_BY_MESSAGE, exchange_s, iteration_s, require_simulable, within_budget

__all__ = ["GROWTHS", "WiringRow", "design_wiring", "grow_wiring", "rewire_wiring", "timed_wirings"]

GROWTHS = 200  # growths that are costed: of 64 to 66 accelerators with 4 ports, 4 s
MAX_FLOWS = 2100  # accelerators times cables of the linear program of all-to-all traffic: 22 accelerators with 4 ports


@dataclass(frozen=True, kw_only=True)
class WiringRow:
    """`forest_factor`: T_B of the best schedule that there is on this wiring, however many steps (ForestColl reaches it). `usd`: of all its parts.
    `all_to_all`: share of the ports' rate that all-to-all traffic can have, by a linear program; None where that is too large. `grown`: what moves,
    and `least_unplugged` of every growth or redesign. `time_s`: of a job's iteration, where one was given.
    """

    design: WiringDesign
    gather: Verdict | None
    scatter: Verdict | None
    forest_factor: Fraction
    usd: int
    all_to_all: float | None = None
    grown: Grown | None = None
    least_unplugged: int = 0
    time_s: float | None = None


def timed_wirings(
    rows: Sequence[WiringRow], problem: TopologyProblem, job: Mapping[str, float] | None, *, budget_usd: int | None = None, simulate: bool = False
) -> list[WiringRow]:
    """Rows within the budget, with the time of the job's iteration: an all-reduce by breadth-first broadcasts on an idle wiring, exactly, and an
    all-to-all at the share that it can have. `simulate`: both as programs on the fabric, message by message; of more than `MAX_BY_MESSAGE`
    accelerators the exact all-reduce, and an all-to-all along the fabric's routes. Raises: as `within_budget`, `require_simulable`.
    """
    within = within_budget(rows, budget_usd)
    if simulate:
        require_simulable(problem.nodes)
    if job is None and not simulate:
        return within
    work = DEFAULT_JOB if job is None else job
    if simulate and problem.nodes <= MAX_BY_MESSAGE:
        return [replace(row, time_s=iteration_s(row.design.fabric(problem), work, (BFB(),))) for row in within]
    return [replace(row, time_s=_time_s(row, problem, work, simulate)) for row in within]


def _time_s(row: WiringRow, problem: TopologyProblem, job: Mapping[str, float], routed: bool) -> float:
    """routed: the all-to-all takes the fabric's routes, one for each pair."""
    d, injection = row.design, row.design.wiring.ports * problem.rate_Bps
    ways = [(d.steps, d.factor) if cost is None else (cost.steps, cost.load * d.wiring.ports / d.nodes) for cost in (d.gather, d.scatter)]
    steps, factor = sum(s for s, _ in ways), sum(float(f) for _, f in ways)
    share = row.all_to_all if row.all_to_all is not None else 1.0 if d.gather is None else float(1 / d.gather.hops)
    reduce_s = bool(job["all_reduce_bytes"]) * steps * problem.latency_s + factor * job["all_reduce_bytes"] / injection
    others = (d.nodes - 1) / d.nodes
    shared_s = bool(job["all_to_all_bytes"]) * d.steps * problem.latency_s + others * job["all_to_all_bytes"] / (share * injection)
    return job["compute_s"] + reduce_s + (exchange_s(d.fabric(problem), job["all_to_all_bytes"]) if routed else shared_s)


@stage("designing wirings")
def design_wiring(
    problem: TopologyProblem, *, strategy_name: str = "directconnect", options: Mapping[str, Any] | None = None, seed: int = 0,
    budget: Budget | None = None,
) -> list[WiringRow]:
    """The frontier, fewest steps first, each design checked. What ends the `budget` leaves the best so far.

    Raises: as the strategy's `plan`; UsageError for its options; CheckFailed."""
    kind = strategy(strategy_name, "wiring", where="--strategy")
    try:
        made = kind(**(options or {}))
    except TypeError as error:
        raise UsageError(f"{strategy_name}: {str(error).partition('() ')[2] or error}", where="options") from None
    budget, rows = budget or Budget(1), list[WiringRow]()
    with budget.net():
        designs = list(made.plan(problem, rng=np.random.default_rng(seed)))
    for design in designs:
        if isinstance(design, WiringDesign) and not (rows and budget.late):  # the check of a thousand accelerators takes seconds
            rows.append(_row(design, problem))
    return rows


@stage("growing a wiring")
def grow_wiring(fabric: Fabric, problem: TopologyProblem, *, evaluations: int = GROWTHS, seed: int = 0, budget: Budget | None = None
) -> list[WiringRow]:
    """Growths of the wiring that stands, to `problem.nodes` accelerators, each checked; old accelerators keep their names.

    Raises: UsageError (no wiring, other ports, not more accelerators), Infeasible (`growth.grow`), CheckFailed.
    """
    base = wiring_of(fabric)
    if base.ports != problem.ports:
        raise UsageError(f"has {base.ports} ports on every accelerator, not {problem.ports}", where=fabric.name, hint=f"give --ports {base.ports}")
    old = [device.name for device in fabric.devices]
    free = (name for k in range(2 * problem.nodes) if (name := f"d{k}") not in set(old))
    names = (*old, *(next(free) for _ in range(problem.nodes - base.nodes)))
    least = least_unplugged(problem.nodes - base.nodes, base.ports) if problem.nodes > base.nodes else 0
    with (budget or Budget(1)).net():
        found = grow(base, problem.nodes, evaluations=evaluations, rng=np.random.default_rng(seed))
    return [_moved_row(grown, names, problem, least) for grown in found]


@stage("rewiring")
def rewire_wiring(
    fabric: Fabric, down: Sequence[str], problem: TopologyProblem | None = None, *, ports: int = 0, moved: int = 0, evaluations: int = GROWTHS,
    seed: int = 0, budget: Budget | None = None,
) -> tuple[list[WiringRow], TopologyProblem]:  # fmt: skip
    """Redesigns of the wiring that stands without the parts `down` (`fabric.edit`), each checked, and the problem that they solve.

    `ports`: of each accelerator; 0: as many as the one with the most links. `problem`: rates and prices. Raises: UnknownName, UsageError (switches,
    links of unlike rates, fewer ports than links), Infeasible (`rewire`), CheckFailed.
    """
    unit, links = links_of(fabric)
    whole = np.bincount([a for a, _ in links], minlength=1)
    ports = ports or int(whole.max())
    if not ports or int(whole.max()) > len(fabric.devices) * ports:
        raise UsageError("has no links of one rate", where=fabric.name, hint="a wiring's links are whole multiples of one port's rate")
    left = without(fabric, down) if down else fabric
    arcs = tuple(sorted(links_of(left, unit)[1]))
    paired = arcs == tuple(sorted((b, a) for a, b in arcs))
    asked = replace(problem or TopologyProblem(nodes=2, ports=1), nodes=len(left.devices), ports=ports, bidirectional=paired)
    standing = Standing(fabric.name, asked.nodes, ports, arcs, paired)
    names = tuple(d.name for d in left.devices)
    with (budget or Budget(1)).net():
        found = rewire(standing, moved=moved, evaluations=evaluations, rng=np.random.default_rng(seed))
    return [_moved_row(grown, names, asked, least_moved(standing)) for grown in found], asked


def _moved_row(grown: Grown, names: tuple[str, ...], problem: TopologyProblem, least: int) -> WiringRow:
    wiring = grown.wiring
    gather = gather_cost(wiring)
    design = WiringDesign(
        wiring=wiring, gather=gather, scatter=gather if wiring.paired else gather_cost(wiring.transposed()), steps=grown.steps,
        factor=grown.load * wiring.ports / problem.nodes, names=names, factor_bound=factor_bound(problem.nodes),
        steps_bound=steps_bound(problem.nodes, wiring.ports, bidirectional=wiring.paired),
    )  # fmt: skip
    return replace(_row(design, problem), grown=grown, least_unplugged=least)


def _row(design: WiringDesign, problem: TopologyProblem) -> WiringRow:
    size = design.nodes * 1000  # any size: the bound is a rate
    bound = bandwidth_bound(CollectiveProblem.on(design.fabric(problem), "all-gather", size))
    return WiringRow(
        design=design, gather=_checked(design, design.gather, 1, problem), scatter=_checked(design, design.scatter, -1, problem),
        forest_factor=bound.exact * design.wiring.ports * problem.rate_Bps / size, usd=problem.prices.of(design.parts),
        all_to_all=_all_to_all(design, problem),
    )  # fmt: skip


def _all_to_all(design: WiringDesign, problem: TopologyProblem) -> float | None:
    if design.nodes * len(design.wiring.arcs) > MAX_FLOWS:
        return None
    return global_share(design.fabric(replace(problem, rate_Bps=1)), links=design.wiring.ports)


def _checked(design: WiringDesign, cost: Cost | None, way: int, problem: TopologyProblem) -> Verdict | None:
    """None where the design is costed by a rule. Raises: CheckFailed."""
    if cost is None:
        return None
    arcs = [(a, b) for a, b in design.wiring.arcs[:, ::way].tolist()]
    tight = [(t.node, t.senders) for t in cost.tight]
    verdict = check_wiring(
        design.nodes, design.wiring.ports, arcs, steps=cost.steps, load=cost.load, paired=design.wiring.paired, tight=tight,
        most_peers=problem.most_peers, most_parallel=problem.most_parallel,
    )  # fmt: skip
    verdict.raise_if_wrong()
    return verdict
