"""Debug mode's messages: whatever is not the message that is due is refused by name."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import timedelta
from typing import Any

import pytest
import torch

from meshwright.errors import MessageDamaged
from meshwright.run.group.checksums import CheckedMessages

LIMIT = timedelta(seconds=1)


class Wire:
    """Queues by tag; `spoil` may change what is delivered."""

    def __init__(self, rank: int, queues: Any) -> None:
        self.rank, self.size, self.mask, self.queues = rank, 3, 5, queues
        self.spoil: Any = None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.queues[self.rank, peer, tag ^ self.mask].append(tensor.clone())

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return tensor, (peer, self.rank, tag ^ self.mask)

    def wait(self, work: Any, limit: timedelta) -> None:
        if work is None:
            return
        into, key = work
        into.copy_(self.queues[key].popleft())
        if self.spoil is not None and not key[2] >> 30:
            self.spoil(into)


def pair() -> tuple[CheckedMessages, CheckedMessages, Wire, Any]:
    queues: Any = defaultdict(deque)
    there = Wire(2, queues)
    return CheckedMessages(Wire(1, queues), (10, 11, 12)), CheckedMessages(there, (10, 11, 12)), there, queues


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_whole_messages_pass(dtype: torch.dtype) -> None:
    a, b, _, _ = pair()
    for tag in (0, 7, 0):
        given = torch.arange(40).to(dtype)
        a.wait(a.send(given[3:17], 2, tag), LIMIT)
        into = torch.zeros(14, dtype=dtype)
        b.wait(b.receive(into, 1, tag), LIMIT)
        assert torch.equal(into, given[3:17])


def test_one_flipped_bit() -> None:
    a, b, wire, _ = pair()
    for bit in range(0, 320, 37):
        a.send(torch.arange(10, dtype=torch.int32), 2, 4)

        def flip(into: torch.Tensor, bit: int = bit) -> None:
            into.view(torch.uint8)[bit // 8] ^= 1 << bit % 8

        wire.spoil = flip
        with pytest.raises(MessageDamaged, match="from rank 11 to rank 12 is damaged") as caught:
            b.wait(b.receive(torch.zeros(10, dtype=torch.int32), 1, 4), LIMIT)
        assert caught.value.data["link"] == "11 -> 12" and caught.value.data["group_rank"] == 1


def test_a_source_that_is_overwritten_while_it_is_sent() -> None:
    a, b, _, queues = pair()
    a.send(torch.arange(10), 2, 4)
    payload = next(q for (_, _, tag), q in queues.items() if not tag >> 30)
    payload[0] += 1
    with pytest.raises(MessageDamaged, match="checksum"):
        b.wait(b.receive(torch.zeros(10, dtype=torch.int64), 1, 4), LIMIT)


def test_a_message_that_is_not_due() -> None:
    a, b, wire, queues = pair()
    a.send(torch.arange(4), 2, 8)
    a.send(torch.arange(4) * 2, 2, 8)
    for queue in queues.values():
        queue.reverse()  # two messages of one tag change places
    with pytest.raises(MessageDamaged, match="its count is 1, not 0"):
        b.wait(b.receive(torch.zeros(4, dtype=torch.int64), 1, 8), LIMIT)
    a, b, wire, queues = pair()
    a.send(torch.arange(4), 2, 8)
    wire.mask = 5
    b._received.clear()
    moved = {(s, d, t ^ 8 ^ 9): q for (s, d, t), q in queues.items()}
    queues.update(moved)  # delivered under another step's tag
    with pytest.raises(MessageDamaged, match="its tag is 8, not 9"):
        b.wait(b.receive(torch.zeros(4, dtype=torch.int64), 1, 9), LIMIT)


def test_a_new_collective_counts_anew() -> None:
    a, b, _, _ = pair()
    for mask in (3, 4):
        a.mask = b.mask = mask
        a.send(torch.arange(4), 2, 8)
        b.wait(b.receive(torch.zeros(4, dtype=torch.int64), 1, 8), LIMIT)
    assert a.mask == 4
