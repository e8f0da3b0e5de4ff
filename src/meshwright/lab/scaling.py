"""The fabric as this machine can rehearse it: rates divided by a factor, parallel links merged, a token bucket per link.

What comes out is an ordinary `Fabric`; it is what planners and the simulator should be given for the lab.

Bucket of a link (`burst_bytes`): at least what its rate passes in one timer tick (the shaper may be woken that late) and at
least four super-packets, so that none has to be cut. Super-packets are kept to what the rate passes in one millisecond, or a
slow link would need a bucket that hides whole messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import Infeasible, UsageError
from ..fabric.fabric import Fabric, Link, Provenance

__all__ = [
    "CARRY_Bps_PER_CORE", "MIN_RATE_Bps", "MAX_SHARE_UNWARNED", "TICK_S", "Load", "burst_bytes", "load_of", "merge_parallel", "parse_scale",
    "rehearsed", "segment_bytes",
]  # fmt: skip

_SCALE = re.compile(r"\d{1,16}(\.\d{1,16}|/\d{1,16})?(e\+?\d)?\Z")
TICK_S = Fraction(4, 1000)  # kernels are built with 250 or 1000 ticks per second; 250 is the slower
SEGMENT_S = Fraction(1, 1000)  # of a link's rate in one segment, so that four of them make no bucket that hides whole messages
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 8 * 1024, 64 * 1024  # the kernel has no longer segments, and shorter ones cost the processor more
MIN_RATE_Bps = 12_500  # 100 kbit/s: 1 MB takes 80 s
# One stream through a lab without limits reaches 8.5 to 13.8 Gbit/s on two cores that do nothing else (benchmarks/lab_links.py).
CARRY_Bps_PER_CORE = 500_000_000
MAX_SHARE_UNWARNED = Fraction(1, 2)  # beyond half of that, times begin to measure the processor instead of the links


@dataclass(frozen=True, kw_only=True)
class Load:
    """What all devices can send at the same moment, against what the cores carry. `scale` is the smallest round one below the warning."""

    sum_Bps: int
    limit_Bps: int
    warn_Bps: int
    scale: Fraction

    @property
    def heavy(self) -> bool:
        return self.sum_Bps > self.warn_Bps


def parse_scale(text: str) -> Fraction:
    """`"8000"`, `"2.5"`, `"1/4"` -> the divisor of all rates. Raises: UsageError."""
    try:
        scale = Fraction(text) if _SCALE.match(text) else Fraction(0)
    except ZeroDivisionError:
        scale = Fraction(0)
    if not 0 < scale <= 10**12:
        raise UsageError(f"must be a positive number, got {text[:32]!r}", where="--scale", hint="8000 makes 25 Mbit/s of 25 GB/s")
    return scale


def merge_parallel(fabric: Fabric) -> Fabric:
    """Links with equal ends and latencies become one link with the sum of their rates; the order is that of the first of each."""
    found: dict[tuple[str, str, float, float], Link] = {}
    for link in fabric.links:
        key = (link.src, link.dst, link.latency_s, link.library_latency_s)
        seen = found.get(key)
        found[key] = link if seen is None else replace(
            seen, rate_Bps=seen.rate_Bps + link.rate_Bps, burst_bytes=seen.burst_bytes + link.burst_bytes, kind=seen.kind
        )  # fmt: skip
    return replace(fabric, links=tuple(found.values())) if len(found) < len(fabric.links) else fabric


def segment_bytes(rate_Bps: int) -> int:
    """Largest super-packet on a link of this rate: what it passes in a millisecond, between 8 KiB and 64 KiB."""
    return max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, int(rate_Bps * SEGMENT_S)))


def burst_bytes(rate_Bps: int) -> int:
    """Token bucket of a link of this rate: a tick's worth, and four super-packets."""
    return max(int(rate_Bps * TICK_S), 4 * segment_bytes(rate_Bps))


def load_of(fabric: Fabric, cores: float) -> Load:
    """How much the devices can send together (each no more than it or its links take) and the scale that would make it bearable."""
    total = 0
    for device in range(len(fabric.devices)):
        sends = sum(fabric.links[x].rate_Bps for x in fabric.out_links[device])
        total += min(sends, sum(fabric.links[x].rate_Bps for x in fabric.in_links[device]))
    limit = int(CARRY_Bps_PER_CORE * cores)
    warn = int(limit * MAX_SHARE_UNWARNED)
    return Load(sum_Bps=total, limit_Bps=limit, warn_Bps=warn, scale=_round_up(Fraction(total, max(1, warn))))


def _round_up(value: Fraction) -> Fraction:
    """The next 1, 2 or 5 times a power of ten."""
    if value <= 0:  # a device without links sends nothing
        return Fraction(1)
    power = Fraction(1)
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * m for m in (1, 2, 5, 10) if power * m >= value)


def rehearsed(fabric: Fabric, scale: Fraction, *, cores: float, force: bool = False) -> Fabric:
    """The fabric that the lab builds.

    Raises: Disconnected; Infeasible when the rates together are beyond this machine (naming sum and scale), or one is too small.
    """
    fabric.require_connected()
    merged = merge_parallel(fabric)
    links = []
    for link in merged.links:
        rate = max(1, round(link.rate_Bps / scale))
        burst = round(link.burst_bytes / scale) if link.burst_bytes else 0
        links.append(replace(link, rate_Bps=rate, burst_bytes=max(burst, burst_bytes(rate))))
    name = fabric.name if scale == 1 else f"{fabric.name} /{scale}"
    note = Provenance(what="rates and bursts of links", source=f"{fabric.name} divided by {scale}; burst: a tick of 4 ms, four super-packets")
    made = replace(merged, name=name, links=tuple(links), provenance=(*merged.provenance, note))
    load = load_of(made, cores)
    if load.sum_Bps > load.limit_Bps and not force:
        wanted = _round_up(scale * load.sum_Bps / max(1, load.warn_Bps))
        raise Infeasible(
            f"its devices can send {load.sum_Bps * 8 / 1e9:.4g} Gbit/s together; {cores:g} cores carry about {load.limit_Bps * 8 / 1e9:.3g} Gbit/s",
            where=fabric.name,
            hint=f"divide the rates: --scale {_text(wanted)}",
            data={"sum_Bps": load.sum_Bps, "limit_Bps": load.limit_Bps, "scale": str(wanted)},
        )
    slow = min(made.links, key=lambda x: x.rate_Bps, default=None)
    if slow is not None and slow.rate_Bps < MIN_RATE_Bps:
        raise Infeasible(
            f"link {slow.src}->{slow.dst} would pass {slow.rate_Bps} B/s; less than {MIN_RATE_Bps} B/s is not rehearsed",
            where=fabric.name,
            hint="use a smaller --scale, or a part of the fabric: --devices",
            data={"link": f"{slow.src}->{slow.dst}", "rate_Bps": slow.rate_Bps, "least_Bps": MIN_RATE_Bps},
        )
    return made


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
