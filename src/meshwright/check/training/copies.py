"""Copies of hot experts: whose weights lie where, worked out from the layout alone, and whether its numbers fit together.

A copy (expert, member) takes one block of the member that has the expert, and one place of its own; both are numbered in the order of copies. What no
copy needs stands for the member's own first block (`plan.copies`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from ...plan.copies import ExpertCopies
from ...plan.plan import ContextExchange, ValueInfo

__all__ = ["block_in_place", "copy_faults", "stands_for"]


def _numbered(x: ExpertCopies) -> dict[tuple[int, int], tuple[int, int]]:
    """(member, place) -> (member, block) of every copy."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    taken, sent = [0] * x.members, [0] * x.members
    for expert, member in x.copies:
        home = expert * x.members // x.experts
        found[member, taken[member]] = home, sent[home]
        taken[member] += 1
        sent[home] += 1
    return found


def block_in_place(x: ExpertCopies, member: int, place: int) -> tuple[int, int]:
    return _numbered(x).get((member, place), (member, 0))


def stands_for(x: ExpertCopies, member: int, block: int) -> int:
    """The block whose weights and gradient a block has."""
    return block if (member, block) in _numbered(x).values() else 0


def copy_faults(x: ContextExchange, a: ValueInfo, b: ValueInfo, members: int) -> list[str]:
    """`a`: the weights that are given, `b`: those that come."""
    c = x.copies
    if c is UNSET or c.members != members or members < 2 or c.experts % members or c.experts < members:
        return [f"{x.target!r} is of copies of experts that {members} members do not divide"]
    homes = [e // (c.experts // members) for e, _ in c.copies]
    known = all(0 <= e < c.experts and 0 <= m < members and m != home for (e, m), home in zip(c.copies, homes, strict=True))
    if not c.copies or list(c.copies) != sorted({*c.copies}) or not known:
        return [f"{x.target!r} has copies {list(c.copies)}: each expert once at each member that is not its home, in order"]
    where = {e: {e // (c.experts // members), *(m for x, m in c.copies if x == e)} for e, _ in c.copies}
    if [e for e, _ in c.rows] != sorted(where) or any(not _divides(of, where[e]) for e, of in c.rows):
        return [f"{x.target!r} divides rows of experts among others than have them"]
    least = max(sum(m == j for _, m in c.copies) + (j not in homes) for j in range(members)), max(homes.count(j) for j in range(members))
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1] or (b.shape[0], a.shape[0]) != least or a.dtype != b.dtype:
        return [f"{x.source!r} {a.shape} and {x.target!r} {b.shape} do not hold {least[1]} blocks and {least[0]} places of the same weights"]
    return []


def _divides(of: Sequence[tuple[int, int]], members: set[int]) -> bool:
    return bool(of) and {m for m, _ in of} <= members and len({m for m, _ in of}) == len(of) and all(n > 0 for _, n in of)
