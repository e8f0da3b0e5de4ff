"""A file of NCCL's variables that follow from the plan's fabric; NCCL reads it as NCCL_CONF_FILE. The tuner file that it names is written by
`meshwright collective export --format nccl-tuner`."""

from __future__ import annotations

from .exported import Exporter, Subject, Written

__all__ = ["EXPORTER"]


def write(subject: Subject) -> Written:
    fabric = subject.plan.target_fabric
    wiring = next((str(n.get("source", "")) for n in fabric.get("provenance", ()) if n.get("what") == "wiring between boxes"), "")
    lines = [f"# variables of NCCL for {fabric.get('name', 'a fabric')}, by meshwright", "NCCL_TUNER_CONFIG_FILE=tuner.csv"]
    missing = ["degrees, stages and micro-batches: NCCL's variables say nothing of a job"]
    if "on its own switch" in wiring or "plane i mod 2" in wiring:
        lines += ["# ports meet only ports of their own rail: never send from one rail to another", "NCCL_CROSS_NIC=0"]
    elif wiring:
        lines.append("# every port reaches every other: NCCL's own choice of NCCL_CROSS_NIC stands")
    chosen = sorted(k for k in subject.plan.decisions if k.startswith("collective"))
    if chosen:
        said = "NCCL chooses among its own algorithms; `collective export` writes MSCCL and MSCCL++"
        missing.append(f"collective programs ({', '.join(chosen)}): {said}")
    to_add = ["tuner.csv: meshwright collective export --format nccl-tuner, and NCCL's example tuner plugin (NCCL_TUNER_PLUGIN)",
              "NCCL_IB_HCA, NCCL_SOCKET_IFNAME: names of your network interfaces"]  # fmt: skip
    return "\n".join(lines) + "\n", missing, to_add


EXPORTER = Exporter(name="nccl", version="NCCL 5067397 (2026-06-11), the variables in its source", write=write, launches=True)
