"""Batch statistics over the data replicas: a step, and several, equal to the plain loop over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gate_rig import gated, plan_of
from rig import graph_of
from torch.nn import functional as F

from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.cli import main
from meshwright.drive.training.stage_steps import StageSteps
from meshwright.drive.training.step_end import require_recipe
from meshwright.errors import DifferentTraining, FormatError, Unsupported, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Recipe, Training
from meshwright.lower.folded import why_not_folded
from meshwright.plan.plan import Plan
from meshwright.program.program import Kind, Part
from meshwright.run.gate.gate import Stated
from meshwright.run.tensor.batch_statistics import batch_norm_moments, batch_norm_sum, normalise

SPREAD = "convolved"  # three forms of BatchNorm in one net


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        ((2, 1, 1), {}), ((4, 1, 1), {"microbatch": 2}), ((2, 1, 2), {}), ((2, 1, 1), {"zero": 1}), ((2, 1, 1), {"zero": 3}),
        ((2, 1, 1), {"recompute": "full"}), ((2, 1, 2), {"zero": 2}),
    ],
)  # fmt: skip
def test_a_step_is_that_of_the_whole_batch(degrees: tuple[int, int, int], how: dict[str, Any]) -> None:
    for model, loss in ((SPREAD, "mse"), ("batch_norm", "mse")):
        report = gated(model, degrees, loss=loss, optimizer="adamw", shared=True, **{"microbatch": 4, **how})
        assert report.against == "the whole batch at once" and not report.stated and report.precision == "float64"
        assert report.largest_error < 1e-9 and "buffers" in report.compared


def test_losses_of_unlike_counts_are_of_the_whole_batch_too() -> None:
    assert gated("normed_language", (2, 1, 1), loss="ignoring", microbatch=4, shared=True).largest_error < 1e-9


def test_parts_are_torchs_batch_norm_forward_and_backward() -> None:
    """Three replicas by hand; samples whose mean is large against their spread lose no digits in float32."""
    for shape, shift in (((12, 5), 0.0), ((6, 4, 3, 2), 3.0), ((6, 4, 7), 1e4)):
        torch.manual_seed(1)
        x = (torch.randn(shape, dtype=torch.float64) + shift).requires_grad_()
        w, b = (torch.randn(shape[1], dtype=torch.float64, requires_grad=True) for _ in range(2))
        statistics = [torch.zeros(shape[1], dtype=torch.float64), torch.ones(shape[1], dtype=torch.float64)]
        g = torch.randn(shape, dtype=torch.float64)
        F.batch_norm(x, *(s.clone() for s in statistics), w, b, True, 0.3).backward(g)
        mine = [p.detach().clone().requires_grad_() for p in x.chunk(3)]
        own = [[p.detach().clone().requires_grad_() for p in (w, b)] for _ in mine]
        total = torch.stack([batch_norm_sum(p) for p in mine]).sum(0)
        parts = [batch_norm_moments(p, total, replicas=3) for p in mine]
        moments = torch.stack(parts).sum(0).detach().requires_grad_()
        kept = [s.clone() for s in statistics]
        found = [normalise(p, moments, *o, *(kept if i == 0 else (None, None)), True, 0.3, 1e-5, False, replicas=3)
                 for i, (p, o) in enumerate(zip(mine, own, strict=True))]  # fmt: skip
        torch.autograd.backward(found, g.chunk(3))
        torch.autograd.backward(parts, [moments.grad] * 3)
        want = [s.clone() for s in statistics]
        y = F.batch_norm(x, *want, w, b, True, 0.3)
        torch.testing.assert_close(torch.cat(found), y, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kept, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(torch.cat([p.grad for p in mine]), x.grad, rtol=1e-8, atol=1e-9)
        for i, p in enumerate((w, b)):
            torch.testing.assert_close(sum(o[i].grad for o in own), p.grad, rtol=1e-9, atol=1e-9)
        narrow = [p.detach().float() for p in mine]
        total = torch.stack([batch_norm_sum(p) for p in narrow]).sum(0)
        squares = torch.stack([batch_norm_moments(p, total, replicas=3) for p in narrow]).sum(0)[1]
        torch.testing.assert_close(squares.double() / (x.numel() / shape[1]), x.transpose(0, 1).flatten(1).var(1, unbiased=False), rtol=2e-3, atol=0)


def test_narrow_samples_stay_narrow() -> None:
    x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    moments = batch_norm_moments(x, batch_norm_sum(x), replicas=1)
    y = normalise(x, moments, None, None, None, None, True, 0.1, 1e-5, False, replicas=1)
    y.sum().backward()
    assert moments.dtype == torch.float32 and y.dtype == x.grad.dtype == torch.bfloat16


def test_what_is_beside_them_is_named() -> None:
    with pytest.raises(DifferentTraining) as caught:
        gated("batch_norm", (2, 1, 1), microbatch=4)
    assert "plan with --batch-statistics global" in caught.value.hint
    with pytest.raises(Unsupported, match="which share no statistics"):
        gated("batch_norm", (2, 1, 1), microbatch=4, stated=Stated(batch_statistics="global"))


# ---- the checker ------------------------------------------------------------------------------------------------------
def planned() -> Plan:
    return plan_of("batch_norm", (2, 1, 1), microbatch=4, shared=True)


def test_layouts_that_do_not_sum_them_are_found() -> None:
    plan = planned()
    layout = plan.layout
    assert layout is not None and not check_layout(layout, 2) and not check_training(plan.main, layout)
    assert plan_from_bytes(plan_bytes(plan)).layout == layout
    first, second, third = layout.segments
    but = msgspec.structs.replace
    for wrong in (
        but(layout, batch_sums=msgspec.UNSET), but(layout, batch_sums=("batch_norm/sum", "batch_norm/moments", "nothing")),
        but(layout, segments=(but(first, sum_writes=()), second, third)), but(layout, segments=(first, second, but(third, sum_grads=()))),
        but(layout, microbatches=2, microbatch_size=2),
    ):  # fmt: skip
        assert check_layout(wrong, 2)
    with pytest.raises(FormatError, match="which the layout does not list"):
        plan_from_bytes(plan_bytes(replace(plan, layout=but(layout, batch_sums=("x",)))))


def test_a_program_that_leaves_out_a_sum_is_found() -> None:
    """Whatever comes from the other replica, of the three sums within the step and of the gradients' at its end, is dropped once."""
    plan = planned()
    assert plan.layout is not None
    p = plan.main
    receives = np.flatnonzero((p.steps.kind == Kind.TRANSFER) & (p.steps.chan_in >= 0)).tolist()
    assert len(receives) >= 2 * 4
    for step in receives:
        parts = p.steps.parts.copy()
        parts[step] &= Part.RECV | Part.SEND
        assert check_training(replace(p, steps=replace(p.steps, parts=parts)), plan.layout), p.describe(step)


