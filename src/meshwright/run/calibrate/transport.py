"""What messages between local processes really cost: measured on the real transport, in as many processes as the run will have,
each under the same pacing.

Two patterns, both with the executor's own kind of message (receives posted ahead, non-blocking sends, one wait each):
- `ring`: every rank sends to the next and receives from the one before at once, as in collectives. Sender and receiver of a rank share
  its quota, so this is the slower and the decisive pattern; the fabric's figures come from it.
- `pingpong`: one message at a time between two ranks, as in a pipeline that is not full. Reported beside it.

Model: time_s = alpha_s + beta_s_per_byte * size. On loopback the cost is processor time (system calls and copies at both ends), so under a
quota it grows with 1/share; CPU seconds per message and byte are therefore measured too. alpha is split into the processor's part, which
occupies the lanes at both ends (`Transport.per_message_s`, half each), and the rest, which is link latency.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...cost import Transport
from ...errors import MissingExtra, UsageError
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ..machine.pacing import Pacing, choose_pacing, machine_facts
from ..ranks.launcher import LocalRanks, scratch_folder
from .fit import FitErrors, Line, errors_of, fit_line, held_back

__all__ = ["MESSAGE_SIZES", "Calibration", "PatternTimes", "calibrate_laptop", "calibration_of", "laptop_shape"]

MESSAGE_SIZES = tuple(4 * 4**i for i in range(12))  # 4 B ... 16 MiB
MAX_CALIBRATION_S = 60.0  # after which a calibration has failed


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

    `add_s_per_byte`: wall seconds to add a received byte to a local buffer. `slowdown`: CPU time of a fixed piece of compute while all
    ranks compute, over the same alone (shared caches and memory); multiply measured compute by it. `seconds`: what calibrating took.
    """

    fabric: Fabric
    transport: Transport
    ring: PatternTimes
    pingpong: PatternTimes
    pacing: Pacing
    add_s_per_byte: float
    slowdown: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": len(self.fabric.devices), "pacing": self.pacing.mode, "share": self.pacing.share, "ring": self.ring.to_json(),
            "pingpong": self.pingpong.to_json(), "add_s_per_byte": self.add_s_per_byte, "slowdown": self.slowdown, "seconds": self.seconds,
        }  # fmt: skip


def calibrate_laptop(
    ranks: int, pacing: Pacing | None = None, *, shape: Fabric | None = None, sizes: Sequence[int] = MESSAGE_SIZES, budget_s: float = 0.09,
    batches: int = 3, limit_s: float = MAX_CALIBRATION_S,
) -> Calibration:  # fmt: skip
    """Start `ranks` processes, measure, fit. `shape`: a fabric with `ranks` devices whose links get the measured figures (default: one switch).

    `budget_s`: wall time spent per size and pattern. No process, file or control group is left behind, whatever happens.
    Raises: UsageError (fewer than 2 ranks, wrong shape), MissingExtra (torch), and what `LocalRanks.run` raises.
    """
    if ranks < 2:
        raise UsageError(f"calibrating messages needs at least 2 ranks, got {ranks}", hint="with one rank there are no messages")
    if shape is not None and len(shape.devices) != ranks:
        raise UsageError(f"fabric {shape.name!r} has {len(shape.devices)} devices, not {ranks}", hint="pass the fabric of the run")
    if not sizes or min(sizes) < 1:
        raise UsageError("message sizes must be positive", hint="leave them out to use 4 B ... 16 MiB")
    if find_spec("torch") is None:
        raise MissingExtra("torch", extra="torch", needed_for="calibrating the transport")
    pacing = pacing or choose_pacing(ranks)
    begin = time.monotonic()
    options = {"sizes": sorted(sizes), "budget_s": budget_s, "batches": batches, "timeout_s": limit_s}
    with scratch_folder("calibrate") as folder:
        started = LocalRanks(
            ranks, folder, "meshwright.run.calibrate.message_times:measuring_rank", options, pacing=pacing, limit_s=limit_s,
            limit_hint="is the machine busy? try again",
        )  # fmt: skip
        started.run()
        parts: list[dict[str, Any]] = started.results(dict)
    return calibration_of(parts, pacing, shape=shape, reference_alone_s=parts[0]["alone_s"], seconds=time.monotonic() - begin)


def calibration_of(
    parts: Sequence[Mapping[str, Any]], pacing: Pacing, *, shape: Fabric | None = None, reference_alone_s: float = 0.0, seconds: float = 0.0
) -> Calibration:
    """Fit what `message_times.MessageTimes.run` returned on every rank, in rank order. Without `reference_alone_s` the slowdown is 1."""
    sizes = [int(s) for s in parts[0]["sizes"]]
    ring = _pattern([p["ring"] for p in parts], sizes)
    pingpong = _pattern([p["pingpong"] for p in parts[:2]], sizes[::2])
    add = float(np.median([p["add_s_per_byte"] for p in parts]))
    together = float(np.median([p["reference_s"] for p in parts]))
    transport = _transport(ring, pacing, pacing.wall_s(add))
    return Calibration(
        fabric=_with_figures(shape or laptop_shape(len(parts)), ring.line, transport, pacing, len(parts)), transport=transport, ring=ring,
        pingpong=pingpong, pacing=pacing, add_s_per_byte=pacing.wall_s(add),
        slowdown=max(together / reference_alone_s, 1.0) if reference_alone_s > 0 else 1.0, seconds=seconds,
    )  # fmt: skip


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


def _transport(ring: PatternTimes, pacing: Pacing, add_s_per_byte: float) -> Transport:
    """Per rank and round the ring spends CPU on one send and one receive; half of it at either end of a message.

    Of the four transfer steps that carry a byte through an all-reduce (send, receive and add, send, receive) one adds it, and the engine
    charges `per_byte_s` at each.
    """
    share = pacing.share if pacing.mode == "quota" else 1.0
    per_message = min(ring.cpu_line.alpha_s / share, ring.line.alpha_s) / 2
    return Transport(
        per_message_s=per_message, per_byte_s=add_s_per_byte / 4, evidence="measured", cpu_per_message_s=ring.cpu_line.alpha_s / 2,
        cpu_per_byte_s=ring.cpu_line.beta_s_per_byte / 2,
    )  # fmt: skip


def _with_figures(shape: Fabric, line: Line, transport: Transport, pacing: Pacing, ranks: int) -> Fabric:
    """All links get the measured rate; latency is what the line has beyond the ends' own work, spread over the links of a route."""
    hops = max(len(shape.route(0, i)) for i in range(1, ranks))
    latency = max(0.0, line.alpha_s - 2 * transport.per_message_s) / hops
    rate = max(1, round(1 / line.beta_s_per_byte)) if line.beta_s_per_byte > 0 else 10**12
    links = tuple(replace(x, rate_Bps=rate, latency_s=latency, library_latency_s=0.0) for x in shape.links)
    share = 0.0 if pacing.mode == "none" else pacing.share
    devices = tuple(replace(d, cpu_share=share) for d in shape.devices)
    source = f"measured here: ring exchange of {ranks} processes over gloo, pacing {pacing.mode}, share {pacing.share:g}"
    return replace(shape, devices=devices, links=links, provenance=(*shape.provenance, Provenance(what="links", source=source)))
