"""The words of a rank's code (`rank_code`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Instruction", "Op", "Place"]


class Op(IntEnum):
    """What an instruction does. `place` and `source` are (space, first element, end)."""

    POST = 0  # receive `key` into `place` from `peer` with `tag`
    SEND = 1  # send `key` from `place` to `peer` with `tag`
    TAKE = 2  # wait for receive `key` from `peer`
    DONE = 3  # wait until what was sent as `key` to `peer` may be overwritten
    COPY = 4  # place = source
    ADD = 5  # place = place (+) source
    RUN = 6  # a compute step: call source


Place = tuple[int, int, int]  # space: number of the rank's buffer, or -1 - staging slot


@dataclass(frozen=True, slots=True)
class Instruction:
    op: Op
    step: int  # of the program's callable form
    place: Place = (0, 0, 0)
    source: Place = (0, 0, 0)
    key: int = -1
    peer: int = -1
    tag: int = -1
