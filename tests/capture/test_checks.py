"""What the owner's forward checks of its batch is checked at every step, and the rest is traced; what it chooses by is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from gate_rig import plan_of

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.errors import UsageError
from meshwright.run.gate.gate import gate
from meshwright.run.steps.forward_graph import ForwardGraph, from_traced
from meshwright.run.train.checks import BatchChecks

MODELS = "tests/capture/checked_models.py:"


@pytest.mark.parametrize(("model", "checks"), [("in_range", 1), ("asserted", 2), ("counted", 1)])
def test_checks_of_the_batch_are_kept_beside_the_graph(model: str, checks: int) -> None:
    graph = capture(MODELS + model, loss="output")
    assert graph.method == "export" and len(graph.nodes) > 4 and not any("checked" in n.target for n in graph.nodes)
    assert graph.scaling is not None, graph.notes
    assert sum("checks its batch" in n and "checked_models.py:" in n for n in graph.notes) == 1, graph.notes
    for degrees in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        report = gate(plan_of(model, degrees, loss="output", models=MODELS), data="synthetic")
        assert not report.why_not and report.largest_error < 1e-9
    traced = from_traced(trace_forward(MODELS + model, loss="output"))
    assert sum(n.target == "meshwright.checked.default" for n in traced.checks) == checks
    assert ForwardGraph.from_json(traced.to_json()) == traced


def test_a_batch_that_fails_a_check_is_refused_with_the_owners_line() -> None:
    checks = BatchChecks(from_traced(trace_forward(MODELS + "in_range", loss="output")))
    tokens, labels = torch.zeros(4, 6, dtype=torch.long), torch.tensor([0, 1, 2, 3])
    checks([tokens, labels])
    line = 1 + next(i for i, x in enumerate(Path("tests/capture/checked_models.py").read_text().splitlines()) if x.endswith("# asked"))
    with pytest.raises(UsageError, match="forward raises for this batch") as found:
        checks([tokens, labels + 2])
    assert found.value.where == f"tests/capture/checked_models.py:{line}" and found.value.data == {"asked": "if labels.max() >= CLASSES:"}


@pytest.mark.parametrize("model", ["chosen", "of_weights"])
def test_a_choice_and_a_check_of_what_is_computed_stay_whole(model: str) -> None:
    graph = capture(MODELS + model, loss="output", scalable=False)
    assert graph.method == "opaque" and any("checked_models.py:" in n for n in graph.notes), graph.notes


@pytest.mark.parametrize("model", ["speech", "speech_cut", "speech_sum", "picked"])
def test_what_takes_values_in_a_row_is_one_operator(model: str) -> None:
    graph = capture(MODELS + model, loss="output")
    assert graph.method == "export" and graph.scaling is not None, graph.notes
    assert [n.target for n in graph.nodes].count("meshwright.region.default") == 1
    for degrees in ((2, 1, 1), (1, 1, 2)):
        report = gate(plan_of(model, degrees, loss="output", models=MODELS), data="synthetic")
        assert not report.why_not and report.largest_error < 1e-6
