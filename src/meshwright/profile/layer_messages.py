"""Passes over layers whose weights are gathered and gradients scattered for every micro-batch (sharding levels 2 and 3), as flows beside computation.

Cite: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3 (layers are gathered ahead, within bounds).
Left open by the papers: what a pass takes. Our answer: a rank computes its layers one after the other, and has one lane of messages, as a library's
stream is. A layer waits for its weights. The next layer's are asked for when it begins, and those of further ones while all that are whole take no
more room than MAX_WHOLE of the largest, as a plan's program gathers them. The first gather of a pass hides behind nothing. In backward a layer's
gradients are scattered when it is done, behind the gathers that were asked for before. The next pass begins when computation ends; what is still on
its way then delays the next pass's messages, so no pass is shorter than its messages. Deviation: seconds of a gather stand for its bytes.
Invariant: the simulated program of those two lanes takes as long. Cost: O(layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MAX_WHOLE", "LayerMessages", "asked_at", "pass_s"]

MAX_WHOLE = 3  # gathered layers that a rank has at once, in units of the largest: that in use, the next of that size, and small ones between them


class LayerMessages(NamedTuple):
    """Seconds of one layer and micro-batch: of the gather of its weights, the scatter of its gradients, and of its own forward and backward."""

    gather_s: float
    scatter_s: float
    forward_s: float
    backward_s: float


def pass_s(layers: Sequence[LayerMessages], *, backward: bool) -> float:
    """Seconds of a forward pass over `layers`, or of a backward pass, which takes them in reverse."""
    order = list(reversed(layers)) if backward else list(layers)
    asked, now, total = asked_at([x.gather_s for x in order]), 0.0, 0.0
    sent = order[0].gather_s  # until when the lane of messages is busy
    there = [sent]  # by layer, when its weights are
    for i, x in enumerate(order):
        begin = max(now, there[i])
        while len(there) < len(order) and asked[len(there)] <= i:
            sent = max(sent, begin) + order[len(there)].gather_s
            there.append(sent)
        now = begin + (x.backward_s if backward else x.forward_s)
        if backward:
            sent = max(sent, now) + x.scatter_s
        total += x.gather_s + (x.scatter_s if backward else 0.0)
    return max(now, total)


def asked_at(sizes: Sequence[float]) -> list[int]:
    """By layer, the layer at whose beginning its weights are asked for."""
    room, found = MAX_WHOLE * max(sizes), [0]
    for j in range(1, len(sizes)):
        first, held = j - 1, sizes[j] + sizes[j - 1]
        while first > found[-1] and held + sizes[first - 1] <= room:
            first -= 1
            held += sizes[first]
        found.append(first)
    return found