# ---- the command ------------------------------------------------------------------------------------------------------
def test_the_command_plans_runs_and_evaluates_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    words = ["train", "plan", "--model", "tests/run/gate_models.py:convolved", "--loss", "mse", "--fabric", "laptop:2", "--global-batch", "8"]
    shared = [*words, "--dp", "2", "--batch-statistics", "global", "--out", plan, "--optimizer", "sgd"]
    assert main([*shared, "--gate"]) == 0
    said = capsys.readouterr().out
    assert "the whole batch at once" in said and "statistics" in said
    assert main(["train", "check", plan]) == 0
    assert main([*shared, "--microbatch", "2"]) == 3
    assert "one micro-batch in each replica" in capsys.readouterr().err
    plain = ["train", "plan", "--model", "tests/run/gate_models.py:mlp", "--loss", "mse", "--fabric", "laptop:2", "--global-batch", "8"]
    assert main([*plain, "--batch-statistics", "global", "--out", plan]) == 2
    assert "no call of the model or its loss looks at other samples of the batch" in capsys.readouterr().err


def test_what_cannot_share_them_is_refused() -> None:
    plan = planned()
    assert plan.layout is not None
    with pytest.raises(Unsupported, match="planned steps share no statistics"):
        StageSteps(plan.layout, lambda layout, key: None)
    graph = graph_of("tests/run/gate_models.py:batch_norm", 4, "mse")
    asked = Training(model="m", global_batch=8, recipe=Recipe(batch_statistics="each"))
    with pytest.raises(UsageError, match="there is no 'each' of it"):
        require_recipe(asked, graph)
    require_recipe(msgspec.structs.replace(asked, recipe=Recipe(batch_statistics="global")), graph)
    assert "lowered rank by rank" in why_not_folded(plan.layout)
