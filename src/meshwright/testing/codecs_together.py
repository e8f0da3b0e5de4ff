"""All ranks in one process: the exchange of a step as plain additions, for trials of a codec without a process group.

The sums run in rank order, as the decoding of gathered payloads does; an all-reduce over a network may add in another order, and is then equal to
rounding (two ranks: equal bit for bit).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..run.codecs.base import At, Codec, Payload, State

__all__ = ["mean_together"]


def mean_together(codec: Codec, gradients: Sequence[torch.Tensor], states: Sequence[State], step: int) -> torch.Tensor:
    """The mean gradient that every rank gets, rank r having `gradients[r]` and `states[r]`; flat float32."""
    world = len(gradients)
    ats = [At(step=step, rank=rank, world=world) for rank in range(world)]
    sent = [codec.encode(x, state, at) for x, state, at in zip(gradients, states, ats, strict=True)]
    out = torch.empty(codec.elements)
    if codec.spec.aggregation == "all-gather":
        for rank, payload in enumerate(sent):
            codec.decode(codec.unpack(payload.wire), out, accumulate=rank > 0)
    else:
        codec.decode(_summed(codec, sent, states, ats), out)
    codec.finish(out, world)
    return out


def _summed(codec: Codec, payloads: Sequence[Payload], states: Sequence[State], ats: Sequence[At]) -> Payload:
    while True:
        total = payloads[0].summand.clone()
        for payload in payloads[1:]:
            total += payload.summand
        for payload in payloads:
            payload.summand.copy_(total)
        following = [codec.advance(p, state, at) for p, state, at in zip(payloads, states, ats, strict=True)]
        remaining = [p for p in following if p is not None]
        if not remaining:
            return payloads[0]
        payloads = remaining
