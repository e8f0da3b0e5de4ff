"""Batches of changing length under a plan of several shapes equal a plain loop that pads nothing, in every layout; others are refused."""

from __future__ import annotations

import pytest
from shape_loops import plain_loop, shaped, shaped_plan
from test_parallelize import alike

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LAYOUTS = {
    "dp2": {"data": 2}, "pp2": {"pipeline": 2}, "tp2": {"tensor": 2}, "zero1": {"data": 2, "zero": 1}, "zero2": {"data": 2, "zero": 2},
    "zero3": {"data": 2, "zero": 3}, "dp2xpp2": {"data": 2, "pipeline": 2, "fabric": "laptop:4"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 200.0)


def planned(name, **more):
    return shaped_plan(tuple(sorted(LAYOUTS[name].items())), **more)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_of_changing_length_equal_a_plain_loop(layout, pool, tmp_path):
    plan = planned(layout)
    losses, state, evaluated = plain_loop()
    for found in pool.run(shaped, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, {"part": layout == "zero2"}):
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0), found.get("message")
        assert found["evaluated"] == {i: pytest.approx(evaluated[i], rel=1e-9) for i in found["evaluated"]} and len(found["evaluated"]) == 3
        alike(found["state"], state)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"length": 13}, "no step of the plan takes a batch of (8, 13), (8, 13): it has (N, 12), (N, 12); (N, 8), (N, 8); (N, 4), (N, 4)"),
        ({"length": 7, "pad": None}, "no step of the plan takes a batch of (8, 7)"),
        ({"length": 7, "pad": (0, 1)}, "padding changes the loss"),
        ({"length": 12, "steps": 1, "pad": (0,)}, "is not a value for each tensor of a batch"),
        ({"length": 7, "pad": (0.5, -100)}, "0.5 does not fit a tensor of int64"),
    ],
    ids=["too long", "no padding", "counted", "values", "whole numbers"],
)  # fmt: skip
def test_what_no_step_takes_is_refused_on_all_ranks(more, text, pool, tmp_path):
    for found in pool.run(shaped, 2, 2, str(tmp_path / "store"), planned("dp2"), more):
        assert text in found["message"] and found["code"] in ("usage", "unsupported")


@pytest.mark.parametrize("length", [7, 11])
def test_a_model_that_looks_at_padding_is_refused(length, pool, tmp_path):
    """In the step of a smaller shape, and in that of the largest."""
    for found in pool.run(shaped, 2, 2, str(tmp_path / "store"), planned("dp2", looks=True), {"length": length, "looks": True}):
        assert found["code"] == "unsupported" and "padding changes the loss" in found["message"]


def test_a_model_that_looks_at_what_comes_after_is_right_where_nothing_is_padded(pool, tmp_path):
    more = {"length": 8, "looks": True, "steps": 2, "pad": None}
    for found in pool.run(shaped, 2, 2, str(tmp_path / "store"), planned("dp2", looks=True), more):
        assert len(found["losses"]) == 2
