"""What a rank does around the exchanges of a redistribution, and what it sends, counted by reason; one redistribution alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...lower.sharding import Redistribution, redistribution_program
from ...plan.sbp import coordinates
from ...program.calls import inline
from ...program.program import Program
from ..executor.executor import Executor
from ..executor.lanes import fuse_lanes
from ..executor.memory import RankMemory
from ..executor.tags import TAG_WINDOW
from ..executor.transport import Messages, Transport
from .pieces import Place, hop, packer, unpacker

__all__ = ["CountedMessages", "LoneRedistribution", "buffers_around", "put_flat", "stage", "take_flat"]


class CountedMessages:
    """A transport that counts bytes and messages sent by this rank, by the reason that names the communicator; `float_elements`: of them those
    whose size is the run's precision."""

    def __init__(self, transport: Transport, program: Program) -> None:
        self.transport, self.grouped, self.receive, self.wait = transport, transport.grouped, transport.receive, transport.wait
        self.reasons = [program.comms.name[tag].partition(":")[0] for tag in program.channels.tag.tolist()]
        self.clear()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        self._count(tensor, tag)
        return self.transport.send(tensor, peer, tag)

    def exchange(self, sends: Messages, receives: Messages) -> Sequence[Any]:
        for tensor, _, tag in sends:
            self._count(tensor, tag)
        return self.transport.exchange(sends, receives)

    def _count(self, tensor: Tensor, tag: int) -> None:
        reason = self.reasons[tag // TAG_WINDOW]
        self.sent_bytes[reason] = self.sent_bytes.get(reason, 0) + tensor.numel() * tensor.element_size()
        if tensor.is_floating_point():
            self.float_elements[reason] = self.float_elements.get(reason, 0) + tensor.numel()
        self.messages += 1

    def clear(self) -> None:
        self.sent_bytes: dict[str, int] = {}
        self.float_elements: dict[str, int] = {}
        self.messages = 0


def buffers_around(program: Program, op: int, memory: RankMemory) -> tuple[int, int]:
    """The buffers that an exchange left before a compute step and that the next one sends, -1 without: they stand first in its reads and writes."""
    read, written = program.ops.reads[op].tolist()[:1], program.ops.writes[op].tolist()[:1]
    came = read[0] if read and int(program.ops.microbatch[op]) else -1
    return came, written[0] if written and memory.infos[written[0]] is not None else -1


def take_flat(memory: RankMemory, buffer: int) -> Tensor:
    found = memory.read(buffer)
    assert found is not None
    return found


def put_flat(memory: RankMemory, buffer: int, flat: Tensor) -> None:
    memory.put(buffer, flat.to(memory.info(buffer).dtype), shared=True)


def stage(
    way: Redistribution, number: int, rank: int, place: Place, memory: RankMemory, around: tuple[int, int], take: Callable[[], Tensor],
    give: Callable[[Tensor], None],
) -> Callable[[], None]:  # fmt: skip
    """Compute step `number` of a redistribution: unpack what came, do what sends nothing, pack what is sent or give the piece in its new state."""
    (came, sent), shape, stages = around, way.shapes[rank], way.stages(place.sizes)
    local = stages[number][:-1] if sent >= 0 else stages[number]

    unpack = unpacker(shape, stages[number - 1][-1], place) if number else None
    pack = packer(stages[number][-1], place) if sent >= 0 else None

    def run() -> None:
        piece = unpack(take_flat(memory, came)) if unpack is not None else take()
        for step in local:
            piece = hop(piece, shape, step, place)
        if pack is not None:
            put_flat(memory, sent, pack(piece))
        else:
            give(piece)

    return run


class LoneRedistribution:
    """One redistribution on one rank, compiled once; `run(piece)` may be called again and again, and counts in `messages`."""

    def __init__(self, sizes: tuple[int, ...], rank: int, way: Redistribution, dtype: str, transport: Transport) -> None:
        lowered = redistribution_program(sizes, dtype, way)
        self.program = inline(lowered.program, lowered.callees).program
        self.way, self.rank, self.place = way, rank, Place(sizes, list(coordinates(sizes))[rank])
        self.messages = CountedMessages(transport, self.program)
        memory = RankMemory(self.program, rank, torch.device("cpu"), lowered.values[rank], {})
        self.executor = Executor(self.program, fuse_lanes(self.program), rank, memory=memory, transport=self.messages, work=self)

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        around, number = buffers_around(self.program, op, memory), int(self.program.ops.microbatch[op])
        return stage(self.way, number, self.rank, self.place, memory, around, lambda: self.piece, self._give)

    def _give(self, piece: Tensor) -> None:
        self.piece = piece

    def run(self, piece: Tensor) -> Tensor:
        """The piece in the new state."""
        self.piece = piece
        self.executor.run()
        return self.piece
