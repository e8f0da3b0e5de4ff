"""A rehearsal lab: a fabric as network namespaces with shaped links, on this machine.

    with Lab.up(load_fabric("two-islands:4")) as lab:
        lab.run([sys.executable, "job.py"])                 # one process per device, gloo's environment set
        lab.counters()["island0/switch->island1/switch"].bytes
        lab.cut("island0/switch<->island1/switch")

`lab.fabric` is the fabric that was built (scaled, merged, with token buckets): plan and simulate on it. `lab.measured_fabric` has
the goodput that was measured in place of the rates.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

from ..errors import RunError, UsageError
from ..fabric import Fabric
from ..io.atomic import write_text
from ..io.fabric_name import load_fabric
from ..io.fabric_toml import fabric_toml, read_fabric_toml
from ..run.cpu_quota import CpuQuota, process_start_ticks, quota_place
from .build import collect, start_holder, stop_holder
from .control import Control
from .impair import Impairment
from .links import Links
from .planning import Options, first_state, plan_lab
from .process import LabProcess
from .ranks import RunResult, device_environment, places, require_success, run_ranks
from .state import LabState, claim, folder_of, new_name, read_state, remove, write_state
from .wiring import Wiring, wire

__all__ = ["Lab"]


class Lab(Links):
    """A lab that stands. Made by `Lab.up` or `Lab.open`."""

    def __init__(self, folder: Path, state: LabState, fabric: Fabric, wiring: Wiring, control: Control) -> None:
        self.folder, self.state, self.fabric, self.wiring, self.control = folder, state, fabric, wiring, control
        self._changing = threading.Lock()
        self._quotas: dict[int, CpuQuota] = {}
        self._finalizer = weakref.finalize(self, _abandoned, os.getpid(), folder, state, control)

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
        collect()
        plan = plan_lab(fabric, name, options)
        folder = claim(name)
        lab: Lab | None = None
        try:
            state = first_state(name, plan, options)
            write_state(folder, state)
            write_text(folder / "fabric.toml", fabric_toml(plan.fabric))
            answer = start_holder(folder, plan.wiring, plan.commands, owner=os.getpid(), helpers=plan.helpers)
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
        wiring = wire(
            fabric, f"mw-{name}-", mtu=state.mtu, offload=state.offload, impaired=impaired, method=state.method, acks_first=state.acks_first
        )
        return cls(folder, state, fabric, wiring, Control(folder))

    def down(self) -> None:
        """End all its processes and remove it. Raises: RunError."""
        stop_holder(self.state)
        self._let_go()
        remove(self.folder)

    def close(self) -> None:
        """Let go of a lab that stays up; processes started through this object end."""
        self._let_go()

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
            run or secrets.token_hex(8), number, argv, environment, folder=cwd, stdin=stdin, stdout=stdout, stderr=stderr,
            groups=self.groups_of(number),
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
