"""An oracle for collective programs that computes with numbers: lanes in random order on numpy arrays, results against numpy.

Written from the definition of a program's semantics; shares nothing with planners, checker or simulator.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from meshwright.decide.collective import CollectiveProblem
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.program import Part, Program

Array = NDArray[np.int64]


def hub(n: int, *, rate_Bps: int = 10**9, latency_s: float = 0.0, servers: int = 1) -> Fabric:
    """n devices around a switch that never blocks: a message takes latency + bytes / rate, a port serves one direction at a time."""
    devices = tuple(Device(name=f"d{i}", group=f"host{i * servers // n}") for i in range(n))
    up = tuple(Link(src=d.name, dst="hub", rate_Bps=rate_Bps, latency_s=latency_s) for d in devices)
    down = tuple(Link(src="hub", dst=d.name, rate_Bps=rate_Bps) for d in devices)
    return Fabric(name=f"hub:{n}", devices=devices, switches=(Switch(name="hub"),), links=up + down)


def execute(program: Program, memory: list[Array], rng: np.random.Generator) -> None:
    """Run the program on `memory` (one array per buffer, a row per chunk and iteration). Fails when no lane can go on."""
    lanes, channels = program.lanes, program.channels
    fifo: list[deque[Array]] = [deque() for _ in range(len(channels))]
    done = np.zeros(len(program.steps), np.int64)
    at = [(0, int(s)) for s in lanes.start]
    held: dict[int, Array] = {}
    chunks = program.buffers.chunks

    def rows(place: tuple[int, int], count: int, iteration: int) -> slice:
        first = iteration * int(chunks[place[0]]) + place[1]
        return slice(first, first + count)

    def advance(lane: int) -> bool:
        iteration, index = at[lane]
        if iteration >= lanes.repeat[lane] or lanes.start[lane] == lanes.end[lane]:
            return False
        step = program.step(index)
        if any(done[other] <= iteration - lag for other, lag in step.after):
            return False
        if lane not in held:
            value: Array | None = None
            if Part.RECV in step.parts:
                if not fifo[step.chan_in]:
                    return False
                value = fifo[step.chan_in].popleft()
            if Part.READ in step.parts:
                local = memory[step.src[0]][rows(step.src, step.count, iteration)].copy()
                value = local if value is None else value + local
            assert value is not None and len(value) == step.count
            if Part.STORE in step.parts:
                target = memory[step.dst[0]]
                if Part.ADD in step.parts and Part.RECV not in step.parts:
                    value = value + target[rows(step.dst, step.count, iteration)]
                target[rows(step.dst, step.count, iteration)] = value
            held[lane] = value
        if Part.SEND in step.parts:
            if len(fifo[step.chan_out]) >= channels.depth[step.chan_out]:
                return False
            fifo[step.chan_out].append(held[lane].copy())
        del held[lane]
        done[index] += 1
        at[lane] = (iteration, index + 1) if index + 1 < lanes.end[lane] else (iteration + 1, int(lanes.start[lane]))
        return True

    while True:
        moved = False
        for lane in rng.permutation(len(lanes)):
            moved |= advance(int(lane))
        if not moved:
            break
    unfinished = [i for i, (iteration, _) in enumerate(at) if lanes.start[i] < lanes.end[i] and iteration < lanes.repeat[i]]
    assert not unfinished, f"lanes {unfinished} wait for ever"
    assert not any(fifo), "messages were left over"


def assert_right(program: Program, problem: CollectiveProblem, rng: np.random.Generator) -> None:
    """Random whole numbers in, numpy's answer out, wherever the contract promises one."""
    contract, n = program.contract, len(problem.ranks)
    assert contract is not None and contract.op == problem.op
    turns = int(program.lanes.repeat.max()) if len(program.lanes) else 1
    size = program.buffers.chunks
    memory = [rng.integers(-(10**9), 10**9, (int(size[b]) * turns, 2)) for b in range(len(program.buffers))]

    def get(place: tuple[int, int, int], turn: int) -> Array:
        buffer, first, count = place
        return memory[buffer][turn * int(size[buffer]) + first :][:count].copy()

    inputs = [[get(place, turn) for place in contract.inputs] for turn in range(turns)]
    execute(program, memory, rng)
    for turn, given in enumerate(inputs):
        wanted = expected(problem, given, [count for _, _, count in contract.outputs])
        for rank in range(n):
            if wanted[rank] is not None:
                np.testing.assert_array_equal(get(contract.outputs[rank], turn), wanted[rank], err_msg=f"{problem.op} rank {rank}")


def expected(problem: CollectiveProblem, given: list[Array], counts: list[int]) -> list[Array | None]:
    """What every rank must hold; None = nothing is promised."""
    n, op, root = len(given), problem.op, problem.root
    if op == "all-reduce":
        return [np.sum(given, axis=0)] * n
    if op == "reduce":
        return [np.sum(given, axis=0) if r == root else None for r in range(n)]
    if op == "broadcast":
        return [given[root]] * n
    if op == "all-gather":
        return [np.concatenate(given)] * n
    if op == "gather":
        return [np.concatenate(given) if r == root else None for r in range(n)]
    ends = np.cumsum(counts)
    if op == "reduce-scatter":
        return list(np.split(np.sum(given, axis=0), ends[:-1]))
    if op == "scatter":
        return list(np.split(given[root], ends[:-1]))
    if op == "all-to-all":
        blocks = [np.split(x, n) for x in given]
        return [np.concatenate([blocks[s][r] for s in range(n)]) for r in range(n)]
    assert op == "permute"
    return [given[p] if p >= 0 else None for p in problem.peers]
