"""In which order the micro-batches of a training step run through the pipeline's stages."""

from __future__ import annotations

from ...cite import Cite
from . import breadthfirst, chimera, gpipe, interleaved, onefoneb, search, vschedules, zerobubble
from .breadthfirst import BreadthFirst
from .chimera import Chimera
from .gpipe import GPipe
from .interleaved import Interleaved
from .onefoneb import OneFOneB, one_f_one_b_order, peak_in_flight
from .problem import Action, Collective, PipelineProblem, PipelineStrategy, Schedule
from .search import Search
from .vschedules import ZBV, DualPipeV, VHalf, VMin
from .zerobubble import ZB1P, ZB2P, InterleavedZB

__all__ = [
    "CITES",
    "NAMES", "STRATEGIES", "ZB1P", "ZB2P", "ZBV", "Action", "BreadthFirst", "Chimera", "Collective", "DualPipeV", "GPipe", "Interleaved",
    "InterleavedZB", "OneFOneB", "PipelineProblem", "PipelineStrategy", "Schedule", "Search", "VHalf", "VMin", "one_f_one_b_order", "peak_in_flight",
]  # fmt: skip

STRATEGIES: tuple[type[PipelineStrategy], ...] = (
    GPipe, OneFOneB, Interleaved, BreadthFirst, Chimera, ZB1P, ZB2P, InterleavedZB, ZBV, VHalf, VMin, DualPipeV, Search,
)  # fmt: skip
NAMES: dict[str, type[PipelineStrategy]] = {
    "gpipe": GPipe, "1f1b": OneFOneB, "interleaved": Interleaved, "breadth-first": BreadthFirst, "chimera": Chimera, "zb1p": ZB1P, "zb2p": ZB2P,
    "interleaved-zb": InterleavedZB, "zbv": ZBV, "v-half": VHalf, "v-min": VMin, "dualpipe-v": DualPipeV, "search": Search,
}  # fmt: skip
CITES: dict[str, Cite] = {
    "gpipe": gpipe.CITE, "1f1b": onefoneb.CITE, "onefoneb": onefoneb.CITE, "interleaved": interleaved.CITE, "breadth-first": breadthfirst.CITE,
    "chimera": chimera.CITE, "zb1p": zerobubble.CITE, "zb2p": zerobubble.CITE, "interleaved-zb": zerobubble.CITE,
    "zbv": vschedules.ZBV_CITE, "v-half": vschedules.CITE,
    "v-min": vschedules.CITE, "dualpipe-v": vschedules.DUALPIPE_CITE, "search": search.CITE,
}  # fmt: skip
