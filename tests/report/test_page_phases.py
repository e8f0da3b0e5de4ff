"""Phases of steps whose layers exchange positions: named on the page and in the comparison, and what a layer waits for comes first."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from page_plans import run_of

from meshwright.drive import plans as drive
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Training
from meshwright.program.phases import PHASES
from meshwright.report.compare import compare_document, compare_text
from meshwright.report.page.gather import gather
from meshwright.report.page.sections import breakdown_section
from meshwright.timeline import Spans
from meshwright.trace.phases import phase_seconds


@cache
def page():
    model = f"{Path(__file__).parents[1] / 'run' / 'context_models.py'}:three_deep"
    degrees = LayoutWanted(data=1, tensor=1, pipeline=1, microbatch=2, context=3)
    wishes = (degrees, RecomputeWanted("none"), ShardingWanted(level=0, overlap=False), CollectivesWanted("ring"))
    job = Training(model=model, loss="cross-entropy", global_batch=2)
    return gather(plan_training(job, drive.read_fabric("laptop:3"), wishes=wishes), plan_file="plan.json")


def test_a_page_names_what_layers_exchange():
    head = re.search(r"Seconds of a rank per phase.*?</thead>", breakdown_section(page()), re.S).group()
    assert "context" in head and "experts" not in head


def test_phases_of_a_comparison_sum_to_the_step():
    compared = run_of(page()).comparison
    document = compare_document(compared)
    assert document["phases"]["context"]["predicted_s"] > 0 and "experts" not in document["phases"]
    for which, step_s in (("predicted_s", compared.predicted.makespan_s), ("measured_s", compared.measured.steps[0].makespan_s)):
        assert sum(of[which] for of in document["phases"].values()) == pytest.approx(step_s)
    assert "  context" in compare_text(compared)


@pytest.mark.parametrize(("inner", "other"), [("experts", "pipeline"), ("context", "gradient"), ("tensor-parallel", "pipeline")])
def test_what_a_layer_exchanges_comes_before_what_was_posted_early(inner, other):
    """A rank computes for a second, then waits a second for its layer's exchange; another message is under way all the time."""
    of_step = np.array([PHASES.index(x) for x in ("forward", inner, other)], np.int8)
    ends = ((0.0, 1.0), (1.0, 2.0), (0.0, 2.5))
    zeros = np.zeros(3, np.int32)
    spans = Spans(rank=zeros, lane=np.arange(3, dtype=np.int32), step=np.arange(3, dtype=np.int32), iteration=zeros,
                  start_s=np.array([a for a, _ in ends]), end_s=np.array([b for _, b in ends]))  # fmt: skip
    found = phase_seconds(spans, of_step, 1, 3.0)[0]
    assert {k: v for k, v in found.items() if v} == {"forward": 1.0, inner: 1.0, other: 0.5, "idle": 0.5}
