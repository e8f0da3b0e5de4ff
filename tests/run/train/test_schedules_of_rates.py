"""Schedules by name: the rates of every step against torch's and against formulas written out; what cannot be used is refused."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.errors import UnknownName, Unsupported, UsageError
from meshwright.job import Recipe, Training
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.schedules import fast_forward, make_schedule
from meshwright.run.train.update import Update, make_update, require_update

FUNCTIONS = "tests/run/recipe_functions.py:"


def optimizer(**options):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.2, **options)


def rates(text, steps, made=None):
    made = made or optimizer()
    schedule = make_schedule(text, made)
    found = []
    for _ in range(steps):
        found.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("cosine:steps=12,warmup=3,end=0.1", lambda t: t / 3 if t < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (t - 3) / 9))) / 2),
        ("linear:steps=12,warmup=3", lambda t: t / 3 if t < 3 else 1 - min(1, (t - 3) / 9)),
        ("constant:warmup=4", lambda t: min(1, t / 4)),
        ("constant", lambda t: 1),
        ("inverse-sqrt:warmup=4", lambda t: t / 4 if t < 4 else math.sqrt(4 / t)),
        (FUNCTIONS + "stairs:every=3", lambda t: 0.1 ** (t // 3)),
    ],
)
def test_rates_follow_the_formula(text, factor):
    assert rates(text, 15) == pytest.approx([0.2 * factor(t) for t in range(15)], rel=1e-12)


def test_schedules_of_torch_by_name():
    torch_s = optimizer()
    schedule = torch.optim.lr_scheduler.OneCycleLR(torch_s, max_lr=1.0, total_steps=9)
    expected = []
    for _ in range(9):
        expected.append(torch_s.param_groups[0]["lr"])
        torch_s.step()
        if len(expected) < 9:
            schedule.step()
    made = optimizer(momentum=0.9)
    assert rates("onecyclelr:max_lr=1.0,total_steps=10", 3, made) != expected[:3]
    assert rates("OneCycleLR:max_lr=1.0,total_steps=9", 8, optimizer(momentum=0.9)) == pytest.approx(expected[:8])


@pytest.mark.parametrize("text", ["CosineAnnealingLR:T_max=4", "CyclicLR:base_lr=0.1,max_lr=0.3,step_size_up=3", "MultiStepLR:milestones=2,3,7"])
def test_a_new_schedule_catches_up_exactly(text):
    made = Update(optimizer(momentum=0.9))
    made.schedule = make_schedule(text, made.optimizer)
    for _ in range(6):
        made.step()
    again = Update(optimizer(momentum=0.9))
    again.schedule = make_schedule(text, again.optimizer)
    fast_forward(again.schedule, 6)
    for _ in range(5):
        assert made.saved() == again.saved()
        made.step()
        again.step()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("cosin:steps=3", UnknownName, "no schedule 'cosin'"),
        ("LRScheduler", UnknownName, "no schedule"),
        ("cosine:steps=3,warm=2", UnknownName, "no option 'warm'"),
        ("cosine", UsageError, "do not fit"),
        ("ReduceLROnPlateau", Unsupported, "needs the loss"),
        (FUNCTIONS + "nothing", UsageError, "returned a int"),
        (FUNCTIONS + "of_another", UsageError, "another optimizer"),
    ],
)
def test_what_is_no_schedule_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        rates(text, 1)


# ---- optimizers --------------------------------------------------------------------------------------------------------
def named():
    return [("a.weight", torch.nn.Parameter(torch.ones(4, 2))), ("a.bias", torch.nn.Parameter(torch.ones(4)))]


def test_groups_stay_in_their_order_where_a_rank_holds_nothing():
    whole = dict(named())
    own = [("a.bias", whole["a.bias"])]
    made = make_optimizer(FUNCTIONS + "by_depth", own, 0.1, whole=whole)
    assert [g["params"] for g in made.param_groups] == [[], [whole["a.bias"]]]
    assert [g["weight_decay"] for g in made.param_groups] == [0.2, 0.0] and made.param_groups[0]["lr"] == pytest.approx(0.09)
    made = make_optimizer("adamw:weight_decay=0.5", own, 0.1, whole=whole, no_decay=("bias",))
    assert [(len(g["params"]), g["weight_decay"]) for g in made.param_groups] == [(0, 0.5), (1, 0.0)]
    made = make_optimizer(FUNCTIONS + "slow", own, 0.1, whole=whole)
    assert made.param_groups[0]["params"] == [whole["a.bias"]]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("adamw:betas=3", UsageError, "torch refuses"),
        ("adamw:momentum=3", UnknownName, "no option 'momentum'"),
        ("muon", Unsupported, "part of parameter 'a.weight'"),
        (FUNCTIONS + "newton", Unsupported, "several times in one step"),
        (FUNCTIONS + "foreign", UsageError, "no parameter of the model"),
        (FUNCTIONS + "eager", Unsupported, "before its first step"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused(text, error, message):
    own = [("a.weight", torch.nn.Parameter(torch.ones(2, 2)))]
    with pytest.raises(error, match=message):
        make_optimizer(text, own, 0.1, whole=dict(named()))


def test_a_function_makes_its_own_groups():
    with pytest.raises(UsageError, match="its own groups"):
        make_optimizer(FUNCTIONS + "slow", named(), 0.1, no_decay=("bias",))


def test_what_groups_hold_is_saved_and_comes_back():
    job = Training(model="m.py:f", global_batch=4, optimizer=FUNCTIONS + "slow", recipe=Recipe(ema=0.5))
    parameters = named()
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    made = make_update(job, parameters)
    made.step()
    made.step()
    assert made.saved()["group:0:done"] == 2
    again = make_update(job, named())
    again.resume(made.saved(), 2)
    assert again.saved() == made.saved()
    average = made.state[parameters[0][1]]["weight_average"]
    assert float(average[0, 0]) == pytest.approx((1 - 1e-3 + 1 - 1.5e-3) / 2)


def test_names_are_looked_at_before_a_plan_is_made():
    job = Training(model="m.py:f", global_batch=4)
    require_update(Training(model="m.py:f", global_batch=4, optimizer="no.module:f", recipe=Recipe(schedule="no.module:g")))
    for optimizer_text, schedule in (("adamw:x=3", ""), ("adamw", "cosine:end=3"), ("adamw", "StepLR:step_size=a")):
        with pytest.raises(UsageError):
            require_update(Training(model="m.py:f", global_batch=4, optimizer=optimizer_text, recipe=Recipe(schedule=schedule)))
    assert job.asked == Recipe()
