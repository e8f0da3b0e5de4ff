"""An epoch's exchanges as a program: pack, send while central nodes are computed, then the marginal ones.

Each pair of workers has one channel, with a lane at either end, so computing goes on while messages travel. An exchange waits for what the one
before it left. Weight gradients are summed by the process group and are no part of it.
"""

from __future__ import annotations

import numpy as np

from ....codec.rows import FULL, WIDTHS
from ....graph.graph import Work
from ....plan.halo import HaloGroup, HaloMessage, HaloStep, text_of_widths
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Program, Role, Unit
from .problem import Assignment, Channel, Exchange, HaloProblem

__all__ = ["CENTRAL", "MARGINAL", "PACK", "grouped", "lower_halo", "op_graph", "stated_steps", "works_of"]

PACK, CENTRAL, MARGINAL = "pack", "central", "marginal"


def op_graph(exchange: str, rank: int) -> str:
    return f"{exchange}/{rank}"


def lower_halo(problem: HaloProblem, assignment: Assignment) -> Program:
    """The program, one rank per worker."""
    ranks = len(problem.ranks)
    b = ProgramBuilder(ranks=ranks, name=problem.name)
    computing = [b.lane(k, unit=Unit.COMPUTE, role=Role.COMPUTE) for k in range(ranks)]
    state = [b.buffer(k, chunks=1, chunk_bytes=_state_bytes(problem, k, 0), role="input", name="features") for k in range(ranks)]
    wires: dict[tuple[int, int], tuple[int, LaneBuilder, LaneBuilder]] = {}
    for pair in sorted({(c.src, c.dst) for x in problem.exchanges for c in x.channels if len(c.weight)}):
        wires[pair] = b.channel(*pair, depth=1), b.lane(pair[0]), b.lane(pair[1])
    for at, x in enumerate(problem.exchanges):
        channels = [c for c in x.channels if len(c.weight)]
        sizes = {(c.src, c.dst): problem.size_bytes(x, c, assignment.widths) for c in channels}
        out = {p: b.buffer(p[0], chunks=1, chunk_bytes=size, name=f"{x.name} to {p[1]}") for p, size in sizes.items()}
        got = {p: b.buffer(p[1], chunks=1, chunk_bytes=size, name=f"{x.name} from {p[0]}") for p, size in sizes.items()}
        packed = [
            computing[k].compute(
                b.op(PACK, graph=op_graph(x.name, k), reads=[(state[k], 0, 1)], writes=[(out[p], 0, 1) for p in sizes if p[0] == k])
            )
            for k in range(ranks)
        ]  # fmt: skip
        arrived: dict[tuple[int, int], StepRef] = {}
        for pair in sorted(sizes, key=lambda p: ((p[1] - p[0]) % ranks, p[0])):
            channel, sending, receiving = wires[pair]
            sent = sending.send(channel, out[pair], 0, after=[packed[pair[0]]])
            arrived[pair] = receiving.recv(channel, got[pair], 0, after=[packed[pair[1]]])
            b.dies_after(out[pair], sent)
        for k in range(ranks):
            state[k] = _computed(b, problem, computing[k], x, at, k, state[k], {p: (got[p], arrived[p]) for p in sizes if p[1] == k})
    return b.build()


def _computed(
    b: ProgramBuilder, problem: HaloProblem, lane: LaneBuilder, x: Exchange, at: int, rank: int, state: int,
    came: dict[tuple[int, int], tuple[int, StepRef]],
) -> int:  # fmt: skip
    """Central nodes at once, marginal ones when the halo is there. Returns the buffer of the result."""
    name = op_graph(x.name, rank)
    inner = b.buffer(rank, chunks=1, chunk_bytes=_state_bytes(problem, rank, at), name=f"{x.name} central")
    after = b.buffer(rank, chunks=1, chunk_bytes=_state_bytes(problem, rank, at + 1), name=f"after {x.name}")
    lane.compute(b.op(CENTRAL, graph=name, reads=[(state, 0, 1)], writes=[(inner, 0, 1)]))
    reads = [(inner, 0, 1), *((buffer, 0, 1) for buffer, _ in came.values())]
    done = lane.compute(b.op(MARGINAL, graph=name, reads=reads, writes=[(after, 0, 1)]), after=[step for _, step in came.values()])
    for buffer in (inner, *(buffer for buffer, _ in came.values())):
        b.dies_after(buffer, done)
    b.dies_after(state, done)
    return after


def _state_bytes(problem: HaloProblem, rank: int, at: int) -> int:
    rows = problem.own[rank] if problem.own else 0
    return max(1, 4 * rows * problem.exchanges[min(at, len(problem.exchanges) - 1)].dim) if problem.exchanges else 1


def works_of(problem: HaloProblem) -> dict[str, Work]:
    """By key of the program's ops."""
    return {f"{op_graph(x, rank)}|{part}": work for (rank, x, part), work in problem.works.items()}


def grouped(c: Channel, bits: np.ndarray, group: int) -> tuple[HaloGroup, ...]:
    """Rows by falling weight in groups; one that holds several widths is divided."""
    order = np.argsort(-c.weight, kind="stable")
    found = []
    for first in range(0, len(order), group):
        rows = order[first : first + group]
        for width in (*WIDTHS, FULL):
            mine = rows[bits[rows] == width]
            if len(mine):
                found.append(HaloGroup(len(mine), float(c.weight[mine].sum()), width))
    return tuple(found)


def stated_steps(problem: HaloProblem, assignment: Assignment, group: int) -> tuple[HaloStep, ...]:
    """What the plan says of every message."""

    def message(x: Exchange, c: Channel) -> HaloMessage:
        bits = assignment.widths[x.name, c.src, c.dst]
        size = problem.size_bytes(x, c, assignment.widths)
        return HaloMessage(src=c.src, dst=c.dst, widths=text_of_widths(bits.tolist()), groups=grouped(c, bits, group), size_bytes=size)

    return tuple(HaloStep(name=x.name, dim=x.dim, messages=tuple(message(x, c) for c in x.channels if len(c.weight))) for x in problem.exchanges)
