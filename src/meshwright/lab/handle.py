"""A lab that stands: its fabric, names, addresses and links, its control socket, the CPU groups of its devices."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path

from ..errors import RunError, UsageError
from ..fabric.fabric import Fabric
from ..run.machine.cpu_quota import CpuQuota, quota_place, quota_times
from ..run.machine.pacing import machine_facts
from .build import stop_holder
from .control import Control
from .links import Links
from .state import LabState, remove
from .wiring import Wiring

__all__ = ["StandingLab"]


class StandingLab(Links):
    """What measures a lab or starts ranks in it needs; `lab.Lab` builds and ends it."""

    def __init__(self, folder: Path, state: LabState, fabric: Fabric, wiring: Wiring, control: Control) -> None:
        self.folder, self.state, self.fabric, self.wiring, self.control = folder, state, fabric, wiring, control
        self._changing = threading.Lock()
        self._quotas: dict[int, CpuQuota] = {}
        self._finalizer = weakref.finalize(self, _abandoned, os.getpid(), folder, state, control)

    def rewire(self, fabric: Fabric) -> None:
        """Take over the same fabric with other buckets."""
        self.fabric = fabric
        self.wiring = replace(self.wiring, fabric=fabric)

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def measured_fabric(self) -> Fabric:
        """The fabric with each link's measured goodput of payload as its rate, and the period of its devices' quotas. Raises: RunError when nothing
        was measured."""
        if not self.state.verified:
            raise RunError("no link was measured", where=self.name, hint="build the lab without --no-verify")
        links = [replace(x, rate_Bps=s.goodput_Bps) for x, s in zip(self.fabric.links, self.state.links, strict=True)]
        shares = [d.cpu_share if self.state.pacing == "quota" else 0.0 for d in self.fabric.devices]
        quotas = quota_times(shares, machine_facts().cores)
        devices = tuple(replace(d, **q) if q else replace(d, cpu_period_s=0.0) for d, q in zip(self.fabric.devices, quotas, strict=True))
        return replace(self.fabric, name=f"{self.fabric.name} measured", devices=devices, links=tuple(links))

    def as_measured(self, fabric: Fabric) -> Fabric:
        """A fabric of this lab's devices, with what was measured of its links and quotas. Raises: RunError for a lab of other devices."""
        there = self.measured_fabric if self.state.verified else self.fabric
        if missing := [d.name for d in fabric.devices if d.name not in there.actor_of]:
            raise RunError(f"lab {self.name} has no device {missing[0]}", where="--lab", hint="build the lab from the fabric that is planned for")
        shares = {d.name: d for d in there.devices}
        names = ("cpu_share", "cpu_period_s", "cpu_overrun_s", "cpu_stretch", "cpu_cores", "cpu_speeds")
        devices = tuple(replace(d, **{n: getattr(shares[d.name], n) for n in names}) for d in fabric.devices)
        rates = {(x.src, x.dst): x for x in there.links}
        links = tuple(
            replace(x, rate_Bps=rates[e].rate_Bps, burst_bytes=rates[e].burst_bytes) if (e := (x.src, x.dst)) in rates else x for x in fabric.links
        )
        return replace(fabric, devices=devices, links=links)

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

    def _choose_pacing(self) -> None:
        shares = [d.cpu_share if 0 < d.cpu_share < 1 else 0.0 for d in self.fabric.devices]
        if any(shares):
            self.state.shares = shares
            self.state.pacing = "quota" if quota_place() is not None else "paced"

    def groups_of(self, device: int) -> list[Path]:
        """Files through which a process joins the CPU group of its device; none where no share is declared. Raises: RunError."""
        share = self.state.shares[device] if self.state.pacing == "quota" else 0.0
        if not share:
            return []
        if device not in self._quotas:
            self._quotas[device] = CpuQuota(share).open()
        return [self._quotas[device].members_file]

    def _let_go(self) -> None:
        self._finalizer.detach()
        self.control.close()
        for quota in self._quotas.values():
            quota.close()
        self._quotas.clear()


def _abandoned(pid: int, folder: Path, state: LabState, control: Control) -> None:
    """A `Lab` object is gone or the interpreter ends: a lab of ours goes with it, a kept one stays."""
    if os.getpid() == pid:  # not in a forked child
        control.close()
        if state.owner == pid:
            stop_holder(state)
            remove(folder)
