"""Which bytes go over which link when: planners for one collective on one fabric."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from ..strategies import found, named
from .bfb.strategy import BFB
from .blink.strategy import Blink
from .blueconnect.strategy import BlueConnect
from .bounds.collective import collective_bound
from .choice import rank
from .classic.bruck import Bruck
from .classic.direct import Direct
from .classic.double_tree import DoubleTree
from .classic.fold_tree import FoldTree
from .classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from .classic.hierarchical import Hierarchical
from .classic.pat import Pat
from .classic.ring import Ring
from .classic.rooted_tree import RootedTree
from .classic.scatter_allgather import ScatterAllGather
from .classic.strategy import Classic
from .cloudcollectives.strategy import CloudCollectives
from .forestcoll.strategy import ForestColl
from .joint.strategy import Joint
from .multipath.strategy import Multipath
from .nccl.strategy import Nccl
from .problem import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ranked, Use
from .switchml.strategy import SwitchML
from .taccl.strategy import Taccl

__all__ = [
    "NAMES", "OPERATIONS", "STRATEGIES", "CollectivePlan", "CollectiveProblem", "CollectiveStrategy", "ForestColl", "Ring", "auto",
    "collective_bound", "default_candidates", "strategy",
]  # fmt: skip

# The list: names, citations, the command line, `auto`, a step's calls and the contract battery follow from it, in this order.
STRATEGIES: tuple[type[CollectiveStrategy], ...] = (
    Ring, ForestColl, Joint, Taccl, Blink, BlueConnect, DoubleTree, HalvingDoubling, RecursiveDoubling, Bruck, Pat, Direct, RootedTree,
    ScatterAllGather, Hierarchical, FoldTree, BFB, SwitchML, Classic, Multipath, Nccl, CloudCollectives,
)  # fmt: skip
NAMES = named(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[CollectiveStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("collective", STRATEGIES, name, where=where, what="collective strategy", also=("auto",))


def default_candidates(problem: CollectiveProblem, *, in_network: bool = False) -> tuple[CollectiveStrategy, ...]:
    """What `auto` plans with: every strategy's most promising variant, then every second one, and so on; not those that only choose among others.

    `in_network`: also what adds and copies in switches, whose programs only the simulator runs.
    """
    uses: tuple[Use, ...] = ("alone", "in network") if in_network else ("alone",)
    ordered: list[CollectiveStrategy] = []
    for use in uses:
        own = [kind.variants(problem, use) for kind in STRATEGIES if not kind.chooses]
        ordered += [variant for turn in zip_longest(*own) for variant in turn if variant is not None]
    return tuple(ordered)


def auto(
    problem: CollectiveProblem, *, candidates: Sequence[CollectiveStrategy] | None = None, search: bool = False, each_s: float = float("inf")
) -> list[Ranked]:
    """Plan with every candidate, simulate, and rank by predicted time (refused candidates last, with the reason).

    Candidates default to `default_candidates(problem)`. `search`: let the simulator choose the number of pieces. `each_s`: limit per candidate.
    Raises: as `choice.rank`.
    """
    return rank(problem, default_candidates(problem) if candidates is None else candidates, search=search, each_s=each_s)
