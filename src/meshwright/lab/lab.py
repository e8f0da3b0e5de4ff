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
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError
from ..fabric.fabric import Fabric
from ..io.atomic import write_text
from ..io.fabric.name import load_fabric
from ..io.fabric.toml import fabric_toml, read_fabric_toml
from ..run.machine.cpu_quota import process_start_ticks
from .build import collect, start_holder, stop_holder
from .calibrate import calibrate
from .control import Control
from .handle import StandingLab
from .impair import Impairment
from .planning import Options, first_state, plan_lab
from .process import LabProcess
from .ranks import RunResult, device_environment, places, require_success, run_ranks
from .state import claim, folder_of, new_name, read_state, remove, write_state
from .wiring import wire

__all__ = ["Lab"]


class Lab(StandingLab):
    """A lab that stands. Made by `Lab.up` or `Lab.open`."""

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
