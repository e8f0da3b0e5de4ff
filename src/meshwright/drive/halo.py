"""Graph training on a fabric: from parts of a graph to the exchanges of an epoch, and from these to a checked plan of bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..cost import Cost, assumed_cost
from ..decide.strategies import options_given
from ..decide.traffic.adaqp import Assignment, Channel, Exchange, HaloProblem, HaloStrategy, epoch_bound
from ..decide.traffic.adaqp.lower import CENTRAL, MARGINAL, lower_halo, stated_steps, works_of
from ..decide.traffic.adaqp.strategy import AdaQP, Uniform
from ..errors import Infeasible, MeshwrightError, TimeLimit, Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..graph.graph import Work
from ..graph.halo import Halo, message_scores
from ..graph.nodes import NodeGraph
from ..job import GraphTraining
from ..kernels.effort import Budget
from ..kernels.stages import stage
from ..plan.halo import HaloJob
from ..plan.plan import Alternative, Plan
from ..simulate import simulate_program
from .plans import check_plan, make_plan

__all__ = ["Ranges", "TriedBits", "aggregated", "compare_halos", "default_strategies", "digest_of", "halo_problem", "plan_halo", "uniform_beside"]

Ranges = Mapping[tuple[str, int, int], "np.ndarray[Any, Any]"]  # (exchange, source, destination) -> mean of (max - min)^2 of each row


@dataclass(frozen=True, kw_only=True)
class TriedBits:
    """A strategy's assignment; `time_s`: of a simulated epoch. Without an assignment: its refusal."""

    strategy: HaloStrategy
    assignment: Assignment | None = None
    time_s: float = float("inf")
    refused: MeshwrightError | None = None

    @property
    def label(self) -> str:
        return f"uniform {self.strategy.bits}" if isinstance(self.strategy, Uniform) else self.strategy.name

    @property
    def why(self) -> str:
        return self.refused.message if self.refused is not None else ""


def digest_of(graph: NodeGraph, of: np.ndarray[Any, Any]) -> str:
    """Of a graph's columns and the parts: a plan is for these."""
    found = hashlib.blake2b(digest_size=16)
    for column in (graph.indptr, graph.indices, np.asarray(of, np.int64)):
        found.update(np.ascontiguousarray(column).data)
    return found.hexdigest()


def halo_problem(job: GraphTraining, shares: Sequence[Halo], fabric: Fabric, ranges: Ranges | None = None) -> HaloProblem:
    """The exchanges of an epoch: features and embeddings forward, their gradients back to the owners, none for the input.

    `ranges`: traced; without them all rows have a range of 1, so that weights follow the graph alone.
    Raises: UsageError for a fabric with fewer devices than workers, or ranges of other rows.
    """
    workers = len(shares)
    if len(fabric.devices) < workers:
        hint = f"--workers {len(fabric.devices)}, or a larger fabric"
        raise UsageError(f"{workers} workers on {len(fabric.devices)} devices of {fabric.name}", where="--fabric", hint=hint)
    scores = {(i, j): message_scores(tuple(shares), i, j) for i in range(workers) for j in range(workers) if i != j}
    exchanges = []
    works: dict[tuple[int, str, str], Work] = {}
    for name, layer, forward in job.exchanges:
        dim, channels = job.dims[layer], []
        for (i, j), score in scores.items():
            src, dst, score = (i, j, score) if forward else (j, i, np.ones(len(score)))
            spread = np.ones(len(score)) if ranges is None else np.asarray(ranges.get((name, src, dst), np.zeros(0)), np.float64)
            if len(spread) != len(score):
                what = f"{len(spread)} traced rows, the graph has {len(score)}"
                raise UsageError(what, where=f"{name}, {src} to {dst}", hint="trace the same graph, parts and layers")
            if len(score):
                channels.append(Channel(src, dst, score * spread * (dim / 6)))
        exchanges.append(Exchange(name, dim, tuple(sorted(channels, key=lambda c: (c.src, c.dst)))))
        for k, share in enumerate(shares):
            works |= {(k, name, part): work for part, work in _works(job, share, layer, forward).items()}
    names = tuple(d.name for d in fabric.devices[:workers])
    own = tuple(s.own for s in shares)
    return HaloProblem(fabric=fabric, ranks=names, exchanges=tuple(exchanges), works=works, own=own, name=job.name)


def aggregated(job: GraphTraining, graph: NodeGraph) -> tuple[NodeGraph, np.ndarray[Any, Any]]:
    """What the network aggregates over, and by what each edge multiplies: GCN adds self-loops."""
    over = graph.looped() if job.model == "gcn" else graph
    return over, over.coefficients("gcn" if job.model == "gcn" else "mean")


def _works(job: GraphTraining, share: Halo, layer: int, forward: bool) -> dict[str, Work]:
    """Sparse product of each part's rows, and the layer's dense one; backward does both for inputs and weights."""
    edges = int(share.indptr[share.central]), int(share.indptr[-1] - share.indptr[share.central])
    rows = share.central, share.own - share.central
    wide = job.dims[layer], job.dims[layer + 1]
    times = 1 if forward else 2
    return {
        part: Work(
            flops=times * (2 * e * wide[0] + 2 * n * wide[0] * wide[1]), bytes_read=times * 4 * (e * wide[0] + n * wide[0]),
            bytes_written=times * 4 * n * wide[1],
        )
        for part, e, n in zip((CENTRAL, MARGINAL), edges, rows, strict=True)
    }  # fmt: skip


