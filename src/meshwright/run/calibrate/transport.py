"""What messages between local processes really cost: measured on the real transport, by the processes of the run under its pacing.

Two patterns, both with the executor's own kind of message (receives posted ahead, non-blocking sends, one wait each):
- `ring`: every rank sends to the next and receives from the one before at once, as in collectives. Sender and receiver of a rank share
  its quota, so this is the slower and the decisive pattern; the fabric's figures come from it.
- `pingpong`: one message at a time between two ranks, as in a pipeline that is not full. Reported beside it.

Model: time_s = alpha_s + beta_s_per_byte * size. On loopback the cost is processor time (system calls and copies at both ends), so under a
quota it grows with 1/share; CPU seconds per message and byte are therefore measured too. alpha is split into the processor's part, which
occupies the lanes at both ends (`Transport.per_message_s`, half each), and the rest, which is link latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...cost import Transport
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ..machine.cpu_quota import quota_times
from ..machine.pacing import Pacing, machine_facts
from .fit import FitErrors, Line, errors_of, fit_line, held_back

__all__ = ["Calibration", "PatternTimes", "calibration_of", "laptop_shape"]


@dataclass(frozen=True, kw_only=True)
class PatternTimes:
    """One pattern: wall and CPU seconds per message for each size (CPU: sending and receiving rank's mean), the line, errors held back."""

    sizes: tuple[int, ...]
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    line: Line
    cpu_line: Line
    errors: FitErrors

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": self.sizes, "wall_s": self.wall_s, "cpu_s": self.cpu_s, "alpha_s": self.line.alpha_s,
            "beta_s_per_byte": self.line.beta_s_per_byte, "cpu_alpha_s": self.cpu_line.alpha_s,
            "cpu_beta_s_per_byte": self.cpu_line.beta_s_per_byte, "held_back": self.errors.to_json(),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`fabric`: the laptop with measured links; `transport`: what the runtime adds.

    `add_s_per_byte`: wall seconds to add a received byte to a local buffer. `seconds`: what calibrating took.
    """

    fabric: Fabric
    transport: Transport
    ring: PatternTimes
    pingpong: PatternTimes
    pacing: Pacing
    add_s_per_byte: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": len(self.fabric.devices), "pacing": self.pacing.mode, "share": self.pacing.share, "ring": self.ring.to_json(),
            "pingpong": self.pingpong.to_json(), "add_s_per_byte": self.add_s_per_byte, "seconds": self.seconds,
        }  # fmt: skip


def calibration_of(
    parts: Sequence[Mapping[str, Any]], pacing: Pacing, shares: Sequence[float] = (), *, seconds: float = 0.0
) -> Calibration:
    """Fit what `message_times.MessageTimes.run` returned on every rank, in rank order. `shares`: of the ranks' devices, where they are unlike."""
    sizes = [int(s) for s in parts[0]["sizes"]]
    ring = _pattern([p["ring"] for p in parts], sizes)
    pingpong = _pattern([p["pingpong"] for p in parts[:2]], sizes[::2])
    add_s_per_byte = pacing.wall_s(float(np.median([p["add_s_per_byte"] for p in parts])))
    threads = np.mean([[float(row.get("thread_s", row["cpu_s"])) for row in p["ring"]] for p in parts], axis=0)
    per_byte_s = 0.0 if pacing.mode == "quota" else fit_line(np.array(sizes, float), np.maximum(threads, 1e-9)).beta_s_per_byte
    own = Line(float(threads[0]), min(per_byte_s, ring.line.beta_s_per_byte))
    transport = _transport(ring, pacing, add_s_per_byte, own)
    fabric = _with_figures(laptop_shape(len(parts)), ring.line, own, transport, pacing, shares or [pacing.share] * len(parts))
    return Calibration(
        fabric=fabric, transport=transport, ring=ring, pingpong=pingpong, pacing=pacing, add_s_per_byte=add_s_per_byte, seconds=seconds
    )


def laptop_shape(ranks: int) -> Fabric:
    """`ranks` processes around the kernel's loopback; rates are placeholders until they are measured."""
    memory = int(0.8 * machine_facts().memory_bytes) // ranks
    devices = tuple(Device(name=f"cpu{i}", kind="cpu", group="laptop", memory_bytes=memory) for i in range(ranks))
    links = tuple(
        Link(src=a, dst=b, rate_Bps=10**9, kind="LO") for d in devices for a, b in ((d.name, "loopback"), ("loopback", d.name))
    )
    return Fabric(name=f"laptop:{ranks}", devices=devices, switches=(Switch(name="loopback", group="laptop"),), links=links)


def _pattern(per_rank: list[list[dict[str, float]]], sizes: list[int]) -> PatternTimes:
    x = np.asarray(sizes, np.float64)
    wall = np.mean([[row["wall_s"] for row in rows] for rows in per_rank], axis=0)
    cpu = np.mean([[row["cpu_s"] for row in rows] for rows in per_rank], axis=0)
    return PatternTimes(
        sizes=tuple(sizes), wall_s=tuple(map(float, wall)), cpu_s=tuple(map(float, cpu)), line=fit_line(x, wall),
        cpu_line=fit_line(x, np.maximum(cpu, 1e-9)), errors=errors_of(*held_back(x, wall)),
    )  # fmt: skip


def _transport(ring: PatternTimes, pacing: Pacing, add_s_per_byte: float, own: Line) -> Transport:
    """Per rank and round the ring spends CPU on one send and one receive; half of it at either end of a message. A lane is occupied by what its own
    thread spends (`own`: gloo's sender copies into the socket itself, 0.2 ms of 0.6 MB); a quota is used up by the transport's threads too.

    Of the four transfer steps that carry a byte through an all-reduce (send, receive and add, send, receive) one adds it, and the engine
    charges `per_byte_s` at each.
    """
    share = pacing.share if pacing.mode == "quota" else 1.0
    spent_s = ring.cpu_line.alpha_s / share if pacing.mode == "quota" else min(own.alpha_s, ring.cpu_line.alpha_s)
    per_message = min(spent_s, ring.line.alpha_s) / 2
    return Transport(
        per_message_s=per_message, per_byte_s=add_s_per_byte / 4 + own.beta_s_per_byte / 2, evidence="measured",
        cpu_per_message_s=ring.cpu_line.alpha_s / 2, cpu_per_byte_s=ring.cpu_line.beta_s_per_byte / 2,
    )  # fmt: skip


def _with_figures(shape: Fabric, line: Line, own: Line, transport: Transport, pacing: Pacing, shares: Sequence[float]) -> Fabric:
    """Rate and latency of all links are what the line has beyond the ends' own work; the latency is spread over the links of a route."""
    ranks = len(shares)
    hops = max(len(shape.route(0, i)) for i in range(1, ranks))
    latency = max(0.0, line.alpha_s - 2 * transport.per_message_s) / hops
    beyond_s = line.beta_s_per_byte - own.beta_s_per_byte
    rate = min(max(1, round(1 / beyond_s)), 10**12) if beyond_s > 0 else 10**12
    links = tuple(replace(x, rate_Bps=rate, latency_s=latency, library_latency_s=0.0) for x in shape.links)
    quotas = quota_times(shares if pacing.mode == "quota" else [0.0] * ranks, machine_facts(rank=True).cores)
    said = ", ".join(f"{s:g}" for s in sorted(set(shares)))
    of_device = [0.0] * ranks if pacing.mode == "none" else shares
    devices = tuple(replace(d, cpu_share=s, **q) for d, s, q in zip(shape.devices, of_device, quotas, strict=True))
    source = f"measured here: ring exchange of {ranks} processes over gloo, pacing {pacing.mode}, share {said}"
    return replace(shape, devices=devices, links=links, provenance=(*shape.provenance, Provenance(what="links", source=source)))
