"""Files for Slurm: topology.conf from a fabric, job_submit.lua from decisions, slurm.conf and gres.conf of a sandbox. Written for Slurm 22.05."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...fabric.fabric import Fabric

__all__ = ["Daemons", "gres_conf", "job_submit_lua", "slurm_conf", "topology_conf"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
OURS = "meshwright:"  # what the comment of a job that `cluster run` submits begins with


def _named(name: str, where: str) -> str:
    if not _NAME.match(name):
        raise UsageError(f"{name[:64]!r} is no name for Slurm", where=where, hint="letters, digits, dots, dashes")
    return name


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:100] or "switch"


def topology_conf(fabric: Fabric) -> str:
    """Servers below switches, as Slurm's topology/tree wants them. Switches that join the same servers, or overlap, are one switch there: rails and
    planes are as near as each other. What no switch joins hangs below one made up, `fabric`.

    Raises: UsageError for names that Slurm does not take."""
    inside = {a: name for name, members in fabric.groups.items() for a in members}
    n = len(fabric.devices)
    inside |= {n + i: s.group for i, s in enumerate(fabric.switches) if s.group in fabric.groups}
    owner: dict[int, str] = dict(inside)
    lines, leaf = [], set(fabric.groups)
    for name in fabric.groups:
        _named(name, "server")
    ends = {(a, b) for a, b in fabric.link_ends}
    ends |= {(b, a) for a, b in ends}
    used: set[str] = set(leaf)

    def fresh(name: str) -> str:
        found = _plain(name)
        while found in used:
            found += "-s"
        used.add(found)
        return found

    while True:
        units = list(dict.fromkeys(owner.values()))
        near: dict[str, set[int]] = {u: set() for u in units}
        for a, b in ends:
            if a in owner and b not in owner:
                near[owner[a]].add(b)
        together = _overlapping({u: s for u, s in near.items() if s})
        if not together:
            break
        for members, switches in together:
            top = fresh(fabric.switches[min(switches) - n].name)
            if len(members) > 1 or members[0] in leaf:
                lines += _lines(top, members, leaf, fresh)
                owner |= {a: top for a, u in owner.items() if u in members}
            else:
                top = members[0]
            owner |= dict.fromkeys(switches, top)
    units = list(dict.fromkeys(owner.values()))
    if len(units) > 1 or (units and units[0] in leaf):
        lines += _lines(fresh("fabric"), units, leaf, fresh)
    return "\n".join(["# topology/tree, written by meshwright", *lines]) + "\n"


def _overlapping(near: Mapping[str, set[int]]) -> list[tuple[list[str], set[int]]]:
    """Units that share a switch, and the switches that they touch."""
    found: list[tuple[list[str], set[int]]] = []
    for unit, switches in near.items():
        members, touched = [unit], set(switches)
        rest = []
        for other, theirs in found:
            if theirs & touched:
                members, touched = [*other, *members], touched | theirs
            else:
                rest.append((other, theirs))
        found = [*rest, (members, touched)]
    return found


def _lines(top: str, members: Sequence[str], leaf: set[str], fresh: object) -> list[str]:
    nodes, switches = [m for m in members if m in leaf], [m for m in members if m not in leaf]
    if not switches:
        return [f"SwitchName={top} Nodes={','.join(nodes)}"]
    lines = []
    if nodes:  # a switch has nodes or switches, not both
        below = fresh(f"{top}-nodes")  # type: ignore[operator]
        lines.append(f"SwitchName={below} Nodes={','.join(nodes)}")
        switches = [*switches, below]
    return [*lines, f"SwitchName={top} Switches={','.join(switches)}"]


def job_submit_lua(*, partition: str = "", refuse: bool = False, decided: Mapping[str, Sequence[str]] | None = None) -> str:
    """A plug-in that keeps a partition (default: all) to decisions. Jobs of `cluster run` pass. Others are pinned to the nodes in `decided` (job
    name -> nodes), else held until somebody releases them, or refused.

    Raises: UsageError for names that Slurm does not take."""
    table = [
        f'  ["{_named(name, "decided")}"] = "{",".join(_named(x, "node") for x in nodes)}",' for name, nodes in sorted((decided or {}).items())
    ]
    others = (
        'slurm.log_user("meshwright: no decision for this job; submit it through `meshwright cluster run`")\n  return slurm.ERROR' if refuse else
        'job_desc.priority = 0\n  slurm.log_user("meshwright: held until it is decided where this job runs")\n  return slurm.SUCCESS'
    )  # fmt: skip
    other = f'job_desc.partition ~= nil and job_desc.partition ~= "{_named(partition, "partition")}"' if partition else ""
    here = f"\n  if {other} then return slurm.SUCCESS end" if partition else ""
    return f"""-- Written by meshwright: who may run where is decided outside.
