"""The event engine: a million steps on exclusive and on fair links, a 1,024-GPU training step by folding, against a plain Python loop.

Run: `python benchmarks/simulate.py`. Times are processor seconds of this process, best of 3, after one small run that compiles; the first
compilation is measured in a process of its own with an empty cache. "engine" is the event loop alone, "call" is
`simulate_program` without recording, all tables included.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import megatron_step
import numpy as np

from meshwright.cost import Cost, Priced
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.builder import ProgramBuilder
from meshwright.program.fold import expand
from meshwright.program.program import Program
from meshwright.simulate import compile_network, simulate_folded, simulate_program
from meshwright.simulate.engine import run
from meshwright.simulate.tables import link_tables, make_state, program_tables
from meshwright.testing.engine_twin import simulate_twin

MESSAGE_BYTES = (100_000, 200_000, 300_000, 400_000, 500_000)


def senders(pairs: list[tuple[int, int]], ranks: int, messages: int) -> Program:
    """Per pair `messages` messages of varying size; one lane sends, one receives, depth 2."""
    b = ProgramBuilder(ranks, name="senders")
    for src, dst in pairs:
        x = b.buffer(src, chunks=8, chunk_bytes=MESSAGE_BYTES[0], role="input", window=1)
        y = b.buffer(dst, chunks=8, chunk_bytes=MESSAGE_BYTES[0], window=1)
        channel, send, recv = b.channel(src, dst, depth=2), b.lane(src), b.lane(dst)
        for i in range(messages):
            count = 1 + (7 * i + src) % 5
            send.send(channel, x, 0, count)
            recv.recv(channel, y, 0, count)
    return b.build(validate=False)


def fabric_of(ranks: int, hops: int) -> Fabric:
    """Direct links (1 hop), a switch (2), or two switches joined by a trunk through a third (4); port rates differ a little."""
    names = [f"d{i}" for i in range(ranks)]
    links = []
    for i, name in enumerate(names):
        rate = 10**9 + 1009 * i
        if hops == 1:
            links.append(Link(src=name, dst=names[(i + 1) % ranks], rate_Bps=rate, latency_s=1e-6))
        else:
            switch = "a" if hops == 2 or i % 2 == 0 else "b"
            links += [Link(src=name, dst=switch, rate_Bps=rate, latency_s=1e-6), Link(src=switch, dst=name, rate_Bps=rate, latency_s=1e-6)]
    switches = () if hops == 1 else ("a",) if hops == 2 else ("a", "b", "trunk")
    if hops == 4:
        for end in "ab":
            links += [Link(src=x, dst=y, rate_Bps=2 * 10**10, latency_s=1e-6) for x, y in ((end, "trunk"), ("trunk", end))]
    return Fabric(
        name=f"{hops} hops", devices=tuple(Device(name=n) for n in names), switches=tuple(Switch(name=s) for s in switches), links=tuple(links)
    )


def timed(p: Program, fabric: Fabric, mode: str) -> dict[str, Any]:
    names = [d.name for d in fabric.devices]
    durations = 1e-5 + 1e-7 * (np.arange(len(p.steps)) % 97)
    t, messages = program_tables(p, durations, p.message_bytes(), p.channels.depth)
    k = link_tables(compile_network(p, fabric, names, mode=mode))  # type: ignore[arg-type]
    best = float("inf")
    for _ in range(3):
        state = make_state(t, k, messages, record=False)
        start = time.process_time()
        run(t, k, state, False)
        best = min(best, time.process_time() - start)

    def call(record: bool) -> Any:
        return simulate_program(p, fabric, names, durations_s=durations, network=mode, record=record)  # type: ignore[arg-type]

    whole, timeline = machine.cpu_s(lambda: call(False))
    recorded, _ = machine.cpu_s(lambda: call(True), repeat=1)
    return {"steps": p.executed_steps, "engine_s": best, "call_s": whole, "recorded_call_s": recorded, "makespan_s": timeline.makespan_s}


def against_twin(hops: int, mode: str) -> dict[str, Any]:
    """The same small program in the plain Python twin (a heap of callbacks and generators) and in the compiled engine."""
    ranks = 16
    p = senders([(i, (i + 1) % ranks) for i in range(ranks)], ranks, 100)
    fabric = fabric_of(ranks, hops)
    durations = np.full(len(p.steps), 1e-5)
    t, messages = program_tables(p, durations, p.message_bytes(), p.channels.depth)
    k = link_tables(compile_network(p, fabric, [d.name for d in fabric.devices], mode=mode))  # type: ignore[arg-type]
    slow_s, twin = machine.cpu_s(lambda: simulate_twin(t, k), repeat=1)
    states = [make_state(t, k, messages, record=True) for _ in range(20)]
    start = time.process_time()
    for state in states:
        run(t, k, state, True)
    quick_s = (time.process_time() - start) / len(states)
    same = all(states[0].instance["end"][t.record_at[step] + turn] == end for (step, turn), end in twin.end.items())
    return {"steps": len(p.steps), "twin_s": slow_s, "engine_s": quick_s, "equal_bits": same}


def folded_1024() -> dict[str, Any]:
    shape = megatron_step.Shape(pipeline=16, tensor=8, data=8, microbatches=64, layers=96)
    cost = Cost(table={key: Priced(value) for key, value in megatron_step.DURATIONS_S.items()})
    fabric, names = megatron_step.boxes(shape.ranks)

    def once() -> Any:
        program, rings = megatron_step.build(shape, folded=True)
        return program, simulate_folded(program, replace(fabric), names, cost, programs=rings)  # a fabric without known routes

    cpu_s, (program, timeline) = machine.cpu_s(once)
    return {"cpu_s": cpu_s, "stored_steps": len(program.steps), "makespan_s": timeline.makespan_s, "network": timeline.attributes["network"]}


def folded_equals_plain() -> list[dict[str, Any]]:
    cost = Cost(table={key: Priced(value) for key, value in megatron_step.DURATIONS_S.items()})
    rows = []
    for pipeline, tensor, data, microbatches, layers, box in ((2, 2, 2, 4, 4, 8), (4, 2, 2, 6, 8, 8), (4, 4, 2, 8, 8, 8), (4, 4, 4, 8, 8, 4)):
        shape = megatron_step.Shape(pipeline=pipeline, tensor=tensor, data=data, microbatches=microbatches, layers=layers)
        fabric, names = megatron_step.boxes(shape.ranks, box)
        folded, rings = megatron_step.build(shape, folded=True)
        plain, _ = megatron_step.build(shape, folded=False)
        short_s, one = machine.cpu_s(lambda a=folded, b=fabric, c=names, d=rings: simulate_folded(a, b, c, cost, programs=d), repeat=1)
        rings = {name: expand(r) for name, r in rings.items()}
        long_s, other = machine.cpu_s(
            lambda a=plain, b=fabric, c=names, d=rings, e=one.attributes["network"]: simulate_program(
                a, b, c, cost, programs=d, network=e, record=False
            ), repeat=1,
        )  # fmt: skip
        rows.append(
            {"ranks": shape.ranks, "folded_s": short_s, "plain_s": long_s, "makespan_s": one.makespan_s,
             "relative_difference": abs(one.makespan_s / other.makespan_s - 1.0)}
        )  # fmt: skip
    return rows


def first_compile_s() -> float:
    """Processor seconds of import and one small recorded simulation with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        return float(machine.fresh("simulate", "--first")["cpu_s"])


