"""Slurm as the engine (22.05 and later): jobs are submitted held and pinned to their nodes, and released in the order of the decisions.

`sbatch --hold` with nodes, GPUs, cores and memory; `scontrol release`, and after it the priority, which a release would overwrite. A job whose
servers have unlike parts becomes several jobs of Slurm, one per kind of part. Within a node Slurm picks the numbers of the GPUs. Ids of Slurm are not
trusted across a restart of its controller, which may lose the last seconds: jobs are found by their names, which are ours.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ...cluster.allocation import Given
from ...cluster.placed import shapes
from ...cluster.servers import Server, Servers
from ...errors import RunError, Unsupported, UsageError
from ...io.atomic import write_text
from ...io.cluster.slurm import SlurmJob, SlurmNode, parse_jobs, parse_nodes, parse_version
from ...io.cluster.slurm_files import OURS
from .interface import Commands, Seen, State, Work

__all__ = ["Slurm"]

MIN_VERSION = (22, 5)  # the oldest that was tried
MAX_SKIPPED = 1000  # numbers of jobs that were used before a controller lost its last seconds
FIRST_PRIORITY = 4_000_000_000  # Slurm's own priorities count down from 2^32
WHERE = "--conf names its slurm.conf, --sandbox one of `meshwright cluster sandbox up slurm`"  # said where it cannot be asked at all
AWAY = (
    "Unable to contact slurm controller", "Connection refused", "Socket timed out", "Transport endpoint", "Zero Bytes were transmitted",
    "Slurm backup controller in standby", "Unexpected m", "slurm_msg_sendto", "slurm_receive_msg", "slurm_load_", "Resource temporarily unavailable",
)  # fmt: skip
WAITING: Mapping[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "RUNNING": "running", "SUSPENDED": "running", "COMPLETING": "running",
    "STOPPED": "running", "COMPLETED": "done",
}  # fmt: skip


class Slurm:
    """`conf`: path of slurm.conf (default: as SLURM_CONF says). Raises: UsageError where Slurm is absent, Unsupported where it is too old,
    EngineAway."""

    name: ClassVar[str] = "slurm"
    picks_gpus: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    launches: ClassVar[bool] = False

    def __init__(self, *, conf: Path | None = None, dry: bool = False, partition: str = "") -> None:
        environment = {**os.environ, **({"SLURM_CONF": str(conf)} if conf else {})}
        self.commands, self.partition, self.notes = Commands(dry=dry, away=AWAY, environment=environment), partition, list[str]()
        self.said = self.commands.said
        self._nodes: dict[str, SlurmNode] = {}
        self._started = self._highest = 0
        for program in ("sinfo", "sbatch", "scontrol", "scancel"):
            self.commands.require(program, engine="Slurm", hint="install slurm-client, or choose --engine local")
        if not dry:
            version = parse_version(self.commands.call(["sinfo", "--version"], hint=WHERE))
            if version < MIN_VERSION:
                raise Unsupported(
                    f"Slurm {version[0]}.{version[1]:02d} is older than {MIN_VERSION[0]}.{MIN_VERSION[1]:02d}", where="--engine slurm",
                    hint="update Slurm; what `scontrol show job -d` prints is not known for older ones", data={"version": list(version)},
                )  # fmt: skip

    def discover(self) -> Servers:
        self._look_at_nodes()
        found = []
        for node in self._nodes.values():
            if node.gpus and node.cores and node.memory_bytes:
                gpus = tuple(f"{node.name}g{k}" for k in range(node.gpus))
                found.append(Server(name=node.name, gpus=gpus, cores=node.cores, memory_bytes=node.memory_bytes, type=node.type or "gpu"))
        if not found:
            raise UsageError("no node of this Slurm has GPUs", where="--engine slurm", hint="nodes need Gres=gpu:N in slurm.conf and gres.conf")
        return Servers(servers=tuple(found), fabric="slurm")

    def _look_at_nodes(self) -> None:
        self._nodes = {n.name: n for n in parse_nodes(self.commands.call(["scontrol", "show", "node", "-o"]))}

    def addresses(self, servers: Sequence[str]) -> Mapping[str, str]:
        if not self._nodes and not self.commands.dry:
            self._look_at_nodes()
        return {s: self._nodes[s].address if s in self._nodes else s for s in servers}

    def down(self) -> set[str]:
        self._look_at_nodes()
        return {n.name for n in self._nodes.values() if not n.up}

    def _jobs(self) -> dict[str, SlurmJob]:
        """By name; of jobs with the same name the last one that is not over."""
        found: dict[str, SlurmJob] = {}
        for job in parse_jobs(self.commands.call(["scontrol", "show", "job", "-d", "-o"])):
            if job.name not in found or found[job.name].state not in WAITING:
                found[job.name] = job
        return found

    def hold(self, work: Work) -> tuple[str, ...]:
        known = {} if self.commands.dry or work.fresh else self._jobs()
        ids = []
        for n, shape in enumerate(shapes(work.placed.given)):
            name = f"{work.key}-{n}"
            if name in known:
                ids.append(known[name].id)
                continue
            launch = f"{shlex.quote(sys.executable)} -S -E {shlex.quote(str(work.node))} {shlex.quote(str(work.folder))} {work.placed.attempt}"
            several = f"srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task={shape.cores} " if len(shape.servers) > 1 else ""
            script = work.folder / f"slurm-{work.placed.attempt}-{n}.sh"
            if not self.commands.dry:
                write_text(script, f"#!/bin/sh\nexec {several}{launch}\n")
            ids.append(self._submitted(name, [
                "sbatch", "--parsable", "--hold", "--no-requeue", f"--job-name={name}", f"--comment={OURS}{work.key}",
                    f"--nodes={len(shape.servers)}",
                f"--nodelist={','.join(shape.servers)}", "--ntasks-per-node=1", f"--cpus-per-task={shape.cores}",
                    f"--mem={shape.memory_bytes >> 20}M",
                f"--gres=gpu:{shape.gpus}", f"--output={work.folder}/slurm-{work.placed.attempt}-{n}.txt",
                *([f"--partition={self.partition}"] if self.partition else []), str(script),
            ]))  # fmt: skip
        return tuple(ids)

    def _submitted(self, name: str, words: list[str]) -> str:
        """Its id, one that was never used: a controller that lost its last seconds counts from an old number, and a node that remembers a job of
        that number is drained for it ("Duplicate jobid"). Such a job is cancelled and submitted once more."""
        for _ in range(MAX_SKIPPED):
            found = self.commands.call(words).strip().partition(";")[0]
            if not found.isdigit() or int(found) > self._highest:
                self.remember((found,))
                return found or f"JOBID-{name}"
            self.commands.call(["scancel", found])
        raise RunError(f"{MAX_SKIPPED} numbers of jobs in a row were used before", where="sbatch", hint="raise FirstJobId in slurm.conf")

    def remember(self, ids: Sequence[str]) -> None:
        self._highest = max((self._highest, *(int(x) for x in ids if x.isdigit())))

    def start(self, works: Sequence[Work]) -> None:
        lines = []
        for work in works:
            self._started += 1
            for job in work.ids:
                lines += [f"release {job}", f"update JobId={job} Priority={FIRST_PRIORITY - self._started}"]
        self.commands.call(["scontrol"], "\n".join([*lines, "quit", ""]))

    def look(self, works: Sequence[Work]) -> list[Seen]:
        known = self._jobs()
        return [self._seen(work, known) for work in works]

    def _seen(self, work: Work, known: Mapping[str, SlurmJob]) -> Seen:
        jobs = [known.get(f"{work.key}-{n}") for n in range(len(shapes(work.placed.given)))]
        found = [j for j in jobs if j is not None]
        if len(found) < len(jobs):
            return Seen("gone")
        names = {s.name: tuple(f"{s.name}g{k}" for k in range(s.gpus)) for s in self._nodes.values()}
        given = tuple(
            Given(job=work.placed.job, server=p.node, gpus=tuple(names.get(p.node, ())[k] if k < len(names.get(p.node, ())) else f"{p.node}g{k}"
                                                                 for k in p.gpus), cores=p.cores, memory_bytes=p.memory_bytes)
            for j in found for p in j.parts
        )  # fmt: skip
        states: list[State] = [WAITING.get(j.state, "failed") for j in found]
        why = "; ".join(dict.fromkeys(f"{j.state} {j.reason}" for j in found))
        for state in ("failed", "running", "waiting", "done"):
            if state in states:
                held = state == "waiting" and any(j.reason == "JobHeldUser" for j in found)
                return Seen("held" if held else state, given, max(j.code for j in found), why)
        return Seen("gone")

    def cancel(self, work: Work) -> None:
        self._cancel(work)

    def leave(self, work: Work) -> None:
        """What runs is asked by its launchers, whatever the site's KillWait is; what waits is cancelled."""
        work.ask()
        self._cancel(work, "--state=PENDING")

    def _cancel(self, work: Work, *more: str) -> None:
        """By name: a number may be another job's since a controller counted from an old one."""
        for n in range(len(shapes(work.placed.given))):
            self.commands.call(["scancel", f"--name={work.key}-{n}", *more])

    def suspend(self, work: Work) -> None:
        for job in work.ids:
            self.commands.call(["scontrol", "suspend", job])

    def resume(self, work: Work) -> None:
        for job in work.ids:
            self.commands.call(["scontrol", "resume", job])

    def resize(self, work: Work, given: tuple[Given, ...]) -> None:
        raise Unsupported(
            "Slurm does not change the cores or the memory of a job that runs", where=f"job {work.placed.job}",
                hint="use an allocation that keeps them"
        )

    def close(self) -> None:
        """Nothing is held open; jobs go on."""
