"""Waves of grouped messages: what NCCL runs. (Every strategy's programs run on them in `test_walks`, whole jobs in `test_group`.)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.check.issued import check_issued
from meshwright.decide.collective import NAMES, CollectiveProblem
from meshwright.errors import Deadlock, GroupFailed
from meshwright.io.fabric.name import load_fabric
from meshwright.program.builder import ProgramBuilder
from meshwright.program.issued import CallOrders, Communicator, Issued, Message
from meshwright.program.program import Contract, Program
from meshwright.run.group.call import Call, Session
from meshwright.run.group.engine import Engine
from meshwright.run.group.rank_code import form_of
from meshwright.run.group.reductions import reduction
from meshwright.run.group.settings import Settings
from meshwright.run.group.streams import DeviceRunner, GroupedMessages
from meshwright.run.group.waves import compile_waves, waves_of

HERE = Path(__file__).parent


def chain(chunks: int, depth: int) -> Program:
    """Rank 0 sends its chunks to rank 1, one after the other, and rank 1 each on to rank 2."""
    b = ProgramBuilder(ranks=3, name="chain")
    x = [b.buffer(r, chunks=chunks, chunk_bytes=8) for r in range(3)]
    first, second = b.channel(0, 1, depth=depth), b.channel(1, 2, depth=depth)
    lanes = [b.lane(r) for r in range(3)]
    for i in range(chunks):
        lanes[0].send(first, x[0], i)
        lanes[1].recv(first, x[1], i)
        lanes[1].send(second, x[1], i)
        lanes[2].recv(second, x[2], i)
    rows = tuple((x[r], 0, chunks) for r in range(3))
    b.contract = Contract(op="broadcast", inputs=rows, outputs=rows, root=0)
    return b.build()


def test_pieces_follow_each_other() -> None:
    """A piece goes on in the wave after it has come, while the next one comes: chunks + hops - 1 waves."""
    form = form_of(chain(8, depth=2))
    waves = waves_of(form.unrolled)
    assert waves.count == 8 + 2 - 1
    middle = compile_waves(form, waves, 1, 8).waves
    assert [(len(w.sends), len(w.receives)) for w in middle] == [(0, 0), (0, 1), *[(1, 1)] * 7, (1, 0)]
    assert all(not w.then for w in middle), "messages lie where they belong"


def test_both_ends_of_every_message_are_in_one_wave() -> None:
    fabric = load_fabric("dgx1-v100")
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20)
    program = NAMES["forestcoll"]().plan(problem, rng=np.random.default_rng(0)).program
    form = form_of(program)
    waves = waves_of(form.unrolled)
    codes = [compile_waves(form, waves, r, 10_007) for r in range(program.ranks)]
    for w in range(waves.count + 1):
        sent = {(c.rank, peer): [p[2] - p[1] for p, to in c.waves[w].sends if to == peer] for c in codes for _, peer in c.waves[w].sends}
        taken = {(peer, c.rank): [p[2] - p[1] for p, of in c.waves[w].receives if of == peer] for c in codes for _, peer in c.waves[w].receives}
        assert sent == taken
    assert all(sum(c.staging) <= 2 * 10_007 for c in codes), "slots are used again"


@pytest.mark.parametrize(("op", "name"), [("all-reduce", "forestcoll"), ("all-reduce", "ring"), ("all-gather", "bruck"), ("all-to-all", "direct")])
def test_waves_end_by_nccl_s_rules(op: str, name: str) -> None:
    """Judged as they are issued: group, then what it makes possible, on one stream."""
    problem = CollectiveProblem.on(load_fabric("dgx1-v100"), op, 1 << 20)
    form = form_of(NAMES[name]().plan(problem, rng=np.random.default_rng(0)).program)
    waves = waves_of(form.unrolled)
    ranks = []
    for r in range(form.unrolled.ranks):
        entries: list[Issued] = []
        for wave in compile_waves(form, waves, r, 10_008).waves:
            calls = [Message(peer, True, high - low) for (_, low, high), peer in wave.sends]
            calls += [Message(peer, False, high - low) for (_, low, high), peer in wave.receives]
            entries += [Issued("messages", 0, 0, tuple(calls))] if calls else []
            entries += [Issued("work")] if wave.then else []
        ranks.append(tuple(entries))
    everyone = (Communicator(tuple(range(len(ranks)))),)
    verdict = check_issued(CallOrders(tuple(ranks), everyone), in_issue_order=True)
    assert verdict.ok and verdict.facts["messages"] == sum(w > 0 for w in waves.wave)
    first = next(i for i, entry in enumerate(ranks[0]) if entry.messages)
    assert not check_issued(CallOrders((ranks[0][first + 1 :], *ranks[1:]), everyone)).ok, "a rank that leaves out its first wave"


def swap(*, sends_first: bool) -> Program:
    """Two ranks send each other a chunk; each has one lane."""
    b = ProgramBuilder(ranks=2, name="swap")
    x = [b.buffer(r, chunks=2, chunk_bytes=8) for r in range(2)]
    channels = [b.channel(r, 1 - r) for r in range(2)]
    for r in range(2):
        lane = b.lane(r)
        if sends_first:
            lane.send(channels[r], x[r], r)
        lane.recv(channels[1 - r], x[r], 1 - r)
        if not sends_first:
            lane.send(channels[r], x[r], r)
    b.contract = Contract(op="all-gather", inputs=((x[0], 0, 1), (x[1], 1, 1)), outputs=((x[0], 0, 2), (x[1], 0, 2)))
    return b.build()


def test_neighbours_that_send_before_they_receive() -> None:
    """That is no deadlock, since a channel holds a message."""
    assert waves_of(form_of(swap(sends_first=True)).unrolled).count == 1


def test_steps_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(Deadlock, match="4 steps wait for each other") as found:
        waves_of(swap(sends_first=False))
    assert found.value.data["steps"] == [0, 1, 2, 3] and "rank 0" in str(found.value.where)


class Calls:
    """What is asked of a backend, in order."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def _start_coalescing(self) -> None:
        self.made.append("group")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.made.append(("send", tensors[0].tolist(), peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.made.append(("recv", peer))
        tensors[0].fill_(7)

    def _end_coalescing(self) -> Calls:
        self.made.append("end")
        return self

    def wait(self) -> None:
        self.made.append("wait")


def test_a_group_of_calls_per_wave() -> None:
    form = form_of(chain(2, depth=2))
    code = compile_waves(form, waves_of(form.unrolled), 1, 2)
    calls, connected = Calls(), []
    runner = DeviceRunner("cpu", GroupedMessages(calls), 3, connected.append, [])
    x = torch.zeros(2)
    for _ in range(2):
        work = runner.run(Call("broadcast", x, x, 0), Session(code, "broadcast", 0, 2, x.dtype, x.device), None, [x], None)
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert work.result()[0] is x and work.get_future().wait()[0] is x
    one = ["group", ("recv", 0), "end", "wait", "group", ("send", [7.0], 2), ("recv", 0), "end", "wait", "group", ("send", [7.0], 2), "end", "wait"]
    assert calls.made == one * 2 and connected == [x.device]


def test_a_failed_call_ends_the_group(tmp_path: Path) -> None:
    """In the caller's thread, with a typed error; later calls and earlier works raise it, too."""
    engine = Engine(Settings(record_dir=str(tmp_path)), dist.HashStore(), 0, 1, 5.0, global_ranks=(0,), devices=(), fabric=None)
    form = form_of(chain(2, depth=2))
    code = compile_waves(form, waves_of(form.unrolled), 0, 2)
    x = torch.ones(2)
    call, session = Call("broadcast", x, x, 0), Session(code, "broadcast", 0, 2, x.dtype, x.device)
    fails: list[bool] = []

    def exchange(sends: Any, receives: Any) -> None:
        if fails:
            raise RuntimeError("NCCL error: unhandled system error")

    runner = DeviceRunner("cpu", exchange, 1, lambda device: None, engine.over)
    found = reduction(dist.ReduceOp.SUM, x.dtype)
    work = engine.run_on(runner, call, session, found, 1, [x], None)
    fails.append(True)
    with pytest.raises(GroupFailed, match="unhandled system error"):
        engine.run_on(runner, call, session, found, 1, [x], None)
    fails.clear()
    with pytest.raises(GroupFailed, match="unhandled system error"):
        engine.run_on(runner, call, session, found, 1, [x], None)
    with pytest.raises(GroupFailed, match="unhandled system error"):
        work.wait()
    assert not work.is_success() and isinstance(work.exception(), GroupFailed)
    engine.close()


class Transport:
    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1
        raise RuntimeError("aborted already")


def test_the_verdict_aborts_what_is_enqueued(tmp_path: Path) -> None:
    engine = Engine(Settings(record_dir=str(tmp_path)), dist.HashStore(), 0, 1, 5.0, global_ranks=(0,), devices=(), fabric=None)
    transport = Transport()
    engine.attend_device(transport)
    engine._failed(GroupFailed("rank 3 is gone"))
    assert transport.aborted == 1 and str(engine.over[0]) == "rank 3 is gone"
    engine.close()


@pytest.mark.real
@pytest.mark.timeout(280)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between GPUs needs two of them")
def test_programs_on_gpus() -> None:
    from test_group import run_ranks

    done = run_ranks(2, [str(HERE / "gpu_rank.py")], LOCAL_WORLD_SIZE="2", CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"))
    assert [code for code, _ in done] == [0, 0], "\n".join(text[-3000:] for code, text in done if code)
