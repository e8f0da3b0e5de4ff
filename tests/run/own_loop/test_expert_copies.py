"""Copies of hot experts in training plans: proved, run on real ranks as the owner's own loop, and refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from expert_loops import CLIP, STEPS, batch_of, loss_of, model_of, plain, plan_for, trained

import meshwright as mw
from meshwright.check.training.layout import check_layout
from meshwright.drive.plans import check_plan, read_plan, write_plan
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import CheckFailed, FormatError, PlanMismatch, UsageError
from meshwright.plan.context import copies_in
from meshwright.plan.routing import Routing
from meshwright.report.plan_text import plan_text


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 500.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LAYOUTS = {
    "ep2": {"expert": 2, "fabric": "laptop:2"}, "ep4": {"expert": 4, "data": 4, "fabric": "laptop:4", "microbatch": 1},
    "ep4, three": {"expert": 4, "data": 4, "fabric": "laptop:4", "microbatch": 1, "spare": 3},
    "ep2xpp2": {"expert": 2, "pipeline": 2, "fabric": "laptop:4"}, "ep2z1": {"expert": 2, "fabric": "laptop:2", "zero": 1},
    "ep2xdp2z3 clipped": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1, "zero": 3, "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep2xcp2xdp2": {"expert": 2, "context": 2, "data": 2, "fabric": "laptop:4"}, "ep2xtp2": {"expert": 2, "tensor": 2, "fabric": "laptop:4"},
}  # fmt: skip


def plan_of(layout, dtype="float64"):
    return plan_for(dtype, tuple(sorted({"spare": 1, **LAYOUTS[layout]}.items())))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_copies_is_the_owners(layout, pool, tmp_path):
    plan = plan_of(layout)
    assert copies_in(plan.layout)
    losses, state, optimizer = plain("float64", clip=CLIP if "clipped" in layout else 0.0, attentive="cp" in layout)
    for found in pool.run(trained, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, "float64"):
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        for name, x in state.items():
            assert torch.allclose(found["state"][name], x, rtol=1e-9, atol=1e-9 * float(x.abs().max())), name
        for number, kept in found["optimizer"]["state"].items():
            assert torch.allclose(kept["exp_avg"], optimizer["state"][number]["exp_avg"], rtol=1e-8, atol=1e-6)


def test_a_state_goes_on_without_copies(pool, tmp_path):
    half = pool.run(trained, 2, 2, str(tmp_path / "a"), plan_of("ep2"), "float64", None, 10)
    rest = pool.run(trained, 2, 2, str(tmp_path / "b"), plan_for("float64", (("expert", 2), ("fabric", "laptop:2"))), "float64", half[0], STEPS - 10)
    losses, state, _ = plain("float64")
    assert half[0]["losses"] + rest[0]["losses"] == pytest.approx(losses, rel=1e-9)
    assert all(torch.allclose(rest[1]["state"][n], x, rtol=1e-9, atol=1e-10) for n, x in state.items())


def test_the_plan_says_what_copies_there_are_and_comes_back_from_a_file(tmp_path):
    plan = plan_of("ep4")
    said = plan.decisions["copies"]
    assert said["strategy"] == "copies" and said["cite"] == ["deepseek2024v3"] and "without" in said["why"]
    o = said["options"]
    assert o["bound_rows"] <= o["busiest_rows"] < o["before_rows"] and o["copies"] == sum(len(x.copies) for x in copies_in(plan.layout).values())
    assert f"{o['copies']} of hot experts in 2 layers" in plan_text(plan)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json").layout == plan.layout


def changed(plan, **what):
    """The plan with these instead in the copies of its first layer that has some."""
    name = next(iter(copies_in(plan.layout)))
    exchanges = tuple(
        msgspec.structs.replace(x, copies=msgspec.structs.replace(x.copies, **what)) if x.target == f"{name}/copies" else x
        for x in plan.layout.exchanges
    )
    return replace(plan, layout=msgspec.structs.replace(plan.layout, exchanges=exchanges))


@pytest.mark.parametrize(("what", "told"), [
    ({"copies": ((0, 0),)}, "each expert once at each member that is not its home"), ({"copies": ()}, "each expert once at each member"),
    ({"copies": ((9, 1),)}, "each expert once at each member"), ({"members": 4}, "that 2 members do not divide"),
    ({"rows": ()}, "divides rows of experts among others than have them"),
    ({"copies": ((0, 1), (1, 1)), "rows": ((0, ((0, 1),)), (1, ((0, 1),)))}, "do not hold 2 blocks and 3 places"),
])  # fmt: skip
def test_copies_that_do_not_fit_are_found(what, told):
    assert any(told in f.message for f in check_layout(changed(plan_of("ep2"), **what).layout, None))


def test_weights_of_another_expert_are_found():
    """The program sends the first member's first block; a layout that wants it from the other member's expert is not what it does."""
    plan = plan_of("ep4, three")
    x = next(iter(copies_in(plan.layout).values()))
    other = [(e, m) for e in range(4) for m in range(4) if m != e and (e, m) not in x.copies]
    copies = tuple(sorted({*x.copies[:-1], other[0]}))
    rows = tuple((e, tuple((m, 1) for m in sorted({e, *(m for c, m in copies if c == e)}))) for e in sorted({e for e, _ in copies}))
    with pytest.raises(CheckFailed):
        check_plan(changed(plan, copies=copies, rows=rows))


def test_files_with_copies_in_other_exchanges_are_refused(tmp_path):
    plan = plan_of("ep2")
    exchanges = tuple(msgspec.structs.replace(x, kind="all-to-all") if x.kind == "copies" else x for x in plan.layout.exchanges)
    with pytest.raises(FormatError, match="belong to an exchange of that kind"):
        write_plan(tmp_path / "bad.json", replace(plan, layout=msgspec.structs.replace(plan.layout, exchanges=exchanges)))
        read_plan(tmp_path / "bad.json")


def test_copies_that_cannot_be_are_refused_and_those_that_do_not_pay_are_left():
    batch, loads = batch_of(0), Routing(measured=(("blocks.*.experts", (40, 3, 3, 2)),))
    wish = LayoutWanted(data=2, tensor=1, pipeline=1, microbatch=2, expert=2, routing=loads, spare=1)
    model = model_of(torch.float64, converted=True)
    with pytest.raises(UsageError, match="and none do") as refused:
        mw.plan(model, batch, loss=loss_of, fabric="laptop:2", wishes=[replace(wish, expert=1)])
    assert refused.value.hint.startswith("expert=2")
    with pytest.raises(UsageError, match="3 places for copies of 2 experts that others have") as refused:
        mw.plan(model, batch, loss=loss_of, fabric="laptop:2", wishes=[replace(wish, spare=3)])
    assert refused.value.hint == "wishes=LayoutWanted(spare=2) at most"
    plan = mw.plan(model, batch, loss=loss_of, fabric="laptop:2", zero=0, wishes=[wish])  # small products, and messages that cost more
    assert plan.decisions["copies"]["strategy"] == "none" and not copies_in(plan.layout)
    assert "copies       of hot experts: none; " in plan_text(plan) and "with copies, " in plan.decisions["copies"]["why"]
    dropping = model_of(torch.float64, converted=True, factor=1.0)
    plan = mw.plan(dropping, batch, loss=loss_of, fabric="laptop:2", zero=0, wishes=[wish])
    assert "drop some" in plan.decisions["copies"]["why"]


def test_another_model_than_the_planned_one_is_named():
    from meshwright.run.context.experts import with_copies
    from meshwright.run.steps.forward_graph import ForwardGraph

    with pytest.raises(PlanMismatch, match="no layer of 4 experts here"):
        with_copies(ForwardGraph(nodes=(), inputs=(), outputs=()), plan_of("ep2").layout)