def default_strategies() -> list[HaloStrategy]:
    """What `graph compare` lists: planned bits, and every uniform width."""
    return [AdaQP(), *(Uniform(bits=b) for b in (2, 4, 8, 32))]


def _simulated_s(problem: HaloProblem, assignment: Assignment, cost: Cost) -> float:
    program = lower_halo(problem, assignment)
    return simulate_program(program, problem.fabric, problem.ranks, cost, works=works_of(problem), record=False, memory=False).makespan_s


@stage("bits of messages")
def compare_halos(
    problem: HaloProblem, candidates: Sequence[HaloStrategy] | None = None, *, cost: Cost | None = None, seed: int = 0, budget: Budget | None = None
) -> list[TriedBits]:  # fmt: skip
    """Candidates in their order, simulated; refused ones with the reason. Those for which the `budget` has no room are left out, never the first.

    Raises: TimeLimit where an interrupt ends the first.
    """
    listed, found = default_strategies() if candidates is None else candidates, list[TriedBits]()
    budget = budget or Budget(len(listed))
    for each in listed:
        if not budget.spend():
            break
        try:
            with budget.net():
                made = each.plan(problem, rng=np.random.default_rng(seed))
                found.append(TriedBits(strategy=each, assignment=made, time_s=_simulated_s(problem, made, cost or assumed_cost(problem.fabric))))
        except (Unsupported, Infeasible) as refused:
            found.append(TriedBits(strategy=each, refused=refused))
        except TimeLimit:
            if not found:
                raise
            break
    return found


def plan_halo(
    job: GraphTraining, problem: HaloProblem, strategy: HaloStrategy, *, digest: str, edges: int, central: Sequence[int], method: str = "own",
    cost: Cost | None = None, seed: int = 0, budget: Budget | None = None,
) -> tuple[Plan, list[TriedBits]]:  # fmt: skip
    """The strategy's bits as a checked plan with its bound, and what was tried: the strategy, then the defaults unlike it.

    `method`: that made the parts. Raises: CheckFailed; what the strategy raises.
    """
    prices = cost or assumed_cost(problem.fabric)
    listed = [strategy, *(s for s in default_strategies() if s != strategy)]
    tried, *more = compare_halos(problem, listed, cost=prices, seed=seed, budget=budget)
    if tried.assignment is None:
        assert tried.refused is not None
        raise tried.refused
    group = getattr(strategy, "group", AdaQP().group)
    steps = stated_steps(problem, tried.assignment, group)
    stated = HaloJob(
        graph=job.name, digest=digest, nodes=sum(problem.own), edges=edges, workers=len(problem.ranks), own=problem.own, central=tuple(central),
        variance=tried.assignment.variance, steps=steps,
    )  # fmt: skip
    bound = epoch_bound(problem, steps, tried.assignment.variance)
    others = [t for t in more if t.assignment]
    decision = {
        "strategy": strategy.name, "options": options_given(strategy, [f.name for f in fields(strategy)]),  # type: ignore[arg-type]
        "why": _why(tried, others, bound), "cite": strategy.cite.key, "exact": tried.assignment.exact, "gap": tried.assignment.gap,
    }  # fmt: skip
    plan = make_plan(
        "halo", problem.fabric, problem.ranks, lower_halo(problem, tried.assignment),
        job={"graph_training": msgspec.to_builtins(job), "halo": msgspec.to_builtins(stated)}, cost=prices, works=works_of(problem),
        decisions={"halo": decision, "partition": {"strategy": method, "options": {}, "why": "few edges between workers", "cite": ""}},
        bound=bound, prediction=tried.time_s, seed=seed,
        alternatives=(Alternative(what=t.label, time_s=t.time_s, why=f"variance {t.assignment.variance:.4g}") for t in others if t.assignment),
    )  # fmt: skip
    check_plan(plan)
    return plan, [tried, *more]


def uniform_beside(tried: Sequence[TriedBits], variance: float) -> TriedBits | None:
    """The fastest uniform width of no larger variance."""
    fit = [t for t in tried if isinstance(t.strategy, Uniform) and t.assignment and t.assignment.variance <= variance * (1 + 1e-12)]
    return min(fit, key=lambda t: t.time_s, default=None)


def _why(tried: TriedBits, others: Sequence[TriedBits], bound: Bound) -> str:
    assert tried.assignment is not None
    full = next((t for t in others if t.label == "uniform 32"), None)
    beside = f", {full.time_s / tried.time_s:.2f} times as fast as float32" if full and tried.time_s else ""
    over = f"{tried.time_s / float(bound) - 1:.1%} above the bound" if float(bound) else "nothing to send"
    return f"variance {tried.assignment.variance:.4g}; {over}{beside}"


