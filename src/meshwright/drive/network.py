"""Networks for so many accelerators beside each other: price, bandwidth shares, least time of a job, and what its product with the price says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..decide.strategies import answering
from ..decide.topology import STRATEGIES, TopologyProblem
from ..decide.topology.hammingmesh.network import NetworkDesign
from ..errors import Infeasible, MeshwrightError
from ..kernels.stages import stage

__all__ = ["DEFAULT_JOB", "NetworkRow", "compare_networks"]

# Of one iteration and accelerator: gradients of 5 billion weights in bf16, tokens of one layer of experts.
DEFAULT_JOB: Mapping[str, float] = {"compute_s": 0.0, "all_reduce_bytes": 10e9, "all_to_all_bytes": 1e9}


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """`time_s`: of the job's iteration, at least: bytes over the shares that rings and cuts leave, and one diameter of latency per collective."""

    design: NetworkDesign
    usd: int
    time_s: float

    @property
    def usd_seconds(self) -> float:
        return self.usd * self.time_s


@stage("comparing networks")
def compare_networks(problem: TopologyProblem, job: Mapping[str, float] = DEFAULT_JOB, *, budget_usd: int | None = None) -> list[NetworkRow]:
    """Every strategy's designs by price times time, the best first. Raises: Infeasible when the cheapest is above the budget."""
    rows = []
    for kind in answering(STRATEGIES, "network"):
        try:
            designs = kind().plan(problem, rng=np.random.default_rng(0))
        except MeshwrightError:  # a family that does not reach this size
            continue
        rows += [_row(d, problem, job) for d in designs if isinstance(d, NetworkDesign)]
    within = [row for row in rows if budget_usd is None or row.usd <= budget_usd]
    if not within:
        cheapest = min(rows, key=lambda row: row.usd)
        raise Infeasible(
            f"no network of {problem.nodes} accelerators costs {budget_usd} USD or less", where="--budget",
            hint=f"the cheapest is {cheapest.design.name} at {cheapest.usd} USD", data={"cheapest": cheapest.design.name, "usd": cheapest.usd},
        )  # fmt: skip
    return sorted(within, key=lambda row: (row.usd_seconds, row.usd, row.design.name))


def _row(design: NetworkDesign, problem: TopologyProblem, job: Mapping[str, float]) -> NetworkRow:
    injection = design.ports * problem.rate_Bps
    others = Fraction(design.nodes - 1, design.nodes)
    reduce_s = float(2 * others / design.all_reduce_share) * job["all_reduce_bytes"] / injection
    all_to_all_s = float(others / design.global_bound) * job["all_to_all_bytes"] / injection
    latency_s = design.diameter * problem.latency_s * (2 * bool(job["all_reduce_bytes"]) + bool(job["all_to_all_bytes"]))
    return NetworkRow(design=design, usd=problem.prices.of(design.parts), time_s=job["compute_s"] + reduce_s + all_to_all_s + latency_s)
