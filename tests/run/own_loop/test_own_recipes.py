"""A plan's recipe in the own loop equals the same lines of PyTorch, in one process or under DDP, whatever is divided; and comes only once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from evaluation_models import WIDTH, Choosing
from loop_rig import make_model, plan_for
from recipe_loops import FULL, NORM, STEPS, by_hand, given, loss_of, optimizer_of, refusals, stepped
from test_parallelize import LAYOUTS, alike

import meshwright as mw
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.run.own_loop.recipe import recipe_of
from meshwright.run.train.update import AVERAGE

WIDE = torch.float64


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 200.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@cache
def plain(recipe, dtype, kind, steps=STEPS):
    return by_hand(recipe, dtype, kind, steps=steps)


@cache
def plan_of(layout, recipe, dtype=WIDE, kind="adamw", **more):
    return plan_for(**LAYOUTS[layout], recipe=recipe, dtype=dtype, optimizer=kind, **more)


def run(pool, tmp_path, layout, recipe, dtype=WIDE, kind="adamw", name="store", **more):
    plan = plan_of(layout, recipe, dtype, kind, **more.pop("options", {}))
    return pool.run(stepped, 2, 2, str(tmp_path / name), plan, recipe, dtype, kind, more)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "zero1", "zero2", "zero3"])
def test_the_full_recipe_equals_a_plain_loop(layout, pool, tmp_path):
    """Clipping by the norm of all, a schedule, an average, a group without decay that the plan makes; and losses in evaluation beside it."""
    expected = plain(FULL, WIDE, "adamw")
    found = run(pool, tmp_path, layout, FULL, evaluate=True)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert one["norms"] == pytest.approx(expected["norms"], rel=1e-9) and min(one["norms"]) > NORM
        alike(one["state"], expected["state"])
        alike(one["averages"], expected["averages"])
        assert one["lr"] == [g["lr"] for g in expected["optimizer"]["param_groups"]]
        for number, state in expected["optimizer"]["state"].items():
            alike({k: v for k, v in one["optimizer"]["state"][number].items() if k != AVERAGE}, state)
    assert found[0]["evaluated"] == found[1]["evaluated"]
    for i, loss in enumerate(found[0]["evaluated"]):
        model = make_model()
        model.load_state_dict(plain(FULL, WIDE, "adamw", i)["state"])
        assert loss == pytest.approx(float(loss_of(model.eval(), given(100 + i, WIDE)).detach()), rel=1e-9)


@pytest.mark.parametrize("layout", ["pp2", "zero3"])
def test_a_saved_recipe_goes_on_with_equal_bits_and_in_another_layout(layout, pool, tmp_path):
    whole = run(pool, tmp_path, layout, FULL, name="a", half=2)
    halves = [x["half"] for x in whole]
    parts = {"state": [h["state"] for h in halves], "optimizer": [h["optimizer"] for h in halves], "steps": 2}
    full = {"state": halves[0]["full"], "optimizer": halves[1]["full_optimizer"], "steps": 2}
    for saved in (parts, full):
        for one, again in zip(whole, run(pool, tmp_path, layout, FULL, name=f"b{saved is full}", saved=saved), strict=True):
            assert again["losses"] == one["losses"][2:] and again["lr"] == one["lr"]
            for what in ("state", "averages"):
                assert all(torch.equal(again[what][n], x) for n, x in one[what].items())
    for again in run(pool, tmp_path, "dp2", FULL, name="c", saved=full):
        assert again["losses"] == pytest.approx(whole[0]["losses"][2:], rel=1e-9)
        alike(again["averages"], whole[0]["averages"])


BF16, FP16 = mw.Recipe(precision="bf16-autocast", clip_norm=NORM), mw.Recipe(precision="fp16-autocast", clip_norm=NORM, ema=0.7)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "tolerance"), [("dp2", 1e-6), ("zero3", 1e-6), ("pp2", 2e-3), ("tp2", 2e-3)])
def test_bf16_autocast_and_clipping_equal_ddp(layout, tolerance, pool, tmp_path):
    """The same rows go together under data parallelism; elsewhere sums round in bfloat16 at other places."""
    one, _ = run(pool, tmp_path, layout, BF16, torch.float32, "sgd", options={"microbatch": 4}, ddp=True)
    theirs = one["ddp"]
    assert one["norms"] == pytest.approx(theirs["norms"], rel=max(tolerance, 1e-5) * 10)
    alike(one["state"], theirs["state"], tolerance)
    exact = plain(mw.Recipe(clip_norm=NORM), torch.float32, "sgd")
    assert one["losses"] != pytest.approx(exact["losses"], rel=1e-6), "it is cast"


def test_fp16_autocast_scales_and_leaves_out_as_gradscaler_under_ddp(pool, tmp_path):
    one, _ = run(pool, tmp_path, "dp2", FP16, torch.float32, "sgd", options={"microbatch": 4}, ddp=True)
    assert one["scales"] == one["ddp"]["scales"]
    alike(one["state"], one["ddp"]["state"], 1e-6)
    alike(one["averages"], one["ddp"]["averages"], 1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "zero2"])
def test_masters_of_bfloat16_weights_equal_ddp_with_masters(layout, pool, tmp_path):
    recipe = mw.Recipe(clip_value=1e-2)
    one, _ = run(pool, tmp_path, layout, recipe, torch.bfloat16, "sgd", options={"microbatch": 4}, ddp=layout == "dp2", half=2)
    theirs = one.get("ddp") or plain(recipe, torch.bfloat16, "sgd")
    alike(one["state"], theirs["state"], 2e-2)
    assert any(not torch.equal(s["master"], s["master"].bfloat16().float()) for s in one["optimizer"]["state"].values())
    saved = {"state": one["half"]["full"], "optimizer": one["half"]["full_optimizer"], "steps": 2}
    again, _ = run(pool, tmp_path, layout, recipe, torch.bfloat16, "sgd", options={"microbatch": 4}, name="again", saved=saved)
    assert all(torch.equal(again["state"][n], x) for n, x in one["state"].items())


def test_what_the_loop_does_beside_the_plan_is_refused_on_every_rank(pool, tmp_path):
    texts = [
        "usage: step: step(batch) is called under torch.autocast", "usage: step: step(batch) is called under torch.autocast",
        "usage: step: step(batch) is called where torch computes no gradients",
        "usage: optimizer: the learning rate of group 0 is 5, the plan's schedule has set 0",
        "usage: average_state_dict: there is no average before the first step",
        "usage: load_optimizer_state_dict: of the recipe the state keeps nothing, this plan ema, schedule",
    ]  # fmt: skip
    for said in pool.run(refusals, 2, 2, str(tmp_path / "store"), plan_of("dp2", FULL)):
        assert [s[: len(t)] for s, t in zip(said, texts, strict=True)] == texts


def alone(recipe=None, optimizer="adamw"):
    return plan_for(fabric="laptop:1", recipe=recipe, optimizer=optimizer)


def scheduled(model):
    made = optimizer_of(model.parameters(), "adamw")
    torch.optim.lr_scheduler.StepLR(made, 2)
    return made


def grouped(model):
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)


@pytest.mark.parametrize(
    ("recipe", "planned", "make", "text"),
    [
        ({"schedule": "cosine:steps=8"}, "adamw", scheduled, "and the optimizer has a scheduler"),
        ({"no_decay": ("bias",)}, "adamw", scheduled, "a scheduler was made of it before"),
        ({"no_decay": ("bias",)}, "adamw", grouped, "no weight decay for 'blocks.0.norm.bias', group 1 of the optimizer has 0.01"),
        ({}, "adamw:weight_decay=0.3", grouped, "the optimizer has weight_decay 0.01, not 0.3"),
        ({}, "sgd:momentum=0.9", grouped, "the optimizer has class AdamW, not SGD"),
    ],
)
def test_what_plan_and_owner_both_have_is_refused(recipe, planned, make, text):
    model = make_model()
    with pytest.raises(UsageError, match=text):
        mw.torch.parallelize(model, make(model), alone(mw.Recipe(**recipe), planned))


def test_a_document_that_names_no_job_has_no_recipe():
    with pytest.raises(FormatError, match="not a training plan's job"):
        recipe_of(replace(alone(), job={}))


def test_a_module_that_cannot_be_evaluated_still_trains():
    """In evaluation mode it looks at values, in training it does not."""
    torch.manual_seed(0)
    model, rows = Choosing(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    step = mw.torch.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mw.plan(model, rows, fabric="laptop:1", loss="mse", microbatch=8)
    )
    for _ in range(2):
        with pytest.raises(Unsupported, match="cannot be traced in evaluation mode"):
            step.evaluate(rows)
        step(rows)
    assert step.steps == 2


def test_evaluation_is_the_owners_module_after_eval_and_changes_nothing():
    """Dropout, running statistics, targets that are left out."""
    from test_one_rank import batch

    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).double()

    def rows(seed):
        x, y = batch(seed, 8)
        y[:3] = -100
        return x.double(), y

    plan = mw.plan(made(), rows(0), fabric="laptop:1", microbatch=8)
    weights = []
    for evaluated in (True, False):
        model = made()
        step = mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        for i in range(2):
            if evaluated:
                with torch.no_grad():
                    found = float(step.evaluate(rows(9)))
                x, y = rows(9)
                assert found == pytest.approx(float(torch.nn.functional.cross_entropy(model.eval()(x), y).detach()), rel=1e-9)
                model.train()
            step(rows(i))
        weights.append(step.state_dict(full=True))
    assert all(torch.equal(x, weights[1][n]) for n, x in weights[0].items())
