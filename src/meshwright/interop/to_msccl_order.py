"""Orders of steps in thread blocks: what a block has to wait for, and an order of messages in which blocks never wait in a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import Unsupported
from .to_msccl_memory import Move

__all__ = ["Block", "levels_of", "root_of", "waits_of"]


@dataclass(slots=True)
class Block:
    rank: int
    send: int  # connection, -1 = none
    recv: int
    moves: list[int]


def root_of(links: list[int], x: int) -> int:
    """The representative of x where joined numbers are linked towards one; the way there is halved."""
    while links[x] != x:
        links[x] = x = links[links[x]]
    return x


def levels_of(moves: Sequence[Move], sender_of: Mapping[int, int]) -> list[int]:
    """Per step the longest chain of waits before it, where a message's two ends count as one step (`sender_of`: receipt -> sending): both then lie on
    one level, and all that waits for either of them on a higher one. So blocks in the order of levels never wait in a circle.

    Raises: Unsupported when an end of a message waits for its other end.
    """
    node = [sender_of.get(k, k) for k in range(len(moves))]
    later: dict[int, list[int]] = {}
    left = dict.fromkeys(node, 0)
    for k, m in enumerate(moves):
        for d in m.after:
            later.setdefault(node[d], []).append(node[k])
            left[node[k]] += 1
    level = dict.fromkeys(left, 0)
    ready = [x for x in left if not left[x]]
    for x in ready:  # grows while it is walked
        for y in later.get(x, ()):
            level[y] = max(level[y], level[x] + 1)
            left[y] -= 1
            if not left[y]:
                ready.append(y)
    if len(ready) < len(left):
        raise Unsupported("messages of this schedule cannot share connections", data={"limit": "order"})
    return [level[x] for x in node]


def waits_of(moves: Sequence[Move], blocks: Sequence[Block]) -> dict[int, list[int]]:
    """Per move the waits that block order and other waits do not imply. Raises: Unsupported when blocks and waits contradict each other."""
    where = {k: (number, at) for number, b in enumerate(blocks) for at, k in enumerate(b.moves)}
    order = _sorted(moves, blocks, where)
    when = {k: j for j, k in enumerate(order)}
    known: dict[int, dict[int, int]] = {}  # move -> per block the last position known to be complete
    waits: dict[int, list[int]] = {}
    for k in order:
        block, at = where[k]
        seen: dict[int, int] = dict(known[blocks[block].moves[at - 1]]) if at else {}
        for d in sorted({d for d in moves[k].after if d in where}, key=lambda d: -when[d]):
            b, p = where[d]
            if b == block or seen.get(b, -1) >= p:
                continue
            waits.setdefault(k, []).append(d)
            for other, position in known[d].items():
                if seen.get(other, -1) < position:
                    seen[other] = position
        seen[block] = at
        known[k] = seen
    return waits


def _sorted(moves: Sequence[Move], blocks: Sequence[Block], where: Mapping[int, tuple[int, int]]) -> list[int]:
    """The moves in an order that respects blocks and waits. Raises: Unsupported when there is none."""
    later: dict[int, list[int]] = {k: [] for k in where}
    left = dict.fromkeys(where, 0)

    def edge(a: int, b: int) -> None:
        later[a].append(b)
        left[b] += 1

    for b in blocks:
        for one, two in pairwise(b.moves):
            edge(one, two)
    for k in where:
        for d in moves[k].after:
            if d in where:
                edge(d, k)
    order = [k for k in where if not left[k]]
    for k in order:  # grows while it is walked
        for x in later[k]:
            left[x] -= 1
            if not left[x]:
                order.append(x)
    if len(order) < len(where):
        raise Unsupported("receiving and sending blocks of this schedule cannot be joined", data={"limit": "order"})
    return order
