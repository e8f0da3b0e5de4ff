"""Networks for so many accelerators beside each other: price, bandwidth shares, least time of a job, and what its product with the price says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, TypeVar

import numpy as np

from ..decide.collective import CollectiveProblem, CollectiveStrategy
from ..decide.collective.choice import tuned
from ..decide.collective.classic.direct import Direct
from ..decide.collective.classic.ring import Ring
from ..decide.strategies import answering
from ..decide.topology import STRATEGIES, TopologyProblem
from ..decide.topology.hammingmesh.network import NetworkDesign
from ..errors import Infeasible, MeshwrightError, Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..kernels.stages import stage
from ..kernels.torus_rings import ring_pair
from ..simulate.rounds import round_of_all_pairs, round_of_pairs

__all__ = ["DEFAULT_JOB", "MAX_BY_MESSAGE", "MAX_SIMULATED", "NetworkRow", "compare_networks", "exchange_s", "iteration_s", "require_simulable",
           "within_budget"]  # fmt: skip

Priced = TypeVar("Priced", bound=Any)  # a row with `design` and `usd`

MAX_BY_MESSAGE = 128  # accelerators that are simulated message by message; 64 take some ten seconds for all networks
MAX_SIMULATED = 4096  # that are simulated round by round
ELEMENT_BYTES = 4  # sizes of a job's collectives are rounded up to whole numbers of elements

# Of one iteration and accelerator: gradients of 5 billion weights in bf16, tokens of one layer of experts.
DEFAULT_JOB: Mapping[str, float] = {"compute_s": 0.0, "all_reduce_bytes": 10e9, "all_to_all_bytes": 1e9}


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """`time_s`: of the job's iteration, at least: bytes over the shares that rings and cuts leave, and one diameter of latency per collective.
    `simulated_s`: of its collectives on the fabric, message by message, of more than `MAX_BY_MESSAGE` accelerators round by round; None where that
    was not asked for."""

    design: NetworkDesign
    usd: int
    time_s: float
    simulated_s: float | None = None

    @property
    def usd_seconds(self) -> float:
        return self.usd * (self.time_s if self.simulated_s is None else self.simulated_s)


@stage("comparing networks")
def compare_networks(
    problem: TopologyProblem, job: Mapping[str, float] = DEFAULT_JOB, *, budget_usd: int | None = None, simulate: bool = False
) -> list[NetworkRow]:
    """Every strategy's designs by price times time, the best first. `simulate`: by simulated time; only those within the budget.

    Raises: Infeasible when the cheapest is above the budget, Unsupported for more accelerators than `MAX_SIMULATED` are simulated with.
    """
    if simulate:
        require_simulable(problem.nodes)
    rows = []
    for kind in answering(STRATEGIES, "network"):
        try:
            designs = kind().plan(problem, rng=np.random.default_rng(0))
        except MeshwrightError:  # a family that does not reach this size
            continue
        rows += [_row(d, problem, job) for d in designs if isinstance(d, NetworkDesign)]
    within = within_budget(rows, budget_usd)
    if simulate:
        within = [replace(row, simulated_s=_simulated_s(row.design, problem, job)) for row in within]
    return sorted(within, key=lambda row: (row.usd_seconds, row.usd, row.design.name))


def within_budget(rows: Sequence[Priced], budget_usd: int | None) -> list[Priced]:
    """Rows that cost no more. Raises: Infeasible where none does."""
    within = [row for row in rows if budget_usd is None or row.usd <= budget_usd]
    if not within:
        cheapest = min(rows, key=lambda row: row.usd)
        raise Infeasible(
            f"no design of {cheapest.design.nodes} accelerators costs {budget_usd} USD or less", where="--budget",
            hint=f"the cheapest is {cheapest.design.name} at {cheapest.usd} USD", data={"cheapest": cheapest.design.name, "usd": cheapest.usd},
        )  # fmt: skip
    return within


def require_simulable(nodes: int) -> None:
    """Raises: Unsupported."""
    if nodes > MAX_SIMULATED:
        text = f"{nodes} accelerators: up to {MAX_SIMULATED} are simulated"
        raise Unsupported(text, where="--simulate", hint="leave it out: least times follow from shares and cuts, at any size")


def iteration_s(fabric: Fabric, job: Mapping[str, float], sums: Sequence[CollectiveStrategy]) -> float:
    """Seconds of a job's iteration: its computing, its all-reduce by the fastest of `sums`, its all-to-all along shortest routes."""
    total, ranks = job["compute_s"], len(fabric.devices)
    for op, field, candidates in (("all-reduce", "all_reduce_bytes", sums), ("all-to-all", "all_to_all_bytes", (Direct(),))):
        if not job[field]:
            continue
        unit = ELEMENT_BYTES * (ranks if op == "all-to-all" else 1)
        problem, times = CollectiveProblem.on(fabric, op, ceil(job[field] / unit) * unit), []
        for candidate in candidates:
            try:
                times.append(tuned(candidate, problem, search=False)[1])
            except (Unsupported, UsageError) as error:  # a grid with a side of two, say
                refused = error
        if not times:
            raise refused
        total += min(times)
    return total


