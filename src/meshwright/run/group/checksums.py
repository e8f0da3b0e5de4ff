"""Debug mode: every message is followed by a small one that says what it was.

It holds the collective (its mask: place in the sequence and program), the tag, how many messages of that tag came before, bytes and CRC-32 of the
payload when it was posted. The receiver compares all of it with what it expects and what it got. So a flipped bit, a source that was overwritten
while it was being sent, a message of another step and a swapped pair are errors that name step and link, at the cost of a second message and two
passes over the data. Walks need not know: `CheckedMessages` wraps the group's messages.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ...errors import MessageDamaged
from ..executor.tags import ReservedTag

__all__ = ["CheckedMessages", "check", "checksum"]

_FIELDS = ("collective", "tag", "count", "bytes", "checksum")


@dataclass
class _Checked:
    payload: Any
    header: Any
    tensor: torch.Tensor
    said: torch.Tensor
    peer: int
    expected: tuple[int, int, int, int] | None  # None: sent


class CheckedMessages:
    """`inner`: what really sends (`GlooMessages`); `names`: global ranks of the group."""

    def __init__(self, inner: Any, names: Sequence[int] = ()) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.names = tuple(names) or tuple(range(self.size))
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._received: dict[tuple[int, int], int] = defaultdict(int)

    @property
    def mask(self) -> int:
        return int(self.inner.mask)

    @mask.setter
    def mask(self, mask: int) -> None:
        self.inner.mask = mask
        self._sent.clear()
        self._received.clear()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        count = self._sent[peer, tag]
        self._sent[peer, tag] = count + 1
        said = torch.tensor([self.mask, tag, count, tensor.numel() * tensor.element_size(), checksum(tensor)])
        payload = self.inner.send(tensor, peer, tag)
        return _Checked(payload, self.inner.send(said, peer, tag | ReservedTag.BESIDE_PROGRAM), tensor, said, peer, None)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        count = self._received[peer, tag]
        self._received[peer, tag] = count + 1
        said = torch.zeros(len(_FIELDS), dtype=torch.int64)
        payload = self.inner.receive(tensor, peer, tag)
        expected = self.mask, tag, count, tensor.numel() * tensor.element_size()
        return _Checked(payload, self.inner.receive(said, peer, tag | ReservedTag.BESIDE_PROGRAM), tensor, said, peer, expected)

    def wait(self, work: _Checked, limit: timedelta) -> None:
        """Raises: RuntimeError as the inner messages; MessageDamaged."""
        self.inner.wait(work.payload, limit)
        self.inner.wait(work.header, limit)
        if work.expected is not None:
            check(work.said.tolist(), work.expected, work.tensor, work.peer, self.rank, self.names)

    def abort(self) -> None:
        self.inner.abort()


def check(said: Sequence[int], expected: Sequence[int], tensor: torch.Tensor, peer: int, rank: int, names: Sequence[int]) -> None:
    """Raises: MessageDamaged, if what came from `peer` is not what is due."""
    for field, here, there in zip(_FIELDS, (*expected, checksum(tensor)), said, strict=True):
        if here != there:
            link = f"{names[peer]} -> {names[rank]}"
            what = "is damaged: its checksum is" if field == "checksum" else f"is not the one that is due: its {field} is"
            raise MessageDamaged(
                f"a message from rank {names[peer]} to rank {names[rank]} {what} {here if field == 'checksum' else there},"
                f" not {there if field == 'checksum' else here}",
                hint="memory, network card or driver; or a buffer that was written while it was being sent",
                data={"rank": names[peer], "link": link, "group_rank": peer, "group_peer": rank, "field": field},
            )


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())
