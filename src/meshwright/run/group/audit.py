"""Do all ranks of a group call the same? Each tells the next one, a few times a second, a digest of its calls so far.

A collective that differs at one rank may wait for its deadline, or end with wrong numbers and no word (a maximum added to sums, where the built-in
backend runs it). Neither is told by the data. So while calls are made, the control thread sends `Told` around the ring of ranks: the number of the
last call, the digest up to it, and what is being planned for the call after it, which no rank could plan alone. Where neighbours' digests of one
number differ, their calls do, and in a ring of ranks that differ somewhere two neighbours do. Nothing is sent while nothing is called.

What is planned may be dropped: the built-in backend refuses a call that all ranks had agreed to make, and the next one has its number. Every rank
takes part in every agreement, so what two ranks plan is compared only where both had as many behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .record_file import call_text
from .verdict import Claim

__all__ = ["AUDIT_PERIOD_S", "Audit", "Told"]

AUDIT_PERIOD_S = 0.25  # between two messages of a rank that calls; also how late a divergence may be found
MAX_PENDING = 16  # what a faster neighbour has told and this rank has not reached yet


class Told(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`digest` of the calls 1..`number`; `planning`: (call, bytes) of call `number` + 1, for which a plan is made or waited for, or which is asked
    about, after so many agreements of the group."""

    number: int
    digest: int
    planning: tuple[int, int] | None = None
    agreements: int = 0


class Audit:
    """What one rank tells and hears. `last()`: its last number; `digest(number)`: None where it is not known any more, or not yet; `call(number)`:
    (call, bytes), as long as it is known; `planning()`: (number, call, bytes, agreements before it) of the call that is being planned;
    `agreements()`: so far."""

    def __init__(
        self, last: Callable[[], int], digest: Callable[[int], int | None], call: Callable[[int], tuple[int, int] | None],
        planning: Callable[[], tuple[int, int, int, int] | None], agreements: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.last, self.digest, self.call, self.planning, self.agreements = last, digest, call, planning, agreements
        self.next_s = 0.0
        self._told: Told | None = None
        self._pending: list[tuple[int, Told]] = []

    def due(self, now_s: float) -> Told | None:
        """What to tell now, if there is news."""
        if now_s < self.next_s:
            return None
        self.next_s = now_s + AUDIT_PERIOD_S
        number = self.last()
        planned = self._planned(number + 1)
        told = Told(number=number, digest=self.digest(number) or 0)
        if planned is not None:
            told = Told(number=number, digest=told.digest, planning=planned[:2], agreements=planned[2])
        if told == self._told or (not number and told.planning is None):
            return None
        self._told = told
        return told

    def hear(self, peer: int, told: Told) -> None:
        self._pending.append((peer, told))
        del self._pending[:-MAX_PENDING]

    def differs(self) -> tuple[int, int] | None:
        """(the neighbour, number of the last call that it told of) where its calls are not this rank's; forgets what is settled."""
        left = []
        for peer, told in self._pending:
            own = self.digest(told.number)
            if own is not None and own != told.digest and told.number:
                return peer, told.number
            follows = told.number + 1
            mine = self._made_or_planned(follows)
            ahead = mine is not None and told.agreements > mine[2]  # it knows already what was agreed on here
            if told.planning is not None and own is not None and mine is not None and mine[2] == told.agreements and mine[:2] != told.planning:
                return peer, follows
            if self.last() < told.number or (told.planning is not None and (ahead or (mine is None and self.last() <= told.number))):
                left.append((peer, told))
        self._pending = left
        return None

    def _made_or_planned(self, number: int) -> tuple[int, int, int] | None:
        made = self.call(number)  # first: a call may follow an agreement
        return (*made, self.agreements()) if made else self._planned(number)

    def _planned(self, number: int) -> tuple[int, int, int] | None:
        """Calls go on while this thread looks, so what is planned is taken only for the call that it is planned for."""
        found = self.planning()
        return found[1:] if found is not None and found[0] == number else None

    def claim(self, rank: int, peer: int, number: int, name: Callable[[int], str]) -> Claim:
        """What is known where the calls that differ are forgotten already."""
        own = self.call(number)
        last = f"; this one's is {call_text(*own)}" if own else ""
        return Claim(
            code="rank-diverged", rank=peer,
            message=f"{name(peer)} and {name(rank)} have called different collectives, up to collective {number}{last}",
            hint="all ranks of a group must call the same collectives in the same order; a branch that one rank took?",
        )  # fmt: skip
