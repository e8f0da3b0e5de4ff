"""The direct all-to-all of many alike servers, of which only the first one's steps are stored (`program.fold`).

Every rank sends each other its block. The servers that are d further on, for all d, are served by lanes of their own, each of which takes those
`WINDOW_SERVERS` apart one after the other, so few messages share a link; where ranks are symmetric, every link still has as many at any time.
A stored step that receives means the image of the channel that arrives there: the block of the rank d servers before.
Source: the rounds of direct exchange (Thakur and Gropp, EuroPVM/MPI 2003), several at once; the fold is ours.
Cost: two steps per peer of one server's ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....errors import Unsupported
from ....program.builder import LaneBuilder, ProgramBuilder
from ....program.program import Contract, Fold, FoldAxis, Program
from ..problem import CollectiveProblem
from ..rates import rate_graph
from ..trees.symmetry import Boxes, Shift

__all__ = ["folded_all_to_all", "servers_of"]

WINDOW_SERVERS = 32  # that a rank serves at once


def servers_of(problem: CollectiveProblem) -> int:
    """Alike servers whose ranks are equal runs in order; 1 = the problem's are none."""
    if problem.shard_bytes is not None:
        return 1
    try:
        graph = rate_graph(problem.fabric, problem.ranks)
        boxes = Boxes.of(graph)
    except Unsupported:
        return 1
    same = len(set(boxes.signature(graph, [1] * graph.ranks))) == 1
    return len(boxes.members) if same and Shift(boxes).stride() else 1


def folded_all_to_all(problem: CollectiveProblem, servers: int) -> Program:
    """The program of `servers` alike servers: rank r's input has a block for every rank, its output one from every rank."""
    n = len(problem.ranks)
    local = n // servers
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = -(-elements // n) * problem.element_bytes
    b = ProgramBuilder(ranks=n, name="direct all-to-all")
    buffers = [[b.buffer(r, chunks=n, chunk_bytes=chunk_bytes, role=role, name=f"{role}:{r}") for r in range(local)] for role in ("input", "output")]
    lanes: dict[tuple[int, ...], LaneBuilder] = {}

    def lane(*key: int) -> LaneBuilder:
        if key not in lanes:
            lanes[key] = b.lane(key[0])
        return lanes[key]

    for r in range(local):
        b.lane(r).copy((buffers[0][r], r), (buffers[1][r], r))
    for d in range(servers):
        for src in range(local):
            for apart in range(local):  # ranks of a server begin with unlike peers
                at = (src + apart) % local
                peer, back = d * local + at, (servers - d) % servers * local + src
                if peer == src:
                    continue
                channel = b.channel(src, peer)
                lane(src, d % WINDOW_SERVERS, at, 0).send(channel, buffers[0][src], peer)
                lane(at, d % WINDOW_SERVERS, src, 1).recv(channel, buffers[1][at], back)
    axes = (FoldAxis("place", local, 1, "plain"), FoldAxis("server", servers, local, "shift"))
    fold = Fold(axes, np.full((1, 2 * local), local, np.int32))
    # The image of a buffer follows it by as many as are stored.
    ranges = [[(x * 2 * local + k, 0, n) for x in range(servers) for k in row] for row in buffers]
    promise = Contract(op="all-to-all", inputs=tuple(ranges[0]), outputs=tuple(ranges[1]), root=-1)
    return replace(b.build(), fold=fold, contracts=(promise,))
