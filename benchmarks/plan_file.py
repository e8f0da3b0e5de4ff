"""A plan of one million stored steps as a file: its size, plain and gzipped, and what loading and validating it costs.

Three programs: a ring all-reduce written out step by step; a pipelined training step with an operation, buffers and names for every
micro-batch; and columns of random numbers, which nothing can compress.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

MIB = 1 << 20


def ring(ranks: int) -> Any:
    """All-reduce over `ranks` ranks: a sending and a receiving lane each, 2 (ranks - 1) steps per lane."""
    from meshwright.program.builder import ProgramBuilder

    b = ProgramBuilder(ranks=ranks, name="ring all-reduce")
    data = [b.buffer(r, chunks=ranks, chunk_bytes=1 << 16, role="input") for r in range(ranks)]
    out = [b.channel(r, (r + 1) % ranks, depth=2) for r in range(ranks)]
    for r in range(ranks):
        sender, receiver = b.lane(r), b.lane(r)
        received = None
        for k in range(2 * (ranks - 1)):
            sender.send(out[r], data[r], (r - k) % ranks, after=[received] if received else [])
            chunk = (r - k - 1) % ranks
            add = receiver.recv_add if k < ranks - 1 else receiver.recv
            received = add(out[(r - 1) % ranks], data[r], chunk)
    return b.build(validate=False)


def pipeline(stages: int, microbatches: int) -> Any:
    """Forward and backward of every micro-batch on every stage, with buffers for activations and gradients."""
    from meshwright.program.builder import ProgramBuilder
    from meshwright.program.program import Role, Unit

    b = ProgramBuilder(ranks=stages, name="pipeline")
    forward = [b.channel(s, s + 1, depth=4) for s in range(stages - 1)]
    backward = [b.channel(s + 1, s, depth=4) for s in range(stages - 1)]
    for s in range(stages):
        compute = b.lane(s, unit=Unit.COMPUTE, role=Role.COMPUTE)
        lanes = [b.lane(s) for _ in range(4)]
        first, last = s == 0, s == stages - 1
        for m in range(microbatches):
            x = b.buffer(s, chunks=1, chunk_bytes=1 << 20, role="activation", name=f"act:block_{s}:{m}")
            g = b.buffer(s, chunks=1, chunk_bytes=1 << 20, role="activation", name=f"grad:block_{s}:{m}")
            got = [] if first else [lanes[0].recv(forward[s - 1], x, 0)]
            f = compute.compute(b.op("F", graph=f"stage{s}", stage=s, microbatch=m, reads=[(x, 0, 1)], writes=[(x, 0, 1)]), after=got)
            if not last:
                lanes[1].send(forward[s], x, 0, after=[f])
            back = [] if last else [lanes[2].recv(backward[s], g, 0)]
            step = compute.compute(b.op("B", graph=f"stage{s}", stage=s, microbatch=m, reads=[(x, 0, 1), (g, 0, 1)], writes=[(g, 0, 1)]), after=back)
            if not first:
                lanes[3].send(backward[s - 1], g, 0, after=[step])
            b.dies_after(x, step)
    return b.build(validate=False)


def noise(steps: int) -> Any:
    """Copies between random places of 500,000 buffers of random sizes, with random `after` edges."""
    import numpy as np

    from meshwright.program.program import Kind, Part, Program
    from meshwright.program.tables import Buffers, Channels, Csr, Lanes, Ops, Steps

    rng = np.random.default_rng(0)
    buffers, n = steps // 2, steps

    def numbers(low: int, high: Any, size: int) -> Any:
        return rng.integers(low, high, size).astype(np.int32)

    def all_(value: int, size: int) -> Any:
        return np.full(size, value, np.int32)

    chunks = numbers(1, 1000, buffers)
    src, dst = numbers(0, buffers, n), numbers(0, buffers, n)
    edges = numbers(0, 2, n)
    pointers = np.zeros(n + 1, np.int32)
    np.cumsum(edges, out=pointers[1:])
    none = np.zeros(0, np.int32)
    return Program(
        ranks=1,
        lanes=Lanes(actor=all_(0, 1), unit=all_(-1, 1), repeat=all_(1, 1), role=all_(1, 1), start=all_(0, 1), end=all_(n, 1)),
        steps=Steps(
            kind=all_(Kind.TRANSFER, n), parts=all_(Part.READ | Part.STORE, n), op=all_(-1, n), chan_in=all_(-1, n), chan_out=all_(-1, n),
            src_buffer=src, src_chunk=numbers(0, chunks[src], n), dst_buffer=dst, dst_chunk=numbers(0, chunks[dst], n),
            count=all_(1, n), size=all_(-1, n), after_ptr=pointers, after_step=numbers(0, n, int(edges.sum())),
            after_lag=all_(0, int(edges.sum())),
        ),
        channels=Channels(src=none, dst=none, tag=none, depth=none, route=none),
        buffers=Buffers(
            actor=all_(0, buffers), space=all_(0, buffers), role=numbers(0, 7, buffers), chunks=chunks,
            chunk_bytes=rng.integers(1, 1 << 20, buffers), size=all_(-1, buffers), alias_of=all_(-1, buffers),
            alias_offset_bytes=np.zeros(buffers, np.int64), window=all_(0, buffers), persistent=all_(0, buffers),
            last=Csr(np.zeros(buffers + 1, np.int32), none), arena_offset=np.full(buffers, -1, np.int64),
        ),
        ops=Ops(
            name=(), graph=(), module=(), copy=none, stage=none, microbatch=none, part=none, parts=none, accumulate=none,
            workspace_bytes=np.zeros(0, np.int64), reads=Csr(), writes=Csr(),
        ),
    )  # fmt: skip


PROGRAMS = {"ring": lambda: ring(501), "pipeline": lambda: pipeline(64, 2630), "random": lambda: noise(1_000_000)}


def write(name: str, folder: str) -> dict[str, Any]:
    """Build and write one plan, plain and gzipped."""
    from meshwright.io.plan.plan import program_hash, write_plan
    from meshwright.plan.plan import CycleEntry, Plan

    program = PROGRAMS[name]()
    key = program_hash(program)
    placement = tuple(f"gpu{r}" for r in range(program.ranks))
    plan = Plan(
        kind="collective", job={}, target_fabric={}, placement=placement, programs={key: program}, cycle=(CycleEntry(program=key),), decisions={}
    )
    start = time.process_time()
    write_plan(f"{folder}/{name}.json", plan)
    written_s = time.process_time() - start
    write_plan(f"{folder}/{name}.json.gz", plan)
    return {"steps": len(program.steps), "write_cpu_s": round(written_s, 3)}


def load(path: str) -> dict[str, Any]:
    """Load and validate in this process."""
    from meshwright.io.plan.plan import read_plan

    before = time.process_time()
    steps = len(read_plan(path).main.steps)
    return {"steps": steps, "cpu_s": round(time.process_time() - before, 3), "memory_bytes": machine.memory_high_water_bytes()}


def main() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            made = machine.fresh("plan_file", "write", name, folder)
            plain, packed = Path(folder, f"{name}.json"), Path(folder, f"{name}.json.gz")
            loads = [machine.fresh("plan_file", "load", str(plain)) for _ in range(3)]
            unpacked = [machine.fresh("plan_file", "load", str(packed)) for _ in range(3)]
            raw[name] = {"write": made, "load": loads, "load_gz": unpacked, "bytes": plain.stat().st_size, "gz_bytes": packed.stat().st_size}
            scale = 1e6 / made["steps"]
            memory_bytes = max(x["memory_bytes"] for x in loads + unpacked)
            compressible = {} if name == "random" else {"limit": 2_000_000}
            rows += [
                {"what": f"{name}: file per million steps", "value": round(plain.stat().st_size * scale), "unit": "bytes", "limit": 35_000_000},
                {"what": f"{name}: gzipped per million steps", "value": round(packed.stat().st_size * scale), "unit": "bytes"} | compressible,
                {"what": f"{name}: load and validate", "value": min(x["cpu_s"] for x in loads), "unit": "s of CPU", "limit": 3},
                {"what": f"{name}: load and validate, gzipped", "value": min(x["cpu_s"] for x in unpacked), "unit": "s of CPU", "limit": 3},
                {"what": f"{name}: resident memory, whole process", "value": memory_bytes, "unit": "bytes", "limit": 400 * MIB},
            ]  # fmt: skip
    return machine.record("plan_file", rows, raw=raw, note="the gzip limit is for programs that planners make; random columns cannot be compressed")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", name, folder]:
            print(json.dumps(write(name, folder)))
        case ["load", path]:
            print(json.dumps(load(path)))
        case _:
            for row in main()["rows"]:
                print(f"{row['what']:<45} {row['value']:>12} {row['unit']:<9} ratio {row.get('ratio', '-')}")
