"""What cannot be traced is kept whole where it is, and no more of the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from gate_rig import plan_of

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.capture.regions import run_region
from meshwright.errors import Infeasible, Unsupported
from meshwright.run.gate.gate import gate

MODELS = "tests/capture/whole_models.py:"
REGION = "meshwright.region.default"


@pytest.mark.parametrize(
    ("model", "loss", "said", "module"),
    [
        ("least_squares", "cross-entropy", "calls of linalg_lstsq are kept whole as one operator each: Dynamic", "middle"),
        ("speech", "output", "calls of ctc_loss are kept whole as one operator each: Dynamic", ""),
        ("gradient_within", "cross-entropy", "middle (Weighted): a gradient is taken inside forward", "middle"),
        ("packed", "cross-entropy", "middle (Packed): Dynamic", "middle"),
        ("traced", f"{MODELS}own_gradient_in_the_loss", "loss (own_gradient_in_the_loss): export would lose the gradient of Softened", "loss"),
        ("routed", "cross-entropy", "middle (Experts): RuntimeError: it returns numbers that depend on values", "middle"),
    ],
)  # fmt: skip
def test_one_operator_is_kept_whole_and_the_rest_is_cut(model: str, loss: str, said: str, module: str) -> None:
    graph = capture(MODELS + model, loss=loss, scalable=False)
    held = [n for n in graph.nodes if n.target == REGION]
    assert graph.method == "export" and [n.module for n in held] == [module] and len(graph.nodes) > 6
    assert any(said in n and "whole_models.py:" in n for n in graph.notes), graph.notes
    for degrees in ((2, 1, 1), (1, 1, 2)):
        report = gate(plan_of(model, degrees, loss=loss, models=MODELS), data="synthetic") if model != "packed" else None
        assert report is None or (not report.why_not and report.largest_error < 1e-9)


def test_numbers_that_follow_the_batch_are_those_of_the_batch_that_is_run() -> None:
    """A graph for other batches, traced in between, gave its own number to all: a plan's step trained with another divisor."""
    traced = trace_forward(MODELS + "averaging", batch_size=4, device="cpu")
    trace_forward(MODELS + "averaging", batch_size=2)
    own = traced.objective(*traced.inputs)
    assert any(str(n.target) == REGION for n in traced.graph_module.graph.nodes)
    assert torch.equal(traced.graph_module(*(traced.value(v) for v in traced.placeholders))[0], own)
    with pytest.raises(Unsupported, match=r"is not known here for tensors of these shapes: \(\(3, 8\),\)"):
        run_region(next(n for n in traced.graph_module.graph.nodes if str(n.target) == REGION).args[0], [torch.ones(3, 8)])


def test_shapes_that_follow_lengths_are_no_operator() -> None:
    graph = capture(MODELS + "packed_to_the_longest", scalable=False)
    assert graph.method == "opaque"
    with pytest.raises(Infeasible, match=r"at most 1 pipeline stages, 2 wanted: torch.export refused .*whole_models.py:\d+"):
        plan_of("packed_to_the_longest", (1, 1, 2), loss="cross-entropy", models=MODELS)


def test_a_module_that_the_meta_device_makes_otherwise_is_built_really() -> None:
    """`base` of torch's orthogonal parametrization stays None there, and forward multiplies by it."""
    graph = capture(MODELS + "orthogonal", scalable=False)
    assert graph.method == "export" and any("construction on the meta device makes another module" in n for n in graph.notes)
    for degrees in ((2, 1, 1), (1, 1, 2)):
        assert gate(plan_of("orthogonal", degrees, loss="cross-entropy", models=MODELS), data="synthetic").largest_error < 1e-9


@pytest.mark.parametrize(("model", "parameter"), [("teacher", "middle."), ("teacher_in_region", ""), ("teacher_in_opaque", "middle.")])
def test_a_parameter_that_forward_changes_is_refused_with_the_line(model: str, parameter: str) -> None:
    """A teacher that begins as a copy is equal in the first step, whatever it does, and is another one afterwards."""
    with pytest.raises(Unsupported, match=rf"forward changes parameter '{parameter}teacher.weight' in place") as caught:
        capture(MODELS + model, scalable=False)
    assert caught.value.where.startswith("tests/capture/whole_models.py:") and caught.value.where.rpartition(":")[2].isdecimal()


def test_what_has_its_samples_in_another_dimension_than_the_first_scales_with_the_batch() -> None:
    """CTC takes times first: its work was rounded to whole numbers per time, and the graph held for one batch size only."""
    assert capture(MODELS + "speech", loss="output").scaling is not None
