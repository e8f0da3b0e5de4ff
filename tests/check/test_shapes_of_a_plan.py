"""Steps for several shapes in one plan: proved one by one, and refused where a rank could not go on from one to the next."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.check import check_plan
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.plan.plan import CycleEntry, ParamShard, Plan
from meshwright.plan.shapes import plan_of_shape, plans_of_shapes


def net() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 16))


def batch(length: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)


@cache
def planned(**options: int) -> Plan:
    options = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2} | options
    return mw.plan(net(), batch(2), shapes=[batch(4), batch(3)], fabric="laptop:2", **options)


LAYOUTS = ({"data": 2, "zero": 2}, {"pipeline": 2}, {"tensor": 2})


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_every_shape_is_a_plan_of_its_own_over_one_state(options):
    plan = planned(**options)
    assert check_plan(plan).status == "ok"
    alone = plans_of_shapes(plan)
    assert [p.job["batch"]["inputs"][0][0] for p in alone] == [[8, 4], [8, 3], [8, 2]]
    assert all(check_plan(p).status == "ok" and not p.shapes and set(p.programs) <= set(plan.programs) for p in alone)
    assert len({sum(w["flops"] for w in p.job["works"].values()) for p in alone}) == 3  # each has its own work
    again = plan_from_bytes(plan_bytes(plan))
    assert plan_bytes(again) == plan_bytes(plan) and [x.layout for x in again.shapes] == [x.layout for x in plan.shapes]


def changed(plan: Plan, **fields: object) -> Plan:
    one = plan.shapes[0]
    layout = msgspec.structs.replace(one.layout, **fields)
    return replace(plan, shapes=(msgspec.structs.replace(one, layout=layout), *plan.shapes[1:]))


def test_a_shape_that_keeps_another_state_is_wrong():
    """The two steps are right, one by one; after one of them a rank does not have what the other begins with."""
    plan, other = planned(data=2, zero=2), planned(data=2, zero=1)
    for taken in (other.shapes[0], msgspec.structs.replace(other.shapes[1], inputs=plan.shapes[0].inputs)):
        mixed = replace(
            plan, shapes=(taken, plan.shapes[1]), programs={**plan.programs, **other.programs},
            cycle=(plan.cycle[0], CycleEntry(program=taken.program, when="shape"), plan.cycle[2]),
        )  # fmt: skip
        assert all(check_plan(p).status == "ok" for p in plans_of_shapes(mixed))
        verdict = check_plan(mixed)
        assert verdict.status == "wrong" and "shapes[0] keeps another state than the plan: zero_level is 1, not 2" in verdict.findings[0].message


def test_every_field_of_the_state_is_looked_at():
    plan = planned(tensor=2)
    shards = tuple(ParamShard(param=s.param, axis=s.axis, blocks=s.blocks, shares=(1, 3)) for s in plan.shapes[0].layout.shards)
    assert check_plan(changed(plan, shards=shards)).status == "wrong"
    assert check_plan(changed(plan, frozen=("1.bias",))).status == "wrong"
    assert check_plan(changed(planned(pipeline=2), stages=planned(pipeline=2).layout.stages[::-1])).status == "wrong"


def test_damaged_documents_are_refused():
    plan = planned(pipeline=2)
    for damage in (
        {"cycle": plan.cycle[:2]}, {"cycle": (plan.cycle[0], plan.cycle[2], plan.cycle[1])}, {"layout": None},
        {"cycle": tuple(msgspec.structs.replace(e, when="every") for e in plan.cycle)},
        {"shapes": (msgspec.structs.replace(plan.shapes[0], inputs=[([8, 0], "int64")]), plan.shapes[1])},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            plan_bytes(replace(plan, **damage))
    assert plan_of_shape(plan_of_shape(plan, 1), 0) == plan_of_shape(plan, 1)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([batch(4, rows=4)], "the batch has (4, 4) int64, (4, 4) int64, the first one (8, 2)"),
        ([batch(2)], "is given twice"),
        ([(torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, 1, dtype=torch.int64))], "no shape holds all others"),
    ],
    ids=["rows", "twice", "no largest"],
)  # fmt: skip
def test_shapes_that_are_none_are_refused(shapes, text):
    with pytest.raises(UsageError) as caught:
        mw.plan(net(), batch(2), shapes=shapes, fabric="laptop:1")
    assert text in str(caught.value)


def test_what_only_one_shape_can_have_is_refused():
    from meshwright.drive.training.compress import CompressWanted
    from meshwright.drive.training.shapes import require_one_state

    with pytest.raises(Unsupported, match="gradient codecs"):
        mw.plan(net(), batch(2), shapes=[batch(3)], fabric="laptop:2", data=2, wishes=[CompressWanted(codec="fp16")])
    with pytest.raises(UsageError, match="1 shapes are given"):
        mw.plan("examples/gpt.py:small", shapes=[32], fabric="laptop:1", global_batch=8)
    with pytest.raises(Unsupported, match=r"for \(8, 2\) would keep another state than the largest shape's: zero_level"):
        require_one_state(plan_of_shape(planned(data=2, zero=2), 0), plan_of_shape(planned(data=2, zero=1), 1), "(8, 2)")
