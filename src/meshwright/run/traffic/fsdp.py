"""FSDP2's reduce-scatter with a codec: `compress_fsdp(model, codec)` after `fully_shard`, through `set_custom_reduce_scatter`.

FSDP2 hands over the gradients of one module as one flat tensor, a piece per rank. Each piece is encoded for the rank that owns it, the payloads go
all to all, and the owner adds what it decodes. So a rank keeps a residual of the whole unsharded gradient, which costs the memory that sharding
saved for gradients; groups are FSDP's modules, and a planned grouping has no place here.
Left open: codecs of several rounds. Our answer: refused; PowerSGD's factors belong to whole matrices, and a rank's piece is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ...codec.codec import CodecSpec, parse_codec
from ...errors import Unsupported
from ..codecs import At, Codec, Payload, State, make_codec
from ..codecs.base import NonFinite

__all__ = ["CompressedReduceScatter", "compress_fsdp"]


class CompressedReduceScatter(ReduceScatter):  # type: ignore[misc]
    """Of one FSDP module. `states[r]`: of the piece that rank r owns; they belong into this rank's checkpoint."""

    def __init__(self, spec: CodecSpec, name: str, nonfinite: NonFinite = "refuse") -> None:
        self.spec, self.name, self.nonfinite = spec, name, nonfinite
        self.codec: Codec | None = None
        self.states: list[State] = []
        self.step = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Fill `output_tensor` with this rank's piece of the sum or mean. Raises: Unsupported (operation), NotFinite, RuntimeError of the group."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Unsupported(f"a reduce-scatter with {op} is not compressed", where=self.name, hint="leave FSDP's divide factor as it is")
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        pieces = input_tensor.view(world, -1)
        if self.codec is None:
            self.codec = make_codec(self.spec, [(pieces.shape[1],)], name=self.name, nonfinite=self.nonfinite)
            self.states = [self.codec.new_state() for _ in range(world)]
        at = At(step=self.step, rank=rank, world=world)
        payloads = [self.codec.encode(piece, state, at) for piece, state in zip(pieces, self.states, strict=True)]
        for r, wire in enumerate(_exchanged([p.wire for p in payloads], group)):
            payload = self.codec.unpack(wire) if self.spec.aggregation == "all-gather" else _like(payloads[0], wire)
            self.codec.decode(payload, output_tensor, accumulate=r > 0)
        self.codec.finish(output_tensor, world)
        if op == dist.ReduceOp.SUM:
            output_tensor *= world
        self.step += 1


def compress_fsdp(model: nn.Module, codec: str, *, nonfinite: NonFinite = "refuse") -> list[CompressedReduceScatter]:
    """Compress the gradients of every FSDP2 module in `model`; returns what holds their states, in the model's order.

    Raises: UnknownName, UsageError (codec); Unsupported for codecs of several rounds and models that are not sharded.
    """
    spec = parse_codec(codec)
    if spec.name == "powersgd":
        raise Unsupported("PowerSGD needs whole matrices, and a rank owns a piece", where="compress_fsdp", hint="use topk, qsgd, fp16, ...")
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            made = CompressedReduceScatter(spec, name or type(model).__name__, nonfinite)
            module.set_custom_reduce_scatter(made)
            found.append(made)
    if not found:
        raise Unsupported("no module of it is sharded by FSDP2", where="compress_fsdp", hint="call fully_shard first")
    return found


def _exchanged(wires: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """What every rank has for this one, in rank order."""
    sizes = torch.tensor([w.numel() for w in wires])
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    lengths = theirs.tolist()
    received = torch.empty(sum(lengths), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(wires), lengths, sizes.tolist(), group=group)
    return list(received.split(lengths))


def _like(payload: Payload, wire: torch.Tensor) -> Payload:
    return Payload.of([(p.dtype, p.numel()) for p in payload.parts], wire)
