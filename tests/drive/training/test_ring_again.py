"""Context parallelism by a ring where memory decides: blocks that came are kept for backward, or come a second time where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.check import check_program
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible
from meshwright.io.fabric.name import load_fabric
from meshwright.job import Training
from meshwright.plan.context import exchange_of
from meshwright.plan.plan import Plan
from meshwright.program.calls import inline

MODEL = f"{Path(__file__).parents[2] / 'run' / 'context_models.py'}:three_deep"  # four heads: an exchange of heads does not divide them by three


def planned(memory_bytes: int = 0) -> Plan:
    """On three ranks that divide the positions; nothing is computed again."""
    fabric = load_fabric("laptop:3")
    fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes or d.memory_bytes) for d in fabric.devices))
    degrees = LayoutWanted(data=1, tensor=1, pipeline=1, microbatch=2, context=3)
    wishes = (degrees, RecomputeWanted("none"), ShardingWanted(level=0, overlap=False), CollectivesWanted("ring"))
    return plan_training(Training(model=MODEL, loss="cross-entropy", global_batch=2), fabric, wishes=wishes)


def needed_bytes(plan: Plan) -> int:
    return max(plan.prediction.memory_worst_bytes)


def test_memory_decides_whether_blocks_come_again() -> None:
    wide = planned()
    assert exchange_of(wide.layout) == "ring", "faster: nothing comes twice"
    need = needed_bytes(wide)
    tight = planned(need - 1)
    assert exchange_of(tight.layout) == "ring-again"
    less = needed_bytes(tight)
    assert less < need and tight.prediction.time_s > wide.prediction.time_s
    assert check_program(inline(tight.main, tight.programs).program).ok
    with pytest.raises(Infeasible):
        planned(less - 1)
