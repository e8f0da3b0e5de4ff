"""What a sandbox of Slurm is made of: files, daemons, and whether its nodes take jobs."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import EngineAway, RunError, Unsupported
from ...fabric.fabric import Fabric
from ...io.atomic import write_bytes, write_text
from ...io.cluster.slurm import parse_nodes
from ...io.cluster.slurm_files import Daemons, gres_conf, job_submit_lua, slurm_conf, topology_conf
from .interface import Commands
from .slurm import AWAY

__all__ = ["DAEMONS", "PATH", "PROGRAMS", "daemons", "not_ready", "require"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
DAEMONS = ("slurmctld", "slurmd")
NVIDIA_MAJOR = 195  # of the character devices that stand for GPUs; nothing answers there
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def require() -> None:
    """Raises: UsageError where a program is not installed."""
    commands = Commands(environment={**os.environ, "PATH": PATH})
    for program in PROGRAMS:
        commands.require(program, engine="Slurm", hint="apt-get install slurmctld slurmd slurm-client munge")


def daemons(
    folder: Path, names: tuple[str, ...], ports: Sequence[int], *, gpus: int, cores: int, memory_bytes: int, lua: bool, fabric: Fabric | None
) -> list[dict[str, object]]:
    """Writes the files; what the holder starts. Raises: Unsupported where no device files can be made."""
    d = Daemons(folder=folder, host=socket.gethostname(), controller_port=ports[0], ports=tuple(ports[1:]), nodes=names, gpus=gpus, cores=cores,
                memory_bytes=memory_bytes, lua=lua, topology=fabric is not None)  # fmt: skip
    _write(d, fabric)
    return _daemons(d)


def not_ready(environment: Mapping[str, str], nodes: int) -> str:
    """Why it takes no jobs yet; "" where it does."""
    commands = Commands(away=AWAY, environment=environment)
    try:
        states = {n.name: n.state for n in parse_nodes(commands.call(["scontrol", "show", "node", "-o"]))}
    except (EngineAway, RunError) as error:
        return error.message
    if all("IDLE" in s and "NOT_RESPONDING" not in s and "*" not in s for s in states.values()) and len(states) == nodes:
        return ""
    return ", ".join(f"{n} is {s}" for n, s in states.items() if "IDLE" not in s or "*" in s) or f"{len(states)} of {nodes} nodes are known"


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
