"""An engine on this machine with any number of nodes and made-up GPUs, cores and memory, beside others, for tries and tests: Slurm or Ray.

Daemons have a folder, a key and ports of their own, and live in a PID namespace whose first process is their holder: when it or its owner is killed,
the kernel ends them and their jobs. Files that are left are removed by the next `up`, `down` or `listed`. Nodes share this machine's cores, memory
and processes; what a job was given is kept by the engine's books only. Needs root, and Debian's slurmctld, slurmd, slurm-client, munge, or Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from ...errors import FormatError, RunError, Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...io.atomic import write_bytes
from ..machine.cpu_quota import process_start_ticks
from . import sandbox_ray, sandbox_slurm
from .sandbox_slurm import PATH, PROGRAMS

__all__ = ["PROGRAMS", "Sandbox", "SandboxState", "listed"]

SCHEMA, VERSION = "meshwright.sandbox", 1
HOLDER = Path(__file__).with_name("holder.py")
MAX_READY_S = {"slurm": 60.0, "ray": 240.0}  # they take 2 s and half a minute here; a busy machine was seen to take four times as long
MAX_END_S = 10.0
MAX_NODES = 64  # each is a slurmd with some 10 MiB
MAX_STATE_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,23}\Z")


class SandboxState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`holder`: the process outside the namespace with which all end, and its start time, which tells recycled numbers apart. `ports`: the
    controller's (of Ray: its head's) first."""

    name: str
    holder: int
    holder_start: str
    nodes: tuple[str, ...]
    gpus: int
    cores: int
    memory_bytes: int
    ports: tuple[int, ...]
    ready_s: float = 0.0
    kind: Literal["slurm", "ray"] = "slurm"
    schema: str = SCHEMA
    version: int = VERSION

    @property
    def alive(self) -> bool:
        return process_start_ticks(self.holder) == self.holder_start


