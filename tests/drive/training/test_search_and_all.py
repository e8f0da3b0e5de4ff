"""The search beside layouts whose choices are fixed one by one: what it leaves aside must not be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from captured import captured
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Training
from meshwright.plan.plan import Plan

LAYOUT_ALONE = ("schedule", "division", "collectives", "compression")


def planned(model: str, name: str, memory_bytes: int, batch: int, **fixed: int | None) -> Plan:
    plain = read_fabric(name)
    fabric = replace(plain, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in plain.devices))
    wishes = (LayoutWanted(**fixed), CollectivesWanted("ring"))  # type: ignore[arg-type]
    return plan_training(Training(model=model, global_batch=batch), fabric, graph=captured(model), wishes=wishes, without=LAYOUT_ALONE)


@pytest.mark.parametrize(("model", "name", "memory_bytes", "batch", "open_", "fixed"), [
    # pipelines came after forty layouts of other degrees that do not fit, none of which counts
    ("examples/gpt.py:tiny", "laptop:4", 2_032_435, 8, {}, {"data": 1, "tensor": 1, "pipeline": 4, "microbatch": 2}),
    # the fastest that fits when its state is divided is the seventh by what a step may take
    ("examples/experts.py:tiny", "laptop:4", 215_217, 8, {"expert": None}, {"data": 2, "tensor": 1, "pipeline": 2, "microbatch": 2}),
    # simulated it takes much less than its closed form, which puts all on the slowest links
    ("examples/gpt.py:tiny", "two-islands", 2_725_713, 16, {}, {"data": 2, "tensor": 1, "pipeline": 2, "microbatch": 2}),
])  # fmt: skip
def test_what_does_not_fit_keeps_nothing_from_being_tried(
    model: str, name: str, memory_bytes: int, batch: int, open_: dict[str, None], fixed: dict[str, int]
) -> None:
    found, there = planned(model, name, memory_bytes, batch, **open_), planned(model, name, memory_bytes, batch, **fixed)
    assert found.prediction is not None and there.prediction is not None
    assert found.prediction.time_s <= there.prediction.time_s
