"""`meshwright collective handlers`: a switch whose packets small cores add up: which design, how fast, how much memory."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

from .arguments import at_least_one
from .collective_bound import message_bytes, rate_Bps, size_bytes
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "a switch that adds up packets on small cores, simulated: designs side by side, and the fastest that fits its memory"
EPILOG = """\
examples:
  meshwright collective handlers --children 64 --rate 100Gbit/s --size 1MiB
  meshwright collective handlers --children 16 --rate 25Gbit/s --size 64KiB --reproducible

Designs: single, one buffer per block; multi, several; tree, a fold over the children's numbers, whose bits no order of arrival changes. With
`staggered` children begin at different blocks, so that packets of one block do not meet at its lock; more blocks are open then."""
MAX_BLOCKS = 4096  # that are simulated; a larger message goes on at the same rate
MAX_PACKETS = 1 << 15


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--children", type=at_least_one, required=True, help="ports whose packets are summed")
    parser.add_argument("--rate", required=True, help="of a port, such as 100Gbit/s")
    parser.add_argument("--size", required=True, help="of the message, such as 1MiB")
    parser.add_argument("--clusters", type=at_least_one, default=64, help="of cores that share a memory (default %(default)s)")
    parser.add_argument("--cores", type=at_least_one, default=8, help="per cluster (default %(default)s)")
    parser.add_argument("--clock-hz", type=at_least_one, default=10**9, help="of a core (default %(default)s)")
    parser.add_argument("--packet", default="1KiB", help="payload of a packet (default %(default)s)")
    parser.add_argument("--element-bytes", type=int, choices=(1, 2, 4), default=4, help="(default %(default)s)")
    parser.add_argument("--buffers", type=at_least_one, default=4, help="per block of the design multi (default %(default)s)")
    parser.add_argument("--memory", default="", help="memory for sums, such as 4MiB (default: no limit)")
    parser.add_argument("--reproducible", action="store_true", help="only the tree: equal bits whatever the order of arrival")


def run(args: argparse.Namespace) -> Result:
    from ..errors import Infeasible
    from ..simulate.handlers import DESIGNS, HandlerSwitch

    packet_bytes, whole_bytes, rate = size_bytes(args.packet, "--packet"), message_bytes(args.size, args.element_bytes), rate_Bps(args.rate)
    most_bytes = size_bytes(args.memory, "--memory") if args.memory else None
    gap = Fraction(packet_bytes * args.clock_hz, rate * args.children)
    switch = HandlerSwitch(
        children=args.children, clusters=args.clusters, cores=args.cores, packet_bytes=packet_bytes, element_bytes=args.element_bytes,
        gap_cycles=gap, buffers=args.buffers,
    )  # fmt: skip
    designs = ("tree",) if args.reproducible else DESIGNS
    rows = [_row(switch, design, staggered, whole_bytes, args.clock_hz) for design in designs for staggered in (False, True)]
    fit = [row for row in rows if most_bytes is None or row["memory_bytes"] <= most_bytes]
    if not fit:
        least = min(row["memory_bytes"] for row in rows)
        raise Infeasible(f"no design fits {most_bytes} bytes", where="--memory", hint=f"{least} bytes do", data={"least_bytes": least})
    best = min(fit, key=lambda row: (row["time_s"], row["memory_bytes"]))
    document = {"schema": "meshwright.handlers", "version": 1, "children": args.children, "size_bytes": whole_bytes, "gap_cycles": str(gap),
                "add_cycles": switch.add_cycles, "line_time_s": whole_bytes / rate, "chosen": best, "rows": rows}  # fmt: skip
    head = f"{'design':<20} {'time':>12} {'of line rate':>12} {'cycles/packet':>14} {'memory':>12} {'queued':>7}"
    lines = [f"{args.children} children at {args.rate}, {args.clusters} x {args.cores} cores, {switch.add_cycles} cycles per addition", head]
    for row in rows:
        share = document["line_time_s"] / row["time_s"]
        mark = "* " if row is best else "  "
        lines.append(f"{mark + row['name']:<20} {row['time_s'] * 1e6:>9.4g} us {share:>12.1%} {row['service_cycles']:>14.6g} "
                     f"{row['memory_bytes']:>10} B {row['queued']:>7}")  # fmt: skip
    return Result(document, "\n".join(lines))


def _row(switch: Any, design: str, staggered: bool, size_bytes: int, clock_hz: int) -> dict[str, Any]:
    from ..simulate.handlers import arrivals, simulate_handlers

    blocks = -(-size_bytes // switch.packet_bytes)
    window = switch.children if staggered else 0
    simulated = max(1, min(blocks, MAX_BLOCKS, MAX_PACKETS // switch.children))
    if window:
        simulated = max(simulated // window, 1) * window
    found = simulate_handlers(switch, design, arrivals(switch, simulated, window))
    return {
        "name": design + (" staggered" if staggered else ""), "design": design, "staggered": staggered, "blocks_simulated": simulated,
        "time_s": found.total_cycles / clock_hz * max(1.0, blocks / simulated), "service_cycles": found.service_cycles,
        "memory_bytes": found.open_blocks * found.held * switch.packet_bytes, "queued": found.queued,
    }  # fmt: skip
