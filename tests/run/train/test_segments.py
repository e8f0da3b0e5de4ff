"""Stages timed by the executor's own pieces: real segments and programs of the small example model, CPU time only."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from meshwright.cost import Priced
from meshwright.errors import UsageError
from meshwright.program.builder import ProgramBuilder
from meshwright.run.calibrate.message_times import MessageTimes
from meshwright.run.calibrate.operators import quiet_single_thread
from meshwright.run.calibrate.rank_times import RankTimes, SilentRank, SilentTransport, adding_up, merged_prices
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.schedule import compile_schedule


def test_replicas_are_averaged():
    times = {
        1: RankTimes({"a|F": Priced(3.0, "measured", 3.0)}, 0, 0),
        0: RankTimes({"a|F": Priced(1.0, "measured", 1.0), "b|F": Priced(5.0, "measured", 5.0)}, 0, 0),
    }
    assert merged_prices(times) == {"a|F": Priced(2.0, "measured", 2.0), "b|F": Priced(5.0, "measured", 5.0)}


def test_prices_add_up_to_a_usual_step():
    usual, calls = {"a|F": 1.0, "b|F": 2.0}, {"a|F": 4, "b|F": 1}
    assert adding_up(usual, calls, [9.0, 9.0, 60.0]) == {"a|F": 1.5, "b|F": 3.0}  # each step lost 3 s, now in this call, now in that
    assert adding_up(usual, calls, [5.0]) == usual and adding_up({}, {}, [1.0]) == {}


def test_silent_messages_are_filled_with_small_numbers():
    transport = SilentTransport(time.thread_time, torch.device("cpu"))
    for numel in (0, 1, 70_000):
        tensor = torch.full((numel,), float("nan"))
        transport.wait(transport.receive(tensor, 1, 0))
        assert torch.isfinite(tensor).all() and (tensor.abs() < 0.1).all()
    assert len(transport.filled) == 6 and transport.filled == sorted(transport.filled) and transport.send(torch.zeros(1), 1, 0) is None


def test_sums_of_a_silent_step_are_what_the_rank_has_itself():
    """Gradients of a step without peers are zero where the rank's own are: kernels take other times for zeros."""
    b = ProgramBuilder(ranks=2, name="sum and a value")
    mine, value, theirs = b.buffer(0, chunks=2, chunk_bytes=4), b.buffer(0, chunks=1, chunk_bytes=4), b.buffer(1, chunks=2, chunk_bytes=4)
    there, back, other = b.channel(0, 1, depth=2), b.channel(1, 0, depth=2), b.channel(1, 0)
    given, added, takes = b.lane(0), b.lane(0), b.lane(0)
    sent = given.send(there, mine, 1)
    added.recv_add(back, mine, 0)
    summed = given.send(there, mine, 0, after=[added.last])
    added.recv(back, mine, 1, after=[sent, summed])
    takes.recv(other, value, 0)
    peer = b.lane(1)
    for chunk in (0, 1):
        peer.send(back, theirs, chunk)
        peer.recv(there, theirs, 1 - chunk)
    b.lane(1).send(other, theirs, 0)
    program = b.build()
    schedule = compile_schedule(program, fuse_lanes(program), 0)
    silent = SilentRank(program, 0)
    silent.leave_sums(schedule)
    found = {}
    last = torch.arange(8.0)
    silent.transport.send(last, 1, 0)
    direct = {step for step, receive in schedule.receives.items() if receive.direct}
    for step, receive in schedule.receives.items():
        tensor = torch.full((8,), 7.0)
        silent.transport.receive(tensor, 1, receive.tag)
        found[step] = tensor
    first = int(program.lanes.start[added.last.lane])
    assert (found.pop(first) == 0).all(), "added: nothing"
    assert torch.equal(found.pop(first + 1), torch.full((8,), 7.0) if first + 1 in direct else last), "stored: what was there, or what was sent"
    silent.transport.left.clear()
    silent.transport.alike.add(77)
    silent.transport.send(last, 1, 0)
    last.zero_()
    silent.transport.receive(other_place := torch.full((8,), 7.0), 1, 77)
    silent.transport.receive(longer := torch.full((9,), 7.0), 1, 77)
    assert torch.equal(other_place, torch.arange(8.0)) and not longer.any(), "as it was when it was sent; nothing was sent of that length"
    assert len(found) == 1 and all(0 < float(x.abs().max()) < 0.1 for x in found.values()), "a value that it has not is small random numbers"


