"""In which order the micro-batches of a training step run through the pipeline's stages."""

from __future__ import annotations

from ...plan.orders import one_f_one_b_order, peak_in_flight
from ..strategies import cites, found, named
from .breadthfirst import BreadthFirst
from .chimera import Chimera
from .dualpipe import DualPipe, DualPipeV
from .gpipe import GPipe
from .interleaved import Interleaved
from .onefoneb import OneFOneB
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule
from .search import Search
from .vschedules import ZBV, VHalf, VMin
from .zerobubble import ZB1P, ZB2P, InterleavedZB

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "Action", "Chimera", "OneFOneB", "PipelineProblem", "PipelineStrategy", "Schedule", "one_f_one_b_order",
    "peak_in_flight", "strategy",
]  # fmt: skip

# The list: names, citations, the command line, `auto` and the contract battery follow from it, in this order.
STRATEGIES: tuple[type[PipelineStrategy], ...] = (
    GPipe, OneFOneB, Interleaved, BreadthFirst, Chimera, ZB1P, ZB2P, InterleavedZB, ZBV, VHalf, VMin, DualPipe, DualPipeV, Search,
)  # fmt: skip
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "--strategy") -> type[PipelineStrategy]:
    """The schedule of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("pipeline", STRATEGIES, name, where=where, what="pipeline schedule", also=("auto",))
