"""All that is decided about a lab before anything is made: what `--dry-run` shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from ..errors import UsageError
from ..fabric.fabric import Fabric
from ..run.machine.cpu_quota import process_start_ticks
from ..run.machine.pacing import machine_facts
from .aggregators import aggregator_commands
from .build import tool_path
from .commands import Command, build, relays, shell_text
from .impair import MIN_DELAY_S, has_netem, has_priorities, impairments, method_for
from .routes import Routes, find_routes
from .scaling import load_of, rehearsed
from .state import LabState, LinkState
from .wiring import Wiring, wire

__all__ = ["LabPlan", "Options", "first_state", "plan_lab"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a fabric is rehearsed. `scale` divides all rates; `force` builds what the processors cannot carry.

    `delay`: latencies of 0.2 ms and more are made real. `loss`: link name (as in `Lab.cut`) -> probability; `seed` is that of the losses.
    """

    scale: Fraction = Fraction(1)
    mtu: int = 1500
    offload: bool = True
    force: bool = False
    delay: bool = True
    loss: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """All that is decided before anything is made."""

    fabric: Fabric
    wiring: Wiring
    routes: Routes | None
    commands: tuple[Command, ...]
    helpers: tuple[list[str], ...]
    notes: tuple[str, ...]

    def shell_text(self) -> str:
        return shell_text(self.commands, self.helpers)


def plan_lab(fabric: Fabric, name: str, options: Options) -> LabPlan:
    """Raises: Disconnected, Infeasible, UsageError, UnknownName; Unsupported when a delay or loss cannot be made here."""
    if not 1280 <= options.mtu <= 9000:
        raise UsageError(f"must be between 1280 and 9000, got {options.mtu}", where="--mtu", hint="1500 is Ethernet's")
    cores = machine_facts().cores
    built = rehearsed(fabric, options.scale, cores=cores, force=options.force)
    impaired = impairments(built, delay=options.delay, loss=options.loss)
    method = method_for(built, impaired, netem=bool(impaired) and has_netem(tool_path()))
    wiring = wire(
        built, f"mw-{name}-", mtu=options.mtu, offload=options.offload, impaired=impaired, method=method, acks_first=has_priorities(tool_path())
    )
    routes = find_routes(wiring) if wiring.style == "routed" else None
    load = load_of(built, cores)
    notes = []
    if load.heavy:
        notes.append(
            f"devices can send {load.sum_Bps * 8 / 1e9:.3g} Gbit/s together, above {load.warn_Bps * 8 / 1e9:.3g}: where all send at once, "
            f"times measure the processors"
        )
    small = max((x.latency_s for i, x in enumerate(built.links) if i not in impaired), default=0.0)
    if small >= MIN_DELAY_S:
        notes.append("latencies are not made real (--no-delay)")
    if not wiring.acks_first:
        notes.append("the kernel has no sch_htb or cls_u32: acknowledgements wait behind data, which slows transfers in both directions at once")
    if method == "relay":
        notes.append(f"delay and loss of {len(impaired)} links by a relay in user space: the kernel has no netem")
    if len(built.links) < len(fabric.links):
        notes.append(f"{len(fabric.links) - len(built.links)} parallel links were merged with others")
    return LabPlan(
        fabric=built, wiring=wiring, routes=routes, commands=tuple(build(wiring, routes, ipv6=Path("/proc/sys/net/ipv6").exists())),
        helpers=(*relays(wiring, options.seed), *aggregator_commands(wiring)),
        notes=tuple(notes),
    )  # fmt: skip


def first_state(name: str, plan: LabPlan, options: Options) -> LabState:
    """The state of a lab that is being built by this process."""
    pid = os.getpid()
    return LabState(
        name=name, fabric=plan.fabric.name, scale=str(options.scale), style=plan.wiring.style, interface=plan.wiring.interface, mtu=options.mtu,
        offload=options.offload, owner=pid, owner_start=process_start_ticks(pid) or "",
        devices=[d.name for d in plan.fabric.devices], addresses=[plan.wiring.address(i) for i in range(len(plan.fabric.devices))],
        namespaces=list(plan.wiring.namespaces), hostnames=[plan.wiring.hostname(i) for i in range(len(plan.fabric.devices))],
        links=[
            LinkState(
                src=x.src, dst=x.dst, rate_Bps=x.rate_Bps, burst_bytes=x.burst_bytes, segment_bytes=end.segment_bytes,
                delay_s=end.impairment.delay_s, loss=end.impairment.loss,
            )
            for i, x in enumerate(plan.fabric.links)
            for end in (plan.wiring.exit_of[i][1],)
        ],
        method=plan.wiring.method, acks_first=plan.wiring.acks_first, seed=options.seed, notes=list(plan.notes),
    )  # fmt: skip
