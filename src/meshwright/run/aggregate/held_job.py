"""A job as a switch holds it: who has joined, which slots it has, whether it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from .control import Aborted, Hop, Join
from .operators import Mode
from .sockets import packed_address, parse_address

__all__ = ["Job"]


@dataclass
class Job:
    """A job's place in the tables is `number`. `nonces[w]` and `names[w]`: of the workers that have joined; `left`: those that have all they want."""

    name: str
    ask: Join
    mode: Mode
    number: int
    world: int
    slots: int
    nonces: dict[int, int] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    asked_at: dict[int, float] = field(default_factory=dict)  # when each last asked to join
    left: set[int] = field(default_factory=set)
    problem: Aborted | None = None
    asked_s: float = 0.0
    welcomed: bool = False

    def forget_before(self, moment: float) -> None:
        """Workers that wait no longer: another may have their place."""
        for worker in [w for w, asked in self.asked_at.items() if asked < moment]:
            del self.asked_at[worker]
            self.nonces.pop(worker, None)
            self.names.pop(worker, None)

    @property
    def above(self) -> Hop | None:
        return self.ask.above[0] if self.ask.above else None

    @property
    def above_name(self) -> bytes:
        """The address of the switch above, as the kernel has it."""
        return packed_address(parse_address(self.above.address, "above")).tobytes() if self.above is not None else b""

    @property
    def cost(self) -> int:
        """Slots' worth of memory: a fold keeps all contributions."""
        return self.slots * (self.ask.children if self.mode.folds else 1)
