"""What every rank hands to its device, in the order of its host: the statement that rules of a transport are applied to (`check.issued`).

An entry is put on a stream of the rank's device. Streams run their entries one after another; entries of different streams run side by side,
except that an entry begins only after those that it names in `after` are over. A host issues its entries one after another and waits for none,
except at entries of kind "host".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["CallOrders", "Communicator", "Issued", "Message"]


class Message(NamedTuple):
    """One point-to-point call. `sends`: to `peer`, else from it; `step`: of the program, for witnesses, -1: none."""

    peer: int
    sends: bool
    size_bytes: int = 0
    step: int = -1


@dataclass(frozen=True, slots=True)
class Issued:
    """One entry of a rank. Kinds:

    - "work": whatever ends by itself once it has begun;
    - "messages": the point-to-point calls of one group (a single one is a group of its own) on communicator `comm`;
    - "collective": a call that all members of `comm` make;
    - "host": the host issues nothing more until the entries in `after` are over.

    `after`: numbers of earlier entries of the same rank.
    """

    kind: Literal["work", "messages", "collective", "host"]
    stream: int = 0
    comm: int = -1
    messages: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()
    step: int = -1


@dataclass(frozen=True, slots=True)
class Communicator:
    """`ready`: made before the first entry. One that is not is made at its first use, where every member's host stands still until all are there."""

    members: tuple[int, ...]
    ready: bool = True


@dataclass(frozen=True)
class CallOrders:
    """`ranks[r]`: the entries of rank r in the order of its host."""

    ranks: tuple[tuple[Issued, ...], ...]
    communicators: tuple[Communicator, ...]
