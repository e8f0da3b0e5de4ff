"""A task for SkyPilot: accelerators, servers, and torchrun with the variables that it sets."""

from __future__ import annotations

import json

from .exported import Exporter, Subject, Written
from .launch import RUN_AFTER, job_name, machine_of, torchrun, uneven

__all__ = ["EXPORTER"]

_ACCELERATORS = {
    "v100": "V100-32GB", "a100-40gb": "A100", "a100": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200", "gh200": "GH200",
    "l40s": "L40S", "mi300x": "MI300X", "trainium1": "Trainium", "rtx-pro-6000": "RTXPRO6000",
}  # fmt: skip


def write(subject: Subject) -> Written:
    machine = machine_of(subject)
    missing = uneven(subject)
    kind = _ACCELERATORS.get(machine.device, "") if machine else ""
    resources = f"resources:\n  accelerators: {kind}:{subject.per_node}\n" if kind else ""
    if not kind:
        missing.append("which accelerators: the plan's fabric is no preset with devices that SkyPilot names")
    head = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    text = (
        f"name: {json.dumps(job_name(subject))}\nworkdir: .\nnum_nodes: {len(subject.nodes)}\n{resources}"
        f"setup: |\n  pip install torch meshwright\nrun: |\n  {head}\n  {torchrun(subject, '$SKYPILOT_NODE_RANK', '$head')}\n"
    )
    return text, missing, [RUN_AFTER]


EXPORTER = Exporter(name="skypilot", version="SkyPilot 0.14.1, its Task.from_yaml", write=write, launches=True)
