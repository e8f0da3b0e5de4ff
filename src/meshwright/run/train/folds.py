"""A rank's own part of the tree over micro-batches: its gradient buffers end a step as the fold of its micro-batches' gradients.

Each micro-batch's gradient is made in an empty buffer. When its last backward is done, finished left halves that it completes are added, and the sum
waits for its right half: a binary counter, ceil(log2 m) buffers for m micro-batches. Where m is no power of two (one rank), what waits joins at the
end, as an odd last node moves up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ...errors import Unsupported
from ...program.program import Kind, Program

__all__ = ["GradientFolds"]


@dataclass
class GradientFolds:
    """Of one rank. `gradients`: flat buffers by name; `microbatches`: numbered 0 and up, done in this order."""

    program: Program
    rank: int
    gradients: Mapping[str, torch.Tensor]
    microbatches: int
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    closing: dict[int, list[tuple[str, int]]] = field(default_factory=dict)  # op -> (buffer, micro-batch) that it is the last to add to

    def __post_init__(self) -> None:
        p, last = self.program, dict[tuple[str, int], int]()
        mine = np.flatnonzero((p.lanes.actor[p.lane_of_step()] == self.rank) & (p.steps.kind == Kind.COMPUTE))
        for op in p.steps.op[mine].tolist():
            if p.ops.name[op] in ("B", "W"):
                names = {p.buffers.name[b] for b in p.ops.writes[op][::3].tolist()} & self.gradients.keys()
                last |= {(name, int(p.ops.microbatch[op])): op for name in names}
        done: dict[str, int] = {}
        for (name, number), op in last.items():
            if number != done.get(name, 0):
                hint = "make the plan again with --reproducible tree"
                raise Unsupported(f"rank {self.rank} adds micro-batch {number} to {name!r} where {done.get(name, 0)} is due", hint=hint)
            done[name] = number + 1
            self.closing.setdefault(op, []).append((name, number))
        for name in done:
            levels = (self.microbatches - 1).bit_length()
            self.waiting[name] = [torch.empty_like(self.gradients[name]) for _ in range(levels)]

    def after(self, op: int, action: Callable[[], None]) -> Callable[[], None]:
        """The action of a backward step, and what is added when it was a micro-batch's last."""
        ends = self.closing.get(op, [])
        if not ends:
            return action

        def act() -> None:
            action()
            for name, number in ends:
                self._close(name, number)

        return act

    def _close(self, name: str, number: int) -> None:
        flat, waiting = self.gradients[name], self.waiting[name]
        final = number == self.microbatches - 1
        level = 0
        while number >> level & 1 or (final and number >> level):
            if number >> level & 1:
                flat.add_(waiting[level])
            level += 1
        if not final:
            waiting[level].copy_(flat)
            flat.zero_()
