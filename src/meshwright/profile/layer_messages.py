"""Passes over layers whose weights are gathered and gradients scattered for every micro-batch (sharding levels 2 and 3), as flows beside computation.

Cite: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3 (one layer is gathered ahead).
Left open by the papers: what a pass takes. Our answer: a rank computes its layers one after the other, and has one lane of messages, as a library's
stream is. A layer waits for its weights. The next layer's are asked for when it begins, so two layers are whole at a time, and the first gather of a
pass hides behind nothing. In backward a layer's gradients are scattered when it is done, behind the gather that was asked for before. The next pass
begins when computation ends; what is still on its way then delays the next pass's messages, so no pass is shorter than its messages.
Invariant: the simulated program of those two lanes takes as long. Cost: O(layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LayerMessages", "pass_s"]


class LayerMessages(NamedTuple):
    """Seconds of one layer and micro-batch: of the gather of its weights, the scatter of its gradients, and of its own forward and backward."""

    gather_s: float
    scatter_s: float
    forward_s: float
    backward_s: float


def pass_s(layers: Sequence[LayerMessages], *, backward: bool) -> float:
    """Seconds of a forward pass over `layers`, or of a backward pass, which takes them in reverse."""
    order = list(reversed(layers)) if backward else list(layers)
    now = 0.0
    sent = there = order[0].gather_s  # the lane of messages is free, the next layer's weights are here
    total = 0.0
    for i, x in enumerate(order):
        begin = max(now, there)
        if i + 1 < len(order):
            sent = there = max(sent, begin) + order[i + 1].gather_s
        now = begin + (x.backward_s if backward else x.forward_s)
        if backward:
            sent = max(sent, now) + x.scatter_s
        total += x.gather_s + (x.scatter_s if backward else 0.0)
    return max(now, total)
