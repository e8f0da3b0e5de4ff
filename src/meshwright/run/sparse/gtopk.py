"""gTopk: selections are merged in pairs up a binomial tree, each merge keeping the k largest; the root's are broadcast down again.

Cite, deviations: `decide.collective.sparse.gtopk`. What a merge drops goes into the residual of the rank that merged, so no mass is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import MessageDamaged
from ...kernels.entries import add_entries, clear_all, entry_values, merge_entries
from .exchange import greet
from .protocol import Message, Post, Protocol, Wait
from .selection import largest_entries, value_of
from .state import Entries, RankState, StepStats, Update
from .unions import _Union

__all__ = ["GTopk"]


@dataclass(kw_only=True)
class GTopk(_Union):
    code = 5

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        picked = self.select(state, gradient, stats)
        rows = np.zeros(state.ranks, np.int64)
        rows[state.rank] = len(picked.entries)
        yield from greet(state, self.code, picked.wrong, rows, stats)
        me, n = state.rank, state.ranks
        state.given, state.given_size = clear_all(state.sums, picked.entries, entry_values(picked.entries))
        kept = self._keep(state, picked.entries)
        distance = 1
        while distance < n and not me & distance:
            if me + distance < n:
                other = yield from _receive(state, me + distance, "other", stats)
                merged = state.entries(f"merged{distance}", len(kept) + len(other))
                length = merge_entries(kept, entry_values(kept), other, entry_values(other), merged, entry_values(merged))
                kept = self._keep(state, merged[:length])
            distance *= 2
        if me:
            yield from _send(state, me - distance, kept, stats)
            kept = yield from _receive(state, me - distance, "result", stats)
        while distance > 1:
            distance //= 2
            if me + distance < n:
                yield from _send(state, me + distance, kept, stats)
        state.total = float(entry_values(kept).sum(dtype=np.float64))
        self.local.commit()
        state.commit()
        stats.selected, stats.result, stats.local_threshold = len(picked.entries), len(kept), value_of(self.local.kth)
        return Update(elements=state.elements, ranks=n, entries=kept.copy(), stats=stats)

    def _keep(self, state: RankState, entries: Entries) -> Entries:
        """The k largest, in place; the others return to the residual."""
        if len(entries) <= state.k:
            return entries
        dropped = state.entries("dropped", len(entries))
        kept, left = largest_entries(entries, state.k, dropped)
        values = entry_values(dropped[:left])
        add_entries(state.sums, 0, dropped[:left], values)
        state.given -= float(values.sum(dtype=np.float64))
        return entries[:kept]


def _send(state: RankState, peer: int, entries: Entries, stats: StepStats) -> Protocol[None]:
    """Their number, then the entries."""
    count = np.array([len(entries)], np.int64)
    sends = (Message(peer, count), Message(peer, entries.reshape(-1)))
    ticket = yield Post("tree", sends, ())
    yield Wait(ticket)
    stats.control_words += 2
    stats.words_sent += len(entries) * state.entry_words


def _receive(state: RankState, peer: int, name: str, stats: StepStats) -> Protocol[Entries]:
    count = np.zeros(1, np.int64)
    ticket = yield Post("tree", (), (Message(peer, count),))
    yield Wait(ticket)
    if not 0 <= int(count[0]) <= state.k:
        raise MessageDamaged(f"rank {peer} announces {int(count[0])} entries, at most {state.k} are kept", where="sparse all-reduce, tree")
    room = state.entries(name, int(count[0]))
    ticket = yield Post("tree", (), (Message(peer, room.reshape(-1)),))
    yield Wait(ticket)
    stats.words_received += len(room) * state.entry_words
    return room
