"""Oracles for collective planners: a symbolic executor, brute force over cuts, random balanced fabrics.

Written from `program.md` alone; shares nothing with the planners, the checker or the simulator.
"""

from __future__ import annotations

from collections import Counter, deque
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.program import Part, Program

Value = Counter  # (origin rank, origin chunk, iteration) -> how often it is in the sum


class Stuck(AssertionError):
    pass


def execute(program: Program, rng: np.random.Generator) -> dict[tuple[int, int, int], Value]:
    """Run the program with lanes in random order; returns (buffer, iteration, chunk) -> value. Raises Stuck on a deadlock.

    Buffers start with the contract's inputs; what is no input is unknown (absent). Reading an unknown chunk fails.
    """
    contract, steps, channels, lanes = program.contract, program.steps, program.channels, program.lanes
    assert contract is not None
    iterations = int(lanes.repeat.max()) if len(lanes) else 1
    memory: dict[tuple[int, int, int], Value] = {}
    for rank, (buffer, first, count) in enumerate(contract.inputs):
        if contract.op in ("broadcast", "scatter") and rank != contract.root:
            continue
        for i, j in product(range(iterations), range(count)):
            memory[buffer, i, first + j] = Counter({(rank, j, i): 1})
    fifo: list[deque[list[Value]]] = [deque() for _ in range(len(channels))]
    done = np.zeros(len(steps), np.int64)
    held: dict[int, list[Value]] = {}  # a lane between the receive and the send part of its step
    at = [(0, int(start)) for start in lanes.start]  # (iteration, step) per lane

    def cells(buffer: int, chunk: int, count: int, iteration: int) -> list[tuple[int, int, int]]:
        return [(buffer, iteration, chunk + j) for j in range(count)]

    def advance(lane: int) -> bool:
        iteration, index = at[lane]
        if iteration >= lanes.repeat[lane] or lanes.start[lane] == lanes.end[lane]:
            return False
        step = program.step(index)
        if any(done[other] <= iteration - lag for other, lag in step.after):
            return False
        if lane not in held:
            received: list[Value] | None = None
            if Part.RECV in step.parts:
                assert channels.dst[step.chan_in] == step.actor
                if not fifo[step.chan_in]:
                    return False
                received = fifo[step.chan_in].popleft()
                assert len(received) == step.count
            local = [memory[c] for c in cells(*step.src, step.count, iteration)] if Part.READ in step.parts else None
            if Part.ADD in step.parts:
                assert local is not None
                other = received if received is not None else [memory[c] for c in cells(*step.dst, step.count, iteration)]
                value = [a + b for a, b in zip(other, local, strict=True)]
            else:
                value = received if received is not None else local
            assert value is not None
            if Part.STORE in step.parts:
                memory.update(zip(cells(*step.dst, step.count, iteration), value, strict=True))
            held[lane] = value
        if Part.SEND in step.parts:
            assert channels.src[step.chan_out] == step.actor
            if len(fifo[step.chan_out]) >= channels.depth[step.chan_out]:
                return False
            fifo[step.chan_out].append(list(held[lane]))
        del held[lane]
        done[index] += 1
        at[lane] = (iteration, index + 1) if index + 1 < lanes.end[lane] else (iteration + 1, int(lanes.start[lane]))
        return True

    moved = True
    while moved:
        moved = False
        for lane in rng.permutation(len(lanes)):
            while advance(int(lane)):
                moved = True
    unfinished = [lane for lane in range(len(lanes)) if at[lane][0] < lanes.repeat[lane]]
    if unfinished:
        raise Stuck(f"lanes {unfinished} wait for ever at steps {[at[x] for x in unfinished]}")
    assert all(not queue for queue in fifo), "a message was never received"
    return memory


