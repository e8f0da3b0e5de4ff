"""A plan in the own loop equals the loop that everybody writes, on real ranks, whatever is divided."""

from __future__ import annotations

import pytest
import torch
from loop_rig import STEPS, plain, plan_for, said, trained


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    """Rank 0 traces while the others wait: longer than a busy machine needs for that."""
    monkeypatch.setattr(pool, "timeout_s", 200.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LAYOUTS = {
    "dp2": {"data": 2}, "pp2": {"pipeline": 2}, "tp2": {"tensor": 2}, "zero1": {"data": 2, "zero": 1}, "zero2": {"data": 2, "zero": 2},
    "zero3": {"data": 2, "zero": 3}, "dp2xpp2": {"data": 2, "pipeline": 2, "fabric": "laptop:4", "zero": 1},
    "tp2xdp2": {"tensor": 2, "data": 2, "fabric": "laptop:4", "zero": 3},
}  # fmt: skip


def alike(found, expected, tolerance=1e-9):
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype and torch.allclose(found[name], x, rtol=tolerance, atol=tolerance), name


def same_optimizer(found, expected, tolerance=1e-9):
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert [g["lr"] for g in found["param_groups"]] == [g["lr"] for g in expected["param_groups"]]
    assert set(found["state"]) == set(expected["state"])
    for number, state in expected["state"].items():
        alike(found["state"][number], state, tolerance)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_weights_and_optimizer_equal_a_plain_loop(layout, pool, tmp_path):
    plan = plan_for(**LAYOUTS[layout])
    losses, state, optimizer = plain()
    for found in pool.run(trained, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, {"part": layout == "zero2"}):
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        alike(found["state"], state)
        same_optimizer(found["optimizer"], optimizer)
        assert found["same"]  # the owner's parameter objects are still his


@pytest.mark.parametrize("layout", ["zero2", "dp2xpp2"])
def test_an_optimizer_that_looks_at_whole_parameters_has_them_whole(layout, pool, tmp_path):
    """Adafactor keeps means of rows and columns: replicas divide parameters, not elements."""
    plan = plan_for(**LAYOUTS[layout], optimizer=torch.optim.Adafactor)
    assert plan.layout.whole_parameters and plan.layout.zero_level
    losses, state, optimizer = plain(kind="adafactor")
    for found in pool.run(trained, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, {"kind": "adafactor"}):
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        alike(found["state"], state)
        same_optimizer(found["optimizer"], optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "zero3"])
def test_a_saved_step_goes_on_with_equal_bits(layout, pool, tmp_path):
    plan = plan_for(**LAYOUTS[layout])
    whole = pool.run(trained, 2, 2, str(tmp_path / "a"), plan, {})
    half = pool.run(trained, 2, 2, str(tmp_path / "b"), plan, {"steps": STEPS // 2})
    rest = pool.run(trained, 2, 2, str(tmp_path / "c"), plan, {"steps": STEPS - STEPS // 2, "saved": half})
    for one, first, then in zip(whole, half, rest, strict=True):
        assert first["losses"] + then["losses"] == one["losses"]
        assert all(torch.equal(then["state"][n], x) for n, x in one["state"].items())
        assert then["lr"] == one["lr"]


def test_every_habit_of_a_loop_is_harmless(pool, tmp_path):
    """A scheduler made before, `zero_grad`, other weights at another rank (rank 0's count, as with DDP), tied parameters, momentum."""
    plan = plan_for(data=2, tied=True)
    more = {"early": True, "zero_grad": True, "apart": True, "tied": True, "kind": "sgd"}
    losses, state, optimizer = plain(kind="sgd", tied=True)
    found = pool.run(trained, 2, 2, str(tmp_path / "store"), plan, more)
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        alike(one["state"], state)
        same_optimizer(one["optimizer"], optimizer)
        assert all(torch.equal(x, one["state"][n]) for n, x in one["own"].items())  # updated in place
    assert found[0]["repr"] == "ParallelStep(Net, rank 0 of 2, data 2 x tensor 1 x pipeline 1, 4 steps done)"


def test_what_other_ranks_hold_is_emptied_and_comes_back_with_the_whole(pool, tmp_path):
    plan = plan_for(pipeline=2)
    found = pool.run(trained, 2, 2, str(tmp_path / "store"), plan, {"steps": 1})
    held = [{n for n, p in one["own"].items() if p.numel()} for one in found]
    assert held[0] | held[1] == set(found[0]["own"]) and held[0] != held[1]
    assert all(set(one["sharded"]["tensors"]) == own for one, own in zip(found, held, strict=True))
    for name, x in found[0]["state"].items():
        assert torch.equal(x, found[1]["state"][name]) and x.numel()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "layouts", "expected"),
    [
        ("world", ("tp2xdp2", "tp2xdp2"), [("plan-mismatch", "the world has 2 ranks, the plan was made for 4")] * 2),
        ("plans", ("dp2", "zero1"), [("plan-mismatch", "rank 1 and rank 0 have different plans")] * 2),
        ("another model", ("dp2", "dp2"), [("usage", "is not the one that was planned"), ("run", "rank 0 refused: the model")]),
        ("one rank's model", ("dp2", "dp2"), [("usage", "have different parameters")] * 2),
        ("rows", ("dp2", "dp2"), [("usage", "8 samples (the global batch) or 4 (this rank's part)")] * 2),
        ("fails", ("dp2", "dp2"), [("rank-failed", "rank 0 lost rank 1"), ("rank-failed", "rank 1 failed in training step 0: IndexError")]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_cannot_be_right_is_refused_by_name(case, layouts, expected, pool, tmp_path):
    plans = [plan_for(**LAYOUTS[x]) for x in layouts]
    found = pool.run(said, 2, 2, str(tmp_path / "store"), plans, case)
    for (code, message, _), (wanted, text) in zip(found, expected, strict=True):
        assert code == wanted and text in message
