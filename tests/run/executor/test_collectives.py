"""Collective programs on real messages give the exact sum, bit for bit: inputs are integers, so every order of additions is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import fabric_of, grouped, in_threads

from meshwright.cost import Transport
from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.errors import Deadlock, Unsupported, UsageError
from meshwright.program.builder import ProgramBuilder
from meshwright.run.executor.collective import CollectiveRank, callable_form, run_collective
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.transport import TaggedTransport


def plan(name: str, ranks: int, size_bytes: int, *, unroll: bool):
    names = tuple(d.name for d in fabric_of(ranks).devices)
    problem = CollectiveProblem(fabric=fabric_of(ranks), op="all-reduce", ranks=names, size_bytes=size_bytes, seed=0, transport=Transport())
    return strategy(name)(unroll=unroll).plan(problem, rng=np.random.default_rng(0)).program


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "forestcoll"])
def test_all_reduce_is_the_exact_sum(name, ranks, groups, unroll):
    program = plan(name, ranks, 48_000, unroll=unroll)
    form = callable_form(program)
    contract = program.contract
    sizes = {r: int((form.buffers.chunks * form.buffers.chunk_bytes)[form.buffers.actor == r][0]) // 4 for r in range(ranks)}
    inputs = [torch.from_numpy(np.random.default_rng(r).integers(-1000, 1000, sizes[r]).astype(np.float32)) for r in range(ranks)]
    expected = torch.stack(inputs).sum(0)
    local = [int((program.buffers.actor[: contract.outputs[r][0]] == r).sum()) for r in range(ranks)]

    def body(rank, group):
        transport = grouped(group) if groups else TaggedTransport(group)
        data = inputs[rank].clone()
        made = CollectiveRank(program, rank, {0: data}, transport)
        made.run()
        once = made.buffer(local[rank]).clone()
        data.copy_(inputs[rank])
        made.run()  # compiled once, run again
        assert torch.equal(once, made.buffer(local[rank]))
        return once

    for result in in_threads(ranks, body):
        assert torch.equal(result, expected)


def test_wrong_sizes_are_refused():
    program = plan("ring", 2, 8000, unroll=True)
    with pytest.raises(UsageError, match="must be a flat tensor of"):
        run_collective(program, 0, {0: torch.zeros(3)}, TaggedTransport(None))
    with pytest.raises(UsageError, match="one dtype"):
        run_collective(program, 0, {0: torch.zeros(3), 1: torch.zeros(3, dtype=torch.float64)}, TaggedTransport(None))


def test_programs_that_cannot_be_walked_are_refused():
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=1, chunk_bytes=4), b.buffer(1, chunks=1, chunk_bytes=4)
    there, back = b.channel(0, 1), b.channel(1, 0)
    first, second = b.lane(0), b.lane(1)
    first.recv(back, x, 0)
    first.send(there, x, 0)
    second.recv(there, y, 0)
    second.send(back, y, 0)
    with pytest.raises(Deadlock) as caught:
        fuse_lanes(b.build())
    assert len(caught.value.data["cycle"]) >= 2
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=1, chunk_bytes=4), b.buffer(1, chunks=1, chunk_bytes=4)
    c = b.channel(0, 1)
    b.lane(0, repeat=2).send(c, x, 0)
    b.lane(1, repeat=2).recv(c, y, 0)
    with pytest.raises(Unsupported, match="repeated lanes"):
        fuse_lanes(b.build())