def assert_delivers(program: Program, rng: np.random.Generator) -> None:
    """Every output chunk holds exactly the sum or the copy that the contract promises, in every iteration."""
    contract = program.contract
    assert contract is not None
    memory = execute(program, rng)
    iterations = int(program.lanes.repeat.max())
    n = program.ranks
    given, taken = ([count for _, _, count in side] for side in (contract.inputs, contract.outputs))
    owner = [(r, j) for r in range(n) for j in range(given[r])]  # of an all-gather's output chunks
    for rank, (buffer, first, count) in enumerate(contract.outputs):
        if (contract.op in ("reduce", "gather") and rank != contract.root) or (contract.op == "permute" and contract.peers[rank] < 0):
            continue
        for i, j in product(range(iterations), range(count)):
            if contract.op in ("all-gather", "gather"):
                wanted = Counter({(*owner[j], i): 1})
            elif contract.op == "broadcast":
                wanted = Counter({(contract.root, j, i): 1})
            elif contract.op == "scatter":
                wanted = Counter({(contract.root, sum(taken[:rank]) + j, i): 1})
            elif contract.op == "all-to-all":
                block = count // n
                wanted = Counter({(j // block, rank * block + j % block, i): 1})
            elif contract.op == "permute":
                wanted = Counter({(contract.peers[rank], j, i): 1})
            else:
                origin = j + (sum(taken[:rank]) if contract.op == "reduce-scatter" else 0)
                wanted = Counter({(r, origin, i): 1 for r in range(n)})
            assert memory.get((buffer, i, first + j)) == wanted, (contract.op, rank, i, j)


def link_loads(program: Program, fabric: Fabric, ranks: tuple[str, ...]) -> dict[tuple[str, str], int]:
    """Bytes over every pair of actors joined by links, from the program's messages and routes."""
    steps, channels = program.steps, program.channels
    repeat = program.lanes.repeat[program.lane_of_step()]
    moved = program.message_bytes() * repeat
    loads: dict[tuple[str, str], int] = {}
    for index in np.flatnonzero(steps.parts & Part.SEND):
        channel = int(steps.chan_out[index])
        if channels.route[channel] >= 0:
            names = channels.routes[channels.route[channel]]
        else:
            src, dst = (fabric.actor_of[ranks[int(side[channel])]] for side in (channels.src, channels.dst))
            names = (fabric.actor_names[src], *(fabric.links[x].dst for x in fabric.route(src, dst)))
        assert (names[0], names[-1]) == (ranks[int(channels.src[channel])], ranks[int(channels.dst[channel])])
        for hop in pairwise(names):
            loads[hop] = loads.get(hop, 0) + int(moved[index])
    return loads


def pair_rates(fabric: Fabric) -> dict[tuple[str, str], int]:
    rates: dict[tuple[str, str], int] = {}
    for link in fabric.links:
        rates[link.src, link.dst] = rates.get((link.src, link.dst), 0) + link.rate_Bps
    return rates


def bandwidth_time_s(program: Program, fabric: Fabric, ranks: tuple[str, ...]) -> Fraction:
    """Time of the most loaded link at full rate."""
    rates = pair_rates(fabric)
    return max(Fraction(load, rates[hop]) for hop, load in link_loads(program, fabric, ranks).items())


def all_cuts(fabric: Fabric):  # type: ignore[no-untyped-def]
    """Every proper non-empty set of actors, with the rate that leaves it."""
    names = fabric.actor_names
    for bits in range(1, (1 << len(names)) - 1):
        inside = frozenset(name for i, name in enumerate(names) if bits >> i & 1)
        leaving = sum(x.rate_Bps for x in fabric.links if x.src in inside and x.dst not in inside)
        yield inside, leaving


def balanced_fabric(rng: np.random.Generator, devices: int, switches: int, unit: int = 1_000_000) -> Fabric:
    """Random fabric in which every actor takes in what it gives out: closed walks (one-way links) plus cables."""
    names = [f"d{i}" for i in range(devices)] + [f"s{i}" for i in range(switches)]
    rates: dict[tuple[str, str], int] = {}
    walks = [list(rng.permutation(names))]
    for _ in range(int(rng.integers(0, 4))):
        walks.append(list(rng.permutation(names))[: int(rng.integers(2, len(names) + 1))])
    for walk in walks:
        amount = int(rng.integers(1, 6)) * unit
        for u, v in zip(walk, walk[1:] + walk[:1], strict=True):
            rates[str(u), str(v)] = rates.get((str(u), str(v)), 0) + amount
    groups = rng.integers(0, 3, len(names))
    return Fabric(
        name="random",
        devices=tuple(Device(name=names[i], group=f"box{groups[i]}") for i in range(devices)),
        switches=tuple(Switch(name=f"s{i}", group=f"box{groups[devices + i]}") for i in range(switches)),
        links=tuple(Link(src=u, dst=v, rate_Bps=r) for (u, v), r in sorted(rates.items())),
    )


def two_islands(k: int = 2, link_Bps: int = 125_000_000, trunk_Bps: int = 25_000_000, latency_s: float = 5e-5) -> Fabric:
    cables = [(f"d{i}", f"s{i // k}", link_Bps) for i in range(2 * k)] + [("s0", "s1", trunk_Bps)]
    return Fabric(
        name="two-islands",
        devices=tuple(Device(name=f"d{i}", group=f"island{i // k}") for i in range(2 * k)),
        switches=(Switch(name="s0", group="island0"), Switch(name="s1", group="island1")),
        links=tuple(Link(src=a, dst=b, rate_Bps=r, latency_s=latency_s) for u, v, r in cables for a, b in ((u, v), (v, u))),
    )


def full_mesh(n: int, rate_Bps: int = 10**9) -> Fabric:
    return Fabric(
        name="mesh",
        devices=tuple(Device(name=f"d{i}") for i in range(n)),
        links=tuple(Link(src=f"d{i}", dst=f"d{j}", rate_Bps=rate_Bps) for i in range(n) for j in range(n) if i != j),
    )


def line(n: int, rate_Bps: int = 10**9) -> Fabric:
    return Fabric(
        name="line",
        devices=tuple(Device(name=f"d{i}") for i in range(n)),
        links=tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=rate_Bps) for i in range(n - 1) for a, b in ((i, i + 1), (i + 1, i))),
    )
