"""Which bytes go over which link when: planners for one collective on one fabric."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import numpy as np

from ...cite import Cite
from ...errors import Infeasible, MeshwrightError, TimeLimit, UnknownName, Unsupported
from .bounds import collective_bound
from .bruck import CITE as BRUCK_CITE
from .bruck import Bruck
from .classic import CITE as CLASSIC_CITE
from .classic import Classic
from .classic_trees import CITE as ROOTED_TREE_CITE
from .classic_trees import RootedTree
from .direct import CITE as DIRECT_CITE
from .direct import Direct
from .double_tree import CITE as DOUBLE_TREE_CITE
from .double_tree import DoubleTree
from .forestcoll import CITE as FORESTCOLL_CITE
from .forestcoll import ForestColl
from .halving_doubling import CITE as HALVING_DOUBLING_CITE
from .halving_doubling import HalvingDoubling, RecursiveDoubling
from .hierarchical import CITE as HIERARCHICAL_CITE
from .hierarchical import Hierarchical
from .nccl import CITE as NCCL_CITE
from .nccl import Nccl
from .pat import CITE as PAT_CITE
from .pat import Pat
from .problem import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ranked
from .ring import CITE as RING_CITE
from .ring import Ring
from .scatter_allgather import CITE as SCATTER_ALLGATHER_CITE
from .scatter_allgather import ScatterAllGather
from .taccl import CITE as TACCL_CITE
from .taccl import Taccl
from .value import simulated_time_s

__all__ = [
    "CANDIDATES", "CITES", "NAMES", "OPERATIONS", "STRATEGIES", "CollectivePlan", "CollectiveProblem", "CollectiveStrategy", "ForestColl", "Ranked",
    "Ring", "Taccl", "auto", "collective_bound", "strategy",
]  # fmt: skip

# name -> (strategy, where it comes from): one line per strategy, in the order in which they are shown
LISTED: dict[str, tuple[type[CollectiveStrategy], Cite]] = {
    "ring": (Ring, RING_CITE),
    "forestcoll": (ForestColl, FORESTCOLL_CITE),
    "taccl": (Taccl, TACCL_CITE),
    "doubletree": (DoubleTree, DOUBLE_TREE_CITE),
    "halvingdoubling": (HalvingDoubling, HALVING_DOUBLING_CITE),
    "recursivedoubling": (RecursiveDoubling, HALVING_DOUBLING_CITE),
    "bruck": (Bruck, BRUCK_CITE),
    "pat": (Pat, PAT_CITE),
    "direct": (Direct, DIRECT_CITE),
    "rootedtree": (RootedTree, ROOTED_TREE_CITE),
    "scatterallgather": (ScatterAllGather, SCATTER_ALLGATHER_CITE),
    "hierarchical": (Hierarchical, HIERARCHICAL_CITE),
    "classic": (Classic, CLASSIC_CITE),
    "nccl": (Nccl, NCCL_CITE),
}
STRATEGIES: tuple[type[CollectiveStrategy], ...] = tuple(kind for kind, _ in LISTED.values())
CITES: dict[str, Cite] = {name: cite for name, (_, cite) in LISTED.items()}
NAMES: dict[str, type[CollectiveStrategy]] = {name: kind for name, (kind, _) in LISTED.items()}
CANDIDATES: tuple[CollectiveStrategy, ...] = (Ring(), Ring(bidirectional=True), ForestColl())  # what `auto` tries, in this order


def strategy(name: str) -> type[CollectiveStrategy]:
    """The strategy of that name; raises UnknownName."""
    if name not in NAMES:
        raise UnknownName(f"no collective strategy {name!r}", hint=f"strategies: {', '.join(NAMES)}, auto")
    return NAMES[name]


def auto(problem: CollectiveProblem, *, candidates: Sequence[CollectiveStrategy] | None = None) -> list[Ranked]:
    """Plan with every candidate that applies, simulate, and rank by predicted time (refused candidates last, with the reason).

    Candidates default to CANDIDATES: a ring, a ring both ways and ForestColl. Those that would start after the time limit are refused; the first is
    always tried. Raises: Infeasible (disconnected devices); MeshwrightError of the first candidate when none has a plan.
    """
    listed = list(CANDIDATES if candidates is None else candidates)
    deadline = monotonic() + problem.time_limit_s
    done: list[tuple[Ranked, MeshwrightError | None]] = []
    for number, candidate in enumerate(listed):
        name = _name(candidate)
        if number and monotonic() > deadline:
            done.append((Ranked(strategy=name, plan=None, time_s=None, why="not tried: time limit"), None))
            continue
        try:
            plan = candidate.plan(problem, rng=np.random.default_rng(problem.seed))
            time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)
        except Infeasible:
            raise
        except (Unsupported, TimeLimit) as error:
            done.append((Ranked(strategy=name, plan=None, time_s=None, why=str(error)), error))
            continue
        done.append((Ranked(strategy=name, plan=plan, time_s=time_s, why=""), None))
    if not any(entry.plan for entry, _ in done):
        raise next(error for _, error in done if error is not None)
    return _explained([entry for entry, _ in done])


def _name(candidate: CollectiveStrategy) -> str:
    name = next((n for n, kind in NAMES.items() if type(candidate) is kind), type(candidate).__name__)
    return name + (" both ways" if getattr(candidate, "bidirectional", False) else "")


def _explained(entries: list[Ranked]) -> list[Ranked]:
    ranked = sorted(entries, key=lambda e: (e.time_s is None, e.time_s or 0.0))
    best = ranked[0].time_s or 0.0
    out = []
    for place, entry in enumerate(ranked):
        if entry.plan is None or entry.time_s is None:
            out.append(entry)
            continue
        bound = float(entry.plan.bound) if entry.plan.bound else 0.0
        above = f"{100 * (entry.time_s / bound - 1):.1f} % above the bound" if bound else "no bound"
        slower = "fastest of the candidates" if place == 0 else f"{100 * (entry.time_s / best - 1):.1f} % slower than the fastest" if best else "tied"
        out.append(Ranked(strategy=entry.strategy, plan=entry.plan, time_s=entry.time_s, why=f"{slower}; {above}"))
    return out
