"""Sequence parallelism as a decision of `train plan`: on request, or where time or memory ask for it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.cli import main
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.citations import citations
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible
from meshwright.graph.graph import OpGraph
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.plan import Plan

MODEL = "tests/run/tensor_models.py:even"


@cache
def graph() -> OpGraph:
    return captured(MODEL)


def planned(wanted: bool | None, *, memory_bytes: int = 0, tensor: int = 2) -> Plan:
    fabric = read_fabric("laptop:2")
    fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes or d.memory_bytes) for d in fabric.devices))
    return plan_training(
        Training(model=MODEL, global_batch=16), fabric, graph=graph(),
        wishes=(
            LayoutWanted(data=None if tensor == 1 else 1, tensor=tensor, pipeline=1, microbatch=16, tensor_options=TensorOptions(sequence=wanted)),
            CollectivesWanted("ring"), RecomputeWanted("none"),
        ),
    )  # fmt: skip


def test_memory_decides_where_it_is_short():
    """The faster way where both fit; the one that fits where one does; and the plan says by how much."""
    without, along, free = planned(False), planned(True), planned(None)
    needs = [max(p.prediction.memory_worst_bytes) for p in (without, along)]
    assert needs[1] < needs[0]
    fastest = min((without, along), key=lambda p: p.prediction.time_s)
    assert free.layout == fastest.layout and free.prediction.time_s == fastest.prediction.time_s
    assert [p.decisions["sequence"]["options"]["wanted"] for p in (without, along, free)] == ["off", "on", "auto"]
    tight = planned(None, memory_bytes=sum(needs) // 2)
    assert tight.layout.sequence and tight.decisions["sequence"]["strategy"] == "sequence"
    assert "which is more than there is" in tight.decisions["sequence"]["why"]
    assert any(key == "sequence" for key, _ in citations(tight)) and not any(key == "sequence" for key, _ in citations(without))
    with pytest.raises(Infeasible, match="does not fit"):
        planned(False, memory_bytes=sum(needs) // 2)


def test_the_plan_file_keeps_it():
    plan = planned(True)
    again = plan_from_bytes(plan_bytes(plan))
    assert again.layout == plan.layout and again.layout.sequence
    assert {s.sequence for s in again.layout.segments} == {False, True} and any(s.gathers for s in again.layout.segments)


def test_required_where_there_is_nothing_to_split():
    with pytest.raises(Infeasible, match="sequence parallelism needs a tensor degree of at least 2"):
        plan_training(
            Training(model=MODEL, global_batch=16), read_fabric("laptop:2"), graph=graph(),
            wishes=(LayoutWanted(tensor=1, tensor_options=TensorOptions(sequence=True)), CollectivesWanted("ring")),
        )  # fmt: skip


def test_required_of_a_model_without_a_sequence():
    fabric = read_fabric("laptop:2")
    job = Training(model="tests/run/tensor_models.py:linears", global_batch=4, loss="mse")
    with pytest.raises(Infeasible, match=r"nothing is split along the sequence: .* no dimension beside samples and features"):
        plan_training(
            job, fabric, wishes=(LayoutWanted(data=1, tensor=2, pipeline=1, tensor_options=TensorOptions(sequence=True)), CollectivesWanted("ring")),
        )  # fmt: skip
    found = plan_training(job, fabric, wishes=(LayoutWanted(data=1, tensor=2, pipeline=1), CollectivesWanted("ring")))
    assert not found.layout.sequence and "no dimension beside samples" in found.decisions["sequence"]["why"]


def test_the_command(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["train", "plan", "--model", MODEL, "--fabric", "laptop:2", "--global-batch", "4", "--tp", "2", "--collective", "ring", "-o", str(out)]
    assert main([*words, "--sequence-parallel", "on", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["sequence"] is True
    assert main(["train", "explain", str(out), "--quick"]) == 0
    shown = capsys.readouterr().out
    assert "sequence-parallel" in shown and "as asked" in shown
    flags = tmp_path / "flags"
    assert main(["train", "export", str(out), "--to", "megatron", "-o", str(flags)]) == 0
    assert "--sequence-parallel" in flags.read_text()
    capsys.readouterr()
    assert main([*words, "--sequence-parallel", "off"]) == 0
    assert "sequence-parallel" not in capsys.readouterr().out
