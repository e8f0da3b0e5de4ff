"""A connection that is closed when a message is posted: the rank behind it is named, as where a message is waited for."""

from __future__ import annotations

import pytest
import torch

from meshwright.program.builder import ProgramBuilder
from meshwright.run.executor.executor import Executor, StepFailed
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.transport import Broken, TaggedTransport


class Closed:
    """Of a gloo group whose peer has gone."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        raise RuntimeError("Connection closed by peer")

    recv = send


@pytest.mark.parametrize("rank", [0, 1])
def test_who_has_gone_is_named(rank: int) -> None:
    b = ProgramBuilder(ranks=2)
    rows = [b.buffer(r, chunks=1, chunk_bytes=8) for r in range(2)]
    channel = b.channel(0, 1)
    b.lane(0).send(channel, rows[0], 0)
    b.lane(1).recv(channel, rows[1], 0)
    program = b.build()
    memory = RankMemory(program, rank, torch.device("cpu"), {}, {})
    executor = Executor(program, fuse_lanes(program), rank, memory=memory, transport=TaggedTransport(Closed()))
    with pytest.raises(StepFailed) as caught:
        executor.run()
    assert caught.value.waiting_for - 1 == 1 - rank and isinstance(caught.value.__cause__, Broken)
    assert str(caught.value.__cause__) == "Connection closed by peer" and caught.value.__cause__.peer == 1 - rank
