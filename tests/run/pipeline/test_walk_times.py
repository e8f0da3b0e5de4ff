"""One thread per rank walks all its lanes in a fused order: with free messages that costs nothing against lanes that run side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import plan_pipeline, problem_of_plan, schedule_of_plan
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part, Program
from meshwright.run.executor.lanes import channel_messages, fuse_lanes
from meshwright.run.pipeline.orders import pipeline_orders


def walked_s(program: Program, orders: list[Any], seconds: dict[int, float]) -> float:
    """Every rank does its steps in order: a receive waits until its message has been sent, a compute step takes `seconds`."""
    s = program.steps
    sends, receives = channel_messages(program)
    message = {b: a for row, to in zip(sends, receives, strict=True) for a, b in zip(row, to, strict=True)}
    now, place, sent = [0.0] * program.ranks, [0] * program.ranks, dict[int, float]()
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                step = int(order[place[rank]])
                if s.parts[step] & Part.RECV:
                    if message[step] not in sent:
                        break
                    now[rank] = max(now[rank], sent[message[step]])
                if s.kind[step] == Kind.COMPUTE:
                    now[rank] += seconds[step]
                if s.parts[step] & Part.SEND:
                    sent[step] = now[rank]
                place[rank] += 1
                left -= 1
        assert left < before, "the walks wait for each other"
    return max(now)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth-first", "interleaved-zb", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_walks_end_when_the_lanes_do(name: str, microbatches: int) -> None:
    problem = PipelineProblem.of(
        4, microbatches, forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02, first_input_grad=False, message_bytes=4096, p2p_latency_s=4e-4
    )
    plan = plan_pipeline(problem, name, {})
    orders, timeline = pipeline_orders(plan, problem_of_plan(plan), schedule_of_plan(plan))
    spans = timeline.spans
    seconds = {step: end - start for step, start, end in zip(spans.step.tolist(), spans.start_s.tolist(), spans.end_s.tolist(), strict=True)}
    program = inline(plan.main, plan.programs).program
    assert walked_s(program, orders, seconds) <= timeline.makespan_s * (1 + 1e-9)


def test_a_sum_that_is_ready_leaves_before_the_next_message_is_waited_for() -> None:
    """Both are due when the first computation ends; only one of them waits for somebody."""
    b = ProgramBuilder(ranks=2, name="one sum, one message")
    gradients, message = ([b.buffer(r, chunks=1, chunk_bytes=4, role="scratch", name=f"{what}{r}") for r in (0, 1)] for what in ("sum", "message"))
    into, onto = b.channel(1, 0), b.channel(0, 1)
    compute, receives, sums = b.lane(0), b.lane(0), b.lane(0)
    first = compute.compute(b.op("B", reads=[], writes=[(gradients[0], 0, 1)]))
    arrived = receives.recv(into, message[0], 0)
    compute.compute(b.op("B", reads=[(message[0], 0, 1)], writes=[]), after=[arrived])
    sums.nop(after=[first])
    sums.send(onto, gradients[0], 0)
    b.lane(1).send(into, message[1], 0)
    b.lane(1).recv(onto, gradients[1], 0)
    program = b.build()
    seconds = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), np.array([1.0, 2.0, 0.5, 1.0, 1.2, 0.5, 1.2])  # start, end
    order = fuse_lanes(program, *seconds, late_receives=True)[0].tolist()
    kinds = [(int(program.steps.kind[s]), bool(program.steps.parts[s] & Part.RECV)) for s in order]
    assert kinds == [(Kind.COMPUTE, False), (Kind.NOP, False), (Kind.TRANSFER, False), (Kind.TRANSFER, True), (Kind.COMPUTE, False)]
