"""What files that start a job on a cluster have in common: how many servers and processes, which accelerators, and torchrun's command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .exported import Subject

if TYPE_CHECKING:
    from ...fabric.machines import Machine

__all__ = ["PROGRAM", "RUN_AFTER", "job_name", "machine_of", "resource_of", "torchrun", "uneven"]

PROGRAM = "train.py"
RUN_AFTER = f"{PROGRAM}: your loop with meshwright.torch.parallelize(model, optimizer, 'plan.json'), and plan.json beside it"


def machine_of(subject: Subject) -> Machine | None:
    """The machine that the plan's fabric is made of, where its name is a preset's."""
    from ...fabric.machines import MACHINES  # here, so that `train export --help` loads little

    return MACHINES.get(str(subject.plan.target_fabric.get("name", "")).partition(":")[0])


def job_name(subject: Subject) -> str:
    """A name that every scheduler takes: letters, digits and dashes, at most 40."""
    stem = str(subject.job.get("model", "plan")).rpartition("/")[2].replace(".py", "")
    return re.sub(r"[^a-z0-9]+", "-", f"meshwright-{stem}".lower()).strip("-")[:40].strip("-")


def resource_of(machine: Machine | None) -> str:
    """Kubernetes' name of the accelerator; "" where the fabric has none that we know."""
    if machine is None or machine.shape == "slice":
        return ""
    return "amd.com/gpu" if machine.device.startswith("mi") else "aws.amazon.com/neurondevice" if "trainium" in machine.device else "nvidia.com/gpu"


def torchrun(subject: Subject, node_rank: str, address: str, port: int = 29500) -> str:
    """One line, for a shell on every server."""
    return (
        f"torchrun --nnodes={len(subject.nodes)} --nproc-per-node={subject.per_node} --node-rank={node_rank} --master-addr={address} "
        f"--master-port={port} {PROGRAM}"
    )


def uneven(subject: Subject) -> list[str]:
    """Servers of unlike size, and the order of devices, which such files have no words for."""
    found = []
    if len(set(subject.nodes.values())) > 1:
        found.append(f"servers with unlike numbers of processes ({', '.join(map(str, subject.nodes.values()))}): all start {subject.per_node}")
    if not subject.in_server_order:
        found.append("ranks that change between servers: ranks are counted server by server")
    return found
