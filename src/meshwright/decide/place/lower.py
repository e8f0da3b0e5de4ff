"""A placement as a program: each device runs its tasks in order on one lane; each pair of devices has one channel for what one hands to the other.

Messages of a pair follow each other in the order in which their tasks end by the planners' clock, so none waits for one that is not made yet. A
channel has a lane at either end, as a copy engine or a network thread would: tasks go on meanwhile.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...cost import Cost, Priced
from ...program.builder import LaneBuilder, ProgramBuilder, StepRef
from ...program.program import Program, Role, Unit
from .problem import Placement, PlaceProblem

__all__ = ["OP", "lower_placement", "price_table"]

OP = "task"  # name of every task's op; `op.graph` is the task's name


def lower_placement(problem: PlaceProblem, placement: Placement) -> Program:
    """The program, one rank per device of the fabric. Edges of 0 bytes carry one byte where they cross: a message that says that its task is done."""
    graph, devices = problem.graph, problem.fabric.devices
    b = ProgramBuilder(ranks=len(devices), name=graph.name)
    sizes = [max(1, e.size_bytes) for e in graph.edges]
    made = [
        b.buffer(placement.on[i], chunks=1, chunk_bytes=size, name=f"{e.src}>{e.dst}")
        for (i, _), e, size in zip(graph.pairs, graph.edges, sizes, strict=True)
    ]
    crosses = [placement.on[i] != placement.on[j] for i, j in graph.pairs]
    got = [
        b.buffer(placement.on[j], chunks=1, chunk_bytes=size, name=f"{e.src}>{e.dst} received") if across else made[n]
        for n, ((_, j), e, size, across) in enumerate(zip(graph.pairs, graph.edges, sizes, crosses, strict=True))
    ]
    into: list[list[int]] = [[] for _ in graph.tasks]
    out: list[list[int]] = [[] for _ in graph.tasks]
    for n, (i, j) in enumerate(graph.pairs):
        out[i].append(n)
        into[j].append(n)
    computing = [b.lane(k, unit=Unit.COMPUTE, role=Role.COMPUTE) for k in range(len(devices))]
    ends = np.array(placement.start_s) + problem.arrays.dur[np.arange(len(graph.tasks)), list(placement.on)]
    place = {i: n for n, i in enumerate(placement.sequence)}
    messages = Counter((placement.on[i], placement.on[j]) for i, j in graph.pairs)
    wires: dict[tuple[int, int], tuple[int, LaneBuilder, LaneBuilder]] = {}
    arrived: dict[int, StepRef] = {}
    sent: dict[int, StepRef] = {}
    for n in sorted((n for n, across in enumerate(crosses) if across), key=lambda n: (ends[graph.pairs[n][0]], place[graph.pairs[n][0]], n)):
        ends_of = placement.on[graph.pairs[n][0]], placement.on[graph.pairs[n][1]]
        if ends_of not in wires:
            # As deep as it has messages: a message on its way does not hold up the next.
            wires[ends_of] = b.channel(*ends_of, depth=messages[ends_of]), b.lane(ends_of[0]), b.lane(ends_of[1])
        channel, out_lane, in_lane = wires[ends_of]
        sent[n] = out_lane.send(channel, made[n], 0)
        arrived[n] = in_lane.recv(channel, got[n], 0)
        b.dies_after(made[n], sent[n])
    for i in placement.sequence:
        op = b.op(OP, graph=graph.tasks[i].name, reads=[(got[n], 0, 1) for n in into[i]], writes=[(made[n], 0, 1) for n in out[i]])
        done = computing[placement.on[i]].compute(op, after=[arrived[n] for n in into[i] if n in arrived])
        for n in out[i]:
            if crosses[n]:
                wires[placement.on[i], placement.on[graph.pairs[n][1]]][1].wait(sent[n].position, done)
        for n in into[i]:
            b.dies_after(got[n], done)
    return b.build()


def price_table(problem: PlaceProblem, placement: Placement) -> Cost:
    """Seconds of every task on the device that it is placed on."""
    dur = problem.arrays.dur
    table = {f"{t.name}|{OP}": Priced(float(dur[i, placement.on[i]])) for i, t in enumerate(problem.graph.tasks)}
    return Cost(name="tasks", table=table, source="work over the rates that the fabric states")