def small() -> None:
    p = senders([(0, 1)], 2, 2)
    for mode in ("exclusive", "fair"):
        simulate_program(p, fabric_of(2, 2), ["d0", "d1"], network=mode)  # type: ignore[arg-type]


def main() -> None:
    if "--first" in sys.argv:
        small()
        print(f'{{"cpu_s": {time.process_time()}}}')
        return
    compile_s = first_compile_s()
    del os.environ["NUMBA_CACHE_DIR"]
    small()
    ring = [(i, (i + 1) % 64) for i in range(64)]
    cases = {
        "1 hop, exclusive": (senders(ring, 64, 7813), fabric_of(64, 1), "exclusive", 1.0),
        "2 hops, exclusive": (senders(ring, 64, 7813), fabric_of(64, 2), "exclusive", 1.0),
        "4 hops, exclusive": (senders(ring, 64, 7813), fabric_of(64, 4), "exclusive", 1.0),
        "2 hops, fair": (senders(ring, 64, 7813), fabric_of(64, 2), "fair", 5.0),
        "4 hops, fair, 200 flows through one trunk": (senders([(2 * i, 2 * i + 1) for i in range(200)], 400, 2500), fabric_of(400, 4), "fair", 5.0),
    }
    facts: dict[str, Any] = {"first_compile_s": compile_s, "engine": {}, "twin": {}}
    rows = []
    for name, (program, fabric, mode, limit) in cases.items():
        facts["engine"][name] = found = timed(program, fabric, mode)
        rows.append({"what": f"{found['steps']} steps, {name}: call", "value": round(found["call_s"], 4), "unit": "s", "limit": limit})
    for name, hops, mode in (("2 hops, exclusive", 2, "exclusive"), ("2 hops, fair", 2, "fair")):
        facts["twin"][name] = found = against_twin(hops, mode)
        rows.append({"what": f"engine against the plain Python twin, {name}", "value": found["engine_s"], "unit": "s", "peer": found["twin_s"]})
    facts["folded_1024"] = found = folded_1024()
    rows.append({"what": "1,024-GPU training step, built, folded and simulated", "value": round(found["cpu_s"], 4), "unit": "s", "limit": 2.0})
    facts["folded_equals_plain"] = equal = folded_equals_plain()
    worst = max(row["relative_difference"] for row in equal)
    rows.append({"what": "folded against plain makespan, largest difference", "value": worst, "unit": "relative", "limit": 1e-9})
    rows.append({"what": "first compilation", "value": round(compile_s, 2), "unit": "s", "limit": 20.0})
    machine.record("simulate", rows, **facts)
    for row in rows:
        print(f"{row['what']:<75} {row['value']:>12.6g} {row['unit']:<9} {row.get('ratio', '')}")


if __name__ == "__main__":
    main()