def _simulated_s(design: NetworkDesign, problem: TopologyProblem, job: Mapping[str, float]) -> float:
    fabric = design.fabric(problem)
    if design.nodes <= MAX_BY_MESSAGE:
        return iteration_s(fabric, job, _rings(design))
    return job["compute_s"] + _rings_s(fabric, design, job["all_reduce_bytes"]) + exchange_s(fabric, job["all_to_all_bytes"])


def exchange_s(fabric: Fabric, size_bytes: float) -> float:
    """Seconds of an all-to-all along the fabric's routes, all messages at once."""
    n = len(fabric.devices)
    return round_of_all_pairs(fabric).seconds(ceil(size_bytes / (ELEMENT_BYTES * n)) * ELEMENT_BYTES) if size_bytes else 0.0


def _rings_s(fabric: Fabric, design: NetworkDesign, size_bytes: float) -> float:
    """Seconds of an all-reduce by rings both ways, round by round: two without a common cable, or one in the order of the accelerators."""
    if not size_bytes:
        return 0.0
    n, found = design.nodes, []
    ways: list[Sequence[Sequence[int]]] = [[range(n)]]
    if design.grid is not None and min(design.grid) >= 3:
        ways.append(ring_pair(*design.grid))
    for pair in ways:
        steps = [(ring[i - 1], ring[i]) for ring in pair for i in range(n)]
        rounds = round_of_pairs(fabric, [*steps, *((b, a) for a, b in steps)])
        found.append(2 * (n - 1) * rounds.seconds(ceil(size_bytes / (2 * len(pair) * n * ELEMENT_BYTES)) * ELEMENT_BYTES))
    return min(found)


def _rings(design: NetworkDesign) -> tuple[CollectiveStrategy, ...]:
    both = Ring(bidirectional=True)
    return (both,) if design.grid is None else (Ring(bidirectional=True, torus=design.grid), both)


def _row(design: NetworkDesign, problem: TopologyProblem, job: Mapping[str, float]) -> NetworkRow:
    injection = design.ports * problem.rate_Bps
    others = Fraction(design.nodes - 1, design.nodes)
    reduce_s = float(2 * others / design.all_reduce_share) * job["all_reduce_bytes"] / injection
    all_to_all_s = float(others / design.global_bound) * job["all_to_all_bytes"] / injection
    latency_s = design.diameter * problem.latency_s * (2 * bool(job["all_reduce_bytes"]) + bool(job["all_to_all_bytes"]))
    return NetworkRow(design=design, usd=problem.prices.of(design.parts), time_s=job["compute_s"] + reduce_s + all_to_all_s + latency_s)
