"""Work that may wait for a pipeline's idle time: items of a cycle of steps. Read from files by `io.plan.fill`, made by `decide.pipeline.fill_work`.

Times are seconds on the rank that does the work. Items of one cycle come from its first step (step 0), or are there from `ready_step` on; the next
cycle brings the same items again.
"""

from __future__ import annotations

import msgspec

__all__ = ["Deferrable", "FillWork"]


class Deferrable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One item.

    ranks: any one of them may do it; all of them at the same time if `together` (a collective: `duration_s` on each).
    after: names of items that must be complete. actions: (rank, action such as `3F0`) of step 0 that must be complete.
    ready_step: not before that step of the cycle. deadline_steps: complete within so many steps of the cycle, 0 = any.
    piece_s: > 0: may be cut into equal pieces of at most that many seconds, all on one rank. group: items of one group lie in one step.
    message_bytes: what each item after it on another rank needs of it.
    keeps_bytes: held on its rank from its actions (or the start of `ready_step`) to its end.
    """

    name: str
    kind: str
    duration_s: float
    ranks: tuple[int, ...]
    together: bool = False
    after: tuple[str, ...] = ()
    actions: tuple[tuple[int, str], ...] = ()
    ready_step: int = 0
    deadline_steps: int = 0
    priority: int = 0
    piece_s: float = 0.0
    group: str = ""
    message_bytes: int = 0
    keeps_bytes: int = 0

    @property
    def pieces(self) -> int:
        return max(1, -int(-self.duration_s * (1 - 1e-12) // self.piece_s)) if self.piece_s > 0 else 1


class FillWork(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a cycle, and what comes with them: bytes held all the time, seconds per step that are in no bubble (preconditioning), per rank."""

    items: tuple[Deferrable, ...]
    resident_bytes: tuple[int, ...] = ()
    exposed_s: tuple[float, ...] = ()
