"""Rank order from a cost matrix: which host plays which rank, for the algorithm that will run.

Cite: L. Luo, J. Nelson, A. Krishnamurthy, L. Ceze, "Cloud Collectives: Towards Cloud-aware Collectives for ML Workloads with Rank Reordering"
(arXiv 2105.14088).
Left open by the paper: when to stop. Our answer: exact for few hosts (all orders, or dynamic programming for rings), else a lower bound
beside the best order found; "no gain possible" when the given order reaches the bound.
Deviations: shared uplinks are part of the cost; ties of the slowest message are broken by the load between groups, then by the sum of all messages;
no solver, but exact search, exchanges and annealing; the endpoints of a host stay together.
Invariant: the order is a permutation, and never predicted to be slower than the identity; sums are taken in another order, so results may differ in
rounding.
Cost: O(2^m m²) for a ring of m <= 14 hosts, else `budget` evaluations of O(messages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Disconnected, Unsupported, UsageError
from ....kernels.effort import NEVER, Deadline
from ..bounds.collective import collective_bound
from ..classic.bruck import Bruck
from ..classic.double_tree import DoubleTree
from ..classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from ..classic.hierarchical import Hierarchical, servers_of
from ..classic.ring import Ring
from ..classic.rooted_tree import RootedTree
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of, require_operation
from ..program_time import simulated_time_s
from .bound import lower_bound, sum_bound
from .cost import ALGORITHMS, BCUBE_RADIX, FAR_FIRST, CostMatrix, Model, Objective, consecutive, model_of
from .search import Search

__all__ = ["CITE", "DEVIATIONS", "CloudCollectives", "RankOrder", "best_choice", "order_ranks"]

CITE = Cite(
    key="luo2021cloud",
    title="Cloud Collectives: Towards Cloud-aware Collectives for ML Workloads with Rank Reordering",
    authors="L. Luo, J. Nelson, A. Krishnamurthy, L. Ceze",
    year=2021,
    venue="arXiv 2105.14088",
    url="https://arxiv.org/abs/2105.14088",
)
DEVIATIONS = (
    "shared uplinks are part of the cost", "lexicographic objective: time, load between groups, sum",
    "exact search, exchanges and annealing, no solver", "hosts are permuted, not their devices",
)  # fmt: skip
# Far partners first is near partners first in another order, so a search over orders needs one of them.
SEARCHED = tuple(name for name in ALGORITHMS if name != FAR_FIRST)
MIN_GAIN_SHARE = 0.10  # predicted gain of speed from which re-ordering a running job is called worth rebuilding its groups


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """`order[rank]` = endpoint.

    `proof`: "exact" (nothing better exists in the model, among the orders that `more["proved_for"]` names), "bound" (all bounds are reached),
    "time bound" (the bound on the time is reached; another order may load the network less) or "" (the best found).
    """

    algorithm: str
    op: str
    size_bytes: int
    names: tuple[str, ...]
    order: tuple[int, ...]
    before: Objective
    after: Objective
    bound_s: float
    proof: str
    evaluated: int
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times faster than the identity, by the model."""
        return self.before.time_s / self.after.time_s if self.after.time_s > 0 else 1.0

    @property
    def verdict(self) -> str:
        if self.order == tuple(range(len(self.order))):
            return "no gain possible" if self.proof else "no better order found"
        if self.gain < 1 - 1e-9:  # the given order has another first endpoint than was asked for
            return "slower than as given, for the first endpoint that was asked for"
        if self.gain <= 1 + 1e-9:
            return "no gain in time; less load on the network"
        return "worth it" if self.gain >= 1 + MIN_GAIN_SHARE else "small gain"

    def hostfile(self) -> str:
        """One endpoint per line, in rank order."""
        return "".join(f"{self.names[i]}\n" for i in self.order)

    def assignment(self) -> str:
        """`name RANK=r` per endpoint, in the order in which they were given."""
        rank = {endpoint: r for r, endpoint in enumerate(self.order)}
        return "".join(f"{name} RANK={rank[i]}\n" for i, name in enumerate(self.names))

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm, "op": self.op, "size_bytes": self.size_bytes, "order": list(self.order),
            "names": [self.names[i] for i in self.order], "before": self.before._asdict(), "after": self.after._asdict(), "bound_s": self.bound_s,
            "proof": self.proof, "gain": self.gain, "verdict": self.verdict, "evaluated": self.evaluated, **self.more,
        }  # fmt: skip


