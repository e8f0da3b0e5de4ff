"""`meshwright collective sparse-switch`: sparse sums up a tree of switches, beside dense ones and beside the hosts alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import prod

from .arguments import at_least_one
from .collective_bound import message_bytes, rate_Bps, size_bytes
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "sparse sums in the network, simulated: pairs on every link, memory of a switch, and whether dense numbers or the hosts are better"
EPILOG = """\
examples:
  meshwright collective sparse-switch --tree 4,8 --density 0.01 --size 4MiB --rate 100Gbit/s
  meshwright collective sparse-switch --tree 8 --density 0.01 --size 4MiB --rate 100Gbit/s --overlap 0.8      (hosts that choose alike)

Hosts send pairs of an index and a value, in blocks of `--span` indices. A switch keeps a table per block, with one place per hash. Pairs that find
their place taken travel on, and are added above. Where pairs take more bytes than an array, an array is kept and sent."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", required=True, metavar="N,...", help="children of a switch, from the top down: 4,8 is one above 4 of 8 hosts")
    parser.add_argument("--density", type=float, required=True, help="share of elements that a host sends, such as 0.01")
    parser.add_argument("--size", required=True, help="of the dense message of float32, such as 4MiB")
    parser.add_argument("--rate", required=True, help="of a link, such as 100Gbit/s")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of a host's indices that are the same on all (default %(default)s)")
    parser.add_argument("--span", type=at_least_one, default=1 << 14, help="indices of a block (default %(default)s)")
    parser.add_argument("--places", type=at_least_one, default=1 << 11, help="of a block's table (default %(default)s)")
    parser.add_argument("--packet", default="1KiB", help="payload of a packet (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the hosts' indices (default %(default)s)")


def run(args: argparse.Namespace) -> Result:
    import numpy as np

    from ..errors import UsageError
    from ..simulate.sparse_switch import SparseSwitch, random_supports, reduce_sparse, ways

    tree = args.tree.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 1 << 16 for part in tree):
        raise UsageError(f"no tree: {args.tree[:64]!r}", where="--tree", hint="children of a switch from the top down, such as 4,8")
    children, elements = [int(part) for part in tree], message_bytes(args.size, 4) // 4
    hosts, packet_bytes, rate = prod(children), size_bytes(args.packet, "--packet"), rate_Bps(args.rate)
    for name in ("density", "overlap"):
        if not 0 <= getattr(args, name) <= 1:
            raise UsageError(f"must be from 0 to 1, got {getattr(args, name):g}", where=f"--{name}", hint=f"e.g. --{name} 0.01, for 1 %")
    switch = SparseSwitch(span=args.span, places=args.places, spill=max(1, packet_bytes // 8 - 1), packet_bytes=packet_bytes)
    supports = random_supports(elements, args.density, hosts, overlap=args.overlap, seed=args.seed)
    found = reduce_sparse([(s, np.ones(len(s))) for s in supports], elements, children, switch)
    times = ways(found, elements, hosts, rate, switch)
    best = min(times, key=times.__getitem__)
    levels = [asdict(level) for level in found.levels]
    document = {
        "schema": "meshwright.sparse_switch", "version": 1, "tree": children, "hosts": hosts, "elements": elements, "density": args.density,
        "levels": levels, "down_bytes": found.down_bytes, "result_pairs": len(found.indices), "times_s": times, "chosen": best,
    }  # fmt: skip
    lines = [f"{hosts} hosts, {elements} elements, {args.density:.4g} of them each",
             f"{'links above':<14} {'links':>6} {'pairs a link':>13} {'independent':>12} {'early':>8} {'mean bytes':>11} {'block holds':>14}"]
    for level in found.levels:
        name = "a host" if level.hosts_below == 1 else f"{level.hosts_below} hosts"
        pairs, independent = level.pairs / level.senders, level.expected_pairs / level.senders
        early, mean = level.spilled / level.senders, round(level.mean_bytes)
        lines.append(f"{name:<14} {level.senders:>6} {pairs:>13.0f} {independent:>12.0f} {early:>8.0f} {mean:>11} {level.table_bytes:>12} B")
    lines.append(f"down: {len(found.indices)} pairs, {found.down_bytes} bytes")
    words = {"sparse": "pairs through the switches", "dense": "all numbers through the switches", "hosts": "pairs, hosts alone", "ring": "a ring"}
    lines += [f"{'* ' if name == best else '  '}{words[name]:<34} {time_s * 1e6:>10.4g} us" for name, time_s in times.items()]
    return Result(document, "\n".join(lines))
