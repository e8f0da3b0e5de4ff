"""What a rank sends and receives of data whose size is not fixed, against what a planner says of it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...program.program import Program
from ..verdict import Finding
from .order import Ints, messages

__all__ = ["check_volume", "symbolic_bytes"]


def symbolic_bytes(p: Program, which: Literal["lower", "expected", "upper"] = "expected") -> tuple[Ints, Ints]:
    """Bytes that every actor (sends, receives) in messages with symbols for sizes, iterations counted."""
    m, lane = messages(p), p.lane_of_step()
    free = p.steps.size[m.send] >= 0
    size = (p.message_bytes(which)[m.send] * p.lanes.repeat[lane[m.send]])[free]
    actors = p.ranks + p.switches
    sent = np.bincount(p.channels.src[m.channel[free]], weights=size, minlength=actors)
    received = np.bincount(p.channels.dst[m.channel[free]], weights=size, minlength=actors)
    return sent.astype(np.int64), received.astype(np.int64)


def check_volume(p: Program, most_bytes: float) -> list[Finding]:
    """No rank is expected to send or receive more than that in messages with symbols for sizes."""
    found = []
    for way, size in zip(("sends", "receives"), symbolic_bytes(p), strict=True):
        rank = int(np.argmax(size))
        if size[rank] > most_bytes:
            text = f"rank {rank} {way} {int(size[rank])} bytes of unfixed size as expected, the plan says at most {most_bytes:.0f}"
            found.append(Finding(check="volume", message=text, witness={"rank": rank, "bytes": int(size[rank])}))
    return found
