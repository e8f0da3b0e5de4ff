"""Chunks of an expert layer: a rank sends all it has before it computes, and between two chunks of its experts it waits for the next one alone."""

from __future__ import annotations

import numpy as np
import pytest

import meshwright as mw
from meshwright.check import check_program
from meshwright.cost import assumed_cost
from meshwright.decide.experts import Choice, ExpertShape
from meshwright.drive.experts import LayerPrograms
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.simulate import simulate_program


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_walk_waits_for_the_next_chunk_alone(chunks, backward):
    fabric = mw.read_fabric("star:4?link=12.5MB/s")
    ranks = tuple(d.name for d in fabric.devices)
    programs = LayerPrograms(fabric, ranks, ExpertShape(ranks=4, experts=4, model=8, inner=8))
    made, works = programs.step(Choice(1, chunks, "linear"), 64, backward=backward)
    check_program(made, programs=programs.callees).raise_if_wrong()
    flat = inline(made, programs.callees).program
    spans = simulate_program(flat, fabric, ranks, assumed_cost(fabric), works=works, memory=False).spans
    start, end = np.zeros(len(flat.steps)), np.zeros(len(flat.steps))
    known = spans.step >= 0
    start[spans.step[known]], end[spans.step[known]] = spans.start_s[known], spans.end_s[known]
    for rank, order in enumerate(fuse_lanes(flat, start, end, late_receives=True)):
        done, sent = 0, 0
        for step in order.tolist():
            s = flat.steps
            if s.kind[step] == Kind.COMPUTE:
                assert sent == 3 * (chunks + done), f"rank {rank} computes chunk {done} with {sent} messages sent"
                done += 1
            elif s.parts[step] & Part.RECV:
                name = flat.buffers.name[int(s.dst_buffer[step])]
                assert name.startswith("arrived:") or done == chunks, f"rank {rank} waits for {name} before chunk {done}"
            elif s.parts[step] & Part.SEND:
                sent += 1
        assert (done, sent) == (chunks, 6 * chunks)
