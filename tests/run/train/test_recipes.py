"""Optimizers with options and groups, schedules and averages in every layout, against a plain loop; and their checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from recipe_rig import checkpoint, job_of, plain, train, worst
from tensor_rig import plan_case, predicted_sends

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.plan.plan import StepEnd

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
MODELS = "tests/run/recipe_models.py:"
LAYOUTS = [((2, 1, 1), 0), ((1, 2, 2), 0), ((2, 1, 2), 0), ((2, 1, 1), 1), ((2, 1, 2), 2), ((2, 2, 1), 3)]
NAME = "tied"


def case_of(degrees, level, name=NAME, **options):
    return plan_case(name, degrees, microbatch=1, global_batch=4, sharding=DataSharding(level, level > 0, 1500), models=MODELS, **options)


def groups(module):
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n and p.dim() > 1]},
        {"params": [p for n, p in named if "bias" in n or p.dim() <= 1], "weight_decay": 0.0},
    ]


def cosine(step):
    return step / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, (step - 2) / 6)))


def by_hand(module):
    optimizer = torch.optim.AdamW(groups(module), lr=0.01, weight_decay=0.3, betas=(0.8, 0.9))
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine), average


def by_milestones(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3, betas=(0.8, 0.9))
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]), average


def annealed(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3, betas=(0.8, 0.9))
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5), None


OTHER_RECIPES = (
    ({"schedule": "MultiStepLR:milestones=1,3", "ema": 0.5}, by_milestones), ({"schedule": "CosineAnnealingLR:T_max=5"}, annealed),
)  # fmt: skip
RECIPE = {"no_decay": ("bias", "1d"), "schedule": "cosine:steps=8,warmup=2,end=0.1", "ema": 0.7}
OPTIMIZER = "adamw:weight_decay=0.3,betas=0.8,0.9"
NORM = 0.5


@pytest.mark.sample(3)
@pytest.mark.parametrize(("degrees", "level"), LAYOUTS)
def test_groups_schedule_average_and_clipping_equal_the_plain_loop(pool, degrees, level):
    case = case_of(degrees, level, end=StepEnd(state_copies=3, norm=True))
    found = pool.run(train, case.layout.ranks, case, job_of(case, OPTIMIZER, clip_norm=NORM, **RECIPE), 0, 4)
    norms = []
    expected = plain(case, NAME, 4, by_hand, lambda m: norms.append(float(torch.nn.utils.clip_grad_norm_(m.parameters(), NORM))))
    assert all(x.rates == expected.rates for x in found)
    assert all(x.norms == pytest.approx(norms, rel=1e-12) for x in found) and min(norms) > NORM
    assert len({tuple(x.norms) for x in found}) == 1, "every rank has the same bits"
    assert worst(case, found, expected) <= 1e-9


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("sgd:momentum=0.9,nesterov=true,weight_decay=0.1", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1)),
        ("Adam:amsgrad=true", lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)),
        ("adagrad:initial_accumulator_value=0.1", lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1)),
        ("tests/run/recipe_functions.py:by_depth:factor=0.5", None),
    ],
)
@pytest.mark.parametrize(("degrees", "level"), [((1, 2, 2), 0), ((2, 1, 1), 3)])
def test_optimizers_equal_the_plain_loop(pool, text, make, degrees, level):
    if make is None and level:
        pytest.skip("a function's optimizer is not given pieces")
    from recipe_functions import by_depth

    case = case_of(degrees, level)
    found = pool.run(train, case.layout.ranks, case, job_of(case, text), 0, 3)
    made = make or (lambda named: by_depth(list(named), 0.01, factor=0.5))
    expected = plain(case, NAME, 3, lambda m: (made(m.parameters() if make else m.named_parameters()), None, None))
    assert worst(case, found, expected) <= 1e-9


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [(((2, 1, 2), 3), ((2, 1, 2), 3)), (((2, 1, 1), 2), ((1, 2, 2), 0)), (((1, 2, 1), 0), ((2, 1, 1), 1))],
)
def test_a_resumed_run_goes_on_exactly(pool, before, after, tmp_path):
    """In the same layout with the same bits; in another within rounding. A schedule that follows its own last rate, a counter of milestones."""
    source, target = (case_of(degrees, level) for degrees, level in (before, after))
    for recipe, make in ((RECIPE, by_hand), *OTHER_RECIPES):
        folder = tmp_path / str(len(recipe))
        job = job_of(source, OPTIMIZER, **recipe)
        index = checkpoint(source, job, 2, pool.run(train, source.layout.ranks, source, job, 0, 2, str(folder)))
        again = pool.run(train, target.layout.ranks, target, job_of(target, OPTIMIZER, **recipe), 2, 5, "", (str(folder), index))
        if before == after:
            whole = pool.run(train, source.layout.ranks, source, job, 0, 5)
            assert [x.rates for x in again] == [whole[0].rates[2:]] * target.layout.ranks
            for a, b in zip(whole, again, strict=True):
                assert a.losses[2:] == b.losses and a.weights.keys() == b.weights.keys() and a.averages.keys() == b.averages.keys()
                assert all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)
                assert all(torch.equal(a.averages[k], b.averages[k]) for k in a.averages)
        else:
            expected = plain(source, NAME, 5, make)
            assert [x.rates for x in again] == [expected.rates[2:]] * target.layout.ranks
            expected.losses = expected.losses[2:]
            assert worst(target, again, expected) <= 1e-9


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "degrees", "level", "options"),
    [
        ("grouped", (1, 4, 1), 0, {}), ("grouped", (1, 4, 1), 0, {"options": TensorOptions(sequence=True)}),
        ("shared", (2, 2, 1), 3, {}),
        ("tied", (1, 1, 2), 0, {"schedule": ("chimera", {})}), ("tied", (2, 1, 2), 2, {"schedule": ("chimera", {})}),
    ],
)  # fmt: skip
def test_what_several_ranks_hold_counts_once(pool, name, degrees, level, options):
    """Key-value heads that two of four ranks hold, parts of the sequence, copies of stages."""
    case = case_of(degrees, level, name, end=StepEnd(norm=True), **options)
    found = pool.run(train, case.layout.ranks, case, job_of(case, "sgd", clip_norm=NORM), 0, 2)
    norms = []
    expected = plain(
        case, name, 2, lambda m: (torch.optim.SGD(m.parameters(), lr=0.01), None, None),
        lambda m: norms.append(float(torch.nn.utils.clip_grad_norm_(m.parameters(), NORM))),
    )  # fmt: skip
    assert all(x.norms == pytest.approx(norms, rel=1e-12) for x in found)
    assert worst(case, found, expected) <= 1e-9
    for rank, ended in enumerate(found):
        assert all(sent == predicted_sends(case, rank) for sent in ended.sent), "the tiny collectives are in the plan"


def test_elements_are_clipped(pool):
    case = case_of((2, 1, 1), 3)
    found = pool.run(train, 2, case, job_of(case, "sgd", clip_value=1e-3), 0, 2)
    expected = plain(
        case, NAME, 2, lambda m: (torch.optim.SGD(m.parameters(), lr=0.01), None, None),
        lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    )  # fmt: skip
    assert worst(case, found, expected) <= 1e-9
