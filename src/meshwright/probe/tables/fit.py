"""Costs of embedding tables on this machine: points are measured, nets are trained. Finalists of a plan are measured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...cost_models.lookups import LookupCosts
from ...decide.tables import TablePlan, TableProblem
from ...drive.tables import Measured
from ...errors import UsageError
from ...fabric.fabric import Fabric
from ...graph.embeddings import Tables
from ...kernels.stages import stage
from ...run.machine.pacing import machine_facts
from .compute import ROUNDS, Meter, collect_compute
from .exchange import ExchangeTask, exchange_tasks, measure_exchanges
from .operator import operator_name
from .train import additive_errors, fit_compute, fit_exchange, split_points

__all__ = ["Fitted", "PlanMeasure", "better_exchanges", "fit_costs", "machine_here", "refuse_foreign"]

F64 = NDArray[np.float64]
LEAST_POINTS = 20  # of which two are held back: a net is no use with fewer


@dataclass(frozen=True)
class Fitted:
    """`additive_error`: of the best additive formula on the points that tell `costs.errors["compute"]`."""

    costs: LookupCosts
    additive_error: float


def machine_here() -> dict[str, str]:
    """What costs of lookups depend on: the processor, torch's release, the operator."""
    import torch

    facts = machine_facts()
    return {"cpu": facts.cpu_model, "cores": str(facts.online_cores), "torch": str(torch.__version__), "operator": operator_name()}


def refuse_foreign(costs: LookupCosts, where: str, here: dict[str, str] | None = None) -> None:
    """Raises: UsageError for costs of another machine (foreign) or of another release or operator on this one (stale)."""
    here = machine_here() if here is None else here
    apart = [f"{key} {costs.machine.get(key, 'unknown')}, here {value}" for key, value in here.items() if costs.machine.get(key) != value]
    if costs.machine and apart:
        what = "foreign" if any(x.startswith(("cpu", "cores")) for x in apart) else "stale"
        hint = "measure again with `meshwright tables fit`, or give --foreign to plan for the machine they are of"
        raise UsageError(f"these costs are {what}: measured on {'; '.join(apart)}", where=where, hint=hint)


def fit_costs(
    tables: Tables, fabric: Fabric, *, points: int, exchange_points: int, epochs: int = 300, seed: int = 0, lab: object = None, runs: int = 5,
) -> Fitted:  # fmt: skip
    """Raises: UsageError for too few points; as measuring exchanges does. `exchange_points` 0: exchanges are priced by the fabric's links."""
    if points < LEAST_POINTS or (exchange_points and exchange_points < LEAST_POINTS):
        hint = f"nets need {LEAST_POINTS} points, and get good with thousands"
        raise UsageError(f"{points} and {exchange_points} points", where="--points", hint=hint)
    with stage("measuring lookups", of=ROUNDS * points) as here:
        meter = Meter(tables, seed=seed)
        found = collect_compute(meter, points, np.random.default_rng([seed, 1]), on_point=lambda: here.begin())
    with stage("training the net of lookups"):
        costs = replace(fit_compute(tables, found, epochs=epochs, seed=seed), machine=machine_here())
    if exchange_points:
        with stage("measuring exchanges"):
            tasks = exchange_tasks(tables, len(fabric.devices), exchange_points, np.random.default_rng([seed, 2]))
            back, fore = measure_exchanges(tasks, len(fabric.devices), tables.batch, lab=lab, runs=runs, element_bytes=tables.element_bytes)
        with stage("training the nets of exchanges"):
            loads, starts = np.array([t.columns for t in tasks], float), np.array([t.start_s for t in tasks])
            nets = fit_exchange(costs, loads, starts, np.array(back), np.array(fore), fabric=fabric.name, epochs=epochs, seed=seed)
            costs = better_exchanges(nets, tables, fabric, loads, starts, np.array([back, fore]), seed)
    return Fitted(costs, additive_errors(tables, found, seed))


def better_exchanges(
    costs: LookupCosts, tables: Tables, fabric: Fabric, columns: F64, starts_s: F64, taken_s: F64, seed: int = 0
) -> LookupCosts:  # fmt: skip
    """The costs with nets of exchanges where these err less, on points that they never saw, than the links' rates do; else without them.

    taken_s: [backward and forward, points, devices]. Both errors are told (`errors`)."""
    problem = TableProblem(tables=tables, fabric=fabric, costs=(costs,))
    test = split_points(len(columns), seed)[2]
    guessed = problem.by_links(columns), problem.by_links(columns, starts_s)
    ways = ("backward", "forward")
    links = {f"{k} by links": float(np.median(np.abs(x[test] / y[test] - 1))) for k, x, y in zip(ways, guessed, taken_s, strict=True)}
    if sum(costs.errors[k] for k in ways) < sum(links.values()):
        return replace(costs, errors={**costs.errors, **links})
    unused = {f"{k} by an unused net": costs.errors[k] for k in ways}
    errors = {**{k: x for k, x in costs.errors.items() if k not in ways}, **links, **unused}
    return replace(costs, errors=errors, backward=None, forward=None, fabric="", devices=0)


@dataclass(frozen=True, kw_only=True)
class PlanMeasure:
    """What `drive.tables` takes as `measure`. `lab`: a `meshwright.lab.Lab` that stands, for exchanges; none: this machine's loopback. `runs`: of an
    exchange. With 5, medians of equal loads lay between 1.5 and 4.6 ms, more than plans differ by."""

    meter: Meter
    fabric: Fabric
    lab: object = None
    runs: int = 25

    def lookups_s(self, plans: Sequence[TablePlan]) -> list[list[float]]:
        """One run each: a moment does to all runs in a row more than they differ by among each other."""
        with stage("measuring lookups of plans"):
            return self.meter.plans_s([p.shards for p in plans], [d.name for d in self.fabric.devices], runs=1, rounds=1)

    def __call__(self, plans: Sequence[TablePlan], compute_s: Sequence[Sequence[float]]) -> list[Measured]:
        tables = self.meter.tables
        with stage("measuring exchanges of plans"):
            tasks = [ExchangeTask(columns=list(p.columns), compute_s=list(c)) for p, c in zip(plans, compute_s, strict=True)]
            size = {"runs": self.runs, "element_bytes": tables.element_bytes}
            back, fore = measure_exchanges(tasks, len(self.fabric.devices), tables.batch, lab=self.lab, **size)
        return [Measured(compute_s=tuple(c), backward_s=tuple(b), forward_s=tuple(f)) for c, b, f in zip(compute_s, back, fore, strict=True)]