def test_parts_of_large_messages_are_in_no_cache_when_their_turn_comes():
    of = SimpleNamespace(tensor=lambda size: torch.ones(size, dtype=torch.uint8))
    for size, count in ((16, 64), (1 << 20, 8), (4 << 20, 2), (1 << 24, 2)):
        assert [len(x) for x in MessageTimes.cold(of, size)] == [size] * count


@pytest.fixture(scope="module")
def rig():
    pytest.importorskip("torch")
    import rig

    return rig


def rank_of(rig, degrees, rank, silent_of):
    """(executor, work, silent) of one rank of the tiny example."""
    from meshwright.plan.shards import local_values
    from meshwright.program.calls import inline
    from meshwright.run.executor.executor import Executor
    from meshwright.run.executor.lanes import fuse_lanes
    from meshwright.run.executor.memory import RankMemory
    from meshwright.run.train.optimizers import make_optimizer
    from meshwright.run.train.segments import build_rank_module
    from meshwright.run.train.work import TrainingWork

    layout, program, callees = rig.lowered(rig.TINY, degrees, microbatch=2, global_batch=8)
    flat = inline(program, callees).program
    forward = rig.forward_of(rig.TINY, 2)
    _, parameters, buffers = rig.whole_model(rig.TINY)
    b, device = flat.buffers, torch.device("cpu")
    sizes = {b.name[i]: int(b.chunks[i] * b.chunk_bytes[i]) for i in range(len(b)) if b.actor[i] == rank and b.name[i].startswith("gradients")}
    module = build_rank_module(forward, layout, rank, parameters, buffers, device=device, gradient_bytes=sizes)
    memory = RankMemory(flat, rank, device, local_values(layout, rank), module.gradients, layout=layout)

    class Data:
        def microbatch(self, step, replica, microbatch):
            return [torch.randint(0, 16, (2, *x.shape[1:])) for x in forward.inputs]

    optimizer = make_optimizer("adamw", [(p.name, p.tensor) for p in module.trained()], 1e-3)
    work = TrainingWork(program=flat, layout=layout, rank=rank, module=module, data=Data(), optimizer=optimizer)
    silent = SilentRank(flat, rank)
    executor = Executor(flat, fuse_lanes(flat), rank, memory=memory, transport=silent.transport, work=silent.timed(work) if silent_of else work)
    return executor, work, silent, layout


@pytest.mark.timeout(280)
def test_prices_sum_to_the_step_of_a_real_executor(rig):
    for _ in range(3):  # CPU time too has bad moments on a busy machine
        executor, work, silent, layout = rank_of(rig, (1, 1, 1), 0, True)
        times = silent.measure(executor.run, begin=work.begin, repeats=5)
        assert set(times.prices) == {"s0.0|F", "s0.0|B", "opt0|optimizer"} and times.per_step_s == 0.0
        total = sum(p.cpu_s * (1 if "optimizer" in key else layout.microbatches) for key, p in times.prices.items())
        plain, work, _, _ = rank_of(rig, (1, 1, 1), 0, False)
        samples = []
        with quiet_single_thread():
            for step in range(6):
                work.begin(step)
                begin = time.thread_time()
                plain.run()
                samples.append(time.thread_time() - begin)
        ratio = total / statistics.median(samples[1:])
        if 0.7 < ratio < 1.4:
            return
    pytest.fail(f"the prices sum to {ratio} of a real step")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_every_layout_can_be_timed_without_its_peers(rig, degrees):
    executor, work, silent, layout = rank_of(rig, degrees, 1, True)
    times = silent.measure(executor.run, begin=work.begin, repeats=1, warmup=0)
    stage = layout.coordinates(1)[0]
    keys = {f"{s.key}|{phase}" for s in layout.segments if s.stage == stage for phase in "FB"} | {f"opt{stage}|optimizer"}
    assert set(times.prices) == keys and times.step_s >= sum(p.cpu_s for p in times.prices.values()) * 0.5
    assert 0 <= times.per_step_s < 0.05


def test_measure_refuses_wrong_counts(rig):
    executor, work, silent, _ = rank_of(rig, (1, 1, 1), 0, True)
    for repeats, warmup in ((0, 1), (1, -1)):
        with pytest.raises(UsageError, match="repeats"):
            silent.measure(executor.run, begin=work.begin, repeats=repeats, warmup=warmup)
