"""A rehearsal lab: a fabric as network namespaces with shaped links, on this machine.

    with Lab.up(load_fabric("two-islands:4")) as lab:
        lab.run([sys.executable, "job.py"])                 # one process per device, gloo's environment set
        lab.counters()["island0/switch->island1/switch"].bytes
        lab.cut("island0/switch<->island1/switch")

`lab.fabric` is the fabric that was built (scaled, merged, with token buckets): plan and simulate on it. `lab.measured_fabric` has
the goodput that was measured in place of the rates.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import RunError, UsageError
from ..fabric import Fabric
from ..fabric_edit import find_part
from ..io.atomic import write_text
from ..io.fabric_name import load_fabric
from ..io.fabric_toml import fabric_toml, read_fabric_toml
from ..run.cpu_quota import CpuQuota, process_start_ticks, quota_place
from ..run.pacing import machine_facts
from .build import start_holder, stop_holder, tool_path
from .commands import Command, batches, build, cut, mend, relays, reshape, shell_text
from .control import Control
from .impair import MIN_DELAY_S, Impairment, has_netem, impairments, method_for
from .process import LabProcess
from .ranks import Place, RunResult, device_environment, places, require_success, run_ranks
from .routes import Routes, find_routes
from .scaling import burst_bytes, load_of, rehearsed
from .state import LabState, LinkState, claim, folder_of, new_name, read_state, remove, write_state
from .wiring import End, Wiring, wire

__all__ = ["Lab", "LinkCount", "Options", "Plan", "plan_lab"]


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
class LinkCount:
    """What has left through one direction of a cable since the lab was built.

    `bytes` as the interface counts: payload and one header per super-packet; `wire_bytes` as the shaper counts: with the headers of
    every packet; `drops` packets refused by the shaper (its queue was full, or the link is cut).
    """

    bytes: int
    packets: int
    wire_bytes: int
    drops: int

    def __sub__(self, before: LinkCount) -> LinkCount:
        return LinkCount(
            bytes=self.bytes - before.bytes, packets=self.packets - before.packets, wire_bytes=self.wire_bytes - before.wire_bytes,
            drops=self.drops - before.drops,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is decided before anything is made."""

    fabric: Fabric
    wiring: Wiring
    routes: Routes | None
    commands: tuple[Command, ...]
    helpers: tuple[list[str], ...]
    notes: tuple[str, ...]

    def shell_text(self) -> str:
        return shell_text(self.commands, self.helpers)


def plan_lab(fabric: Fabric, name: str, options: Options) -> Plan:
    """Raises: Disconnected, Infeasible, UsageError, UnknownName; Unsupported when a delay or loss cannot be made here."""
    if not 576 <= options.mtu <= 9000:
        raise UsageError(f"must be between 576 and 9000, got {options.mtu}", where="--mtu")
    cores = machine_facts().cores
    built = rehearsed(fabric, options.scale, cores=cores, force=options.force)
    impaired = impairments(built, delay=options.delay, loss=options.loss)
    method = method_for(built, impaired, netem=bool(impaired) and has_netem(tool_path()))
    wiring = wire(built, f"mw-{name}-", mtu=options.mtu, offload=options.offload, impaired=impaired, method=method)
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
    if method == "relay":
        notes.append(f"delay and loss of {len(impaired)} links by a relay in user space: the kernel has no netem")
    if len(built.links) < len(fabric.links):
        notes.append(f"{len(fabric.links) - len(built.links)} parallel links were merged with others")
    return Plan(
        fabric=built, wiring=wiring, routes=routes, commands=tuple(build(wiring, routes)), helpers=tuple(relays(wiring, options.seed)),
        notes=tuple(notes),
    )  # fmt: skip


