"""gTopk: selections are merged in pairs up a binomial tree, each merge keeping the k largest; the root's are broadcast down again.

Cite, deviations, programs: `decide.collective.sparse.gtopk`. What a merge drops goes into the residual of the rank that merged, so no mass is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...errors import MessageDamaged
from ...kernels.entries import add_entries, entry_values, merge_entries
from .selection import largest_entries
from .state import Entries
from .unions import Union
from .walk import Place, Words

__all__ = ["GTopk"]


@dataclass(kw_only=True)
class GTopk(Union):
    code = 5

    def ops(self) -> dict[str, Callable[[tuple[Place, ...]], None]]:
        return super().ops() | {"tree|merge": self.merge}

    def agree(self, reads: tuple[Place, ...]) -> None:
        super().agree(reads)
        self.give()
        self.kept = self._keep(self.entries)

    def control(self, at: Place) -> Words:
        """How many entries follow."""
        if at.name != "count":
            return super().control(at)
        if not at.receives:
            return np.array([len(self.kept)], np.int64)
        self.count = np.zeros(1, np.int64)
        return self.count

    def data(self, at: Place) -> Words:
        if not at.receives:
            return self.kept.reshape(-1)
        rows = int(self.count[0])
        if not 0 <= rows <= self.state.k:
            raise MessageDamaged(f"rank {at.peer} announces {rows} entries, at most {self.state.k} are kept", where="sparse all-reduce, tree")
        self.other = self.state.entries(at.name, rows)
        if at.name == "below":
            self.kept = self.other
        return self.other.reshape(-1)

    def merge(self, reads: tuple[Place, ...]) -> None:
        kept, other = self.kept, self.other
        merged = self.state.entries(f"merged with {reads[1].name}", len(kept) + len(other))
        length = merge_entries(kept, entry_values(kept), other, entry_values(other), merged, entry_values(merged))
        self.kept = self._keep(merged[:length])

    def finish(self, reads: tuple[Place, ...]) -> None:
        self.end_with(self.kept)

    def _keep(self, entries: Entries) -> Entries:
        """The k largest, in place; the others return to the residual."""
        state = self.state
        if len(entries) <= state.k:
            return entries
        dropped = state.entries("dropped", len(entries))
        kept, left = largest_entries(entries, state.k, dropped)
        values = entry_values(dropped[:left])
        add_entries(state.sums, 0, dropped[:left], values)
        state.given -= float(values.sum(dtype=np.float64))
        return entries[:kept]
