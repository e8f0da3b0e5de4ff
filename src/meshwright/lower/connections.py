"""Who sends what to whom in a pipeline, for any schedule: connections in the producer's order, and how far a receiver may run ahead.

A connection carries the messages of one kind (activations, gradients) and one copy of the stages from one place of the pipeline to another. They are
sent in the order in which the sender computes them and received in that order, so first in first out always matches. A receive waits until the
receiver has used what came `window` groups before it, so at most `window` received groups per connection are ever unused, whatever the stages' speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Connection", "RankOrder", "connections", "uses", "window"]

RankOrder = Sequence[tuple[str, int, int]]  # (phase, stage, micro-batch) of what one place of the pipeline computes, in order
Used = tuple[str, int, int]  # (kind, stage, micro-batch)


@dataclass
class Connection:
    """`groups`: (stage, micro-batch) that the messages are for, in the order in which they are made; `first`: number of a group's first message."""

    kind: str  # "F": activations, "B": gradients
    copy: int
    source: int  # places of the pipeline
    target: int
    groups: list[tuple[int, int]] = field(default_factory=list)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: int = 0


def connections(
    orders: Sequence[RankOrder], stages: int, copy_of: Callable[[int], int], place: Callable[[int, int], int],
    count: Callable[[str, int], int] = lambda kind, stage: 1,
) -> dict[tuple[str, int, int, int], Connection]:  # fmt: skip
    """(kind, copy, source, target) -> its messages. `place(copy, stage)`: where a stage is; `count(kind, stage)`: messages that it gets at once."""
    found: dict[tuple[str, int, int, int], Connection] = {}
    for source, order in enumerate(orders):
        for phase, stage, mb in order:
            kind = "F" if phase == "F" else "B"
            onward = stage + (1 if kind == "F" else -1)
            if phase == "W" or not 0 <= onward < stages or not (messages := count(kind, onward)):
                continue
            copy = copy_of(mb)
            key = (kind, copy, source, place(copy, onward))
            if key[2] == key[3]:
                continue
            c = found.setdefault(key, Connection(*key))
            c.first[onward, mb] = c.messages
            c.messages += messages
            c.groups.append((onward, mb))
    return found


def uses(order: RankOrder) -> dict[Used, int]:
    """Where in an order a message for (kind, stage, micro-batch) is used."""
    return {("B" if phase == "I" else phase, stage, mb): i for i, (phase, stage, mb) in enumerate(order)}


def window(c: Connection, used: Mapping[Used, int], least: int) -> int:
    """Groups that the receiver holds at most: `least`, or as many as its order of use asks for."""
    found, highest = least, list[int]()
    for j, (stage, mb) in enumerate(c.groups):
        at = used[c.kind, stage, mb]
        highest.append(max(at, highest[-1]) if highest else at)
        while j >= found and highest[j - found] > at:  # all up to j - found must be used before group j is
            found += 1
    return found
