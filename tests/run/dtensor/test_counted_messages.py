"""What a rank counts of what it sends: bytes by reason, and of them what the run's precision makes larger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from meshwright.run.dtensor.redistribute import CountedMessages
from meshwright.run.executor.tags import TAG_WINDOW


def test_floats_are_counted_apart_from_what_has_one_size() -> None:
    """A run in float64 is to send the plan's bytes and four more for each float, none for an index."""
    passed: list[tuple[int, int]] = []

    def send(tensor: torch.Tensor, peer: int, tag: int) -> None:
        passed.append((peer, tag))

    transport: Any = SimpleNamespace(grouped=False, receive=None, wait=None, send=send)
    program: Any = SimpleNamespace(comms=SimpleNamespace(name=["gradients:0", "loader"]), channels=SimpleNamespace(tag=np.array([0, 1, 0])))
    counted = CountedMessages(transport, program)
    counted.send(torch.zeros(3), 1, 0)
    counted.send(torch.zeros(2, dtype=torch.int64), 2, TAG_WINDOW)
    counted.send(torch.zeros(5, dtype=torch.float64), 1, 2 * TAG_WINDOW + 1)
    assert counted.sent_bytes == {"gradients": 52, "loader": 16} and counted.messages == 3
    assert counted.float_elements == {"gradients": 8}
    assert passed == [(1, 0), (2, TAG_WINDOW), (1, 2 * TAG_WINDOW + 1)]
    counted.clear()
    assert (counted.sent_bytes, counted.float_elements, counted.messages) == ({}, {}, 0)
