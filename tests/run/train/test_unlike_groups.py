"""Groups whose gradients are summed by collectives that cut them unlike: buffers of all ranks of a communicator are cut alike."""

from __future__ import annotations

from typing import Any

from tensor_rig import MODELS, TensorOptions, fabric_of, graph_of, lowered_calls

from meshwright.check import check_program
from meshwright.cost import Transport
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.drive.training.collectives import CollectivePlanner
from meshwright.lower.training import lower_training
from meshwright.plan.sizes import summed_over


def test_tensor_ranks_whose_replicas_are_summed_by_unlike_programs() -> None:
    """Replicas of rank 1 by a ring of 2 chunks, all other sums by whole buffers: what tensor ranks sum together has one cut on both."""
    options, sharding = TensorOptions(sequence=True), DataSharding(0, True, 1 << 20)
    layout, *_ = lowered_calls(MODELS + "even", (2, 2, 1), 2, 8, "cross-entropy", options, None, "none", sharding)
    fabric = fabric_of(4)
    places = tuple(d.name for d in fabric.devices)
    whole, ring = (CollectivePlanner(fabric=fabric, transport=Transport(), strategy=x).for_placement(places) for x in ("recursive-doubling", "ring"))

    def unlike(purpose: str, ranks: tuple[int, ...], size_bytes: int, op: str = "all-reduce") -> Any:
        return (ring if op != "all-reduce" or (purpose == "gradient" and 1 in ranks) else whole)(purpose, ranks, size_bytes, op)

    program, callees = lower_training(graph_of(MODELS + "even", 2), layout, one_f_one_b_order, unlike)
    assert any(name.startswith("gradients") and summed_over(name) for name in program.buffers.name), "partial sums over tensor ranks"
    verdict = check_program(program, programs=callees)
    assert verdict.ok, verdict.findings
