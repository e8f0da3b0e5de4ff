"""A batch script for Slurm: as many servers and processes as the plan has, one torchrun per server."""

from __future__ import annotations

from .exported import Exporter, Subject, Written
from .launch import RUN_AFTER, job_name, machine_of, resource_of, torchrun, uneven

__all__ = ["EXPORTER"]


def write(subject: Subject) -> Written:
    machine = machine_of(subject)
    missing = uneven(subject)
    gres = f"#SBATCH --gpus-per-node={subject.per_node}\n" if resource_of(machine).endswith("gpu") else ""
    text = (
        f"#!/bin/bash\n#SBATCH --job-name={job_name(subject)}\n#SBATCH --nodes={len(subject.nodes)}\n#SBATCH --ntasks-per-node=1\n{gres}"
        "#SBATCH --exclusive\n#SBATCH --output=%x-%j.out\nset -euo pipefail\n\n"
        # No `| head`: it would leave before `scontrol` has written its last line, and pipefail would then end the job.
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")\nhead=${hosts%%$\'\\n\'*}\n'
        f"srun --kill-on-bad-exit=1 bash -c '{torchrun(subject, '$SLURM_NODEID', chr(39) + chr(34) + '$head' + chr(34) + chr(39))}'\n"
    )
    if not gres:
        missing.append("which GPUs: the plan's fabric is no preset with GPUs")
    return text, missing, [RUN_AFTER, "partition, account and time limit of your cluster"]


EXPORTER = Exporter(name="slurm", version="Slurm 23.11, options of sbatch(1)", write=write, launches=True)
