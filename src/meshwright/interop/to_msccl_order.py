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
    block_of, place = [-1] * len(moves), [-1] * len(moves)
    for number, one in enumerate(blocks):
        for at, k in enumerate(one.moves):
            block_of[k], place[k] = number, at
    order = _sorted(moves, blocks, block_of)
    when = [-1] * len(moves)
    for j, k in enumerate(order):
        when[k] = j
    nothing: dict[int, int] = {}
    known: list[dict[int, int]] = [nothing] * len(moves)  # per other block the last position known to be complete; shared along a block until a wait
    waits: dict[int, list[int]] = {}
    for k in order:
        block, at = block_of[k], place[k]
        seen, mine = known[blocks[block].moves[at - 1]] if at else nothing, False
        after = moves[k].after
        for d in sorted(set(after), key=lambda d: -when[d]) if len(after) > 1 else after:
            b, p = block_of[d], place[d]
            if b < 0 or b == block or seen.get(b, -1) >= p:
                continue
            waits.setdefault(k, []).append(d)
            if not mine:
                seen, mine = dict(seen), True
            for other, position in known[d].items():
                if seen.get(other, -1) < position:
                    seen[other] = position
            seen[b] = max(p, seen.get(b, -1))
        known[k] = seen
    return waits


def _sorted(moves: Sequence[Move], blocks: Sequence[Block], block_of: Sequence[int]) -> list[int]:
    """The moves in an order that respects blocks and waits. Raises: Unsupported when there is none."""
    kept = [k for b in blocks for k in b.moves]
    later: list[list[int]] = [[] for _ in moves]
    left = [0] * len(moves)
    for b in blocks:
        for one, two in pairwise(b.moves):
            later[one].append(two)
            left[two] += 1
    for k in kept:
        for d in moves[k].after:
            if block_of[d] >= 0:
                later[d].append(k)
                left[k] += 1
    order = [k for k in kept if not left[k]]
    for k in order:  # grows while it is walked
        for x in later[k]:
            left[x] -= 1
            if not left[x]:
                order.append(x)
    if len(order) < len(kept):
        raise Unsupported("receiving and sending blocks of this schedule cannot be joined", data={"limit": "order"})
    return order
