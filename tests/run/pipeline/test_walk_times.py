"""One thread per rank walks all its lanes in a fused order: with free messages that costs nothing against lanes that run side by side."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive_pipelines import plan_pipeline, problem_of_plan, schedule_of_plan
from meshwright.program import Kind, Part, Program
from meshwright.program_calls import inline
from meshwright.run.lanes import channel_messages
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
