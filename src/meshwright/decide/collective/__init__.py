"""Which bytes go over which link when: planners for one collective on one fabric."""

from __future__ import annotations

from collections.abc import Sequence

from ...cite import Cite
from ...errors import UnknownName
from .blink.strategy import CITE as BLINK_CITE
from .blink.strategy import Blink
from .blueconnect.strategy import CITE as BLUECONNECT_CITE
from .blueconnect.strategy import BlueConnect
from .bounds.collective import collective_bound
from .choice import rank
from .classic.bruck import CITE as BRUCK_CITE
from .classic.bruck import Bruck
from .classic.direct import CITE as DIRECT_CITE
from .classic.direct import Direct
from .classic.double_tree import CITE as DOUBLE_TREE_CITE
from .classic.double_tree import DoubleTree
from .classic.halving_doubling import CITE as HALVING_DOUBLING_CITE
from .classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from .classic.hierarchical import CITE as HIERARCHICAL_CITE
from .classic.hierarchical import Hierarchical
from .classic.pat import CITE as PAT_CITE
from .classic.pat import Pat
from .classic.ring import CITE as RING_CITE
from .classic.ring import Ring
from .classic.rooted_tree import CITE as ROOTED_TREE_CITE
from .classic.rooted_tree import RootedTree
from .classic.scatter_allgather import CITE as SCATTER_ALLGATHER_CITE
from .classic.scatter_allgather import ScatterAllGather
from .classic.strategy import CITE as CLASSIC_CITE
from .classic.strategy import Classic
from .cloudcollectives.strategy import CITE as CLOUDCOLLECTIVES_CITE
from .cloudcollectives.strategy import CloudCollectives
from .forestcoll.strategy import CITE as FORESTCOLL_CITE
from .forestcoll.strategy import ForestColl
from .joint.strategy import CITE as JOINT_CITE
from .joint.strategy import Joint
from .multipath.strategy import CITE as MULTIPATH_CITE
from .multipath.strategy import Multipath
from .nccl.strategy import CITE as NCCL_CITE
from .nccl.strategy import Nccl
from .problem import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ranked
from .taccl.strategy import CITE as TACCL_CITE
from .taccl.strategy import Taccl

__all__ = [
    "CITES", "NAMES", "OPERATIONS", "STRATEGIES", "CollectivePlan", "CollectiveProblem", "CollectiveStrategy", "ForestColl", "Joint", "Ranked",
    "Ring", "Taccl", "auto", "collective_bound", "default_candidates", "name_of", "strategy",
]  # fmt: skip

# name -> (strategy, where it comes from): one line per strategy, in the order in which they are shown
LISTED: dict[str, tuple[type[CollectiveStrategy], Cite]] = {
    "ring": (Ring, RING_CITE),
    "forestcoll": (ForestColl, FORESTCOLL_CITE),
    "joint": (Joint, JOINT_CITE),
    "taccl": (Taccl, TACCL_CITE),
    "blink": (Blink, BLINK_CITE),
    "blueconnect": (BlueConnect, BLUECONNECT_CITE),
    "double-tree": (DoubleTree, DOUBLE_TREE_CITE),
    "halving-doubling": (HalvingDoubling, HALVING_DOUBLING_CITE),
    "recursive-doubling": (RecursiveDoubling, HALVING_DOUBLING_CITE),
    "bruck": (Bruck, BRUCK_CITE),
    "pat": (Pat, PAT_CITE),
    "direct": (Direct, DIRECT_CITE),
    "rooted-tree": (RootedTree, ROOTED_TREE_CITE),
    "scatter-all-gather": (ScatterAllGather, SCATTER_ALLGATHER_CITE),
    "hierarchical": (Hierarchical, HIERARCHICAL_CITE),
    "classic": (Classic, CLASSIC_CITE),
    "multipath": (Multipath, MULTIPATH_CITE),
    "nccl": (Nccl, NCCL_CITE),
    "cloudcollectives": (CloudCollectives, CLOUDCOLLECTIVES_CITE),
}
STRATEGIES: tuple[type[CollectiveStrategy], ...] = tuple(kind for kind, _ in LISTED.values())
CITES: dict[str, Cite] = {name: cite for name, (_, cite) in LISTED.items()}
NAMES: dict[str, type[CollectiveStrategy]] = {name: kind for name, (kind, _) in LISTED.items()}


def strategy(name: str) -> type[CollectiveStrategy]:
    """The strategy of that name; raises UnknownName."""
    if name not in NAMES:
        raise UnknownName(f"no collective strategy {name!r}", hint=f"strategies: {', '.join(NAMES)}, auto")
    return NAMES[name]


def default_candidates(*, in_network: bool = False) -> tuple[CollectiveStrategy, ...]:
    """What `auto` tries: every strategy with its own choices, and the ring both ways; not `classic`, which chooses among others listed here.

    `in_network`: also joint packing over switches that add and copy, whose programs only the simulator runs.
    """
    plain = tuple(kind() for kind in STRATEGIES if kind is not Classic)
    return (*plain, Ring(bidirectional=True), *((Joint(in_network=True),) if in_network else ()))


def auto(
    problem: CollectiveProblem, *, candidates: Sequence[CollectiveStrategy] | None = None, search: bool = False, each_s: float = float("inf")
) -> list[Ranked]:
    """Plan with every candidate that applies, simulate, and rank by predicted time (refused candidates last, with the reason).

    Candidates default to `default_candidates()`. `search`: let the simulator choose the number of pieces. `each_s`: limit per candidate.
    Raises: as `choice.rank`.
    """
    return rank(problem, default_candidates() if candidates is None else candidates, name_of, search=search, each_s=each_s)


def name_of(candidate: CollectiveStrategy) -> str:
    """The name of a candidate in rankings."""
    name = next((n for n, kind in NAMES.items() if type(candidate) is kind), type(candidate).__name__)
    ways = " both ways" if getattr(candidate, "bidirectional", False) else ""
    return name + ways + (" in network" if getattr(candidate, "in_network", False) else "")
