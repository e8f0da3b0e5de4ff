"""Slurm's lists of GPUs as clusters write them: types that are numbers, several types, numbers of a job, none."""

from __future__ import annotations

import pytest

from meshwright.io.cluster.slurm import parse_jobs, parse_nodes
from meshwright.io.fabric.nodes import parse_slurm_nodes
from meshwright.io.gres import gpus_in


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:a100:4(S:0-1)", [("a100", 4)]), ("gpu:8", [("", 8)]), ("gpu:(null):2(S:0)", [("", 2)]), ("(null)", []), ("", []), ("gpu", [("", 1)]),
        ("gpu:3090:8(S:0-1)", [("3090", 8)]), ("gpu:2080ti:4", [("2080ti", 4)]), ("gpu:1080:2,gpu:2080ti:4", [("1080", 2), ("2080ti", 4)]),
        ("gpu:a100:1(S:0,2),gpu:a100_1g.5gb:7,mps:a100:400,shard:8", [("a100", 1), ("a100_1g.5gb", 7)]), ("gpu:a100:no_consume:4", [("a100", 4)]),
        ("craynetwork:4,gpu:v100s-pcie-32gb:2", [("v100s-pcie-32gb", 2)]), ("gpu:tesla", [("tesla", 1)]), ("gpumem:80G,vgpu:2", []),
    ],
)  # fmt: skip
def test_types_and_counts(gres, found):
    """A type that begins with a digit was read as the count: 3090 GPUs, or none."""
    assert [x[:2] for x in gpus_in(gres)] == found
    total, types = sum(n for _, n in found), {t for t, _ in found}
    line = f"NodeName=n1 CPUTot=4 Gres={gres} RealMemory=1 State=IDLE"
    (node,), (other,) = parse_nodes(line), parse_slurm_nodes(line.encode())
    assert node.gpus == other.count == total
    assert node.type == (types.pop() if len(types) == 1 else "") and other.product == " and ".join(t for t, _ in found if t)


def test_a_job_has_the_gpus_of_all_its_types():
    line = "JobId=7 JobName=j JobState=RUNNING   Nodes=n1 CPU_IDs=0-3 Mem=1024 GRES=gpu:3090:2(IDX:0,3),gpu:h100:1(IDX:5)"
    assert parse_jobs(line)[0].parts[0].gpus == (0, 3, 5)


@pytest.mark.parametrize(("state", "up"), [("IDLE", True), ("IDLE*", False), ("MIXED*+CLOUD", False), ("MIXED+PLANNED", True), ("IDLE~", True)])
def test_a_node_that_does_not_answer_takes_no_jobs(state, up):
    line = f"NodeName=n1 CPUTot=4 Gres=gpu:8 RealMemory=1 State={state}"
    assert parse_nodes(line)[0].up is up and (not parse_slurm_nodes(line.encode())[0].lacks) is up