def order_ranks(
    matrix: CostMatrix, algorithm: str, op: str, size_bytes: int, *, rng: np.random.Generator, budget: int = 4000, restarts: int = 3,
    first: int | None = None, deadline: Deadline = NEVER,
) -> RankOrder:  # fmt: skip
    """The best order found for one algorithm, with a bound that no order beats.

    Args: first: endpoint that must be rank 0 (checkpoint writer, rendezvous). Raises: Unsupported, UsageError.
    """
    if first is not None and not 0 <= first < len(matrix):
        raise UsageError(f"first must be an endpoint 0..{len(matrix) - 1}, got {first}", where="cloudcollectives")
    if budget < 1 or restarts < 1:
        raise UsageError(f"budget and restarts must be >= 1, got {budget} and {restarts}", where="cloudcollectives")
    model = model_of(matrix, algorithm, op, size_bytes)
    search = Search(model, rng, budget=budget, restarts=restarts, first=first, deadline=deadline)
    bound = lower_bound(model)
    sum_s = sum_bound(model)
    slack = 1 + 1e-9
    if search.best.time_s <= bound * slack and _least_load(model, search.best) and search.best.sum_s <= sum_s * slack:
        search.proof = "bound"
    else:
        search.run()
        search.inside()
        if not search.proof and search.best.time_s <= bound * slack:
            search.proof = "time bound"
    more: dict[str, Any] = {"first": first} if first is not None else {}
    if algorithm == "ring":
        more["sum_bound_s"] = sum_s
    if search.proof == "exact":
        more["proved_for"] = "all orders" if len(search.hosts) == len(matrix) else "orders of whole hosts, each host's endpoints as given"
    return RankOrder(
        algorithm=algorithm, op=op, size_bytes=size_bytes, names=matrix.names, order=search.order, before=search.before, after=search.best,
        bound_s=min(bound, search.best.time_s), proof=search.proof, evaluated=search.evaluated, more=more,
    )  # fmt: skip


def _least_load(model: Model, found: Objective) -> bool:
    """Whether no order loads the links between groups less: there is one group, or a ring leaves every group once per round."""
    groups = set(model.matrix.group)
    if len(groups) < 2:
        return True
    if model.algorithm != "ring" or np.isfinite(model.matrix.capacity_Bps).any():
        return False
    return found.load <= sum(s.times for s in model.stages) * len(groups)


def best_choice(
    matrix: CostMatrix, op: str, size_bytes: int, *, rng: np.random.Generator, algorithms: Sequence[str] = SEARCHED,
    limit: Callable[[], Deadline] = Deadline, **more: Any
) -> list[RankOrder]:
    """The algorithms that have the operation, each in its best order, fastest first (by the model); those whose bound rules them out are left out.

    `limit` begins the time of each.
    """
    models: list[Model] = []
    for name in algorithms:
        try:
            models.append(model_of(matrix, name, op, size_bytes))
        except Unsupported:
            continue
    identity = range(len(matrix))
    found: list[RankOrder] = []
    for model in sorted(models, key=lambda m: m(identity).time_s):  # those that start well first, so that bounds rule the others out
        if found and lower_bound(model) >= min(o.after.time_s for o in found):
            continue
        found.append(order_ranks(matrix, model.algorithm, op, size_bytes, rng=rng, deadline=limit(), **more))
    if not found:
        raise Unsupported(f"no algorithm to order ranks for a {op}", hint=f"algorithms: {', '.join(ALGORITHMS)}")
    return sorted(found, key=lambda o: o.after.time_s)


