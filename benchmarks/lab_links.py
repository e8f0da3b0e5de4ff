"""Is the lab's network what it says? Goodput of shaped links, what the processors carry, what a relay carries, gloo against arithmetic.

Needs the right to make namespaces. Goodput is payload at a Python receiver after two buckets; its ceiling follows from the rate and the headers
(1448 of 1514 bytes). gloo's all-reduce is a ring: 2 (n-1)/n of the buffer crosses each link, so its time over the slowest link is arithmetic.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

BUILDS, ROUNDS = 5, 5
GLOO = """
import sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(int(sys.argv[1]) // 4)
for _ in range(int(sys.argv[2]) + 1):
    x.fill_(1); dist.barrier(); begin = time.perf_counter(); dist.all_reduce(x); took = time.perf_counter() - begin
    assert bool((x == dist.get_world_size()).all())
    print(took)
dist.destroy_process_group()
"""


def links(mbit: int) -> dict[str, Any]:
    """Errors of four directions over several builds, without raising a bucket."""
    from meshwright.lab import Lab

    errors, trips, burst = [], [], 0
    for _ in range(BUILDS):
        with Lab.up(f"star:2?link={mbit * 125_000}B/s") as lab:
            errors += [x.goodput_Bps / x.ceiling_Bps - 1 for x in lab.state.links]
            trips += [x.round_trip_s for x in lab.state.links]
            burst = lab.state.links[0].burst_bytes
    return {
        "what": f"goodput of {mbit} Mbit/s links, worst of {len(errors)}", "value": max(map(abs, errors)), "unit": "of the ceiling", "limit": 0.03,
        "median": statistics.median(map(abs, errors)), "errors": errors, "round_trip_s": statistics.median(trips), "burst_bytes": burst,
    }  # fmt: skip


def carried() -> dict[str, Any]:
    """One TCP stream through links that are far too fast to be the limit: what two processes on this machine move."""
    from meshwright.lab import Lab
    from meshwright.lab.calibrate_worker import CHUNK_BYTES

    code = (
        "import os, socket, sys, time\n"
        f"b = bytearray({CHUNK_BYTES}); at = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if os.environ['RANK'] == '0':\n"
        "    s = socket.create_server(at); p = s.accept()[0]; got = 0; begin = time.perf_counter()\n"
        "    while n := p.recv_into(b): got += n\n"
        "    print(got / (time.perf_counter() - begin))\n"
        "else:\n"
        "    time.sleep(0.5); p = socket.create_connection(at); end = time.perf_counter() + 2\n"
        "    while time.perf_counter() < end: p.sendall(b)\n"
    )
    with Lab.up("star:2?link=20GB/s", verify=False, force=True) as lab:
        rates = [float(lab.run([sys.executable, "-c", code]).outputs[0]) for _ in range(ROUNDS)]
    from meshwright.lab.scaling import CARRY_Bps_PER_CORE
    from meshwright.run.machine.pacing import machine_facts

    limit = CARRY_Bps_PER_CORE * machine_facts().cores
    return {"what": "limit of all rates together against one unshaped stream", "value": limit, "unit": "B/s", "peer": max(rates), "rates": rates}


def relayed(mbit: int) -> dict[str, Any]:
    """Eight directions with 1 ms of delay, four at the same moment, through one relay."""
    from meshwright.errors import RunError
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab, calibrate, impair

    impair.MAX_RELAY_Bps = impair.MAX_RELAY_SUM_Bps = 10**12  # what is beyond the limit is what is looked for

    fabric = load_fabric(f"star:4?link={mbit * 125_000}B/s")
    fabric = replace(fabric, links=tuple(replace(x, latency_s=1e-3) for x in fabric.links))
    calibrate.MAX_PHASE_Bps, before = 10**12, calibrate.MAX_PHASE_Bps
    try:
        with Lab.up(fabric, force=True) as lab:
            errors = [x.goodput_Bps / x.ceiling_Bps - 1 for x in lab.state.links]
            trips = [x.round_trip_s for x in lab.state.links]
    except RunError as error:
        return {"what": f"four relayed directions of {mbit} Mbit/s", "value": 1.0, "unit": "of the ceiling", "limit": 0.03, "refused": str(error)}
    finally:
        calibrate.MAX_PHASE_Bps = before
    return {
        "what": f"four relayed directions of {mbit} Mbit/s at once, worst", "value": max(map(abs, errors)), "unit": "of the ceiling", "limit": 0.03,
        "round_trip_s": statistics.median(trips),
    }  # fmt: skip


DUPLEX = """
import os, socket, sys, threading, time
size, first, at = int(sys.argv[1]), os.environ["RANK"] == "0", (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
server = socket.create_server(at) if first else None
def connected():
    while True:
        try: return server.accept()[0] if first else socket.create_connection(at)
        except OSError: time.sleep(0.01)
a, b = connected(), connected()
out, into = (a, b) if first else (b, a)
buffer = bytearray(1 << 18)
for _ in range(int(sys.argv[2]) + 1):
    out.send(b"x"); into.recv(1); begin = time.perf_counter(); left = size
    sends = threading.Thread(target=out.sendall, args=(bytes(size),)); sends.start()
    while left: left -= into.recv_into(buffer, min(len(buffer), left))
    print(time.perf_counter() - begin); sends.join()
"""


def duplex(acks_first: bool) -> dict[str, Any]:
    """8 MiB each way at once between devices at 400 and 100 Mbit/s."""
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab, planning

    fabric = load_fabric("star:2?link=50MB/s")
    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=12_500_000) if "d1" in (x.src, x.dst) else x for x in fabric.links))
    kept = planning.has_priorities
    if not acks_first:
        planning.has_priorities = lambda path: False
    try:
        with Lab.up(fabric) as lab:
            result = lab.run([sys.executable, "-c", DUPLEX, str(8 << 20), str(ROUNDS)], timeout_s=120)
    finally:
        planning.has_priorities = kept
    times = [max(map(float, ranks)) for ranks in zip(*(out.split() for out in result.outputs), strict=True)][1:]
    assert result.machine is not None
    return {
        "what": f"8 MiB both ways at 100 Mbit/s, acknowledgements {'first' if acks_first else 'in line'}", "value": statistics.median(times),
        "unit": "s", "peer": (8 << 20) / (12.5e6 * 1448 / 1514), "times_s": times, "machine": result.machine.to_json(),
    }  # fmt: skip


def gloo(what: str, fabric: Any, size_bytes: int, ring_link_Bps: float, order: list[int] | None = None) -> dict[str, Any]:
    from meshwright.lab import Lab

    with Lab.up(fabric) as lab:
        result = lab.run([sys.executable, "-c", GLOO, str(size_bytes), str(ROUNDS)], order=order, timeout_s=300)
    times = [max(map(float, ranks)) for ranks in zip(*(out.split() for out in result.outputs), strict=True)][1:]  # of the last rank to end
    n = len(fabric.devices)
    peer = 2 * (n - 1) / n * size_bytes / (ring_link_Bps * 1448 / 1514)
    return {"what": what, "value": statistics.median(times), "unit": "s", "peer": peer, "times_s": times, "machine": result.machine.to_json()}


def build_time(name: str, devices: str | None, scale: int, verify: bool) -> dict[str, Any]:
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab

    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with Lab.up(load_fabric(name, devices), scale=scale, verify=verify, force=True):
            times.append(time.perf_counter() - begin)
    return {"what": f"building {name}" + (", measured" if verify else ""), "value": statistics.median(times), "unit": "s"}


def main() -> None:
    from meshwright.io.fabric.name import load_fabric

    star = load_fabric("star:4?link=50MB/s")
    slow = replace(star, links=tuple(replace(x, rate_Bps=12_500_000) if "d3" in (x.src, x.dst) else x for x in star.links))
    islands = load_fabric("two-islands:4")
    rows = [
        *(links(mbit) for mbit in (100, 400, 1000)),
        carried(),
        duplex(False),
        duplex(True),
        *(relayed(mbit) for mbit in (100, 250, 500)),
        gloo("gloo all-reduce, 8 MiB, 4 x 400 Mbit/s", star, 8 << 20, 50e6),
        gloo("gloo all-reduce, 8 MiB, 400/400/400/100 Mbit/s", slow, 8 << 20, 12.5e6),
        gloo("gloo all-reduce, 8 MiB, two islands, contiguous ranks", islands, 8 << 20, 25e6),
        gloo("gloo all-reduce, 8 MiB, two islands, interleaved ranks", islands, 8 << 20, 25e6 / 4, [0, 4, 1, 5, 2, 6, 3, 7]),
        build_time("star:4?link=50MB/s", None, 1, False), build_time("star:4?link=50MB/s", None, 1, True),
        build_time("dgx1-v100:1", None, 8000, False), build_time("dgx1-v100:1", None, 8000, True),
    ]  # fmt: skip
    machine.record("lab_links", rows)
    for row in rows:
        against = f"{row.get('limit', row.get('peer')):12.4g}  ratio {row['ratio']:.3f}" if "ratio" in row else ""
        print(f"{row['what']:60s} {row['value']:12.4g} {row['unit']:16s} {against}")


if __name__ == "__main__":
    main()
