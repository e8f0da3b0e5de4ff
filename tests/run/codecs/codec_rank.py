"""What each of two ranks does: three steps with every codec, over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.codec.codec import parse_codec
from meshwright.run.codecs import At, make_codec

SHAPES = [(24, 40), (40,), (11, 3)]
STEPS = 3


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(24 * 40 + 40 + 33, generator=torch.Generator().manual_seed(10 * step + rank))


def gathered(group: dist.ProcessGroup, x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(2)]
    group.allgather([found], [x]).wait()
    return found


def exchanged(text: str, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    codec = make_codec(parse_codec(text), SHAPES, name="g")
    state, out, means = codec.new_state(), torch.empty(codec.elements), []
    for step in range(STEPS):
        at = At(step=step, rank=rank, world=2)
        payload = codec.encode(gradient(rank, step), state, at)
        if codec.spec.aggregation == "all-gather":
            lengths = gathered(group, torch.tensor([payload.size_bytes]))
            padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
            padded[: payload.size_bytes] = payload.wire
            for other, wire in enumerate(gathered(group, padded)):
                codec.decode(codec.unpack(wire[: int(lengths[other])]), out, accumulate=other > 0)
        else:
            while True:
                group.allreduce([payload.summand]).wait()
                if (following := codec.advance(payload, state, at)) is None:
                    break
                payload = following
            codec.decode(payload, out)
        codec.finish(out, 2)
        means.append(out.clone())
    return torch.stack(means)


def all_exchanged(rank: int, group: dist.ProcessGroup, texts: list[str]) -> list[torch.Tensor]:
    """Per codec, [step, element] mean gradients of this rank."""
    return [exchanged(text, rank, group) for text in texts]
