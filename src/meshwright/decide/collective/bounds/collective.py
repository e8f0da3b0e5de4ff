"""The best lower bound on the time of a collective that we can certify: of bytes, of latency, or of both together.

`bandwidth` counts bytes that links must carry, `latency` the farthest pair, `delay` both for operations of one root: there all data leaves one
server, and what leaves it last has still to be passed on. For all-gather and reduce-scatter `delay_bound` is stated beside the optimum of bytes,
which is what their schedules are measured by, here and in the literature.
"""

from __future__ import annotations

from ....bound import Bound
from ..memo import remember
from ..problem import CollectiveProblem
from .bandwidth import bandwidth_bounds
from .delay import delay_bound
from .latency import latency_bound

__all__ = ["collective_bound"]

WITH_DELAY = ("broadcast", "reduce")


def collective_bound(problem: CollectiveProblem) -> Bound:
    """The best of all bounds that there are for the operation.

    Raises: Disconnected; Unsupported when rates need more than 63 bits.
    """
    key = ("bound", problem.op, problem.ranks, problem.root, problem.size_bytes, problem.shard_bytes, problem.peers)

    def best() -> Bound:
        later = delay_bound(problem) if problem.op in WITH_DELAY else None
        return max([*bandwidth_bounds(problem), latency_bound(problem), *([later] if later is not None else [])], key=lambda b: b.exact)

    return remember(problem.fabric, key, best)