# ---- the strategy ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class CloudCollectives(CollectiveStrategy):
    """Options.

    algorithm: one of `cost.ALGORITHMS` (bcube: halving and doubling with radix 4); None = the fastest in its best order.
    order: rank -> position in the given ranks; None = searched.
    budget, restarts: orders evaluated at most, and annealing runs.
    keep_first: rank 0 stays rank 0.
    hosts: keep the devices of a server together (permute servers); False = every device is free.
    unroll: pieces as explicit chunks (repeat 1).
    """

    name: ClassVar[str] = "cloudcollectives"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all")
    searches: ClassVar[bool] = True

    algorithm: str | None = None
    order: tuple[int, ...] | None = None
    budget: int = 2000
    restarts: int = 3
    keep_first: bool = False
    hosts: bool = True
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """The algorithm in the order whose simulated time is least: the one found, or the identity.

        Raises: Disconnected, Unsupported (operations no algorithm has, uneven shards), UsageError (options).
        """
        collective_bound(problem)
        require_operation(problem, self.name, self.operations, uneven=True)  # before the costs of all pairs are found
        n = len(problem.ranks)
        if problem.shard_bytes is not None:
            raise Unsupported("rank orders are sought for equal shards", hint="use --strategy direct")
        if self.order is not None and sorted(self.order) != list(range(n)):
            raise UsageError(f"order must hold every rank of 0..{n - 1} once, got {self.order}", where="cloudcollectives")
        notes: dict[str, Any] = {}
        algorithm, orders = self.algorithm, [self.order] if self.order is not None else []
        if self.order is None or algorithm is None:
            found = self._search(problem, rng)
            algorithm = found.algorithm
            notes = {"search": found.to_json()}
            orders = [tuple(range(n)), found.order] if self.order is None else [self.order]
        assert algorithm is not None
        best: tuple[float, tuple[int, ...], CollectivePlan] | None = None
        for order in dict.fromkeys(tuple(o) for o in orders if o is not None):
            plan = _strategy(problem, algorithm, order, self.unroll).plan(problem, rng=np.random.default_rng(problem.seed))
            time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)
            if best is None or time_s < best[0]:
                best = (time_s, order, plan)
        assert best is not None
        chosen = replace(self, algorithm=algorithm, order=best[1])
        facts = {"algorithm": algorithm, "order": [problem.ranks[r] for r in best[1]], **notes}
        return replace(best[2], strategy=self.name, options=options_of(chosen), notes=facts)

    def _search(self, problem: CollectiveProblem, rng: np.random.Generator) -> RankOrder:
        try:
            matrix = CostMatrix.of_fabric(problem.fabric, problem.ranks, problem.transport)
        except Disconnected as error:
            raise Unsupported(f"every rank must reach every other: {error.message}", hint="use --strategy forestcoll", data=error.data) from None
        if not self.hosts or len(set(matrix.host)) == 1:
            matrix = replace(matrix, host=tuple(range(len(matrix))))
        algorithms = SEARCHED if self.algorithm is None else (self.algorithm,)
        first = 0 if self.keep_first else problem.root if problem.op in ("broadcast", "reduce") else None
        share = 1 / (2 * len(algorithms))
        if self.algorithm is not None:
            return order_ranks(
                matrix, self.algorithm, problem.op, problem.size_bytes, rng=rng, budget=self.budget, restarts=self.restarts, first=first,
                deadline=problem.deadline(share),
            )  # fmt: skip
        return best_choice(
            matrix, problem.op, problem.size_bytes, rng=rng, algorithms=algorithms, budget=self.budget, restarts=self.restarts, first=first,
            limit=lambda: problem.deadline(share),
        )[0]  # fmt: skip


def _strategy(problem: CollectiveProblem, algorithm: str, order: tuple[int, ...], unroll: bool) -> CollectiveStrategy:
    groups = tuple(tuple(order[p] for p in group) for group in consecutive([len(s) for s in servers_of(problem)]))
    kinds: dict[str, CollectiveStrategy] = {
        "ring": Ring(order=order, unroll=unroll), "halving-doubling": HalvingDoubling(order=order),
        FAR_FIRST: HalvingDoubling(order=order, near=False), "bcube": HalvingDoubling(order=order, radix=BCUBE_RADIX),
        "recursive-doubling": RecursiveDoubling(order=order), "bruck": Bruck(order=order),
        "hierarchical": Hierarchical(groups=groups),
        "double-tree": DoubleTree(order=order, unroll=unroll), "rooted-tree": RootedTree(order=order, unroll=unroll),
    }  # fmt: skip
    if algorithm not in kinds:
        raise UsageError(f"no algorithm {algorithm!r}", where="cloudcollectives", hint=f"one of {', '.join(kinds)}")
    return kinds[algorithm]
