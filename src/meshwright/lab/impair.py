"""Delay and loss: which links get them, and how: by the kernel's netem, else by a user-space relay at low rates, else refused.

A latency that the fabric declares becomes a delay when it is well above what the lab itself takes (about 0.02 ms per link);
smaller ones cannot be told from noise and are left to the simulator. Losses are asked for by link; a fabric has none.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..errors import UnknownName, Unsupported, UsageError
from ..fabric.edit import find_part
from ..fabric.fabric import Fabric

__all__ = [
    "MAX_RELAY_Bps", "MAX_RELAY_SUM_Bps", "MIN_DELAY_S", "UNIMPAIRED", "Impairment", "Method", "has_netem", "has_priorities", "impairments",
    "method_for",
]  # fmt: skip

MIN_DELAY_S = 200e-6  # shorter latencies are left to the simulator (docs/lab.md)
# Measured on two cores (docs/lab.md): eight relayed directions passed 500 Mbit/s each, four at a time; half of that sum is the limit
# that is documented, because the ranks need the processors too.
MAX_RELAY_Bps = 62_500_000
MAX_RELAY_SUM_Bps = 250_000_000
MAX_LOSSY_RELAY_Bps = 12_500_000  # losses are of single packets, which the relay then carries one by one
Method = Literal["", "netem", "relay"]


@dataclass(frozen=True, kw_only=True)
class Impairment:
    """Of one direction: every packet is late by `delay_s`, and lost with probability `loss`."""

    delay_s: float = 0.0
    loss: float = 0.0


def impairments(fabric: Fabric, *, delay: bool = True, loss: Mapping[str, float] | None = None) -> dict[int, Impairment]:
    """Link -> what it gets, for links that get something. Raises: UnknownName, UsageError."""
    losses: dict[int, float] = {}
    for name, value in (loss or {}).items():
        if not (math.isfinite(value) and 0 <= value < 1):
            raise UsageError(f"must be at least 0 and below 1, got {value:g}", where=f"loss of {name}", hint="0.01 is one packet in a hundred")
        links = find_part(fabric, name).links
        if not links:
            raise UnknownName(f"{name} has no link", where="--loss")
        losses |= dict.fromkeys(links, value)
    found = {}
    for index, link in enumerate(fabric.links):
        late = link.latency_s if delay and link.latency_s >= MIN_DELAY_S else 0.0
        if late or losses.get(index):
            found[index] = Impairment(delay_s=late, loss=losses.get(index, 0.0))
    return found


UNIMPAIRED = Impairment()


def has_netem(path: str) -> bool:
    """Whether the running kernel can delay and lose packets. Found by trying in a namespace that ends with the trial."""
    return "netem" in _features(path)


def has_priorities(path: str) -> bool:
    """Whether it can let small packets pass others (htb and u32), found in the same way."""
    return "priorities" in _features(path)


@cache
def _features(path: str) -> frozenset[str]:
    command = [sys.executable, "-m", "meshwright.lab.impair_trial"]
    try:
        done = subprocess.run(command, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(done.stdout.decode().split())


def method_for(fabric: Fabric, wanted: Mapping[int, Impairment], *, netem: bool) -> Method:
    """How these are made. Raises: Unsupported naming the link that neither way can do, and what is missing."""
    if not wanted:
        return ""
    if netem:
        return "netem"
    cables = {frozenset((fabric.links[i].src, fabric.links[i].dst)) for i in wanted}
    relayed = [x for x in fabric.links if frozenset((x.src, x.dst)) in cables]
    lossy = {(fabric.links[i].src, fabric.links[i].dst) for i, x in wanted.items() if x.loss}
    total = sum(x.rate_Bps for x in relayed)
    for link in relayed:
        whole = (link.src, link.dst) not in lossy and (link.dst, link.src) not in lossy
        most = MAX_RELAY_Bps if whole else MAX_LOSSY_RELAY_Bps
        if link.rate_Bps > most or total > MAX_RELAY_SUM_Bps:
            what = "delay" if whole else "loss"
            shown = f"all relayed links have {total * 8 / 1e6:.4g}" if link.rate_Bps <= most else f"it has {link.rate_Bps * 8 / 1e6:.4g}"
            limit = (MAX_RELAY_SUM_Bps if link.rate_Bps <= most else most) * 8 / 1e6
            raise Unsupported(
                f"{what} on {link.src}->{link.dst} needs the kernel's netem (sch_netem), which is not there; a relay in user space carries "
                f"{limit:.4g} Mbit/s, {shown}",
                where=fabric.name,
                hint="load sch_netem, lower the rates with --scale, or leave delays to the simulator: --no-delay",
                data={"missing": "sch_netem", "link": f"{link.src}->{link.dst}", "rate_Bps": link.rate_Bps, "limit_Bps": int(limit * 125_000)},
            )
    return "relay"
