"""An MSCCL++ execution plan: per GPU thread blocks of one-sided operations, as MSCCL++'s executor reads it.

Cite: MSCCL++ (Microsoft), "Rethinking GPU communication abstractions for cutting-edge AI applications" (arXiv 2504.09014, 2025).
What is read and written here is the subset without packets (protocol LL), switch channels, pipelines and groups of blocks.

- `put` writes into a peer's buffer, `get` reads from it; `signal` and `wait` count on a channel, whose k-th connection of one GPU to another is
  the k-th of the other to it. `re` sums buffers; with a leading `r` operands are remote, with a trailing `s` the sum is also put.
- Threads of a block run ahead of each other: between an operation and another that needs it stands a `nop` (or a barrier).
- `channel_ids` of an operation count in the block's own list of channels, `buffer_id` in its list of remote buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ..errors import Unsupported
from ..program.program import Program
from ..program.tables import I32

__all__ = [
    "DATA", "SYNC", "BlockChannels", "Channel", "ImportedMscclpp", "MscclppBlock", "MscclppGpu", "MscclppOp", "MscclppPlan", "Ref",
    "RemoteBuffer", "Semaphore", "operation_of",
]  # fmt: skip

ChannelType = Literal["memory", "port"]
Letter = Literal["i", "o", "s"]
OpName = Literal[
    "nop", "barrier", "copy", "put", "pws", "pwsf", "get", "signal", "rlxsignal", "wait", "rlxwait", "flush", "re", "res", "rre", "rres",
    "sem_acquire", "sem_release",
]  # fmt: skip
DATA = ("copy", "put", "pws", "pwsf", "get", "re", "res", "rre", "rres")  # operations that move data
SYNC = ("nop", "barrier")
_OPS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter", "alltoall": "all-to-all", "broadcast": "broadcast"}


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class Ref(_Record, frozen=True, kw_only=True):
    """`size` chunks from `index` on: of the GPU's own buffer `type`, or of remote buffer `buffer_id` of the block."""

    type: Letter | None = None
    buffer_id: int | None = None
    index: int
    size: int


class MscclppOp(_Record, frozen=True, kw_only=True):
    name: OpName
    src_buff: tuple[Ref, ...] = ()
    dst_buff: tuple[Ref, ...] = ()
    channel_ids: tuple[int, ...] = ()
    channel_type: ChannelType | None = None
    reduce_op: Literal["sum"] | None = None
    semaphore_ids: tuple[int, ...] = ()
    barrier_id: int | None = None
    num_threadblocks: int | None = None


class BlockChannels(_Record, frozen=True, kw_only=True):
    channel_type: ChannelType
    channel_ids: tuple[int, ...]


class BlockBuffers(_Record, frozen=True, kw_only=True):
    access_channel_type: ChannelType
    remote_buffer_ids: tuple[int, ...]


class MscclppBlock(_Record, frozen=True, kw_only=True, omit_defaults=False):
    id: int
    ops: tuple[MscclppOp, ...]
    channels: tuple[BlockChannels, ...] = ()
    remote_buffer_refs: tuple[BlockBuffers, ...] = ()


class Channel(_Record, frozen=True, kw_only=True):
    channel_type: ChannelType
    connected_to: tuple[int, ...]


class RemoteBuffer(_Record, frozen=True, kw_only=True):
    rank: int
    type: Letter
    access_channel_types: tuple[ChannelType, ...]


class Semaphore(_Record, frozen=True, kw_only=True, omit_defaults=False):
    init_value: int = 0


class MscclppGpu(_Record, frozen=True, kw_only=True, omit_defaults=False):
    id: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    threadblocks: tuple[MscclppBlock, ...] = ()
    channels: tuple[Channel, ...] = ()
    remote_buffers: tuple[RemoteBuffer, ...] = ()
    semaphores: tuple[Semaphore, ...] = ()

    @property
    def blocks(self) -> tuple[MscclppBlock, ...]:
        return self.threadblocks

    def peers(self, kind: str) -> list[int]:
        """The peer of every connection of a type, as channel ids count them."""
        return [peer for c in self.channels if c.channel_type == kind for peer in c.connected_to]


class MscclppPlan(_Record, frozen=True, kw_only=True, omit_defaults=False):
    name: str
    collective: str
    protocol: str = "Simple"
    inplace: bool
    reuse_resources: bool = False
    gpus: tuple[MscclppGpu, ...]
    num_threads_per_block: int = 1024
    use_double_scratch_buffer: bool = False
    buffer_alignment: int = 16
    min_message_size: int = 0
    max_message_size: int = (1 << 64) - 1

    @property
    def in_place(self) -> bool:
        return self.inplace


@dataclass(frozen=True)
class ImportedMscclpp:
    """`program` and the operation that each of its steps belongs to: GPU, block, position in the block."""

    program: Program
    gpu: I32
    block: I32
    position: I32


def operation_of(plan: MscclppPlan) -> str:
    """Our name of the operation. Raises: Unsupported."""
    if plan.collective not in _OPS:
        raise Unsupported(f"what a {plan.collective[:40]!r} plan promises is not known", hint=f"known: {', '.join(_OPS)}")
    return _OPS[plan.collective]