def runtime() -> Path:
    """The folder of all sandboxes of this user. Raises: RunError when it is not ours."""
    given = os.environ.get("MESHWRIGHT_SANDBOX_DIR")
    folder = Path(given) if given else Path("/run/meshwright/sandboxes") if os.geteuid() == 0 else Path(tempfile.gettempdir(),
        f"meshwright-{os.geteuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise RunError("the folder of sandboxes belongs to somebody else", where=str(folder), hint="set MESHWRIGHT_SANDBOX_DIR")
    return folder


def listed() -> list[SandboxState]:
    """Sandboxes that live. What dead ones left is removed. Raises: FormatError."""
    found = []
    for folder in sorted(x for x in runtime().iterdir() if _NAME.match(x.name)):
        try:
            with (folder / "sandbox.json").open("rb") as file:
                state = msgspec.json.decode(file.read(MAX_STATE_BYTES), type=SandboxState)
        except OSError:
            if time.time() - folder.stat().st_mtime > MAX_READY_S["ray"]:  # else it is being made
                shutil.rmtree(folder, ignore_errors=True)
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(str(error), where=str(folder / "sandbox.json"), hint="remove the folder") from None
        if state.alive:
            found.append(state)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _free_ports(count: int) -> tuple[int, ...]:
    taken = [socket.socket() for _ in range(count)]
    try:
        for s in taken:
            s.bind(("127.0.0.1", 0))
        return tuple(s.getsockname()[1] for s in taken)
    finally:
        for s in taken:
            s.close()


class Sandbox:
    """A sandbox that stands; ends with `down`, `with`, or this process, unless it was made to `keep`. `conf`: its slurm.conf; `address`: of Ray."""

    def __init__(self, folder: Path, state: SandboxState, process: subprocess.Popen[bytes] | None) -> None:
        self.folder, self.state, self._process = folder, state, process
        self.conf = folder / "slurm.conf"
        self.address = f"{sandbox_ray.HOST}:{state.ports[0]}"

    @classmethod
    def up(
        cls, *, nodes: int = 4, gpus: int = 4, cores: int = 8, memory_bytes: int = 64 << 30, name: str = "", fabric: Fabric | None = None,
        lua: bool = False, keep: bool = False, kind: Literal["slurm", "ray"] = "slurm",
    ) -> Sandbox:  # fmt: skip
        """`fabric`: its groups are the nodes' names, and topology.conf says how they are joined. `lua`: jobs that were not decided are held (Slurm).

        Raises: UsageError (no Slurm here, a name that is taken, figures), MissingExtra (no Ray), Unsupported (not root), RunError with the end of a
        log."""
        name = name or f"{kind}-{secrets.token_hex(3)}"
        names = tuple(fabric.groups) if fabric is not None else tuple(f"n{i}" for i in range(1, nodes + 1))
        if not _NAME.match(name) or not 1 <= len(names) <= MAX_NODES or not 0 <= gpus <= 64 or cores < 1 or memory_bytes < 1 << 20:
            raise UsageError(f"a sandbox {name[:32]!r} of {len(names)} nodes with {gpus} GPUs, {cores} cores, {memory_bytes} bytes", where="sandbox",
                             hint=f"1 to {MAX_NODES} nodes, up to 64 GPUs, a name of small letters, digits, dashes")  # fmt: skip
        if kind == "ray":
            sandbox_ray.require()
        else:
            sandbox_slurm.require()
        if os.geteuid() != 0:
            said = f"a sandbox of {kind.title()} needs root: its processes live in a namespace of their own"
            raise Unsupported(said, where="sandbox", hint="use sudo")
        listed()
        folder = runtime() / name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise UsageError(f"a sandbox is called {name!r} already", where="--name", hint=f"`meshwright cluster sandbox down {name}`") from None
        process = None
        try:
            ports = _free_ports(len(names) + 1)
            state = SandboxState(
                name=name, holder=0, holder_start="", nodes=names, gpus=gpus, cores=cores, memory_bytes=memory_bytes, ports=ports, kind=kind
            )
            if kind == "ray":
                daemons = sandbox_ray.daemons(folder, names, ports, gpus=gpus, cores=cores, memory_bytes=memory_bytes)
            else:
                daemons = sandbox_slurm.daemons(folder, names, ports, gpus=gpus, cores=cores, memory_bytes=memory_bytes, lua=lua, fabric=fabric)
            write_bytes(folder / "daemons.json", msgspec.json.encode({"daemons": daemons}))
            process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--", sys.executable, "-S", "-E", str(HOLDER), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=(folder / "holder.log").open("ab"),
                start_new_session=True, cwd="/", env={**os.environ, "PATH": PATH},
            )  # fmt: skip
            begun = time.monotonic()
            state = msgspec.structs.replace(state, holder=process.pid, holder_start=process_start_ticks(process.pid) or "")
            write_bytes(folder / "sandbox.json", msgspec.json.encode(state))
            sandbox = cls(folder, state, process)
            sandbox.wait_until_ready()
            sandbox.state = msgspec.structs.replace(state, ready_s=round(time.monotonic() - begun, 3))
            write_bytes(folder / "sandbox.json", msgspec.json.encode(sandbox.state))
            if keep:  # until now it would have ended with this process
                assert process.stdin is not None
                process.stdin.write(b"k")
                process.stdin.flush()
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return sandbox

    @classmethod
    def open(cls, name: str) -> Sandbox:
        """One that stands. Raises: UsageError."""
        known = {s.name: s for s in listed()}
        if name not in known:
            raise UsageError(f"no sandbox is called {name[:32]!r}", where="NAME", hint=f"there are: {', '.join(known) or 'none'}")
        return cls(runtime() / name, known[name], None)

    def environment(self) -> Mapping[str, str]:
        """For programs of Slurm that are to talk to it."""
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.conf)}

    def wait_until_ready(self) -> None:
        """Until every node takes jobs. Raises: RunError with the end of the log of what is not ready."""
        deadline, why = time.monotonic() + MAX_READY_S[self.state.kind], ""
        while time.monotonic() < deadline:
            if not self.state.alive:
                why = "its holder has ended"
                break
            if self.state.kind == "ray":
                why = sandbox_ray.not_ready(self.address, self.state.nodes, deadline - time.monotonic())
            else:
                why = sandbox_slurm.not_ready(self.environment(), len(self.state.nodes))
            if not why:
                return
            time.sleep(0.05)
        logs = {p.name: p.read_text(errors="replace")[-400:] for p in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])}
        raise RunError(f"the sandbox is not ready: {why}", where=self.state.name, hint="\n".join(f"{k}: {v}" for k, v in logs.items())[-2000:])

    def pids(self, program: str) -> list[int]:
        """Processes of a daemon, by numbers outside its namespace: those whose command line names the program and this folder."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    words = (path / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[0].rsplit(b"/", 1)[-1] == program.encode() and any(str(self.folder).encode() in w for w in words):
                    found.append(int(path.name))
        return found

    def down(self) -> None:
        """End all its daemons and jobs, and remove its files."""
        if self.state.alive:
            os.kill(self.state.holder, signal.SIGKILL)
        deadline = time.monotonic() + MAX_END_S
        daemons = sandbox_ray.DAEMONS if self.state.kind == "ray" else sandbox_slurm.DAEMONS
        while (self.state.alive or any(map(self.pids, daemons))) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
        else:
            with contextlib.suppress(ChildProcessError):  # it may be ours all the same, started through another object
                os.waitpid(self.state.holder, 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()