class Lab:
    """A lab that stands. Made by `Lab.up` or `Lab.open`."""

    def __init__(self, folder: Path, state: LabState, fabric: Fabric, wiring: Wiring, control: Control) -> None:
        self.folder, self.state, self.fabric, self.wiring, self.control = folder, state, fabric, wiring, control

    # ---- up and down -----------------------------------------------------------------------------------------------
    @classmethod
    def up(
        cls, fabric: Fabric | str, *, name: str | None = None, scale: Fraction | int = 1, verify: bool = True, keep: bool = False, mtu: int = 1500,
        offload: bool = True, force: bool = False, delay: bool = True, loss: Mapping[str, float] | None = None, seed: int = 0,
        say: Callable[[str], None] | None = None,
    ) -> Lab:  # fmt: skip
        """Build a lab. It ends with this process unless `keep`. `verify` measures every link first (see `calibrate`).

        Raises: UsageError (name in use), Infeasible (beyond this machine), Disconnected, Unsupported (tools, kernel or rights are
        missing), RunError (a command failed, or a link misses its rate).
        """
        fabric = load_fabric(fabric) if isinstance(fabric, str) else fabric
        name = new_name() if name is None else name
        options = Options(scale=Fraction(scale), mtu=mtu, offload=offload, force=force, delay=delay, loss=loss or {}, seed=seed)
        folder_of(name)
        plan = plan_lab(fabric, name, options)
        folder = claim(name)
        lab: Lab | None = None
        try:
            state = _first_state(name, plan, options)
            write_state(folder, state)
            write_text(folder / "fabric.toml", fabric_toml(plan.fabric))
            answer = start_holder(folder, plan.wiring, plan.routes, owner=os.getpid(), helpers=plan.helpers)
            state.holder, state.user_namespace = answer["pid"], answer["user_namespace"]
            state.holder_start = process_start_ticks(state.holder) or ""
            write_state(folder, state)
            lab = cls(folder, state, plan.fabric, plan.wiring, Control(folder))
            lab._choose_pacing()
            if verify:
                from .calibrate import calibrate

                calibrate(lab, say=say)
            if keep:
                lab.control.ask({"do": "keep"})
                state.owner, state.owner_start = 0, ""
            write_state(folder, state)
        except BaseException:
            if lab is not None:
                lab.down()
            else:
                remove(folder)
            raise
        return lab

    @classmethod
    def open(cls, name: str) -> Lab:
        """A lab that stands already. Raises: UnknownName, FormatError, RunError when it is dead."""
        folder = folder_of(name)
        state = read_state(folder)
        fabric = read_fabric_toml(folder / "fabric.toml")
        impaired = {i: Impairment(delay_s=x.delay_s, loss=x.loss) for i, x in enumerate(state.links) if x.delay_s or x.loss}
        wiring = wire(fabric, f"mw-{name}-", mtu=state.mtu, offload=state.offload, impaired=impaired, method=state.method)
        return cls(folder, state, fabric, wiring, Control(folder))

    def down(self) -> None:
        """End all its processes and remove it. Raises: RunError."""
        self.control.close()
        stop_holder(self.state)
        remove(self.folder)

    def close(self) -> None:
        """Let go of a lab that stays up; processes started through this object end."""
        self.control.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def rewire(self, fabric: Fabric) -> None:
        """Take over the same fabric with other buckets."""
        self.fabric = fabric
        self.wiring = replace(self.wiring, fabric=fabric)

    # ---- names -----------------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.state.name

    @property
    def measured_fabric(self) -> Fabric:
        """The fabric with each link's measured goodput of payload as its rate. Raises: RunError when nothing was measured."""
        if not self.state.verified:
            raise RunError("no link was measured", where=self.name, hint="build the lab without --no-verify")
        links = [replace(x, rate_Bps=s.goodput_Bps) for x, s in zip(self.fabric.links, self.state.links, strict=True)]
        return replace(self.fabric, name=f"{self.fabric.name} measured", links=tuple(links))

    def address(self, device: int | str) -> str:
        """A device's address inside the lab."""
        return self.wiring.address(self.device_number(device))

    def device_number(self, device: int | str) -> int:
        """Raises: UsageError."""
        number = self.fabric.actor_of.get(device, -1) if isinstance(device, str) else device
        if not 0 <= number < len(self.fabric.devices):
            hint = f"devices are 0-{len(self.fabric.devices) - 1}, or their names"
            raise UsageError(f"the lab has no device {device!r}", where=self.name, hint=hint)
        return number

    # ---- processes -------------------------------------------------------------------------------------------------
    def run(
        self, argv: Sequence[str], *, ranks: Sequence[int] | None = None, order: Sequence[int] | None = None, per_device: int = 1,
        env: Mapping[str, str] | None = None, torchrun: bool = False, timeout_s: float | None = None,
        sink: Callable[[int, bytes], None] | None = None, check: bool = True, cwd: Path | None = None,
    ) -> RunResult:  # fmt: skip
        """Run a command once per rank and wait for all. See `ranks.places` and `ranks.run_ranks`.

        Raises: RankFailed (unless `check=False`), RunTimeout, Interrupted, UsageError, RunError.
        """
        if not argv:
            raise UsageError("there is nothing to run", hint="meshwright lab run NAME -- COMMAND")
        taken = places(len(self.fabric.devices), ranks=ranks, order=order, per_device=per_device)
        result = run_ranks(self, argv, taken, env=env, torchrun=torchrun, timeout_s=timeout_s, sink=sink, folder=cwd)
        return require_success(result) if check else result

    def popen(
        self, device: int | str, argv: Sequence[str], env: Mapping[str, str] | None = None, *, stdin: int | None = None,
        stdout: int | BinaryIO | None = None, stderr: int | BinaryIO | None = None, cwd: Path | None = None, run: str | None = None,
    ) -> LabProcess:  # fmt: skip
        """Start one process on a device. It gets our environment, the device's, and `env`; `stdout`, `stderr` as in `subprocess`.

        It ends at the latest when this `Lab` is closed. Processes started under one `run` id can be ended together by `end(run)`.
        Raises: UsageError when the program cannot be started; RunError when the lab is gone.
        """
        number = self.device_number(device)
        environment = {**os.environ, **device_environment(self, number), **(env or {})}
        return self.control.start(
            run or secrets.token_hex(8), number, argv, environment, folder=cwd, stdin=stdin, stdout=stdout, stderr=stderr
        )  # fmt: skip

    def end(self, run: str) -> None:
        """Kill every process of a run and whatever it started. Raises: RunError."""
        self.control.end(run)

    # ---- what device speed costs -----------------------------------------------------------------------------------
    def _choose_pacing(self) -> None:
        shares = [d.cpu_share if 0 < d.cpu_share < 1 else 0.0 for d in self.fabric.devices]
        if any(shares):
            self.state.shares = shares
            self.state.pacing = "quota" if quota_place() is not None else "paced"

    @contextmanager
    def share_groups(self, taken: Sequence[Place]) -> Iterator[dict[int, list[Path]]]:
        """CPU groups for ranks on devices with a declared share: rank -> files through which a process joins its group."""
        with ExitStack() as stack:
            groups: dict[int, list[Path]] = {}
            quotas: dict[int, CpuQuota] = {}
            if self.state.pacing == "quota":
                for place in taken:
                    share = self.state.shares[place.device]
                    if share and place.device not in quotas:
                        quotas[place.device] = stack.enter_context(CpuQuota(share))
                    if share:
                        groups[place.rank] = [quotas[place.device].members_file]
            yield groups

    # ---- links -----------------------------------------------------------------------------------------------------
    def link_name(self, index: int) -> str:
        """`src->dst`, with `#k` for the k-th of parallel links (from 1) after the first."""
        link = self.fabric.links[index]
        before = sum((x.src, x.dst) == (link.src, link.dst) for x in self.fabric.links[:index])
        return f"{link.src}->{link.dst}" + (f"#{before + 1}" if before else "")

    def counters(self) -> dict[str, LinkCount]:
        """Bytes that left over every link since the lab was built. Raises: RunError."""
        names = [x for x in self.wiring.namespaces if x]
        outputs = self.control.read([[t, "-n", n, "-j", "-s", *what] for n in names for t, what in (("ip", ["link"]), ("tc", ["qdisc"]))])
        found: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        for at, namespace in enumerate(names):
            interfaces = {x["ifname"]: x["stats64"]["tx"] for x in json.loads(outputs[2 * at])}
            for qdisc in json.loads(outputs[2 * at + 1]):
                if qdisc.get("root"):
                    found[namespace, qdisc["dev"]] = (interfaces[qdisc["dev"]], qdisc)
        counts = {}
        for index in range(len(self.fabric.links)):
            end = self.wiring.exit_of[index][1]
            sent, shaper = found[self.wiring.namespaces[end.actor], end.interface]
            counts[self.link_name(index)] = LinkCount(
                bytes=sent["bytes"], packets=sent["packets"], wire_bytes=shaper["bytes"], drops=shaper["drops"]
            )  # fmt: skip
        return counts

    def links_named(self, name: str) -> list[int]:
        """Links that a name stands for: `a->b`, `a<->b`, `a->b#2`, or a device or switch with all its links. Raises: UnknownName."""
        exact = [i for i in range(len(self.fabric.links)) if self.link_name(i) == name and "#" in name]
        return exact or sorted(find_part(self.fabric, name).links)

    def set_rate(self, link: str, rate_Bps: int) -> None:
        """Another rate, live, with a bucket to match. Raises: UnknownName, UsageError, RunError."""
        if rate_Bps < 1:
            raise UsageError(f"must be at least 1 B/s, got {rate_Bps}", where=link, hint="`cut` lets nothing through")

        def slow(end: End, state: LinkState) -> list[Command]:
            state.rate_Bps, state.burst_bytes = rate_Bps, burst_bytes(rate_Bps)
            return [reshape(self.wiring, end, rate_Bps, state.burst_bytes)]

        self._change(link, slow)

    def cut(self, link: str) -> None:
        """Let nothing through any more, silently. Raises: UnknownName, RunError."""

        def silence(end: End, state: LinkState) -> list[Command]:
            if state.cut:
                return []
            state.cut = True
            return [cut(self.wiring, end)]

        self._change(link, silence)

    def restore(self, link: str) -> None:
        """Undo `cut` and `set_rate`. Raises: UnknownName, RunError."""

        def undo(end: End, state: LinkState) -> list[Command]:
            assert end.link is not None
            link = self.fabric.links[end.link]
            state.rate_Bps, state.burst_bytes = link.rate_Bps, link.burst_bytes
            commands = [reshape(self.wiring, end, link.rate_Bps, link.burst_bytes)]
            if state.cut:
                commands.append(mend(self.wiring, end, link.rate_Bps, link.burst_bytes))
            state.cut = False
            return commands

        self._change(link, undo)

    def _change(self, name: str, change: Callable[[End, LinkState], list[Command]]) -> None:
        indices = self.links_named(name)
        commands = [c for i in indices for c in change(self.wiring.exit_of[i][1], self.state.links[i])]
        self.control.do(list(batches(commands)))
        write_state(self.folder, self.state)


def _first_state(name: str, plan: Plan, options: Options) -> LabState:
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
        method=plan.wiring.method, seed=options.seed, notes=list(plan.notes),
    )  # fmt: skip
