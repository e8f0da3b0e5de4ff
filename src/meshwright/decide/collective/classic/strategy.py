"""The textbook: every classic algorithm that has the operation, simulated, and the fastest taken.

Cite: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19(1), 2005), which chooses among
these algorithms by message size and number of ranks.
Left open by the paper: where one algorithm overtakes another on a given fabric. Our answer: simulation on that fabric instead of fixed thresholds.
Deviations: rank orders as given and server by server are both tried where the ranks of a server are not together.
Invariant: never slower than the best of its algorithms, in the same simulator; ties go to the first.
Cost: one plan and one simulation per algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ...strategies import named
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from ..program_time import simulated_time_s
from .bruck import Bruck
from .direct import Direct
from .double_tree import DoubleTree
from .halving_doubling import CITE as THAKUR
from .halving_doubling import HalvingDoubling, RecursiveDoubling
from .hierarchical import Hierarchical, groups_of
from .nearness import near_order
from .pat import Pat
from .ring import Ring
from .rooted_tree import RootedTree
from .scatter_allgather import ScatterAllGather

__all__ = ["ALGORITHMS", "CITE", "DEVIATIONS", "Classic", "classic_candidates"]

CITE = Cite(key=THAKUR.key, title=THAKUR.title, authors=THAKUR.authors, year=THAKUR.year, venue=THAKUR.venue, doi=THAKUR.doi)
DEVIATIONS = ("simulation instead of fixed thresholds", "rank orders as given and server by server")
MAX_MESSAGES = 40_000  # algorithms that send n (n - 1) messages are left out where that is more
ALGORITHMS = named((Ring, DoubleTree, HalvingDoubling, RecursiveDoubling, Bruck, Pat, Direct, RootedTree, ScatterAllGather, Hierarchical))
BY_OPERATION: dict[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "all-reduce": (
        ("ring", {}), ("halving-doubling", {}), ("recursive-doubling", {}), ("double-tree", {}), ("direct", {}), ("bruck", {}), ("hierarchical", {}),
    ),
    "all-gather": (("ring", {}), ("halving-doubling", {}), ("bruck", {}), ("direct", {}), ("pat", {}), ("hierarchical", {})),
    "reduce-scatter": (("ring", {}), ("halving-doubling", {}), ("bruck", {}), ("direct", {}), ("pat", {}), ("hierarchical", {})),
    "broadcast": (
        ("ring", {}), ("rooted-tree", {}), ("double-tree", {}), ("scatter-all-gather", {}),
        ("scatter-all-gather", {"exchange": "bruck"}), ("hierarchical", {}),
    ),
    "reduce": (
        ("ring", {}), ("rooted-tree", {}), ("double-tree", {}), ("scatter-all-gather", {}),
        ("scatter-all-gather", {"exchange": "bruck"}), ("hierarchical", {}),
    ),
    "all-to-all": (("direct", {}), ("bruck", {}), ("hierarchical", {})),
    "scatter": (("direct", {}), ("rooted-tree", {}), ("hierarchical", {})),
    "gather": (("direct", {}), ("rooted-tree", {}), ("hierarchical", {})),
    "permute": (("direct", {}),),
}  # fmt: skip


def classic_candidates(problem: CollectiveProblem) -> list[tuple[str, dict[str, Any]]]:
    """(algorithm, options) worth trying: ranks as given and by nearness where it differs, no hierarchy in one group, no n² messages on many ranks."""
    n, groups = len(problem.ranks), groups_of(problem)
    near = near_order(problem) == tuple(range(n))
    found = []
    for name, options in BY_OPERATION[problem.op]:
        rounds = 2 if name == "ring" and problem.op == "all-reduce" else 1
        quadratic = name in ("ring", "direct") and problem.op not in ("broadcast", "reduce", "scatter", "gather", "permute")
        if quadratic and rounds * n * (n - 1) > MAX_MESSAGES:
            continue
        if name == "hierarchical" and not 1 < len(groups) < n:
            continue
        has_order = name != "ring" and "order" in {f.name for f in fields(ALGORITHMS[name])}  # type: ignore[arg-type]
        found.append((name, {**options, "order": "rank"} if has_order else dict(options)))
        if has_order and not near:
            found.append((name, {**options, "order": "near"}))
    return found


@dataclass(frozen=True, kw_only=True)
class Classic(CollectiveStrategy):
    """Options.

    algorithm: a name of ALGORITHMS; None = the fastest in simulation.
    settings: the algorithm's own options.
    unroll: pieces as explicit chunks; passed on to the algorithm.
    """

    name: ClassVar[str] = "classic"
    cite: ClassVar[Cite] = CITE
    chooses: ClassVar[bool] = True

    algorithm: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (no classic algorithm has a plan), UsageError (options), what the algorithms raise."""
        if self.algorithm is not None:
            plan = self._one(problem, self.algorithm, self.settings)
            return self._named(plan, self.algorithm, {})
        deadline = problem.deadline()
        collective_bound(problem)  # a disconnected fabric is reported as such, whatever the algorithms say
        best: tuple[float, str, CollectivePlan] | None = None
        tried: dict[str, Any] = {}
        refused: Unsupported | None = None
        for name, settings in classic_candidates(problem):
            if best is not None and deadline.past:
                break
            label = " ".join([name, *(f"{k}={v}" for k, v in settings.items())])
            try:
                plan = self._one(problem, name, settings)
                time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)
            except Unsupported as error:
                refused, tried[label] = error, str(error)
                continue
            tried[label] = time_s
            if best is None or time_s < best[0]:
                best = (time_s, name, plan)
        if best is None:
            text = f"no classic algorithm for this {problem.op} on {len(problem.ranks)} ranks"
            raise refused or Unsupported(text, hint="use --strategy forestcoll")
        return self._named(best[2], best[1], tried)

    def _one(self, problem: CollectiveProblem, name: str, settings: Mapping[str, Any]) -> CollectivePlan:
        if name not in ALGORITHMS:
            raise UsageError(f"no classic algorithm {name!r}", where="classic", hint=f"algorithms: {', '.join(ALGORITHMS)}")
        kind = ALGORITHMS[name]
        unknown = set(settings) - {f.name for f in fields(kind)}  # type: ignore[arg-type]
        if unknown:
            raise UsageError(f"{name} has no option {sorted(unknown)[0]!r}", where="classic")
        chosen = {"unroll": self.unroll, **settings}
        return kind(**chosen).plan(problem, rng=np.random.default_rng(problem.seed))

    def _named(self, plan: CollectivePlan, name: str, tried: Mapping[str, Any]) -> CollectivePlan:
        options = {"algorithm": name, "settings": dict(plan.options), "unroll": self.unroll}
        notes = {**plan.notes, "algorithm": name} | ({"tried": dict(tried)} if tried else {})
        return CollectivePlan(program=plan.program, bound=plan.bound, strategy=self.name, options=options, notes=notes)