local decided = {{
{chr(10).join(table)}
}}

function slurm_job_submit(job_desc, part_list, submit_uid){here}
  if job_desc.comment ~= nil and string.sub(job_desc.comment, 1, {len(OURS)}) == "{OURS}" then return slurm.SUCCESS end
  if job_desc.name ~= nil and decided[job_desc.name] ~= nil then
    job_desc.req_nodes = decided[job_desc.name]
    return slurm.SUCCESS
  end
  {others}
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end
"""


@dataclass(frozen=True)
class Daemons:
    """A sandbox: its folder, this machine's name, ports of the controller and of each node, and what a node claims to have."""

    folder: Path
    host: str
    controller_port: int
    ports: tuple[int, ...]
    nodes: tuple[str, ...]
    gpus: int
    cores: int
    memory_bytes: int
    lua: bool = False
    topology: bool = False


def slurm_conf(d: Daemons) -> str:
    """Controller and nodes on one host; decisions come from outside, so priorities are plain and the scheduler looks at once."""
    f = d.folder
    gres = f" Gres=gpu:fake:{d.gpus}" if d.gpus else ""
    nodes = [
        f"NodeName={name} NodeHostname={d.host} NodeAddr=127.0.0.1 Port={port} CPUs={d.cores} RealMemory={d.memory_bytes >> 20}{gres}"
        for name, port in zip(d.nodes, d.ports, strict=True)
    ]
    plug_ins = [*(["JobSubmitPlugins=lua"] if d.lua else []), *(["TopologyPlugin=topology/tree"] if d.topology else [])]
    return "\n".join([
        f"ClusterName={_plain(f.name)}", f"SlurmctldHost={d.host}(127.0.0.1)", f"SlurmctldPort={d.controller_port}", "SlurmUser=root",
        "AuthType=auth/munge", f"AuthInfo=socket={f}/munge.sock", "CredType=cred/munge", f"StateSaveLocation={f}/state",
            f"SlurmctldPidFile={f}/slurmctld.pid",
        f"SlurmctldLogFile={f}/slurmctld.log", f"SlurmdSpoolDir={f}/spool-%n", f"SlurmdPidFile={f}/slurmd-%n.pid", f"SlurmdLogFile={f}/slurmd-%n.log",
        "SlurmdParameters=config_overrides", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none", "MpiDefault=none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory", "PriorityType=priority/basic", "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0", "ReturnToService=2", "SlurmctldTimeout=30",
        "SlurmdTimeout=5", "InactiveLimit=0", "KillWait=5", "MinJobAge=3600", "MaxJobCount=20000", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "JobCompType=jobcomp/none", *plug_ins, *(["GresTypes=gpu"] if d.gpus else []), *nodes,
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]) + "\n"  # fmt: skip


def gres_conf(d: Daemons, devices: Iterable[Path]) -> str:
    """GPUs as device files: with ordinary files CUDA_VISIBLE_DEVICES stays empty."""
    files = list(devices)
    if not files:
        return "AutoDetect=off\n"
    return "AutoDetect=off\n" + "".join(f"NodeName={n} Name=gpu Type=fake File={x}\n" for n in d.nodes for x in files)
