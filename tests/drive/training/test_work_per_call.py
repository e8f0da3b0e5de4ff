"""Work that a call does whatever its batch is: done once per micro-batch, and a bound on the step counts it where it is least."""

from __future__ import annotations

from meshwright.capture.graph import capture
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.graph.scale import at_batch
from meshwright.job import Training

MODEL = "tests/capture/whole_models.py:orthogonal_square"


def test_a_bound_on_the_step_holds_for_every_micro_batch() -> None:
    """The matrix exponential of torch's orthogonal parametrization; the plan was refused by its own checker before."""
    graph = capture(MODEL)
    flops = {rows: sum(n.forward.flops + n.backward.flops for n in at_batch(graph, rows).nodes) for rows in (4, 8)}
    assert flops[8] < 2 * flops[4]
    plan = plan_training(Training(model=MODEL, global_batch=8), read_fabric("laptop:2"), graph=graph, wishes=[LayoutWanted(data=1, pipeline=2)])
    assert plan.bound is not None and plan.bound.certificate.data["flops"] == flops[8]
