"""Copies of hot experts in a training plan: what a rank gives of its experts, what it gets, and where. Arithmetic, without torch.

Of n neighbours that divide E experts, expert e is at home at member e // (E / n). A copy (e, member) lies beside the member's own experts for a step:
its weights come from home before the experts run, its gradient goes back and is added to that of its home. Member m gives blocks of weights, one for
each copy of its experts, in the order of `copies`; copies that it gets lie in its places, in that order too. All members have as many blocks, and
as many places. A place that no copy needs holds the member's own first block, and a block that nobody gets stands for the first: so both always hold
something, and nobody reads it.
Buffers of rows then have a part for every own expert and every place of every member ("slots"): member m's are the (E / n + places) from there on.
Cite: `decide.experts.replicas`, and J. He and others, "FasterMoE" (PPoPP 2022), section 4.2, for weights that travel in every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["COPIED", "ExpertCopies", "blocks_of", "came_from", "given", "held", "own_first", "places_of", "slot_shares"]

COPIED = "copies"  # the kind of the exchange, and its target's name after the layer's: M/copies


class ExpertCopies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one layer. `copies`: (expert, member), sorted. `rows`: of each expert with copies, (member, rows there), as loads say of which the plan was
    made; a member's share is that of all. `busiest_rows`: of the member with most; `before_rows`: without copies; `bound_rows`: no placement in as
    many places a member has fewer."""

    members: int
    experts: int
    copies: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    busiest_rows: int
    before_rows: int
    bound_rows: int

    @property
    def local(self) -> int:
        return self.experts // self.members


def given(x: ExpertCopies, member: int) -> list[tuple[int, int]]:
    """(expert, to whom) of every block that a member gives, in order."""
    return [(e, m) for e, m in x.copies if e // x.local == member]


def held(x: ExpertCopies, member: int) -> list[int]:
    """Experts in a member's places, in order."""
    return [e for e, m in x.copies if m == member]


def blocks_of(x: ExpertCopies) -> int:
    return max(1, *(len(given(x, m)) for m in range(x.members)))


def places_of(x: ExpertCopies) -> int:
    """A member that gives nothing has one more: it hands its own first block to itself."""
    return max(len(held(x, m)) + (not given(x, m)) for m in range(x.members))


def came_from(x: ExpertCopies, member: int, place: int) -> tuple[int, int]:
    """(member, its block) of what lies in a place."""
    mine = held(x, member)
    if place >= len(mine):
        return member, 0
    home = mine[place] // x.local
    return home, given(x, home).index((mine[place], member))


def own_first(rows: Mapping[int, int], members: int, member: int) -> list[tuple[int, int]]:
    """(member, share of this one's rows) that come to `rows` where all members have as many tokens: a member's own copy takes its rows first, the
    others get what is left."""
    total = sum(rows.values())
    room = {m: members * n for m, n in rows.items()}
    shares = [{m: min(room[m], total)} if m in room else {} for m in range(members)]
    for m, first in enumerate(shares):
        room[m] = room.get(m, 0) - first.get(m, 0)
    for mine in shares:
        left = total - sum(mine.values())
        for m in room:
            take = min(left, room[m])
            mine[m], room[m], left = mine.get(m, 0) + take, room[m] - take, left - take
    return [(m, n) for m, n in shares[member].items() if n]


def slot_shares(x: ExpertCopies, member: int) -> list[list[tuple[int, int]]]:
    """Of every expert, (slot, share) of a member's rows of it."""
    wide = x.local + places_of(x)
    slot = {(e, e // x.local): e // x.local * wide + e % x.local for e in range(x.experts)}
    slot |= {(e, m): m * wide + x.local + i for m in range(x.members) for i, e in enumerate(held(x, m))}
    rows = {e: dict(of) for e, of in x.rows}
    return [[(slot[e, m], n) for m, n in own_first(rows.get(e) or {e // x.local: 1}, x.members, member)] for e in range(x.experts)]
