"""Training by a plan's own program gives the losses of plain eager training, whatever the layout. Ranks are threads here, messages are gloo's."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
import torch
from rig import TINY, forward_of, grouped, in_threads, lowered, make_plan, whole_model

from meshwright.capture.resolve import build_model
from meshwright.errors import PlanMismatch
from meshwright.job import Training
from meshwright.plan.shards import local_values
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.launch.outcome import walk_orders
from meshwright.run.train.data import Batches, open_data
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes
from meshwright.testing.serial import serial_losses

CPU = torch.device("cpu")
GLOBAL_BATCH = 8


def train(degrees, microbatch, steps, *, model=TINY, collective="ring", groups=False, data="python-source"):
    layout, program, callees = lowered(model, degrees, microbatch=microbatch, global_batch=GLOBAL_BATCH, collective=collective)
    flat = inline(program, callees).program
    orders, graph = fuse_lanes(flat), forward_of(model, microbatch)
    _, parameters, buffers = whole_model(model)
    dataset = open_data(data, build_model(model, device="cpu", batch_size=microbatch).inputs, 0)

    def body(rank, group):
        module = build_rank_module(graph, layout, rank, parameters, buffers, device=CPU, gradient_bytes=gradient_bytes(flat, rank))
        optimizer = make_optimizer("adamw", [(p.name, p.tensor) for p in module.trained()], 1e-3)
        work = TrainingWork(flat, layout, rank, module, Batches(dataset, layout, graph.inputs, CPU), optimizer)
        memory = RankMemory(flat, rank, CPU, local_values(layout, rank), module.gradients, layout=layout)
        transport = grouped(group) if groups else TaggedTransport(group)
        executor = Executor(flat, orders, rank, memory=memory, transport=transport, work=work)
        losses = []
        for step in range(steps):
            work.begin(step)
            executor.run()
            losses.append(work.loss())
            assert not executor._sent and not executor._received
            assert all(v is None for v in memory.values), "a value outlived the step"
        return losses, {p.name: p.tensor.detach().clone() for p in module.parameters.values()}

    results = in_threads(layout.ranks, body)
    last = [x for r, (x, _) in enumerate(results) if layout.coordinates(r)[0] == layout.pipeline - 1 and layout.coordinates(r)[2] == 0]
    return layout, [sum(c) / len(c) for c in zip(*last, strict=True)], [p for _, p in results]


@pytest.fixture(scope="module")
def serial():
    torch.set_num_threads(1)
    return serial_losses(Training(model=TINY, global_batch=GLOBAL_BATCH), data="python-source", steps=8)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("degrees", "microbatch", "steps"),
    [((4, 1, 1), 2, 8), ((2, 2, 1), 2, 8), ((2, 1, 2), 1, 8), ((1, 1, 4), 2, 8), ((1, 2, 2), 2, 8), ((1, 4, 1), 8, 5), ((1, 1, 1), 4, 5)],
)
def test_loss_curve_equals_serial(degrees, microbatch, steps, serial):
    _, losses, _ = train(degrees, microbatch, steps)
    assert losses == pytest.approx(serial[:steps], rel=1e-5)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert losses[-1] < losses[0] - 0.3  # it learns


def test_a_tied_head_over_two_stages_trains_as_one_parameter():
    model = "examples/gpt.py:tiny_tied"
    expected = serial_losses(Training(model=model, global_batch=GLOBAL_BATCH), data="python-source", steps=6)
    layout, losses, parameters = train((2, 1, 2), 2, 6, model=model)
    assert losses == pytest.approx(expected, rel=1e-5)
    shared = [p for p in layout.stages[0].params if p in layout.stages[1].params]
    assert shared
    for name in shared:
        copies = [p[name] for p in parameters if name in p]
        assert len(copies) == 4
        assert all(torch.equal(copies[0], c) for c in copies)


def test_replicas_and_whole_parameters_stay_equal():
    layout, _, parameters = train((2, 2, 1), 2, 3)
    sharded = {s.param for s in layout.shards}
    for name in parameters[0]:
        groups = [(0, 1, 2, 3)] if name not in sharded else [(0, 2), (1, 3)]
        for ranks in groups:
            assert all(torch.equal(parameters[ranks[0]][name], parameters[r][name]) for r in ranks), name


def test_groups_in_one_order_are_enough_without_tags(serial):
    """What NCCL needs: messages match by order alone, and a rank that has begun a group goes on when all of it is done."""
    for degrees, microbatch in (((2, 1, 2), 1), ((2, 2, 1), 2), ((1, 1, 4), 2)):
        _, losses, _ = train(degrees, microbatch, 4, groups=True)
        assert losses == pytest.approx(serial[:4], rel=1e-5)


def test_forestcoll_gradients(serial):
    _, losses, _ = train((4, 1, 1), 2, 4, collective="forestcoll")
    assert losses == pytest.approx(serial[:4], rel=1e-5)


def test_two_runs_give_equal_bits():
    a, b = train((2, 1, 2), 1, 3)[1], train((2, 1, 2), 1, 3)[1]
    assert a == b


def test_a_parameter_that_the_plan_does_not_train_must_not_be_trained():
    layout, program, callees = lowered(TINY, (1, 1, 1), microbatch=2, global_batch=GLOBAL_BATCH, collective="ring")
    _, parameters, buffers = whole_model(TINY)
    name, sizes = next(iter(parameters)), gradient_bytes(inline(program, callees).program, 0)
    planned = msgspec.structs.replace(layout, frozen=(name,))
    with pytest.raises(PlanMismatch, match=re.escape(f"does not train parameter {name!r}")):
        build_rank_module(forward_of(TINY, 2), planned, 0, parameters, buffers, device=CPU, gradient_bytes=sizes)


def test_a_walk_waits_for_a_message_when_it_is_used():
    """One that is late must not hold up a computation that does not read it."""
    plan = make_plan((1, 1, 3), global_batch=16)
    program = inline(plan.main, plan.programs).program
    s = program.steps
    waited = 0
    for order in walk_orders(plan):
        place = {step: i for i, step in enumerate(order.tolist())}
        users = {r: c for c in place if s.kind[c] == Kind.COMPUTE for r in s.after_step[s.after_ptr[c] : s.after_ptr[c + 1]].tolist()}
        for receive, user in users.items():
            if s.parts[receive] & Part.RECV:
                between = order[place[receive] + 1 : place[user]]
                assert not any(s.kind[x] == Kind.COMPUTE for x in between.tolist())
                waited += 1
    assert waited > 10
