"""Messages of the user's own between two ranks (`send`, `recv`): do both ends mean the same one?

gloo ends the process that gets more bytes than it expects, and lets a shorter message pass for right. So the user's tag is mixed with bytes and type:
ends that differ never meet. They hear of it over the control connections: a rank tells the other end when a message of a stream (one pair, direction
and tag) is unlike the one before it, and nothing otherwise; messages of a stream are counted at both ends, so each compares what it has posted with
what it was told. A tag with which somebody receives from any source is not compared: its messages cannot be counted.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..executor.tags import TAG_BITS
from .record_file import call_text, pack_call
from .verdict import Claim
from .work import BuiltinWork

__all__ = ["Note", "PairWork", "Pairs", "mixed"]

MAX_KEPT_CHANGES = 64  # of a stream: where its messages changed, for a peer that is behind
_mixes: dict[tuple[int, torch.dtype], int] = {}


class Note(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`sends`: the teller does; message `number` of its stream and those after it are of `size_bytes` and `dtype`."""

    sends: bool
    tag: int
    number: int
    size_bytes: int
    dtype: str


def mixed(tag: int, tensor: torch.Tensor) -> int:
    """The tag of a message of these bytes and this type."""
    key = int(tensor.numel()) * int(tensor.element_size()), tensor.dtype
    found = _mixes.get(key)
    if found is None:
        digest = hashlib.blake2b(struct.pack("<q", key[0]) + str(key[1]).encode(), digest_size=4).digest()
        found = _mixes[key] = int.from_bytes(digest, "little") & ((1 << TAG_BITS - 1) - 1)
    return tag ^ found


class PairWork(BuiltinWork):
    """A message's work; what the ranks make of its failure is raised."""

    def wait(self, timeout: Any = None) -> bool:
        try:
            return bool(self._work.wait(timeout) if timeout else self._work.wait())
        except RuntimeError as error:
            self._engine.explain(error)
            raise


class _Stream:
    """`changes`: (first number, bytes, type) of what was posted here; `told`: the same as the other end has told."""

    def __init__(self) -> None:
        self.count = 0
        self.changes: deque[tuple[int, int, str]] = deque(maxlen=MAX_KEPT_CHANGES)
        self.told: deque[tuple[int, int, str]] = deque(maxlen=MAX_KEPT_CHANGES)

    def differs(self) -> tuple[int, tuple[int, str], tuple[int, str]] | None:
        """(number, ours, theirs) of the first message of which the other end has told, and that is unlike what was posted here.

        Where the other end has told nothing it may not have come so far; of a change on this side that one hears.
        """
        for number, size, dtype in self.told:
            ours = _at(self.changes, number) if number < self.count else None
            if ours is not None and ours != (size, dtype):
                return number, ours, (size, dtype)
        return None


def _at(changes: deque[tuple[int, int, str]], number: int) -> tuple[int, str] | None:
    return next(((size, dtype) for first, size, dtype in reversed(changes) if first <= number), None)


class Pairs:
    """Of one rank of a group. `tell(peer, note)` sends a note; `alarm(claim)` ends the group; `names`: of the ranks, for messages."""

    def __init__(self, rank: int, names: tuple[int, ...], tell: Callable[[int, Note], None], alarm: Callable[[Claim], None]) -> None:
        self.rank, self.names, self.tell, self.alarm = rank, names, tell, alarm
        self.uncounted: set[int] = set()
        self._streams: dict[tuple[int, int, bool], _Stream] = {}
        self._lock = threading.Lock()

    def posts(self, tensor: torch.Tensor, peer: int, tag: int, *, sends: bool) -> None:
        """This rank sends to `peer`, or receives from it. Called before gloo hears of it."""
        what = int(tensor.numel()) * int(tensor.element_size()), str(tensor.dtype).removeprefix("torch.")
        with self._lock:
            stream = self._streams.setdefault((peer, tag, sends), _Stream())
            number, stream.count = stream.count, stream.count + 1
            new = not stream.changes or stream.changes[-1][1:] != what
            if new:
                stream.changes.append((number, *what))
            found = stream.differs() if new or stream.told else None
        if new:
            self.tell(peer, Note(sends=sends, tag=tag, number=number, size_bytes=what[0], dtype=what[1]))
        self._judge(peer, tag, sends, found)

    def hear(self, peer: int, note: Note) -> None:
        """In the control thread."""
        with self._lock:
            stream = self._streams.setdefault((peer, note.tag, not note.sends), _Stream())
            stream.told.append((note.number, note.size_bytes, note.dtype))
            found = stream.differs()
        self._judge(peer, note.tag, not note.sends, found)

    def _judge(self, peer: int, tag: int, sends: bool, found: tuple[int, tuple[int, str], tuple[int, str]] | None) -> None:
        if found is None or tag in self.uncounted:
            return
        number, ours, theirs = found
        (source, sent), (target, taken) = ((self.rank, ours), (peer, theirs)) if sends else ((peer, theirs), (self.rank, ours))

        def text(op: str, what: tuple[int, str]) -> str:
            return call_text(pack_call(op, -1, "", what[1]), what[0])

        message = f"rank {self.names[source]} calls {text('send', sent)} to rank {self.names[target]}, which calls {text('recv', taken)}"
        message += f" (message {number + 1} of tag {tag} between them)"
        hint = "both ends of a message must name the same number of elements and the same type"
        self.alarm(Claim(code="rank-diverged", message=message, rank=source, where=f"rank {self.names[source]}", hint=hint))
