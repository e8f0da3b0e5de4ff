"""Slurm on this machine: a controller and any number of nodes with made-up GPUs, cores and memory, beside other instances, for tries and tests.

Daemons have a folder, a key and ports of their own, and live in a PID namespace whose first process is their holder: when it or its owner is
killed, the
kernel ends them and their jobs. Files that are left are removed by the next `up`, `down` or `listed`. Nodes share this machine's cores, memory and
processes; what a job was given is kept by Slurm's books only. Needs root and Debian's slurmctld, slurmd, slurm-client, munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from ...errors import EngineAway, FormatError, RunError, Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...io.atomic import write_bytes, write_text
from ...io.cluster.slurm import parse_nodes
from ...io.cluster.slurm_files import Daemons, gres_conf, job_submit_lua, slurm_conf, topology_conf
from ..machine.cpu_quota import process_start_ticks
from .interface import Commands
from .slurm import AWAY

__all__ = ["PROGRAMS", "Sandbox", "SandboxState", "listed"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
SCHEMA, VERSION = "meshwright.sandbox", 1
HOLDER = Path(__file__).with_name("holder.py")
MAX_READY_S = 60.0  # it takes 2 s here; a busy machine was seen to take 8
MAX_END_S = 10.0
MAX_NODES = 64  # each is a slurmd with some 10 MiB
NVIDIA_MAJOR = 195  # of the character devices that stand for GPUs; nothing answers there
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_STATE_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,23}\Z")


class SandboxState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`holder`: the process outside the namespace with which all end, and its start time, which tells recycled numbers apart."""

    name: str
    holder: int
    holder_start: str
    nodes: tuple[str, ...]
    gpus: int
    cores: int
    memory_bytes: int
    ports: tuple[int, ...]
    ready_s: float = 0.0
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
            if time.time() - folder.stat().st_mtime > MAX_READY_S:  # else it is being made
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
    """A sandbox that stands; ends with `down`, `with`, or this process, unless it was made to `keep`. `conf`: its slurm.conf."""

    def __init__(self, folder: Path, state: SandboxState, process: subprocess.Popen[bytes] | None) -> None:
        self.folder, self.state, self._process = folder, state, process
        self.conf = folder / "slurm.conf"

    @classmethod
    def up(
        cls, *, nodes: int = 4, gpus: int = 4, cores: int = 8, memory_bytes: int = 64 << 30, name: str = "", fabric: Fabric | None = None,
        lua: bool = False, keep: bool = False,
    ) -> Sandbox:  # fmt: skip
        """`fabric`: its groups are the nodes' names, and topology.conf says how they are joined. `lua`: jobs that were not decided are held.

        Raises: UsageError (no Slurm here, a name that is taken, figures), Unsupported (not root), RunError with the end of a log."""
        name = name or f"slurm-{secrets.token_hex(3)}"
        names = tuple(fabric.groups) if fabric is not None else tuple(f"n{i}" for i in range(1, nodes + 1))
        if not _NAME.match(name) or not 1 <= len(names) <= MAX_NODES or not 0 <= gpus <= 64 or cores < 1 or memory_bytes < 1 << 20:
            raise UsageError(f"a sandbox {name[:32]!r} of {len(names)} nodes with {gpus} GPUs, {cores} cores, {memory_bytes} bytes", where="sandbox",
                             hint=f"1 to {MAX_NODES} nodes, up to 64 GPUs, a name of small letters, digits, dashes")  # fmt: skip
        commands = Commands(environment={**os.environ, "PATH": PATH})
        for program in PROGRAMS:
            commands.require(program, engine="Slurm", hint="apt-get install slurmctld slurmd slurm-client munge")
        if os.geteuid() != 0:
            raise Unsupported("a sandbox of Slurm needs root: its daemons run jobs, and its GPUs are device files", where="sandbox", hint="use sudo")
        listed()
        folder = runtime() / name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise UsageError(f"a sandbox is called {name!r} already", where="--name", hint=f"`meshwright cluster sandbox down {name}`") from None
        process = None
        try:
            ports = _free_ports(len(names) + 1)
            d = Daemons(folder=folder, host=socket.gethostname(), controller_port=ports[0], ports=ports[1:], nodes=names, gpus=gpus, cores=cores,
                        memory_bytes=memory_bytes, lua=lua, topology=fabric is not None)  # fmt: skip
            _write(d, fabric)
            write_bytes(folder / "daemons.json", msgspec.json.encode({"keep": keep, "daemons": _daemons(d)}))
            process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--", sys.executable, "-S", "-E", str(HOLDER), str(folder)],
                stdin=subprocess.DEVNULL if keep else subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=(folder / "holder.log").open("ab"),
                start_new_session=True, cwd="/", env={**os.environ, "PATH": PATH},
            )  # fmt: skip
            begun = time.monotonic()
            state = SandboxState(name=name, holder=process.pid, holder_start=process_start_ticks(process.pid) or "", nodes=names, gpus=gpus,
                cores=cores,
                                 memory_bytes=memory_bytes, ports=ports)  # fmt: skip
            write_bytes(folder / "sandbox.json", msgspec.json.encode(state))
            sandbox = cls(folder, state, process)
            sandbox.wait_until_ready()
            sandbox.state = msgspec.structs.replace(state, ready_s=round(time.monotonic() - begun, 3))
            write_bytes(folder / "sandbox.json", msgspec.json.encode(sandbox.state))
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
        commands = Commands(away=AWAY, environment=self.environment())
        deadline, why = time.monotonic() + MAX_READY_S, ""
        while time.monotonic() < deadline:
            if not self.state.alive:
                why = "its holder has ended"
                break
            try:
                states = {n.name: n.state for n in parse_nodes(commands.call(["scontrol", "show", "node", "-o"]))}
                if all("IDLE" in s and "NOT_RESPONDING" not in s and "*" not in s for s in states.values()) and len(states) == len(self.state.nodes):
                    return
                why = ", ".join(f"{n} is {s}" for n, s in states.items() if "IDLE" not in s or "*" in s)
            except (EngineAway, RunError) as error:
                why = error.message
            time.sleep(0.05)
        logs = {p.name: p.read_text(errors="replace")[-400:] for p in sorted(self.folder.glob("*.log"))}
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
        while (self.state.alive or self.pids("slurmd") or self.pids("slurmctld")) and time.monotonic() < deadline:
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


def _write(d: Daemons, fabric: Fabric | None) -> None:
    (d.folder / "state").mkdir()
    devices = []
    for i in range(d.gpus):
        path = d.folder / f"gpu{i}"
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, i))
        except OSError as error:
            raise Unsupported(
                f"device files cannot be made here: {error.strerror}", where="sandbox", hint="run with CAP_MKNOD, or use --gpus 0"
            ) from error
        devices.append(path)
    for name in d.nodes:
        (d.folder / f"spool-{name}").mkdir()
    write_text(d.folder / "slurm.conf", slurm_conf(d))
    write_text(d.folder / "gres.conf", gres_conf(d, devices))
    if d.lua:
        write_text(d.folder / "job_submit.lua", job_submit_lua())
    if fabric is not None:
        write_text(d.folder / "topology.conf", topology_conf(fabric))
    write_bytes(d.folder / "munge.key", secrets.token_bytes(128))
    (d.folder / "munge.key").chmod(0o400)


def _daemons(d: Daemons) -> list[dict[str, object]]:
    f, conf = d.folder, {"SLURM_CONF": str(d.folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", "--num-threads=2", f"--socket={f}/munge.sock", f"--key-file={f}/munge.key", f"--pid-file={f}/munged.pid",
        f"--log-file={f}/munged.log", f"--seed-file={f}/munge.seed",
    ]  # fmt: skip
    nodes: list[dict[str, object]] = [
        {"name": f"slurmd-{n}", "argv": ["slurmd", "-D", "-N", n, "-f", f"{f}/slurm.conf"], "ready": "", "env": conf} for n in d.nodes
    ]
    return [
        {"name": "munged", "argv": munge, "ready": f"{f}/munge.sock", "env": {}},
        {"name": "slurmctld", "argv": ["slurmctld", "-D", "-f", f"{f}/slurm.conf"], "ready": "", "env": conf}, *nodes,
    ]  # fmt: skip
